"""mmcv's names for job start-up: `init_dist`, `get_dist_info`, `infer_launcher`."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from typing_extensions import Unpack

from unisono.arguments import suggestion
from unisono.context import current_model
from unisono.errors import ArgumentError, EnvironmentDetectionError
from unisono.lifecycle import initialize
from unisono.options import InitializeOptions
from unisono.registry import find_environment
from unisono.topology import RankInfo

# The environments behind each launcher's name, in order of detection.
_LAUNCHERS = {
    "pytorch": ("torchrun",),
    "slurm": ("slurm",),
    "mpi": ("openmpi", "mpich", "mvapich", "pals", "lsf", "cray"),
}


def get_dist_info() -> tuple[int, int]:
    """Return rank and world size.

    Returns:
        ``(rank, world_size)``; (0, 1) if no context is active.

    Example:
        >>> import unisono as idist
        >>> idist.get_dist_info()
        (0, 1)
    """
    topology = current_model().topology
    return topology.rank, topology.world_size


def _detected(launcher: str) -> RankInfo | None:
    """Return this rank according to a launcher's variables, None if they aren't set."""
    found = (find_environment(name).detect(os.environ) for name in _LAUNCHERS[launcher])
    return next((info for info in found if info is not None), None)


def infer_launcher() -> str:
    """Return the launcher that started this process, according to its environment variables.

    Returns:
        ``"pytorch"`` for torchrun, ``"slurm"`` for a Slurm step, ``"mpi"`` for mpirun or a
        similar program, ``"none"`` otherwise. `init_dist` accepts these names.

    Example:
        >>> import unisono as idist
        >>> idist.infer_launcher()
        'none'
    """
    for launcher in _LAUNCHERS:
        with suppress(EnvironmentDetectionError):  # incomplete variables count as none
            if _detected(launcher) is not None:
                return launcher
    return "none"


def init_dist(
    launcher: str | None = None, backend: str | None = None, **kwargs: Unpack[InitializeOptions]
) -> None:
    """Create the context of a job that a launcher started.

    Collective over all ranks of the job.

    Args:
        launcher: ``"pytorch"``, ``"slurm"`` or ``"mpi"``, to read only its variables;
            ``"none"`` for a single process; None infers it.
        backend: as in `initialize`.
        kwargs: further options of `initialize`, such as ``timeout``; ``rank`` and ``world_size``
            together replace the launcher's values.

    Raises:
        ArgumentError: unknown launcher; lists the known ones.
        EnvironmentDetectionError: the launcher's variables are missing or incomplete.
        AlreadyInitializedError: a context is live.
        ContextError: the ranks couldn't connect.

    Example:
        >>> import unisono as idist
        >>> idist.init_dist("none", "gloo")
        >>> idist.finalize()
    """
    name = infer_launcher() if launcher is None else launcher
    options: dict[str, Any] = {key: value for key, value in kwargs.items() if value is not None}
    if name not in (*_LAUNCHERS, "none"):
        known = sorted((*_LAUNCHERS, "none"))
        raise ArgumentError(
            f"unknown launcher {launcher!r}.{suggestion(name, known)} Known: {', '.join(known)}; "
            "pass None to infer the launcher"
        )
    if "rank" in options or "world_size" in options:  # `initialize` raises if one is missing
        initialize(backend, **options)
        return
    if name == "none":
        initialize(backend, rank=0, world_size=1, **options)
        return
    info = _detected(name)
    if info is None:
        raise EnvironmentDetectionError(
            f"init_dist({launcher!r}): the variables of {' or '.join(_LAUNCHERS[name])} are "
            f"not set; the environment looks like {infer_launcher()!r}: start the job "
            "with that launcher",
            source=name,
        )
    initialize(backend, rank=info.rank, world_size=info.world_size, **options)
