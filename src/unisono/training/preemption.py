"""Preemption: a signal to one rank makes all ranks stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.collectives.call import exchange_blobs, guarded
from unisono.context import communicator
from unisono.errors import ArgumentError, UnsupportedOperation

_watched: dict[int, Any] = {}  # recorded signals, with their previous handlers
_received: set[int] = set()  # signals received
_reported: set[int] = set()  # signals that a preemption_point reported for any rank
_NO, _YES, _CANNOT = b"n", b"y", b"c"


@contextmanager
def preemptible(*signals: int) -> Iterator[None]:
    """Record signals in a block instead of exiting; `preemption_point` reports them to all ranks.

    It is needed for signals other than SIGTERM, for ranks that are threads, and for programs that
    continue after the block. At its end previous handlers are restored, and a received signal that
    no `preemption_point` has reported is raised again.

    Args:
        signals: numbers such as ``signal.SIGUSR1``; SIGTERM is always recorded.

    Yields:
        None.

    Raises:
        ArgumentError: a signal can't be handled, or this isn't the main thread of the process.

    Example:
        >>> import signal, unisono as idist
        >>> with idist.preemptible(signal.SIGUSR1):
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     idist.preemption_point()
        True
    """
    if not _is_main():
        raise ArgumentError(
            "only the main thread of a process can handle signals: open preemptible() there, "
            "before thread ranks start"
        )
    before = {number: _watched.get(number) for number in (*signals, signal.SIGTERM)}
    try:
        for number in before:
            _watch(number)
        yield
    finally:
        unreported = (_received - _reported) & before.keys()
        for number, handler in before.items():
            # A signal without a handler here before is one that this block began to watch; outer
            # blocks still watch the others.
            if handler is None and number in _watched:
                signal.signal(number, _watched.pop(number))
        _received.intersection_update(_watched)
        _reported.intersection_update(_watched)
        # Sent again, to the restored handler, unless an outer block watches the signal.
        for number in unreported - _watched.keys():
            os.kill(os.getpid(), number)


def _watch(number: int) -> None:
    """Record a signal from now on, and keep its previous handler."""
    if number in _watched:
        return
    try:
        before = signal.signal(number, _record)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"signal {number!r} can't be handled: {error}") from error
    # None means a handler that C code has set, which Python can't restore.
    _watched[number] = signal.SIG_DFL if before is None else before


def _record(number: int, frame: Any) -> None:
    _received.add(number)


def _after_fork() -> None:
    """Restore the previous handlers in a forked child."""
    # SIGTERM must end a child, such as a loader's worker, which has no preemption_point.
    for number, handler in _watched.items():
        signal.signal(number, handler)
    _watched.clear()
    _received.clear()
    _reported.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@guarded
def preemption_point() -> bool:
    """Return whether any rank received a signal, so that all save and exit at the same step.

    Collective over all ranks.

    From the first call on, SIGTERM is recorded in this process and no longer ends it. A block of
    `preemptible` records other signals. Signals reach the main thread only: if ranks are other
    threads, open that block in the main thread.

    Returns:
        Whether a rank had received a signal before this call, the same on every rank; once True,
        it stays so.

    Raises:
        UnsupportedOperation: a rank is a thread, and its process records no signals (on every
            rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> with idist.preemptible():
        ...     idist.preemption_point()
        False
    """
    context = communicator()
    if not _watched and _is_main():
        _watch(signal.SIGTERM)
    # A signal received later counts in the next call, as this call's answer is sent now.
    _reported.clear()
    _reported.update(_received)
    mark = _CANNOT if not _watched else _YES if _reported else _NO
    with context.calls.begin("preemption_point"):
        marks = [bytes(each) for each in exchange_blobs(context, "preemption_point", mark, None)]
    if _CANNOT in marks:
        ranks = [rank for rank, each in enumerate(marks) if each == _CANNOT]
        raise UnsupportedOperation(
            context.model.name,
            f"preemption_point without preemptible: ranks {ranks} are threads, which get no signal",
            "open `with preemptible():` in the main thread, around the call that starts the ranks. "
            "If ranks are threads of a process that spawn started, as on xla-cpu, check for a file "
            "on rank 0 and broadcast the result: idist.broadcast(path.exists())",
        )
    if _YES in marks:
        _reported.update(_watched)  # a signal sent to all ranks may reach some of them later
    return _YES in marks
