"""Which models and launchers there are: built in, registered by programs, and plug-ins."""

from __future__ import annotations

import difflib
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.environments.detection import ENVIRONMENTS, Environment
from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    LaunchError,
    RegistrationError,
    UnisonoError,
    UnknownBackendError,
)
from unisono.model.contract import ComputationModel
from unisono.plugins import LAUNCHERS, MODELS, Row, load, only_row, scan, why_not_installed
from unisono.topology import ContextHint

__all__ = (
    "availability",
    "available_backends",
    "check_is_model",
    "find_environment",
    "find_launcher",
    "find_model",
    "launcher_availability",
    "load_environment",
    "load_launcher",
    "load_model",
    "probe",
    "register_model",
    "registered_models",
    "unregister_model",
)


def check_is_model(cls: Any) -> type[ComputationModel]:
    """Check that `cls` is a model with all that is required of one.

    Local.

    Returns:
        `cls`.

    Raises:
        RegistrationError: it isn't; says what it lacks.
    """
    name = cls.__qualname__ if isinstance(cls, type) else repr(cls)
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    missing += [member for member in ("name", "backends", "dtypes") if not hasattr(cls, member)]
    if missing:
        raise RegistrationError(f"{name} can't be registered: it lacks {missing}")
    if not (isinstance(cls, type) and issubclass(cls, ComputationModel)):
        raise RegistrationError(f"{name} can't be registered: it isn't a ComputationModel")
    return cls


def load_model(backend: str, row: Row) -> type[ComputationModel]:
    """Load the model that `row` names.

    Local.

    Raises:
        BackendUnavailableError: loading it failed, or it isn't a model.
    """
    try:
        return check_is_model(load(row.path))
    except Exception as error:  # a plug-in's import may raise anything
        raise _unusable("backend", backend, row, error) from error


def load_launcher(name: str, row: Row) -> Callable[..., Any]:
    """Load the launcher that `row` names.

    Local.

    Raises:
        BackendUnavailableError: loading it failed, or it can't be called.
    """
    try:
        launch: Callable[..., Any] = load(row.path)
        if not callable(launch):
            raise TypeError(f"{launch!r} can't be called")
    except Exception as error:  # a plug-in's import may raise anything
        raise _unusable("launcher", name, row, error) from error
    return _guarded(launch, name, row) if row.distribution else launch


def _guarded(launch: Callable[..., Any], name: str, row: Row) -> Callable[..., Any]:
    """Hold a plug-in's launcher to the contract: a list of results, or an error of ours. Local."""
    who = f"launcher {name!r} of distribution {row.distribution}"

    @functools.wraps(launch)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            results = launch(*args, **kwargs)
        except UnisonoError:
            raise
        except Exception as error:  # whatever the library under it raises
            raise LaunchError(f"{who} failed: {type(error).__name__}: {error}") from error
        if not isinstance(results, list):
            raise LaunchError(
                f"{who} returned {type(results).__name__}: it should return a list of what the "
                "ranks returned, by rank; report this to its author"
            )
        return results

    return guarded


def load_environment(name: str, row: Row) -> Any:
    """Load the environment that `row` names: a module or an object.

    Local.

    Raises:
        BackendUnavailableError: loading it failed, or it lacks ``NAME`` or ``detect``.
    """
    try:
        found = load(row.path if ":" in row.path else f"{row.path}:")
        missing = [member for member in ("NAME", "detect") if not hasattr(found, member)]
        if missing:
            raise TypeError(f"it lacks {missing}")
    except Exception as error:  # a plug-in's import may raise anything
        raise _unusable("environment", name, row, error) from error
    return found


def _unusable(what: str, name: str, row: Row, error: Exception) -> BackendUnavailableError:
    owner = f" of distribution {row.distribution}" if row.distribution else ""
    return BackendUnavailableError(
        f"{what} {name!r}: loading {row.path}{owner} failed: {type(error).__name__}: {error}"
    )


_GROUP = "unisono.models"
_LAUNCHER_GROUP = "unisono.launchers"
_ENVIRONMENT_GROUP = "unisono.environments"
_NATIVE = "unisono.models.native.model:NativeModel"
_registered: dict[str, type[ComputationModel]] = {}
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
    check_is_model(cls)
    backends = [backend.lower() for backend in cls.backends]
    with _lock:
        for backend in backends:
            if not override and _is_taken(backend, cls):
                raise RegistrationError(
                    f"backend {backend!r} of {cls.__qualname__} is taken: choose another name, or "
                    "pass override=True"
                )
        _registered.update(dict.fromkeys(backends, cls))
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
    return any(backend in row.names for row in MODELS) or _native().claims(backend)


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
        cls = _native() if row is None else _load_by_name(wanted, row)
        if row is None and not cls.claims(wanted):
            raise UnknownBackendError(_unknown(backend))
    reason = cls.why_unavailable(wanted)
    if reason is not None:
        raise BackendUnavailableError(f"backend {backend!r} can't be used here: {reason}")
    return cls


