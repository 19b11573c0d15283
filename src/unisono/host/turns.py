"""Operations that several threads ask for, one after the other, until one is left half-way."""

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
    """Looks after operations, as the control plane does."""

    def begin(self, group: Group | None, call: str) -> Check:
        """Record an operation that begins; return what the arena calls while it waits."""

    def interrupt(self, how: str) -> None:
        """Tell the other ranks that this one left an operation half-way."""


class Turn:
    """A lock whose holder learns that it would wait for itself."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # which knows at any moment whose it is
        self.call: str = ""
        """What its holder is doing."""

    def of(self, call: str) -> Any:
        """Return the lock, for a ``with`` block, which no interrupt comes between."""
        if self._lock._is_owned():
            raise CollectiveError(
                f"{call} was called within {self.call}, by a signal handler or a finalizer: let "
                "those call no collective"
            )
        return self._lock

    def is_free(self) -> bool:
        """Return whether nobody has it, this thread included."""
        is_free = not self._lock._is_owned() and self._lock.acquire(blocking=False)
        if is_free:
            self._lock.release()
        return is_free


class Turns:
    """What runs the operations of one group."""

    def __init__(self, monitor: Monitor, group: Group | None = None) -> None:
        self._monitor, self._group = monitor, group
        self._turn = Turn()  # threads of one group must agree on their order anyway
        self._ended: UnisonoError | None = None

    def belong_to(self, monitor: Any) -> None:
        """Take note that another view of the context has it now."""
        self._monitor = monitor

    def close(self) -> None:
        """Let go of the memory; nothing can be called any more."""
        self._ended = ContextError(
            "the context of this memory has ended, by finalize() or with its process group"
        )

    def _run(self, call: str, work: Callable[[Check], None], target: Tensor | None = None) -> None:
        """Run an operation that overwrites `target`; one that is left half-way is the last."""
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
