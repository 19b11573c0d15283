"""Record which derived members of the contract a law used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.model.contract import ComputationModel

DERIVED = (
    "exchange",
    "all_reduce",
    "broadcast",
    "reduce",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)


def note_derived(model: ComputationModel) -> set[str]:
    """Record each derived member that is called on a model."""
    # It gets a class of its own below its class, so that no other replica is touched.
    used: set[str] = set()
    cls = type(model)
    base: Any = ComputationModel
    inherited = [name for name in DERIVED if getattr(cls, name) is getattr(base, name)]
    members = {name: _noting(name, getattr(base, name), used) for name in inherited}
    kind: Any = type(cls)
    model.__class__ = kind(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    return used


def _noting(name: str, derived: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    def member(self: ComputationModel, *args: Any, **kwargs: Any) -> Any:
        used.add(name)
        return derived(self, *args, **kwargs)

    return member
