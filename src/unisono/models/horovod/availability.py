"""Check of the installed Horovod, without importing it."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_EXTENSION = f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}"
_AGAIN = "install it again beside this torch and Python, with HOROVOD_WITH_PYTORCH=1"


def why_unusable() -> str | None:
    """Return why the installed Horovod can't be used, None if no fault is found."""
    # Only files are read: faults that the loader alone detects are the import's own error.
    spec = importlib.util.find_spec("horovod")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        return None
    built = [folder for folder in folders if (folder / "torch" / _EXTENSION).exists()]
    if not built:
        return (
            f"horovod in {folders[0]} was installed without its C++ part for torch and this "
            f"Python (torch/{_EXTENSION}): {_AGAIN}, so that the build reports the missing part"
        )
    built_for = _torch_of(built[0])
    if built_for and built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        return (
            f"horovod in {built[0]} was built for torch {built_for}, but this is torch "
            f"{torch.__version__}: {_AGAIN}"
        )
    return None


def _torch_of(folder: Path) -> str:
    """Return the torch version recorded by Horovod's build, empty if it recorded none."""
    try:
        return str(json.loads((folder / "metadata.json").read_text()).get("pytorch") or "")
    except (OSError, ValueError, AttributeError):
        return ""
