"""Operations of several threads, one at a time, until one is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.errors import CollectiveError, ContextError, UnisonoError
from unisono.host.arena import Check
from unisono.topology import Group

_AS_IT_IS = nullcontext()


class Monitor(Protocol):
    """An observer of operations, such as the control plane."""

    def begin(self, group: Group | None, call: str) -> Check:
        """Record an operation that begins; return the check for the arena's waits."""

    def interrupt(self, how: str) -> None:
        """Report to the other ranks that this one was interrupted in an operation."""


class Turn:
    """A lock that raises if its holder would wait for itself."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # which knows its owner at any moment
        self.call: str = ""
        """The holder's call."""

    def of(self, call: str) -> Any:
        """Return the lock for a ``with`` block; raise if this thread holds it."""
        if self._lock._is_owned():
            raise CollectiveError(
                f"{call} was called within {self.call}: signal handlers and finalizers must not "
                "call collectives"
            )
        return self._lock

    def is_free(self) -> bool:
        """Return whether no thread holds it, this one included."""
        is_free = not self._lock._is_owned() and self._lock.acquire(blocking=False)
        if is_free:
            self._lock.release()
        return is_free


class Turns:
    """The operations of one group, run in turn."""

    def __init__(self, monitor: Monitor, group: Group | None = None) -> None:
        self._monitor, self._group = monitor, group
        self._turn = Turn()  # threads of one group must agree on their order anyway
        self._ended: UnisonoError | None = None

    def belong_to(self, monitor: Any) -> None:
        """Set the monitor of the view of the context that has it now."""
        self._monitor = monitor

    def close(self) -> None:
        """Release the memory; later calls raise."""
        self._ended = ContextError(
            "the context of this memory has ended, by finalize() or with its process group"
        )

    def _run(self, call: str, work: Callable[[Check], None], target: Tensor | None = None) -> None:
        """Run an operation that overwrites `target`; after an interrupted one, all raise."""
        is_apart = target is not None and target.is_inference()
        with self._turn.of(call), torch.inference_mode() if is_apart else _AS_IT_IS:
            self._turn.call = call
            if self._ended is not None:
                raise type(self._ended)(f"{call}: {self._ended}")
            self._do(call, work)

    def _do(self, call: str, work: Callable[[Check], None]) -> None:
        try:
            work(self._monitor.begin(self._group, call))
        except BaseException as error:
            self._ended = CollectiveError(
                "an earlier call left the memory that the ranks share half-way, so they are "
                "out of step: end the job, or finalize() and initialize again"
            )
            if not isinstance(error, UnisonoError):
                self._monitor.interrupt(f"{type(error).__name__} interrupted {call}")
            raise
