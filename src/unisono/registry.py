"""Which models there are: the built-in table, what programs register, and entry points."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    RegistrationError,
    UnknownBackendError,
)
from unisono.model import ComputationModel
from unisono.topology import ContextHint

__all__ = (
    "availability",
    "available_backends",
    "find_launcher",
    "find_model",
    "probe",
    "register_model",
    "registered_models",
    "unregister_model",
)

_GROUP = "unisono.models"


@dataclass(frozen=True, slots=True)
class _Row:
    """One model that can be loaded: where from, and what it needs to be importable."""

    backends: tuple[str, ...]
    path: str
    library: str = ""
    remedy: str = ""
    distribution: str = ""


_NATIVE = "unisono.models.native:NativeModel"
_BUILT_IN = (
    _Row(("serial",), "unisono.models.serial:SerialModel"),
    _Row(("threads",), "unisono.models.threads:ThreadsModel"),
)
_LAUNCHERS = {"processes": "unisono.launchers.processes"}
_registered: dict[str, type[ComputationModel]] = {}
_plugins: dict[str, list[_Row]] | None = None
_loaded: dict[str, type[ComputationModel]] = {}
_lock = threading.RLock()


def register_model(cls: type[ComputationModel], override: bool = False) -> type[ComputationModel]:
    """Make a model's backends known to this process; usable as a decorator.

    Local.

    Args:
        cls: the model.
        override: whether it may take over names that are taken.

    Returns:
        `cls`.

    Raises:
        RegistrationError: a name is taken, or `cls` lacks a required member.

    Example:
        >>> import unisono as idist
        >>> idist.register_model(idist.ComputationModel)
        Traceback (most recent call last):
        ...
        unisono.errors.RegistrationError: ComputationModel can't be registered: it lacks ...
    """
    global _watch
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    missing += [name for name in ("name", "backends", "dtypes") if not hasattr(cls, name)]
    if missing:
        raise RegistrationError(f"{cls.__qualname__} can't be registered: it lacks {missing}")
    with _lock:
        for backend in cls.backends:
            if not override and _is_taken(backend, cls):
                raise RegistrationError(
                    f"backend {backend!r} of {cls.__qualname__} is taken: choose another name, or "
                    "pass override=True"
                )
        _registered.update(dict.fromkeys(cls.backends, cls))
        _watch = None
    return cls


def unregister_model(cls: type[ComputationModel]) -> None:
    """Take back what `register_model` did; harmless if it wasn't called.

    Local.

    Args:
        cls: the model.
    """
    global _watch
    with _lock:
        for backend in [name for name, other in _registered.items() if other is cls]:
            del _registered[backend]
        _watch = None


def _is_taken(backend: str, cls: type[ComputationModel]) -> bool:
    if _registered.get(backend, cls) is not cls:
        return True
    return any(backend in row.backends for row in _BUILT_IN) or _load(_NATIVE).claims(backend)


def find_model(backend: str) -> type[ComputationModel]:
    """Find and load the one model that a backend belongs to.

    Local.

    Args:
        backend: a backend's name, in any case.

    Returns:
        The model's class.

    Raises:
        UnknownBackendError: nobody claims it; the message lists what there is.
        BackendUnavailableError: it is known but can't be used here; says why and what to do.
        RegistrationError: two plug-ins claim it.
    """
    if not isinstance(backend, str):
        raise UnknownBackendError(f"a backend is named by a str, not {type(backend).__name__}")
    wanted = backend.lower()
    cls = _registered.get(wanted)
    if cls is None:
        row = _row_of(wanted)
        cls = _load(_NATIVE) if row is None else _load_by_name(wanted, row)
        if row is None and not cls.claims(wanted):
            raise UnknownBackendError(_unknown(backend))
    reason = cls.why_unavailable(wanted)
    if reason is not None:
        raise BackendUnavailableError(f"backend {backend!r} can't be used here: {reason}")
    return cls


def _row_of(backend: str) -> _Row | None:
    for row in _BUILT_IN:
        if backend in row.backends:
            return row
    if _load(_NATIVE).claims(backend):
        return None
    rows = _scan().get(backend, [])
    if len(rows) > 1:
        owners = " and ".join(sorted(row.distribution for row in rows))
        raise RegistrationError(
            f"backend {backend!r} is claimed by two plug-ins, {owners}: uninstall one of them"
        )
    return rows[0] if rows else None


def _load_by_name(backend: str, row: _Row) -> type[ComputationModel]:
    reason = _why_not_installed(row)
    if reason is not None:
        raise BackendUnavailableError(f"backend {backend!r} can't be used here: {reason}")
    try:
        return _load(row.path)
    except Exception as error:  # a plug-in's import may raise anything
        owner = f" of distribution {row.distribution}" if row.distribution else ""
        raise BackendUnavailableError(
            f"backend {backend!r}: importing {row.path}{owner} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _why_not_installed(row: _Row) -> str | None:
    root = row.library.partition(".")[0]
    if not root or root in sys.modules or importlib.util.find_spec(root) is not None:
        return None
    return f"{root} isn't installed: {row.remedy}"


def _load(path: str) -> type[ComputationModel]:
    cls = _loaded.get(path)
    if cls is None:
        module, _, name = path.partition(":")
        cls = _loaded[path] = getattr(importlib.import_module(module), name)
    return cls


def _scan() -> dict[str, list[_Row]]:
    """Read the entry points, once for each process."""
    global _plugins
    with _lock:
        if _plugins is None:
            found: dict[str, list[_Row]] = {}
            for point in importlib.metadata.entry_points(group=_GROUP):
                owner = point.dist.name if point.dist else "unknown"
                name = point.name.lower()
                root = point.value.partition(":")[0].partition(".")[0]
                row = _Row((name,), point.value, root, f"reinstall {owner}", owner)
                if row not in found.setdefault(name, []):
                    found[name].append(row)
            _plugins = found
    return _plugins


def _unknown(backend: str) -> str:
    known = sorted(availability())
    near = difflib.get_close_matches(backend.lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown backend {backend!r}.{hint} Known: {', '.join(known)}"


def probe(hint: ContextHint) -> ComputationModel | None:
    """Adopt the live context that somebody made in this process, if there is one.

    Local. A model whose library nobody has imported can have none, so it isn't imported either.

    Args:
        hint: handed to each model's ``from_context``.

    Returns:
        What the first model adopted: registered models are asked first, then built-in ones, then
        plug-ins. A broken plug-in is left out with one warning.
    """
    for watched in _watch if _watch is not None else _make_watch():
        if watched.library in sys.modules:
            cls = watched.cls or _load_or_warn(watched)
            model = None if cls is None else cls.from_context(hint)
            if model is not None:
                return model
    return None


@dataclass(slots=True)
class _Watched:
    """A model that may have a live context once its library is loaded."""

    row: _Row
    library: str
    cls: type[ComputationModel] | None = None


_watch: list[_Watched] | None = None


def _make_watch() -> list[_Watched]:
    global _watch
    with _lock:
        rows = [row for row in _BUILT_IN if row.library]
        rows += [row for rows in _scan().values() for row in rows]
        _watch = [
            _Watched(_Row(cls.backends, ""), "unisono", cls)
            for cls in dict.fromkeys(_registered.values())
        ]
        _watch.append(_Watched(_Row((), _NATIVE), "torch.distributed"))
        _watch += [_Watched(row, row.library) for row in rows]
        return _watch


def _load_or_warn(watched: _Watched) -> type[ComputationModel] | None:
    row = watched.row
    try:
        watched.cls = _load(row.path)
    except Exception as error:  # a plug-in's import may raise anything, and must not stop others
        watched.library = "\0"  # no module has this name, so it isn't tried again
        owner = row.distribution or "unisono"
        warnings.warn(
            f"model {row.path} of {owner} is left out: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
    return watched.cls


def find_launcher(name: str) -> Callable[..., Any]:
    """Load a launcher by its name.

    Local.

    Args:
        name: such as ``"processes"``.

    Returns:
        Its ``launch(entry, plan, ...)``.

    Raises:
        ArgumentError: there is none of this name.
    """
    path = _LAUNCHERS.get(name)
    if path is None:
        raise ArgumentError(f"unknown launcher {name!r}. Known: {', '.join(sorted(_LAUNCHERS))}")
    launch: Callable[..., Any] = importlib.import_module(path).launch
    return launch


def availability() -> dict[str, str | None]:
    """Tell for every known backend why it can't be used here, None where it can.

    Local. No library is imported to answer.

    Returns:
        Reason and remedy by backend.
    """
    table: dict[str, str | None] = {}
    for row in _BUILT_IN:
        table.update(dict.fromkeys(row.backends, _why_not_installed(row)))
    native = _load(_NATIVE)
    for backend in native.known_backends():
        table[backend] = native.why_unavailable(backend)
    for backend, rows in _scan().items():
        if len(rows) > 1:
            table[backend] = "claimed by two plug-ins: " + ", ".join(r.distribution for r in rows)
        else:
            table.setdefault(backend, _why_not_installed(rows[0]))
    for backend, cls in _registered.items():
        table[backend] = cls.why_unavailable(backend)
    return table


def available_backends() -> tuple[str, ...]:
    """List the backends that can be used here.

    Local. No library is imported to answer.

    Returns:
        Names that `initialize` and `spawn` take.

    Example:
        >>> import unisono as idist
        >>> "threads" in idist.available_backends()
        True
    """
    return tuple(name for name, reason in availability().items() if reason is None)


def registered_models() -> tuple[type[ComputationModel], ...]:
    """List the models whose library is loaded or that need none.

    Local.

    Returns:
        Model classes: registered, built-in, then plug-ins.
    """
    rows = [row for row in _BUILT_IN if not row.library or row.library in sys.modules]
    built_in = [*(_load(row.path) for row in rows), _load(_NATIVE)]
    loaded = [watched.cls for watched in _watch or () if watched.cls is not None]
    return tuple(dict.fromkeys([*built_in, *_registered.values(), *loaded]))
