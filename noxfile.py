"""Sessions that set up all they need: ``python -m nox`` is the test command.

It runs what is fast. ``python -m nox -t all`` runs every test. Sessions share the environments in
.nox/envs: one for each torch, and one for tools that need none.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import nox
from nox.command import CommandFailed
from python_discovery import get_interpreter

PAIRS = {  # of Python and torch; torch of the others is that of constraints.txt
    "oldest": ("3.10", "2.6.0"),
    "3.12": ("3.12", "2.13.0"),
    "3.13": ("3.13", "2.13.0"),
    "3.14": ("3.14", "2.15.0"),
    "newest": ("3.13", "2.15.0"),
}
nox.options.sessions = ["fast"]
nox.options.default_venv_backend = "none"
nox.needs_version = ">=2026.8.10"  # the first that runs sessions at once

PYPROJECT = nox.project.load_toml("pyproject.toml")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "unisono")
DURATIONS = Path(".nox", "durations")  # what ``python -m tests.support.durations`` reads
SAVED = Path(".nox", "saved.txt")  # tests that a second try has saved
SITE = Path(".nox", "site")
FEW = 3  # more tests than this don't fail by chance
TWO = ("-n", "2", "--dist", "worksteal")
OWN = ("-e", ".[examples]", "-e", "./tests/plugin")
GROUPS = (
    *("test", "lint", "types", "notebook", "metrics", "peers", "manifests", "recipes", "plugins"),
    *("docs", "perfetto"),
)
ALL = ["all", "rest"]
TAGS = dict.fromkeys(("oldest", "newest", "mpi", "horovod", "xla"), ALL)
XLA = {"PJRT_DEVICE": "CPU"}
LAWS = "tests/real/test_laws.py"
REAL = {  # what must be there, and the tests, of which those with the library's name are taken
    "horovod": ("horovod", "tests/real/test_horovod.py", LAWS, "tests/faults"),
    "xla": ("xla", "tests/real/test_xla.py", LAWS),
    "mpi": ("mpi,mpi4py", "tests/real/test_mpi.py", LAWS, "tests/docs/test_guides.py"),
    "mpich": ("mpi,mpi4py", "tests/real/test_mpi.py", LAWS),
}  # in the order of their starts: that of Horovod is the longest, and installs while XLA's runs
# What a script sees, and how it ends, as a fork of an interpreter that has imported torch.
FORKED = (
    "a_fork_sees_what_a_new_interpreter_does[script]",
    "scripts_that_pass_end_as_in_new_interpreters",
    "scripts_that_fail_end_as_in_new_interpreters",
)
# What Python's and torch's versions decide: the oldest and the newest pair run it and the laws.
OF_VERSIONS = (
    *(f"tests/unit/{room}" for room in ("payload", "models", "host")),
    *(f"tests/unit/test_{name}.py" for name in ("facade", "tracebacks", "at_exit")),
    *("tests/process/payload", "tests/process/test_spawn.py"),
    "tests/process/models/native/test_exit.py",
    *(f"tests/launch/test_forked_scripts.py::test_{name}" for name in FORKED),
    # And those of cloudpickle: what goes by value, and what errors say of it.
    *(f"tests/process/launchers/job/test_{name}.py" for name in ("pickling", "failure")),
)


@dataclass(frozen=True)
class Environment:
    """An interpreter with a torch of its own, which sessions share."""

    session: nox.Session
    name: str = "main"
    python: str = sys.executable
    constraints: str = "constraints.txt"
    """Without a file, all but torch is the newest that there is."""
    torch: str = ""
    """Its version, in place of the one in the constraints."""
    env: dict[str, str] = field(default_factory=dict)
    """What the library needs besides."""

    @property
    def folder(self) -> Path:
        return Path(".nox", "envs", self.name).resolve()

    def install(self, *groups: str, own: tuple[str, ...] = OWN) -> Environment:
        """Install this project and dependency groups, unless that's done."""
        constraints = Path(self.constraints).read_text() if self.constraints else "torch=="
        if self.torch:
            constraints = re.sub(r"(?m)^torch==.*", f"torch=={self.torch}", constraints)
        packages = (*own, *nox.project.dependency_groups(PYPROJECT, *groups))
        words = (str(self.folder), self.python, constraints, *packages)
        self.session.run(sys.executable, ".ci/environment.py", *words, external=True, log=False)
        return self

    def run(self, program: str, *words: str, env: dict[str, str] | None = None, **how: Any) -> Any:
        """Run a program of the environment, as if it were active."""
        path = os.pathsep.join((str(self.folder / "bin"), os.environ.get("PATH", "")))
        active = {"PATH": path, "VIRTUAL_ENV": str(self.folder), "PYTHONPATH": ""}
        active["PYTHONDONTWRITEBYTECODE"] = ""  # to compile torch takes longer than to import it
        command = (str(self.folder / "bin" / program), *words)
        variables = {**active, **self.env, **(env or {})}
        return self.session.run(*command, env=variables, external=True, **how)

    def test(self, *args: str, require: str = "", env: dict[str, str] | None = None) -> None:
        """Run tests; run the few that failed once more, and list those that pass then.

        Thousands of tests of processes share two cores here. One that another's load has pushed
        over its limit mustn't cost the whole run, nor may it be hidden: it's a fault to look for.
        """
        name = re.sub(r"\W+", "-", self.session.name).strip("-")
        cache, seed = Path(".nox", "pytest", name).resolve(), random.randrange(1 << 32)
        shutil.rmtree(cache, ignore_errors=True)
        options = (f"cache_dir={cache}", f"--durations-to={DURATIONS / name}")
        command = ("python", "-m", "pytest", f"--hypothesis-seed={seed}", "-o", *options)
        env = {**({"UNISONO_REQUIRE": require} if require else {}), **(env or {})}
        try:
            self.run(*command, *args, env=env)
        except CommandFailed as error:
            failed = cache / "v" / "cache" / "lastfailed"  # a run that broke off leaves none
            tests = list(json.loads(failed.read_text())) if failed.exists() else []
            if error.return_code != 1 or not 0 < len(tests) <= FEW:
                raise
            load = os.getloadavg()[0]
            self.run(*command, *tests, env=env)
            with SAVED.open("a") as file:
                file.writelines(f"{name}, seed {seed}, load {load:.1f}: {test}\n" for test in tests)


