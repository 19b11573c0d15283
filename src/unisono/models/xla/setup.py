"""Availability of XLA, and the variables of its replicas; doesn't import torch_xla."""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.metadata
import warnings
from typing import Any

import torch

from unisono.errors import BackendUnavailableError
from unisono.topology import LaunchPlan


def why_unusable(backend: str) -> str | None:
    """Return why torch_xla can't be used as `backend`, None if no fault is found."""
    # Versions and device files decide. The checks for TPU and CUDA are written from documentation,
    # and haven't run on such a machine yet.
    version = _version_of("torch_xla")
    if version is None:  # built in place: its import shows any fault
        return None
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
    """Return the parts of a version on which torch's C++ interface depends."""
    return version.split("+")[0].split(".")[:2]


def _why_no_tpu() -> str | None:
    if _version_of("libtpu") is None:
        install = "python -m pip install 'torch_xla[tpu]==2.9.0'"
        return f"libtpu isn't installed: {install}, or use backend 'xla-cpu' without a TPU"
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


KINDS = {"xla-tpu": "TPU", "xla-cuda": "CUDA", "xla-cpu": "CPU"}
# With fewer threads than blocked launches XLA's CPU client hangs.
_THREADS_PER_REPLICA, _MIN_THREADS = 4, 16


def environment(backend: str, plan: LaunchPlan) -> dict[str, str]:
    """Return the variables for the start of the runtime."""
    threads = str(max(_MIN_THREADS, _THREADS_PER_REPLICA * plan.nproc_per_node))
    variables = {
        "PJRT_DEVICE": KINDS[backend],
        "XLA_THREAD_POOL_SIZE": threads,  # of torch_xla's own pool
        "PJRT_NPROC": threads,  # of XLA's CPU client
    }
    if backend == "xla-cpu":
        variables["CPU_NUM_DEVICES"] = str(plan.nproc_per_node)
    return variables


def load_graph() -> Any:
    """Import the module that needs torch_xla; it doesn't initialise the runtime."""
    try:
        return importlib.import_module("unisono.models.xla.graph")
    except Exception as error:  # a broken library may raise anything
        raise BackendUnavailableError(
            f"torch_xla can't be imported: {type(error).__name__}: {error}; install it again "
            "beside the torch that it was built for: pip install torch==2.9.0 torch_xla==2.9.0"
        ) from error


@functools.cache
def find_graph() -> Any:
    """Return the result of `load_graph`; if torch_xla is broken, warn once, and return None."""
    try:
        return load_graph()
    except BackendUnavailableError as error:
        # Level 5 is past this function, `from_context`, `probe` and its caller.
        warnings.warn(f"XLA is left out: {error}", RuntimeWarning, stacklevel=5)
        return None
