"""What must be here for a test, and where it may be missing."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

__all__ = ("require", "require_backend")

_PARTS = {"mpi4py": ("mpi4py", "mpiexec"), "horovod": ("horovod", None)}


def require(name: str, reason: str | None) -> None:
    """Skip what can't be had here; or fail, where UNISONO_REQUIRE names it."""
    if reason is None:
        return
    if name in os.environ.get("UNISONO_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, but UNISONO_REQUIRE names {name}")
    pytest.skip(reason)


def require_backend(backend: str) -> None:
    """Do so for a backend whose library may be missing."""
    library, program = _PARTS.get(backend, (None, None))
    if library is not None and importlib.util.find_spec(library) is None:
        require(backend, f"{library} isn't installed")
    if program is not None and shutil.which(program) is None:
        require(backend, f"there is no {program}")
