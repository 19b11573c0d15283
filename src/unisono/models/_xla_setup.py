"""What XLA's replicas start with; imports no torch_xla."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from unisono.errors import BackendUnavailableError
from unisono.topology import LaunchPlan

__all__ = ("KINDS", "environment", "find_step", "load_step")

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
        BackendUnavailableError: torch_xla can't be imported, or lacks what is needed of it.
    """
    try:
        return importlib.import_module("unisono.models._xla_step")
    except Exception as error:  # what is broken in it may raise anything
        raise BackendUnavailableError(
            f"torch_xla can't be imported: {type(error).__name__}: {error}; install it again "
            "beside the torch that it was built for: pip install torch==2.9.0 torch_xla==2.9.0"
        ) from error


@functools.cache
def find_step() -> Any:
    """Give what `load_step` gives if the program has imported torch_xla, else None.

    Local. Where it is broken: None, and one warning for each process.
    """
    try:
        return load_step()
    except BackendUnavailableError as error:
        warnings.warn(f"XLA is left out: {error}", RuntimeWarning, stacklevel=5)
        return None
