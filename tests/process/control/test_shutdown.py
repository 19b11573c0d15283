"""Ranks that leave, in good order or not, and what forked children have of them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import by_hand, join, leave, prepare
from tests.support.processes import in_fork
from unisono.context import communicator
from unisono.control import missing, rendezvous
from unisono.errors import ContextError, PeerFailedError
from unisono.topology import EVERYBODY

BIG = 8_000_000  # elements: more than what is on its way at any time


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield


def start(folder: Path, rank: int, size: int, timeout: float = 60) -> None:
    store = FileStore(str(folder / "store"), size)
    unisono.initialize("gloo", rank=rank, world_size=size, store=store, timeout=timeout)


def pidfds() -> list[int]:
    return [os.pidfd_open(pid) for pid in unisono.all_gather(os.getpid())]


def child_until(path: Path) -> int:
    """Fork a child that does nothing until a file is there."""
    child = os.fork()
    if child == 0:
        while not path.exists():
            time.sleep(0.01)
        os._exit(0)
    return child


@pytest.mark.parametrize("slow", [1, 2])
def test_a_rank_that_has_done_its_part_may_leave(slow: int, tmp_path: Path) -> None:
    """Rank 0 still sends to the slow one when the other has its broadcast and is gone."""

    def fn(rank: int) -> float:
        # else all come before anything is sent
        os.environ.update(UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
        start(tmp_path, rank, 3)
        ends = pidfds()
        tensor = torch.full((BIG,), float(rank + 7))
        if rank == slow:
            select.select([ends[3 - slow]], [], [])
            select.select([], [], [], 1.0)  # long enough for rank 0 to look around
        unisono.broadcast_(tensor, src=0)
        unisono.finalize()
        return tensor[-1].item()

    assert by_hand(fn, 3) == [7.0] * 3


def test_one_that_died_is_no_such_rank(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        os.environ.update(UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
        start(tmp_path, rank, 3)
        ends = pidfds()
        unisono.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([ends[1]], [], [])
        with pytest.raises(PeerFailedError, match="rank 1 .* has ended") as caught:
            unisono.all_reduce(torch.ones(BIG))
        return caught.value.rank

    assert by_hand(fn, 3, killed=1) == [1, None, 1]


@pytest.mark.parametrize("size", [1, BIG])
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_left_in_good_order_is_named_so(leaver: int, size: int, tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        os.environ.update(UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
        start(tmp_path, rank, 3)
        ends = pidfds()
        unisono.barrier()
        if rank == leaver:
            unisono.finalize()
            return ""
        select.select([ends[leaver]], [], [])
        with pytest.raises(PeerFailedError) as caught:
            unisono.all_reduce(torch.ones(size))
        assert caught.value.rank == leaver
        return str(caught.value)

    said = by_hand(fn, 3)
    del said[leaver]
    for text in said:
        assert "left after barrier at " in text
        assert "Connection reset" not in text


PROGRAM = """
import sys, unisono
rank = int(sys.argv[1])
unisono.initialize("gloo", init_method=sys.argv[2], rank=rank, world_size=2, timeout=60)
unisono.barrier()
unisono.barrier()
if rank == 0:
    sys.stdin.read()
    unisono.barrier()
if sys.argv[3] == "raise":
    raise ValueError("in the middle of it")
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("end", r"ended its program after barrier at <string>:6"),
        ("raise", "has ended"),
    ],
)
def test_a_program_that_came_to_its_end_is_named_so(how: str, says: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), url, how if rank else "end"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    _, its_errors = second.communicate()
    _, errors = first.communicate()
    assert second.returncode == (how == "raise"), its_errors
    assert first.returncode == 1, errors
    assert "PeerFailedError" in errors
    assert re.search(rf"rank 1 \(pid {second.pid} on this host\) {says}", errors), errors


@pytest.mark.parametrize("seen_by", ["its connection", "its process"])
def test_a_death_is_seen_although_a_forked_child_lives_on(seen_by: str, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def fn(rank: int) -> Any:
        if seen_by == "its connection":  # as between hosts
            vars(rendezvous)["host_of_this_process"] = lambda: f"host {rank}"
            vars(missing)["watch"] = lambda pids: {}
            os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
        start(tmp_path, rank, 2)
        ends = pidfds()
        unisono.barrier()
        if rank == 1:
            child_until(done)
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([ends[1]], [], [])
        begin = time.monotonic()
        with pytest.raises(PeerFailedError, match="rank 1"):
            unisono.barrier()
        done.touch()
        return time.monotonic() - begin

    seconds, _ = by_hand(fn, killed=1)
    assert seconds < 10  # its timeout is a minute


def test_what_a_context_has_open_ends_with_it_although_a_forked_child_lives_on(
    tmp_path: Path,
) -> None:
    def fn(rank: int) -> Any:
        done = tmp_path / f"done{rank}"
        start(tmp_path, rank, 2)
        groups = [unisono.new_group([0, 1]) for _ in range(2)]
        for group in groups:
            unisono.barrier(group=group)
        child = child_until(done)
        threads = [t for t in threading.enumerate() if t.name.startswith("unisono-sideband")]
        unisono.finalize()
        for thread in threads:
            thread.join(10)
        done.touch()
        os.waitpid(child, 0)
        return len(threads), sum(thread.is_alive() for thread in threads)

    assert by_hand(fn) == [(3, 0)] * 2


def test_a_forked_child_has_no_connection_of_its_parent(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        start(tmp_path, rank, 2)
        unisono.barrier()
        hub = vars(communicator().control)["hubs"][EVERYBODY]
        detector = hub._detector
        fds = [
            connection.fd
            for connection in (
                *detector._connections.values(),
                *detector._sideband._connections.values(),
            )
        ]
        fds += [
            *detector.pidfds.values(),
            detector._sideband._wake_writer,
            detector._sideband._wake_reader,
        ]
        child = os.fork()
        if child == 0:
            left = 0
            for fd in fds:
                left += os.path.exists(f"/proc/self/fd/{fd}")
            os._exit(left)
        _, status = os.waitpid(child, 0)
        return len(fds), os.waitstatus_to_exitcode(status), unisono.all_reduce(1)

    assert by_hand(fn) == [(5, 0, 2)] * 2


def after(change: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        change()
        unisono.barrier()

    return call


CALLS: dict[str, Callable[[], Any]] = {
    "after sync": after(unisono.sync),
    "after set_local_rank": after(lambda: unisono.set_local_rank(0)),
    "finalize": unisono.finalize,
    "initialize": lambda: unisono.initialize("gloo"),
    "new_group": lambda: unisono.new_group([0, 1]),
    "barrier": unisono.barrier,
}


@pytest.mark.parametrize("has_asked", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_fork_is_told_so_in_every_call(call: str, has_asked: bool, tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)  # the user's own context
        if has_asked:
            unisono.barrier()

        def look() -> None:
            with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                CALLS[call]()

        code, total = in_fork(look), unisono.all_reduce(1)
        leave()
        return code, total

    assert by_hand(fn) == [(0, 2)] * 2
