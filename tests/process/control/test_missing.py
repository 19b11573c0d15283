"""Who is missing, and who isn't: all ranks that wait name them, wherever the leader is."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.process.control.contexts import (
    LIMIT_S,
    heard,
    start,
    tell_of_two_looks,
    until_there,
)
from tests.support.by_hand import by_hand
from tests.support.clock import fast_clock
from tests.support.processes import until
from tests.support.requirements import require_backend
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

BIG = 2_000_000  # elements: more than what travels in a round


def test_a_group_goes_on_when_a_rank_outside_of_it_has_finished(tmp_path: Path) -> None:
    looked = tmp_path / "looked"

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 3, 30, is_compared=False)
        pair = unisono.new_group([0, 1])
        ended = os.pidfd_open(unisono.all_gather(os.getpid())[2])
        if rank == 2:
            return None
        select.select([ended], [], [])
        if rank == 1:
            until_there(looked)
        else:
            tell_of_two_looks(looked, ended)
        found = [
            unisono.all_reduce(torch.ones(BIG), group=pair).sum().item(),
            unisono.all_reduce(torch.ones(BIG), group=pair, async_op=True).wait().sum().item(),
            unisono.all_gather("x", group=pair),
        ]
        with pytest.raises(PeerFailedError, match="rank 2"):
            unisono.all_reduce(torch.ones(BIG))
        return found

    assert by_hand(fn, 3)[:2] == [[2 * BIG, 2 * BIG, ["x", "x"]]] * 2


@pytest.mark.parametrize(
    ("victim", "is_in_round", "is_stopped"),
    [(0, True, False), (0, False, True), (1, True, True), (1, False, False)],
)
def test_a_rank_that_hangs_is_named_at_the_deadline(
    victim: int, is_in_round: bool, is_stopped: bool, tmp_path: Path
) -> None:
    late = [tmp_path / f"late{rank}" for rank in range(3) if rank != victim]

    def fn(rank: int) -> str:
        start(tmp_path, rank, 3, 30, is_in_round)
        pids = unisono.all_gather(os.getpid())
        if rank == victim:
            if is_stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            until_there(*late)
            return ""
        if is_stopped:
            until(lambda: psutil.Process(pids[victim]).status() == psutil.STATUS_STOPPED, LIMIT_S)
        with fast_clock(), pytest.raises(CollectiveTimeoutError) as caught:
            unisono.barrier() if is_in_round else unisono.all_reduce(torch.ones(BIG))
        (tmp_path / f"late{rank}").touch()
        until_there(*late)
        return str(caught.value)

    results = by_hand(fn, 3, killed=victim if is_stopped else -1)
    del results[victim]
    for said in results:
        call = " to barrier" if is_in_round else ""
        state = "it is stopped by a signal\n" if is_stopped else "it is at "
        assert said.startswith(f"rank {victim} never came{call}: {state}")
        assert said.count("never came") == 1
        assert ("in until_there" in said) != is_stopped
        assert re.search(r"its process is \d+ on this host", said)
        assert ("not done after 30 s" in said) != is_in_round
        assert ("  ranks 0 and 2 wait in barrier at " in said) == (is_in_round and victim == 1)


def test_those_on_another_line_of_the_same_collective_are_not_called_late(tmp_path: Path) -> None:
    late = [tmp_path / f"late{rank}" for rank in (0, 2)]

    def fn(rank: int) -> str:
        start(tmp_path, rank, 4, 30, is_compared=False)
        unisono.barrier()
        some = unisono.new_group([0, 2, 3])
        unisono.barrier(group=some)
        if rank % 2:
            until_there(*late)
            return ""
        with fast_clock(), pytest.raises(CollectiveTimeoutError) as caught:
            if rank == 0:
                unisono.all_reduce(torch.ones(BIG), group=some)
            else:
                unisono.all_reduce(torch.ones(BIG), group=some)
        (tmp_path / f"late{rank}").touch()
        until_there(*late)
        return str(caught.value)

    for said in by_hand(fn, 4)[::2]:
        assert said.count("never came") == 1
        assert said.startswith("rank 3 never came")


@pytest.mark.parametrize("is_in_round", [True, False])
def test_who_waits_long_is_told_once_who_is_missing_and_where_that_is(
    is_in_round: bool, tmp_path: Path
) -> None:
    def fn(rank: int) -> list[str]:
        start(tmp_path, rank, 3, 600, is_in_round)
        unisono.barrier()
        with fast_clock(), heard(tmp_path / f"warned{rank}") as said:
            if rank == 2:
                until_there(tmp_path / "warned0", tmp_path / "warned1")
            unisono.barrier() if is_in_round else unisono.all_reduce_(torch.ones(BIG))
        unisono.finalize()
        return said

    results = by_hand(fn, 3)
    assert [len(said) for said in results] == [1, 1, 0]
    for (said,) in results[:2]:
        if is_in_round:
            first = "rank 0 of 3 is still waiting: rank 2 never came to barrier: it is at "
            assert said.startswith(first)
            assert "  ranks 0 and 1 wait in barrier at " in said
            assert "  its last collective was barrier at " in said
            assert "round" not in said
        else:
            assert "all_reduce SUM is still waiting: rank 2 never came: it is at " in said
        assert said.count("never came") == 1
        assert "in until_there" in said


@pytest.mark.parametrize("backend", ["threads", "mpi4py"])
def test_models_without_sockets_tell_too_who_is_missing(backend: str, tmp_path: Path) -> None:
    require_backend(backend)

    def fn(rank: int) -> list[str]:
        unisono.barrier()
        with fast_clock(), heard(tmp_path / f"warned{rank}", f"rank {rank} ") as said:
            if rank == 1:
                until_there(tmp_path / "warned0", tmp_path / "warned2")
            unisono.barrier()
        return said

    first, late, third = unisono.spawn(backend, fn, nproc_per_node=3, timeout=600)
    assert [len(first), late, len(third)] == [1, [], 1]
    for said in (first[0], third[0]):
        assert "still waits in " in said
        assert "rank 1 never came" in said
        assert said.count("never came") == 1
        assert ("in until_there" in said) == (backend == "threads")


def test_on_threads_too_the_late_are_named_with_their_line() -> None:
    done = threading.Event()

    def late() -> None:
        done.wait()

    def fn(rank: int) -> str:
        if rank == 1:
            late()
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught, unisono.deadline(30):
            unisono.barrier()
        done.set()
        return str(caught.value)

    with fast_clock():
        said, _ = unisono.spawn("threads", fn, nproc_per_node=2)
    assert re.match(r"rank 1 never came to barrier: it is at .*:\d+ \(done\.wait\(\)\)\n", said)
    # deadline() began a little before barrier did.
    assert re.search(r"rank 0 waited (30|2\d(\.\d)?) s in barrier at ", said)
    assert "in late" in said


def test_a_death_is_noticed_while_the_leader_is_elsewhere(tmp_path: Path) -> None:
    known = [tmp_path / f"known{rank}" for rank in (1, 3)]

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 4)
        unisono.barrier()
        if rank == 0:
            until_there(*known)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerFailedError, match="rank 2") as caught:
            unisono.barrier()
        (tmp_path / f"known{rank}").touch()
        return caught.value.rank

    assert by_hand(fn, 4, killed=2) == [2, 2, None, 2]


def test_two_threads_in_collectives_of_one_group_are_refused(tmp_path: Path) -> None:
    def fn(rank: int) -> list[str]:
        start(tmp_path, rank, 2)
        unisono.barrier()
        said: list[str] = []
        if rank == 1:
            until_there(tmp_path / "refused")
            with pytest.raises(CollectiveError) as mine:
                unisono.all_reduce(2)
                unisono.barrier()
            return [str(mine.value)]

        def wait() -> None:
            with pytest.raises(CollectiveError) as caught:
                unisono.all_reduce(1)
            said.append(str(caught.value))

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: said, LIMIT_S)
        (tmp_path / "refused").touch()
        for thread in threads:
            thread.join()
        return said

    for said in by_hand(fn):
        for text in said:
            assert "two threads called collectives of one group at once" in text
            assert "all_reduce SUM at " in text


@pytest.mark.parametrize("is_in_round", [True, False])
def test_a_deadline_holds_for_what_is_started_in_it(is_in_round: bool, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        start(tmp_path, rank, 2, 3600, is_in_round)
        unisono.barrier()
        if rank == 1:
            return until_there(tmp_path / "done")
        begin = time.monotonic()
        with fast_clock():
            with unisono.deadline(30):
                handle = unisono.all_reduce(torch.ones(BIG), async_op=True)
            with pytest.raises(CollectiveTimeoutError, match="rank 1"):
                handle.wait()
        (tmp_path / "done").touch()
        assert 0.5 <= time.monotonic() - begin < 30  # the context's own is over after 60

    by_hand(fn)


def test_a_deadline_holds_for_a_group_that_is_made_in_it(tmp_path: Path) -> None:
    late = [tmp_path / f"late{rank}" for rank in (0, 2)]

    def fn(rank: int) -> None:
        start(tmp_path, rank, 3, 3600)
        unisono.barrier()
        if rank != 1:
            begin = time.monotonic()
            with fast_clock(), unisono.deadline(30), pytest.raises(CollectiveError):
                unisono.barrier(group=[0, 1, 2])
            assert time.monotonic() - begin < 30  # as above
            (tmp_path / f"late{rank}").touch()
        until_there(*late)

    by_hand(fn, 3)
