"""Build a wheel of Horovod for the torch of this environment, or find it in a cache.

    python .ci/horovod_wheel.py CACHE

Prints the wheel's path last. Horovod's last release is a source distribution that asks for
C++14, which the headers of today's torch refuse: its build files are raised to C++20. MPI is built
in where ``mpicxx`` is on the PATH, gloo always. It takes 2 to 8 minutes on 2 cores; the cache is
keyed by all that the wheel depends on. It needs a C++ compiler and make; cmake comes from PyPI.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HOROVOD = "0.28.1"
BUILD_NEEDS = ("cmake<4", "setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
CMAKE_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
OLD, NEW = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"


def say(text: str) -> None:
    print(f"horovod_wheel: {text}", file=sys.stderr, flush=True)


def compilers() -> dict[str, str]:
    """Find what builds it, and say what is missing."""
    found = {name: shutil.which(name) for name in ("g++", "make", "mpicxx")}
    missing = [name for name in ("g++", "make") if found[name] is None]
    if missing:
        raise SystemExit(
            f"horovod_wheel: {' and '.join(missing)} not found: apt-get install build-essential"
        )
    return {name: path for name, path in found.items() if path is not None}


def key(tools: dict[str, str]) -> str:
    """Name all that the wheel depends on."""
    mpi = "none"
    if "mpicxx" in tools:
        shown = subprocess.run([tools["mpicxx"], "--version"], capture_output=True, text=True)
        mpi = f"{shown.stdout}{mpi_version()}"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"
    recipe = hashlib.sha256(Path(__file__).read_bytes() + mpi.encode()).hexdigest()[:10]
    return f"horovod-{HOROVOD}-torch-{version('torch')}-{python}-{recipe}"


def mpi_version() -> str:
    shown = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    return shown.stdout


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, stdout=sys.stderr)


def build(into: Path, tools: dict[str, str]) -> None:
    """Build the wheel in a folder of its own, and move it to `into`."""
    pip("install", "-q", *BUILD_NEEDS)
    with tempfile.TemporaryDirectory(prefix="horovod-") as name:
        folder = Path(name)
        pip(
            *("download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
            *("-d", name, f"horovod=={HOROVOD}"),
        )
        with tarfile.open(folder / f"horovod-{HOROVOD}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        source = folder / f"horovod-{HOROVOD}"
        for part in CMAKE_FILES:
            text = (source / part).read_text()
            if OLD not in text:
                raise SystemExit(f"horovod_wheel: {part} has no {OLD!r} any more: look at it")
            (source / part).write_text(text.replace(OLD, NEW))
        with_mpi = {"HOROVOD_WITH_MPI": "1"} if "mpicxx" in tools else {"HOROVOD_WITHOUT_MPI": "1"}
        os.environ.update(
            HOROVOD_WITH_PYTORCH="1",
            HOROVOD_WITHOUT_TENSORFLOW="1",
            HOROVOD_WITHOUT_MXNET="1",
            HOROVOD_WITH_GLOO="1",
            MAKEFLAGS=f"-j{os.cpu_count() or 2}",
            **with_mpi,
        )
        wheels = folder / "wheels"
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
        into.mkdir(parents=True, exist_ok=True)
        for wheel in wheels.glob("horovod-*.whl"):
            partial = into / f"{wheel.name}.partial"
            shutil.copy(wheel, partial)
            partial.replace(into / wheel.name)  # a wheel that is there is complete


def main() -> int:
    tools = compilers()
    folder = Path(sys.argv[1]).expanduser() / key(tools)
    if not list(folder.glob("*.whl")):
        mpi = f"MPI of {tools['mpicxx']}" if "mpicxx" in tools else "no MPI: mpicxx isn't there"
        say(f"building {folder.name} ({mpi}), which takes 2 to 8 minutes")
        build(folder, tools)
    else:
        say(f"found {folder.name} in the cache")
    print(next(folder.glob("*.whl")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
