"""Requirements of tests, and whether they may be missing here."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

_PARTS = {"mpi4py": ("mpi4py", "mpiexec"), "horovod": ("horovod", None)}


def is_required(name: str) -> bool:
    """Return whether UNISONO_REQUIRE names a requirement, as in the session of a real library."""
    return name in os.environ.get("UNISONO_REQUIRE", "").split(",")


def require(name: str, reason: str | None) -> None:
    """Skip the test if there is a reason why it can't run, or fail if UNISONO_REQUIRE names it."""
    if reason is None:
        return
    if is_required(name):
        pytest.fail(f"{reason}, but UNISONO_REQUIRE names {name}")
    pytest.skip(reason)


def require_backend(backend: str) -> None:
    """Skip or fail a test on a real library, which runs only in the session of this library."""
    if backend not in _PARTS:
        return
    if not is_required(backend):
        pytest.skip(f"{backend} is tested where UNISONO_REQUIRE names it")
    library, program = _PARTS[backend]
    if importlib.util.find_spec(library) is None:
        require(backend, f"{library} isn't installed")
    if program is not None and shutil.which(program) is None:
        require(backend, f"there is no {program}")
