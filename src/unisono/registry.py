"""Registry of models and launchers: built in, registered by programs, and plug-ins."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.arguments import suggestion
from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    LaunchError,
    RegistrationError,
    UnisonoError,
    UnknownBackendError,
)
from unisono.model.contract import ComputationModel
from unisono.plugins import (
    LAUNCHERS,
    MODELS,
    NATIVE,
    PluginRegistry,
    Row,
    by_name,
    check_callable,
    load,
    warn_left_out,
)
from unisono.topology import ContextHint

if TYPE_CHECKING:
    from unisono.environments.detection import Environment


def check_is_model(cls: Any) -> type[ComputationModel]:
    """Check that `cls` is a model with all required members, and return it."""
    name = cls.__qualname__ if isinstance(cls, type) else repr(cls)
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    missing += [member for member in ("name", "backends", "dtypes") if not hasattr(cls, member)]
    if missing:
        raise RegistrationError(f"{name} can't be registered: it lacks {missing}")
    if not (isinstance(cls, type) and issubclass(cls, ComputationModel)):
        raise RegistrationError(f"{name} can't be registered: it isn't a ComputationModel")
    return cls


def _guarded(launch: Callable[..., Any], name: str, row: Row) -> Callable[..., Any]:
    """Wrap a plug-in's launcher: it must return a list of results, or raise a UnisonoError."""
    who = f"launcher {name!r} of distribution {row.distribution}"

    @functools.wraps(launch)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            results = launch(*args, **kwargs)
        except UnisonoError:
            raise
        except Exception as error:  # its library may raise anything
            raise LaunchError(f"{who} failed: {type(error).__name__}: {error}") from error
        if not isinstance(results, list):
            raise LaunchError(
                f"{who} returned {type(results).__name__}: it must return a list of the ranks' "
                "results, by rank; report this to its author"
            )
        return results

    return guarded


@dataclass(slots=True)
class _Watched:
    """A model that may have a live context once its library is loaded."""

    row: Row
    library: str
    cls: type[ComputationModel] | None = None


class _Models(PluginRegistry[type[ComputationModel]]):
    """Models by backend. A name without a row may be a backend of torch, which only torch knows."""

    watched: list[_Watched] | None = None

    @property
    def native(self) -> type[ComputationModel]:
        return self.load(NATIVE)

    def is_of_torch(self, name: str) -> bool:
        """Return whether torch knows a backend, or each of ``cpu:one,cuda:other``."""
        parts = name.split(",") if ":" in name else [name]
        known = self.native.backends
        return all(part.rpartition(":")[2] in known for part in parts)

    def is_built_in(self, name: str) -> bool:
        return super().is_built_in(name) or self.is_of_torch(name)

    def entry(self, name: Any) -> Row | type[ComputationModel] | None:
        if name not in self.registered and name not in self.built_in and self.is_of_torch(name):
            return NATIVE
        return super().entry(name)

    def watch(self) -> list[_Watched]:
        """List the models that may have a live context: registered, built-in, then plug-ins."""
        with self._lock:
            rows = [row for row in MODELS if row.library]
            rows += [row for rows in self.plugins.values() for row in rows]
            registered = dict.fromkeys(self.registered.values())  # a model may have several names
            self.watched = [
                # Their libraries are unknown, so unisono, which is always loaded, stands for them.
                *(_Watched(Row(cls.backends, ""), "unisono", cls) for cls in registered),
                _Watched(NATIVE, "torch.distributed"),
                *(_Watched(row, row.library) for row in rows),
            ]
            return self.watched


_models = _Models(
    "backend", "unisono.models", by_name(MODELS), check_is_model, replaces_built_in=True
)
launchers: PluginRegistry[Callable[..., Any]] = PluginRegistry(
    "launcher", "unisono.launchers", by_name(LAUNCHERS), check_callable
)


