"""Whether XLA can be used here, told without importing torch_xla."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util

import torch

__all__ = ("why_unusable",)

_REMEDY = "python -m pip install torch==2.9.0 torch_xla==2.9.0"


def why_unusable(backend: str) -> str | None:
    """Say why torch_xla can't be used as `backend`, None if nothing speaks against it.

    Local. Answered by versions and device files; those of TPU and CUDA are written from
    documentation and not yet run on such a machine.

    Args:
        backend: ``"xla-tpu"``, ``"xla-cuda"`` or ``"xla-cpu"``.

    Returns:
        What is wrong and what to do: it isn't there, was built for another torch, or has no such
        device here.
    """
    version = _version_of("torch_xla")
    if version is None:
        if importlib.util.find_spec("torch_xla") is None:
            return f"torch_xla isn't installed: {_REMEDY}"
        return None  # built in place: its import will tell
    built_for = version.split("+")[0]
    if _release(torch.__version__) != _release(built_for):
        return (
            f"torch_xla {version} works with torch {built_for} alone, and this is torch "
            f"{torch.__version__}: python -m pip install torch=={built_for} torch_xla=={built_for}"
        )
    if backend == "xla-tpu":
        return _why_no_tpu()
    return _why_no_cuda(version) if backend == "xla-cuda" else None


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> list[str]:
    """Give the parts of a version that torch's C++ interface changes with."""
    return version.split("+")[0].split(".")[:2]


def _why_no_tpu() -> str | None:
    if _version_of("libtpu") is None:
        return "libtpu isn't installed: python -m pip install 'torch_xla[tpu]==2.9.0'"
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        return "this machine has no TPU (/dev/accel*, /dev/vfio/*): use backend 'xla-cpu'"
    return None


def _why_no_cuda(version: str) -> str | None:
    release = [int(part) for part in _release(version) if part.isdecimal()]
    if release >= [2, 9]:
        return f"torch_xla {version} has no CUDA, which 2.9 removed: use backend 'nccl'"
    if _version_of("torch_xla_cuda_plugin") is None:
        return "torch_xla_cuda_plugin isn't installed: install it, or use backend 'nccl'"
    return None if torch.cuda.is_available() else "torch sees no CUDA device: use 'xla-cpu'"
