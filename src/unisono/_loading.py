"""What is loaded by name is what it should be, or an error has its cause and its distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono._table import Row, load
from unisono.errors import BackendUnavailableError, RegistrationError
from unisono.model import ComputationModel

__all__ = ("check_is_model", "load_launcher", "load_model")


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
    return launch


def _unusable(what: str, name: str, row: Row, error: Exception) -> BackendUnavailableError:
    owner = f" of distribution {row.distribution}" if row.distribution else ""
    return BackendUnavailableError(
        f"{what} {name!r}: loading {row.path}{owner} failed: {type(error).__name__}: {error}"
    )