@atexit.register  # after what nox says of sessions
def print_saved(begin: float = time.time()) -> None:
    if SAVED.exists() and SAVED.stat().st_mtime >= begin:
        print(f"FAILED AT FIRST, and passed by itself: look for the cause\n{SAVED.read_text()}")


def main_environment(session: nox.Session, *groups: str) -> Environment:
    """Return the environment with the torch of constraints.txt, and all that tests in it need."""
    return Environment(session).install(*GROUPS, *groups)


def unavailable(session: nox.Session, what: str) -> NoReturn:
    """Skip a session, loudly; fail where it may not be skipped: in CI, and on --required."""
    text = f"NOT TESTED: {what} can't be had here"
    if os.environ.get("CI") or "--required" in session.posargs:
        session.error(text)
    session.skip(text)


def arguments(session: nox.Session) -> list[str]:
    """Return what was passed on, without our own flag."""
    return [each for each in session.posargs if each != "--required"]


@nox.session(tags=["all"])
def fast(session: nox.Session) -> None:
    """Lint, types and the tests that are fast: ``python -m nox``, or ``nox -s fast -- ARGS``."""
    start = time.monotonic()
    main = main_environment(session)
    if session.posargs:
        main.run("pytest", *session.posargs)
        return
    for path in (DURATIONS, SAVED.with_name("pytest")):  # of a run before this one
        shutil.rmtree(path, ignore_errors=True)
    SAVED.unlink(missing_ok=True)
    lint(session)
    types(session)
    main.test(*TWO, "--set=fast")
    known = json.loads(Path("tests", "durations.json").read_text())["sessions"]
    others = sum(facts["tests"] for name, facts in known.items() if name != "fast")
    atexit.register(
        print,
        f"Ran: lint, types and the fast tests, in {time.monotonic() - start:.0f} s. Not run: about "
        f"{others} other tests, of which those of MPI, Horovod, XLA, other torches and Pythons, "
        "faults, the site and the package. To run all of them: python -m nox -t all",
    )


