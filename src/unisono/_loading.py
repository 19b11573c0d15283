"""What is loaded by name is what it should be, or an error has its cause and its distribution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unisono._table import Row, load
from unisono.errors import BackendUnavailableError, LaunchError, RegistrationError, UnisonoError
from unisono.model import ComputationModel

__all__ = ("check_is_model", "load_environment", "load_launcher", "load_model")


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
        raise RegistrationError(f"{name} can't be registered: it is no ComputationModel")
    return cls


def load_model(backend: str, row: Row) -> type[ComputationModel]:
    """Load the model that `row` names.

    Local.

    Raises:
        BackendUnavailableError: loading it failed, or it is no model.
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
