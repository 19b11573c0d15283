"""Install Horovod for the torch of this environment: build its wheel, or find it in a cache.

    python .ci/horovod_wheel.py CACHE

Horovod's last release is a source distribution that asks for
C++14, which the headers of today's torch refuse: its build files are raised to C++20. As the build
is waited for, it optimises less and leaves out symbols for a debugger. MPI is built in where
``mpicxx`` is on the PATH, gloo always. The cache is keyed by all that the wheel depends on. It
needs a C++ compiler and make; cmake comes from PyPI.
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
STANDARD = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
KIND = "CMAKE_CXX_FLAGS_RELWITHDEBINFO"
FLAGS = (f'string(REPLACE "-O2" "-O3" {KIND} "${{{KIND}}}")', f'set({KIND} "-O1 -DNDEBUG")')
CHANGES = {"CMakeLists.txt": (STANDARD, FLAGS), "horovod/torch/CMakeLists.txt": (STANDARD,)}
WITH = {
    **dict.fromkeys(("HOROVOD_WITH_PYTORCH", "HOROVOD_WITH_GLOO"), "1"),
    **dict.fromkeys(("HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITHOUT_MXNET"), "1"),
    "MAKEFLAGS": f"-j{os.cpu_count() or 2}",
}


def say(text: str) -> None:
    print(f"horovod_wheel: {text}", file=sys.stderr, flush=True)


def key(has_mpi: bool) -> str:
    """Name all that the wheel depends on."""
    asked = (("mpicxx", "--version"), ("mpirun", "--version")) if has_mpi else ()
    shown = [subprocess.run(words, capture_output=True, text=True).stdout for words in asked]
    recipe = hashlib.sha256(Path(__file__).read_bytes() + "".join(shown).encode()).hexdigest()[:10]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"
    return f"horovod-{HOROVOD}-torch-{version('torch')}-{python}-{recipe}"


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, stdout=sys.stderr)


def build(into: Path, has_mpi: bool) -> None:
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
        for part, changes in CHANGES.items():
            text = (source / part).read_text()
            for old, new in changes:
                if old not in text:
                    raise SystemExit(f"horovod_wheel: {part} has no {old!r} any more: look at it")
                text = text.replace(old, new)
            (source / part).write_text(text)
        os.environ.update({**WITH, f"HOROVOD_WITH{'' if has_mpi else 'OUT'}_MPI": "1"})
        wheels = folder / "wheels"
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
        into.mkdir(parents=True, exist_ok=True)
        for wheel in wheels.glob("horovod-*.whl"):
            partial = into / f"{wheel.name}.partial"
            shutil.copy(wheel, partial)
            partial.replace(into / wheel.name)  # a wheel that is there is complete


def main() -> int:
    missing = [name for name in ("g++", "make") if shutil.which(name) is None]
    if missing:
        sys.exit(f"horovod_wheel: no {' and '.join(missing)}: apt-get install build-essential")
    has_mpi = shutil.which("mpicxx") is not None
    folder = Path(sys.argv[1]).expanduser() / key(has_mpi)
    if not list(folder.glob("*.whl")):
        with_mpi = "with MPI" if has_mpi else "without MPI, as there is no mpicxx"
        say(f"building {folder.name} ({with_mpi}), which takes minutes")
        build(folder, has_mpi)
    else:
        say(f"found {folder.name} in the cache")
    pip("install", "-q", "--no-deps", str(next(folder.glob("*.whl"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