@nox.session
def lint(session: nox.Session) -> None:
    main = main_environment(session)
    main.run("ruff", "check", "--no-cache", ".")  # the cache misses that a module has moved
    main.run("ruff", "format", "--no-cache", "--check", ".")
    main.run("lint-imports", "--no-cache", silent=True)


@nox.session
def types(session: nox.Session) -> None:
    main = main_environment(session)
    main.run("mypy")
    main.run("pyright", "--ignoreexternal", "--verifytypes", "unisono", silent=True)
    main.run("pyright", "--pythonversion", "3.10", "tests/unit/test_types.py")


@nox.session(tags=ALL)
def slow(session: nox.Session) -> None:
    """The tests on serial, threads and gloo that `fast` leaves out."""
    main = main_environment(session)
    peers = "import accelerate, ignite, lightning_fabric, mmengine, torchmetrics, ipykernel, "
    peers += "nbclient, kubernetes_validate, kubeflow_trainer_api, torch.utils.tensorboard"
    main.run("python", "-c", peers)  # else tests are skipped
    main.test(*TWO, "--set=rest", "-m", "not timed", require="perfetto")
    main.test("--set=rest", "-m", "timed", require="perfetto")


@nox.session(tags=ALL)
def faults(session: nox.Session) -> None:
    """Every way to fail, and what is left; the example plug-ins: ``nox -s faults -- ARGS``.

    ``nox -s faults -- --write-table docs/facts/faults.md`` puts what was measured into that page.
    """
    main = real_environment(session, "mpi")
    # Two hosts need root and network namespaces: without, they are skipped, which is said.
    files = ("network", "examples", "plugins", "conformance")
    paths = ("tests/faults", *(f"tests/launch/test_{name}.py" for name in files))
    if args := arguments(session):  # the table that they write is of one process
        main.test("tests/faults", *args, require="mpi4py")
    else:
        main.test(*TWO, *paths, require="mpi4py,plugins")


def real_environment(session: nox.Session, library: str) -> Environment:
    """Return an environment with a real library; skip the session where it can't be installed."""
    try:
        if library == "xla":
            xla = Environment(session, "xla", constraints="constraints-xla.txt", env=XLA)
            return xla.install("test", "xla")
        if library == "mpich":
            return Environment(session, "mpich").install("test", "mpich")
        main = main_environment(session, "mpi")
        if library == "horovod":  # built from its source distribution the first time
            main.env["LD_LIBRARY_PATH"] = str(main.folder / "lib")
            main.run("python", ".ci/horovod_wheel.py", str(CACHE / "wheels"))
        return main
    except CommandFailed:
        unavailable(session, library)


@nox.session(allow_parallel=True)
@nox.parametrize("library", [nox.param(name, id=name, tags=TAGS.get(name, [])) for name in REAL])
def real(session: nox.Session, library: str) -> None:
    """A model, its laws and its faults on the real library: ``nox -s "real(mpi)" -- ARGS``."""
    required, *paths = REAL[library]
    environment = real_environment(session, library)
    name = "mpi" if library == "mpich" else library
    with tempfile.TemporaryDirectory() as folder:
        # A world of one leaves its file (Open MPI 5): not where Horovod's faults look, beside this.
        env = {"OMPI_MCA_btl_sm_backing_directory": folder} if name == "mpi" else {}
        environment.test("-k", name, *paths, *arguments(session), require=required, env=env)


