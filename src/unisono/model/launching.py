"""Optional hooks of ``spawn`` that start a model's replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from unisono.errors import UnsupportedOperation
from unisono.model.contract import ComputationModel
from unisono.topology import LaunchPlan

__all__ = ("LaunchHooks", "launch_hooks_of")

T = TypeVar("T")


class LaunchHooks:
    """Hooks that ``spawn`` calls on a model's class, beside the contract."""

    @classmethod
    def worker_environ(cls, plan: LaunchPlan) -> dict[str, str]:
        """Return variables that worker processes inherit unless the user has set them."""
        return {}

    @classmethod
    def launch(cls, entry: Callable[[Any], T], plan: LaunchPlan, **options: Any) -> list[T]:
        """Create replicas in the model's own way and run `entry` in each.

        Called only if the model has the capability ``"launch"``; other models name a `launcher`.

        Args:
            entry: called once in each replica with its model.
            plan: the number of replicas.
            options: those named in the class's `options`.

        Returns:
            The results of `entry`, by rank.

        Raises:
            WorkerFailedError: a replica failed.
        """
        raise UnsupportedOperation(cls.__name__, "launch of its own", "use a launcher")


def launch_hooks_of(cls: type[ComputationModel]) -> type[LaunchHooks]:
    """Return the hooks of a model's class, or the defaults if it has none."""
    return cls if issubclass(cls, LaunchHooks) else LaunchHooks