def _row_of(backend: str) -> Row | None:
    for row in MODELS:
        if backend in row.names:
            return row
    if _native().claims(backend):
        return None
    return only_row("backend", backend, scan(_GROUP).get(backend, []))


def _native() -> type[ComputationModel]:
    cls: type[ComputationModel] = load(_NATIVE)
    return cls


def _load_by_name(backend: str, row: Row) -> type[ComputationModel]:
    reason = why_not_installed(row, backend)
    if reason is not None:
        raise BackendUnavailableError(f"backend {backend!r} can't be used here: {reason}")
    return load_model(backend, row)


def _unknown(backend: str) -> str:
    known = availability()
    near = difflib.get_close_matches(backend.lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    usable = ", ".join(sorted(name for name, why in known.items() if why is None))
    others = ", ".join(sorted(name for name, why in known.items() if why is not None))
    rest = f" Known, but not usable here: {others} (`unisono doctor` says why)" if others else ""
    return f"unknown backend {backend!r}.{hint} Usable here: {usable}.{rest}"


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

    row: Row
    library: str
    cls: type[ComputationModel] | None = None


_watch: list[_Watched] | None = None


def _make_watch() -> list[_Watched]:
    global _watch
    with _lock:
        rows = [row for row in MODELS if row.library]
        rows += [row for rows in scan(_GROUP).values() for row in rows]
        _watch = [
            _Watched(Row(cls.backends, ""), "unisono", cls)
            for cls in dict.fromkeys(_registered.values())
        ]
        _watch.append(_Watched(Row((), _NATIVE), "torch.distributed"))
        _watch += [_Watched(row, row.library) for row in rows]
        return _watch


def _load_or_warn(watched: _Watched) -> type[ComputationModel] | None:
    row = watched.row
    try:
        watched.cls = check_is_model(load(row.path))
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
        BackendUnavailableError: what it needs isn't installed; says what to do.
        RegistrationError: two plug-ins claim it.
    """
    rows = {row.names[0]: row for row in LAUNCHERS}
    plugins = scan(_LAUNCHER_GROUP)
    row = rows.get(name) or only_row("launcher", name, plugins.get(name, []))
    if row is None:
        known = ", ".join(sorted({*rows, *plugins}))
        raise ArgumentError(f"unknown launcher {name!r}. Known: {known}")
    reason = why_not_installed(row, name)
    if reason is not None:
        raise BackendUnavailableError(f"launcher {name!r} can't be used here: {reason}")
    return load_launcher(name, row)


def find_environment(name: str) -> Environment:
    """Load an environment by its name.

    Local.

    Args:
        name: such as ``"slurm"``, or the name of an entry point of ``unisono.environments``.

    Returns:
        The object with ``NAME`` and ``detect``.

    Raises:
        ArgumentError: there is none of this name.
        BackendUnavailableError: loading it failed.
        RegistrationError: two plug-ins claim it.
    """
    known = {each.NAME: each for each in ENVIRONMENTS}
    if name in known:
        return known[name]
    plugins = scan(_ENVIRONMENT_GROUP)
    row = only_row("environment", name, plugins.get(name.lower(), []))
    if row is None:
        names = ", ".join(sorted({*known, *plugins}))
        raise ArgumentError(f"unknown environment {name!r}. Known: {names}")
    found: Environment = load_environment(name, row)
    return found


def availability() -> dict[str, str | None]:
    """Tell for every known backend why it can't be used here, None where it can.

    Local. No library is imported to answer.

    Returns:
        Reason and remedy by backend.
    """
    table: dict[str, str | None] = {}
    for row in MODELS:
        table.update({name: why_not_installed(row, name) for name in row.names})
    native = _native()
    for backend in native.known_backends():
        table[backend] = native.why_unavailable(backend)
    for backend, rows in scan(_GROUP).items():
        if len(rows) > 1:
            table[backend] = "claimed by two plug-ins: " + ", ".join(r.distribution for r in rows)
        else:
            table.setdefault(backend, why_not_installed(rows[0], backend))
    for backend, cls in _registered.items():
        table[backend] = cls.why_unavailable(backend)
    return table


def launcher_availability() -> dict[str, str | None]:
    """Tell for every known launcher why it can't be used here, None where it can.

    Local. No library is imported to answer.

    Returns:
        Reason and remedy by name.
    """
    table = {row.names[0]: why_not_installed(row, row.names[0]) for row in LAUNCHERS}
    for name, rows in scan(_LAUNCHER_GROUP).items():
        owners = ", ".join(row.distribution for row in rows)
        clash = f"claimed by two plug-ins: {owners}" if len(rows) > 1 else None
        table.setdefault(name, clash or why_not_installed(rows[0], name))
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
    rows = [row for row in MODELS if not row.library or row.library in sys.modules]
    built_in = [*(load(row.path) for row in rows), _native()]
    loaded = [watched.cls for watched in _watch or () if watched.cls is not None]
    return tuple(dict.fromkeys([*built_in, *_registered.values(), *loaded]))