@nox.session(allow_parallel=True)
@nox.parametrize("pair", [nox.param(pair, id=pair, tags=TAGS.get(pair, [])) for pair in PAIRS])
def pythons(session: nox.Session, pair: str) -> None:
    """What depends on versions, and the laws, with each Python and torch that users have.

    The newest pair has the newest of every dependency, as who installs it today.
    """
    version, torch = PAIRS[pair]
    # A shim of pyenv on the path may be no more than that.
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = get_interpreter(version, sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))))
    if found is None:
        unavailable(session, f"Python {version}")
    constraints = "" if pair == "newest" else Environment.constraints
    where = (f"{version}-{torch}", str(found.executable), constraints, torch)
    environment = Environment(session, *where).install("test", "metrics")
    environment.test(*OF_VERSIONS, *arguments(session))
    for backend, size in (("serial", "1"), ("threads", "2"), ("gloo", "2")):
        environment.run("python", "-m", "unisono", "check", backend, "-n", size, silent=True)


@nox.session(tags=ALL, allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Build the site into .nox/site, follow every link in it, run its notebooks.

    A warning is an error, and nothing is fetched from the network. The code of the pages runs in
    `fast` and `slow`.
    """
    main = main_environment(session)
    strict = ("-E", "-W", "--keep-going", "--nitpicky", "--quiet")
    main.run("python", "-m", "sphinx", *strict, "-c", "docs", ".", str(SITE))
    main.test("tests/docs/test_site.py", *session.posargs, env={"UNISONO_SITE": str(SITE)})


@nox.session(tags=ALL, allow_parallel=True)
def package(session: nox.Session) -> None:
    """Build the distributions, check them, and use the wheel where nothing else of ours is.

    Before a release, ``nox -s package -- extras`` tries every extra of the wheel, and
    ``nox -s package -- first-hour python3.10`` README's first command and its program.
    """
    tools = Environment(session, "tools").install("package", own=())
    tools.run("python", ".ci/package.py", *(session.posargs or ["wheel"]))


@nox.session
def launch(session: nox.Session) -> None:
    """Every launcher on the real thing, Slurm and Ray too: ``nox -s launch -- [--required]``."""
    main = main_environment(session, "mpi", "ray")
    packages = ("slurmctld", "slurmd", "munge", "iproute2", "util-linux")
    apt = ("apt-get", "install", "--yes", "--no-install-recommends", *packages)
    try:
        session.run("apt-get", "update", external=True, silent=True)
        session.run(*apt, external=True, silent=True, env={"DEBIAN_FRONTEND": "noninteractive"})
    except CommandFailed:
        unavailable(session, "Slurm, or hosts in network namespaces (as root, on Debian),")
    main.test("tests/launch", *arguments(session), require="slurm,mpi,mpi4py,ray,netns")


@nox.session
def support(session: nox.Session) -> None:
    """Write docs/facts/support.md out of every law on every backend, with 1, 2 and 3 replicas."""
    main, xla = real_environment(session, "horovod"), real_environment(session, "xla")
    reports = Path(".nox", "reports")  # what `unisono check` finds, backend by backend
    reports.mkdir(parents=True, exist_ok=True)
    for backend in ("serial", "threads", "gloo", "kvstore", "mpi4py", "horovod", "xla-cpu"):
        sizes = ("-n", "1") if backend == "serial" else ("-n", "1", "-n", "2", "-n", "3")
        save = ("--save", str(reports / f"{backend}.json"))
        where = xla if backend == "xla-cpu" else main
        where.run("python", "-m", "unisono", "check", backend, *sizes, *save)
    main.run("python", ".ci/support.py", str(reports), "docs/facts/support.md")


@nox.session
def bench(session: nox.Session) -> None:
    """What unisono costs over its peers, measured in the same run; first, that each one runs."""
    main = main_environment(session, "mpi", "bench", "sessions")
    # Both are peers, which start MPI in every session of pytest unless told otherwise.
    others = ("-p", "no:mpi-pytest", "-p", "no:pytest_isolate_mpi")
    main.run("pytest", *others, "tests/benchmarks")
    main.run("python", "benchmarks/recording.py")
    for name in ("imports", "dispatch", "sessions", "exact", "tensors", "gradients", "calls"):
        main.run("python", f"benchmarks/{name}.py")
    for name in ("payloads", "starts", "scripts"):
        for size in ("2", "4"):
            main.run("python", f"benchmarks/{name}.py", "--nproc-per-node", size)
