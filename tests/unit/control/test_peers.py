"""Peers in this process: how a hub fails and ends."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from unisono.control.connection import Connection
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import links
from unisono.errors import CollectiveError, CollectiveTimeoutError

LIMIT_S = 20.0


@contextmanager
def hub(pids: Mapping[int, int] | None = None) -> Iterator[list[Hub]]:
    """Make the hub of a rank whose only neighbour is silent; who drops it from the list ends it."""
    pairs = [socket.socketpair() for _ in range(2)]
    lines: Any = [{1: Connection(ours, None, 1 << 16)} for ours, _ in pairs]
    before = set(threading.enumerate())
    both, tree = (lines[0], lines[1]), links([[0, 1]], 0)
    peers = Peers(range(2), 0, tree, both, pids or {}, SequenceNumbers())
    (thread,) = set(threading.enumerate()) - before
    held = [Hub(peers, None, 60.0)]
    del peers
    with pairs[0][1], pairs[1][1]:
        yield held
        held.clear()
        gc.collect()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_hub_that_has_failed_ends_with_its_last_reference_and_keeps_no_frame() -> None:
    """What is raised later has no traceback of the first time, whose frames keep the users' own."""

    class Batch:
        pass

    def fail(held: list[Hub]) -> weakref.ref[Batch]:
        batch = Batch()
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match="rank 1 never (arrived|reached)"):
                held[0].exchange(b"mine", 0.0)
        return weakref.ref(batch)

    with hub() as held:
        batch = fail(held)
        gc.collect()
        assert batch() is None


def test_an_interrupt_at_the_end_of_a_round_is_what_later_rounds_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not that one was called within another; and the lock is free."""

    def interrupted(self: Peers, name: str, value: object) -> None:
        if (name, value) == ("is_in_round", False):
            raise KeyboardInterrupt
        object.__setattr__(self, name, value)

    with hub() as held:
        with monkeypatch.context() as patched:
            patched.setattr(Hub, "_round", lambda *_: ([b"mine"], [4]))
            patched.setattr(Peers, "__setattr__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                held[0].exchange(b"mine", LIMIT_S)
        for _ in range(2):
            with pytest.raises(CollectiveError, match="interrupted .* out of step"):
                held[0].exchange(b"mine", LIMIT_S)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(held[0].peers.lock.acquire, blocking=False).result()


def test_a_late_rank_is_named_where_no_descriptor_is_left() -> None:
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with hub({1: os.getppid()}) as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
        try:
            with pytest.raises(CollectiveTimeoutError, match="rank 1 never (arrived|reached)"):
                held[0].exchange(b"mine", 0.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
