"""Ranks that leave, in good order or not, and what forked children have of them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.process.control.contexts import start, tell_of_two_looks, until_there
from tests.support.by_hand import by_hand, join, leave
from tests.support.processes import in_fork
from unisono.context import communicator
from unisono.control import missing, rendezvous
from unisono.errors import ContextError, PeerFailedError
from unisono.topology import EVERYBODY

BIG = 8_000_000  # elements: more than what is on its way at any time


def pidfds() -> list[int]:
    return [os.pidfd_open(pid) for pid in unisono.all_gather(os.getpid())]


def child_until(path: Path) -> int:
    """Fork a child that does nothing until a file is there."""
    child = os.fork()
    if child == 0:
        try:
            until_there(path)
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("slow", [1, 2])
def test_a_rank_that_has_done_its_part_may_leave(slow: int, tmp_path: Path) -> None:
    """Rank 0 still sends to the slow one when the other has its broadcast and is gone."""

    def fn(rank: int) -> float:
        start(tmp_path, rank, 3, is_compared=False)  # else all come before anything is sent
        ends = pidfds()
        tensor = torch.full((BIG,), float(rank + 7))
        if rank == slow:
            select.select([ends[3 - slow]], [], [])
            until_there(tmp_path / "looked")
        elif rank == 0:
            tell_of_two_looks(tmp_path / "looked", ends[3 - slow])
        unisono.broadcast_(tensor, src=0)
        unisono.finalize()
        return tensor[-1].item()

    assert by_hand(fn, 3) == [7.0] * 3


@pytest.mark.parametrize(("leaver", "size"), [(0, 1), (0, BIG), (1, BIG), (2, 1)])
def test_a_rank_that_left_in_good_order_is_named_so(leaver: int, size: int, tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        start(tmp_path, rank, 3, is_compared=False)
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
unisono.initialize("gloo", init_method=sys.argv[2], rank=rank, world_size=3, timeout=60)
pairs = [unisono.new_group([0, peer]) for peer in (1, 2)]
for pair in pairs:
    if rank in pair.ranks:
        unisono.barrier(pair)
unisono.barrier()
if rank == 2:
    raise ValueError("in the middle of it")
if rank == 0:
    sys.stdin.read()
    for pair in pairs:
        try:
            unisono.barrier(pair)
        except unisono.errors.PeerFailedError as error:
            print(error)
"""


def test_a_program_that_came_to_its_end_is_named_so(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    first, *others = (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    )
    ends = [other.communicate() for other in others]
    assert [other.returncode for other in others] == [0, 1], ends
    out, errors = first.communicate()
    found = re.findall(r"rank (\d) \(pid (\d+) on this host\) (.*)", out)
    ended, raised = (["1", str(others[0].pid)], ["2", str(others[1].pid)])
    assert [[*each[:2]] for each in found] == [ended, raised], (out, errors)
    assert re.match(r"ended its program after barrier at <string>:8", found[0][2])
    assert found[1][2].startswith("has ended")


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
        with pytest.raises(PeerFailedError, match="rank 1"):
            unisono.barrier()
        done.touch()

    by_hand(fn, killed=1)


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


def test_a_fork_is_told_so_in_every_call(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)  # the user's own context

        def is_told(call: Callable[[], Any]) -> int:
            def look() -> None:
                with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                    call()

            return in_fork(look)

        codes = [is_told(call) for call in CALLS.values()]
        unisono.barrier()  # there are connections now
        codes += [is_told(call) for call in CALLS.values()]
        total = unisono.all_reduce(1)
        leave()
        return codes, total

    assert by_hand(fn) == [([0] * 2 * len(CALLS), 2)] * 2
