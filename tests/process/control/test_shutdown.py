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
from tests.process.control.contexts import in_ranks, start, tell_of_two_looks, until_there
from tests.support.by_hand import join, leave
from tests.support.processes import in_fork
from unisono.context import communicator
from unisono.control import rendezvous
from unisono.errors import ContextError, PeerFailedError
from unisono.topology import EVERYBODY

BIG = 8_000_000  # elements: more than what is on its way at any time


def pidfds() -> list[int]:
    return [os.pidfd_open(pid) for pid in unisono.all_gather(os.getpid())]


def child_until(path: Path, look: Callable[[], int] = int) -> int:
    """Fork a child that looks, and does nothing more until a file is there."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = look()
            until_there(path)
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("slow", [1, 2])
@in_ranks(3)
def test_a_rank_that_has_done_its_part_may_leave(rank: int, folder: Path, slow: int) -> None:
    """Rank 0 still sends to the slow one when the other has its broadcast and is gone."""
    start(folder, rank, 3, is_compared=False)  # else all come before anything is sent
    ends = pidfds()
    tensor = torch.full((BIG,), float(rank + 7))
    if rank == slow:
        select.select([ends[3 - slow]], [], [])
        until_there(folder / "looked")
    elif rank == 0:
        tell_of_two_looks(folder / "looked", ends[3 - slow])
    unisono.broadcast_(tensor, src=0)
    unisono.finalize()
    assert tensor[-1] == 7


@pytest.mark.parametrize(("leaver", "size"), [(0, 1), (0, BIG), (1, BIG), (2, 1)])
@in_ranks(3)
def test_a_rank_that_left_in_good_order_is_named_so(
    rank: int, folder: Path, leaver: int, size: int
) -> None:
    start(folder, rank, 3, is_compared=False)
    ends = pidfds()
    unisono.barrier()
    if rank == leaver:
        unisono.finalize()
        return
    select.select([ends[leaver]], [], [])
    with pytest.raises(PeerFailedError, match="left after barrier at ") as caught:
        unisono.all_reduce(torch.ones(size))
    assert caught.value.rank == leaver
    assert "Connection reset" not in str(caught.value)


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
@in_ranks(killed=1)
def test_a_death_is_seen_although_a_forked_child_lives_on(
    rank: int, folder: Path, seen_by: str
) -> None:
    if seen_by == "its connection":  # as between hosts
        vars(rendezvous)["host_of_this_process"] = lambda: f"host {rank}"
        os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    start(folder, rank, 2)
    ends = pidfds()
    unisono.barrier()
    if rank == 1:
        child_until(folder / "done")
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([ends[1]], [], [])
    with pytest.raises(PeerFailedError, match="rank 1"):
        unisono.barrier()
    (folder / "done").touch()


@in_ranks()
def test_what_a_context_has_open_ends_with_it_although_a_forked_child_lives_on(
    rank: int, folder: Path
) -> None:
    """And no connection is the child's."""
    done = folder / f"done{rank}"
    start(folder, rank, 2)
    groups = [unisono.new_group([0, 1]) for _ in range(2)]
    for group in (None, *groups):
        unisono.barrier(group=group)
    peers = vars(communicator().control)["hubs"][EVERYBODY].peers
    held = (*peers.rounds.values(), *peers.sideband.values())
    fds = [connection.fd for connection in held]
    fds += [*peers.pidfds.values(), peers._wake_writer, peers._wake_reader]
    child = child_until(done, lambda: sum(os.path.exists(f"/proc/self/fd/{n}") for n in fds))
    assert unisono.all_reduce(1) == 2
    threads = [t for t in threading.enumerate() if t.name.startswith("unisono-sideband")]
    unisono.finalize()
    for thread in threads:
        thread.join(10)
    done.touch()
    _, status = os.waitpid(child, 0)
    assert (len(fds), os.waitstatus_to_exitcode(status)) == (5, 0)
    assert (len(threads), sum(thread.is_alive() for thread in threads)) == (3, 0)


def after(change: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        change()
        unisono.barrier()

    return call


CALLS: list[Callable[[], Any]] = [
    after(unisono.sync),
    after(lambda: unisono.set_local_rank(0)),
    unisono.finalize,
    lambda: unisono.initialize("gloo"),
    lambda: unisono.new_group([0, 1]),
    unisono.barrier,
]


@in_ranks()
def test_a_fork_is_told_so_in_every_call(rank: int, folder: Path) -> None:
    """Of the user's own context, too, and before there are connections."""
    join(folder, rank, 2)
    for _ in range(2):
        for call in CALLS:

            def look(call: Callable[[], Any] = call) -> None:
                with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                    call()

            assert in_fork(look) == 0
        unisono.barrier()
    assert unisono.all_reduce(1) == 2
    leave()
