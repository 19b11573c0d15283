"""Whether XLA can be used here, and what its replicas start with; imports no torch_xla."""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
from typing import Any

import torch

from unisono.errors import BackendUnavailableError
from unisono.topology import LaunchPlan

__all__ = ("KINDS", "environment", "load_step", "why_unavailable")

KINDS = {"xla-tpu": "TPU", "xla-cuda": "CUDA", "xla-cpu": "CPU"}
# With fewer threads than blocked launches XLA's CPU client hangs.
_THREADS_PER_REPLICA, _MIN_THREADS = 4, 16


def environment(backend: str, plan: LaunchPlan) -> dict[str, str]:
    """Give the variables that the runtime must find when it starts.

    Local.
    """
    threads = str(max(_MIN_THREADS, _THREADS_PER_REPLICA * plan.nproc_per_node))
    variables = {"XLA_THREAD_POOL_SIZE": threads, "PJRT_NPROC": threads}
    variables["PJRT_DEVICE"] = KINDS[backend]
    if backend == "xla-cpu":
        variables["CPU_NUM_DEVICES"] = str(plan.nproc_per_node)
    return variables


def load_step() -> Any:
    """Import the part that needs torch_xla.

    Local. It doesn't initialise the runtime.

    Raises:
        BackendUnavailableError: torch_xla can't be imported.
    """
    try:
        return importlib.import_module("unisono.models._xla_step")
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(f"torch_xla can't be imported: {error}") from error


def why_unavailable(backend: str) -> str | None:
    """Say why `backend` can't be used here and what to do, or None if it can.

    Local. Answered by versions and devices; imports nothing.
    """
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return "torch_xla isn't installed: pip install torch==2.9.0 torch_xla==2.9.0"
    release, built_for = torch.__version__.split("+")[0], version.split("+")[0]
    if release.split(".")[:2] != built_for.split(".")[:2]:
        return (
            f"torch_xla {version} works with torch {built_for} alone, and this is torch "
            f"{torch.__version__}: pip install torch=={built_for} torch_xla=={built_for}"
        )
    if backend == "xla-tpu":
        return _why_no_tpu()
    return _why_no_cuda(version) if backend == "xla-cuda" else None


def _why_no_tpu() -> str | None:
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "libtpu isn't installed: pip install 'torch_xla[tpu]'"
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        return "this machine has no TPU (/dev/accel*, /dev/vfio/*): use backend 'xla-cpu'"
    return None


def _why_no_cuda(version: str) -> str | None:
    if tuple(int(part) for part in version.split(".")[:2]) >= (2, 9):
        return f"torch_xla {version} has no CUDA, which 2.9 removed: use backend 'nccl'"
    try:
        importlib.metadata.version("torch_xla_cuda_plugin")
    except importlib.metadata.PackageNotFoundError:
        return "torch_xla_cuda_plugin isn't installed: install it, or use backend 'nccl'"
    return None if torch.cuda.is_available() else "torch sees no CUDA device: use 'xla-cpu'"
