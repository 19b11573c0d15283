"""Whether the installed Horovod can be used, told without importing it."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_EXTENSION = "mpi_lib_v2"
_AGAIN = "install it again beside this torch and Python, with HOROVOD_WITH_PYTORCH=1"


def why_unusable() -> str | None:
    """Say why the installed Horovod can't be used, None if nothing speaks against it."""
    # It looks at files alone: what only the loader finds out is the import's own error.
    spec = importlib.util.find_spec("horovod")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        return None
    extensions = [
        extension for folder in folders for extension in folder.glob(f"torch/{_EXTENSION}.*")
    ]
    if not extensions:
        return (
            f"horovod in {folders[0]} was installed without its C++ part for torch "
            f"(torch/{_EXTENSION}): {_AGAIN}, so that its build says what is missing"
        )
    if not any(
        extension.name == f"{_EXTENSION}{EXTENSION_SUFFIXES[0]}" for extension in extensions
    ):
        return (
            f"horovod in {folders[0]} was built for another Python: it has {extensions[0].name}, "
            f"this Python loads {_EXTENSION}{EXTENSION_SUFFIXES[0]}: {_AGAIN}"
        )
    built_for = _torch_of(extensions[0].parents[1])
    if built_for and _release(built_for) != _release(torch.__version__):
        return (
            f"horovod in {folders[0]} was built for torch {built_for}, but this is torch "
            f"{torch.__version__}: {_AGAIN}"
        )
    return None


def _torch_of(folder: Path) -> str:
    """Read the torch that Horovod's build wrote down, empty if it didn't."""
    try:
        metadata = json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError):
        return ""
    version = metadata.get("pytorch") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) else ""


def _release(version: str) -> list[str]:
    """Return the parts of a version that torch's C++ interface changes with."""
    return version.split("+")[0].split(".")[:2]