def register_model(cls: type[ComputationModel], override: bool = False) -> type[ComputationModel]:
    """Register a model's backends with this process; usable as a decorator.

    Args:
        cls: the model.
        override: whether it may replace names that are taken.

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
    check_is_model(cls)
    backends = [backend.lower() for backend in cls.backends]
    _models.register(backends, cls, override=override)
    _models.watched = None  # the next `probe` lists them again
    return cls


def unregister_model(cls: type[ComputationModel]) -> None:
    """Remove the names that `register_model` added, if any.

    Args:
        cls: the model.
    """
    _models.unregister(cls)
    _models.watched = None


def find_model(backend: str) -> type[ComputationModel]:
    """Load and return the model of a backend."""
    if not isinstance(backend, str):
        raise UnknownBackendError(f"a backend is named by a str, not {type(backend).__name__}")
    cls = _models.find(backend.lower())
    if cls is None:
        raise UnknownBackendError(_unknown(backend))
    reason = cls.why_unavailable(backend.lower())
    if reason is not None:
        raise BackendUnavailableError(f"backend {backend!r} can't be used here: {reason}")
    return cls


def _unknown(backend: str) -> str:
    known = availability()
    usable = ", ".join(sorted(name for name, why in known.items() if why is None))
    others = ", ".join(sorted(name for name, why in known.items() if why is not None))
    rest = f" Known, but not usable here: {others} (see `unisono doctor`)" if others else ""
    return f"unknown backend {backend!r}.{suggestion(backend, known)} Usable here: {usable}.{rest}"


def probe(hint: ContextHint) -> ComputationModel | None:
    """Adopt the live context that was created outside unisono in this process, or return None."""
    # A model without its library in the process can have no context, so it isn't imported.
    for watched in _models.watched or _models.watch():
        if watched.library in sys.modules:
            cls = watched.cls or _load_or_warn(watched)
            model = None if cls is None else cls.from_context(hint)
            if model is not None:
                return model
    return None


def _load_or_warn(watched: _Watched) -> type[ComputationModel] | None:
    row = watched.row
    try:
        watched.cls = _models.load(row)
    except Exception as error:  # a plug-in's import may raise anything, and must not stop others
        watched.library = "\0"  # no module has this name, so the model isn't tried again
        warn_left_out(f"model {row.path} of {row.distribution or 'unisono'}", error)
    return watched.cls


def find_launcher(name: str) -> Callable[..., Any]:
    """Load and return a launcher by its name."""
    launch = launchers.find(name)
    if launch is None:
        raise ArgumentError(f"unknown launcher {name!r}.{launchers.known(name)}")
    row = launchers.entry(name)
    if isinstance(row, Row) and row.distribution:  # a plug-in's
        return _guarded(launch, name, row)
    return launch


def find_script_runner(name: str) -> Callable[[Any], Any]:
    """Return a launcher's own runner of scripts, or one that runs a script as a function."""
    launch = find_launcher(name)
    row = launchers.built_in.get(name)
    if isinstance(row, Row) and row.script:
        runner: Callable[[Any], Any] = load(row.script)
        return runner
    return functools.partial(
        load("unisono.launchers.script.supervisor:run_as_function"), launch=launch
    )


def find_environment(name: str) -> Environment:
    """Load and return an environment by its name."""
    environments: PluginRegistry[Environment] = load("unisono.environments.detection:environments")
    environment = environments.find(name)
    if environment is None:
        raise ArgumentError(f"unknown environment {name!r}.{environments.known(name)}")
    return environment


def availability() -> dict[str, str | None]:
    """Return for every known backend why it can't be used here, None if it can."""
    # No library is imported. A backend of torch for devices that this machine lacks can't be used
    # here; `find_model` still returns it, as ranks may run on machines with such devices.
    native = _models.native
    why_no_device = load("unisono.models.native.process_group:why_no_device")
    table = _models.availability()
    table.update(
        {name: native.why_unavailable(name) or why_no_device(name) for name in native.backends}
    )
    # Last, because registered models replace others.
    table.update({name: cls.why_unavailable(name) for name, cls in _models.registered.items()})
    return table


def available_backends() -> tuple[str, ...]:
    """Return the backends that can be used here.

    No library is imported.

    Returns:
        Names for `initialize` and `spawn`.

    Example:
        >>> import unisono as idist
        >>> "threads" in idist.available_backends()
        True
    """
    return tuple(name for name, reason in availability().items() if reason is None)


def registered_models() -> tuple[type[ComputationModel], ...]:
    """Return the models whose library is loaded or that need none."""
    rows = [row for row in MODELS if not row.library or row.library in sys.modules]
    built_in = [*(_models.load(row) for row in rows), _models.native]
    loaded = [watched.cls for watched in _models.watched or () if watched.cls is not None]
    return tuple(dict.fromkeys([*built_in, *_models.registered.values(), *loaded]))
