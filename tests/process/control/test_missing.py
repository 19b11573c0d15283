"""Who is missing, and who isn't: all ranks that wait name them, wherever the leader is."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import unisono
from tests.process.control.contexts import (
    LIMIT_S,
    heard,
    in_ranks,
    start,
    tell_of_two_looks,
    until_there,
)
from tests.support.by_hand import by_hand
from tests.support.clock import fast_clock
from tests.support.processes import until
from tests.support.requirements import require_backend
from unisono.context import communicator
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError
from unisono.topology import EVERYBODY

BIG = 2_000_000  # elements: more than what travels in a round


@in_ranks(3)
def test_a_group_goes_on_when_a_rank_outside_of_it_has_finished(rank: int, folder: Path) -> None:
    looked = folder / "looked"
    start(folder, rank, 3, 30, is_compared=False)
    pair = unisono.new_group([0, 1])
    ended = os.pidfd_open(unisono.all_gather(os.getpid())[2])
    if rank == 2:
        return
    select.select([ended], [], [])
    if rank == 1:
        until_there(looked)
    else:
        tell_of_two_looks(looked, ended)
    ones = torch.ones(BIG)
    assert unisono.all_reduce(ones, group=pair).sum() == 2 * BIG
    assert unisono.all_reduce(ones, group=pair, async_op=True).wait().sum() == 2 * BIG
    assert unisono.all_gather("x", group=pair) == ["x", "x"]
    with pytest.raises(PeerFailedError, match="rank 2"):
        unisono.all_reduce(ones)


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
            if is_in_round:  # a late call fails, too, where a message would still be there
                control: Any = communicator().control
                peers = control.hubs[EVERYBODY].peers
                until(lambda: peers.flooded is not None, LIMIT_S)
                with pytest.raises(CollectiveTimeoutError, match=f"rank {victim} never"):
                    unisono.all_reduce(1)
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
        call = "reached barrier" if is_in_round else "arrived"
        state = "it is stopped by a signal\n" if is_stopped else "it is at "
        assert said.startswith(f"rank {victim} never {call}: {state}")
        assert said.count(" never ") == 1
        assert ("in until_there" in said) != is_stopped
        assert re.search(r"its process is \d+ on this host", said)
        assert ("not done after 30 s" in said) != is_in_round
        assert ("  ranks 0, 2 wait in barrier at " in said) == (is_in_round and victim == 1)


@pytest.mark.parametrize(
    ("wrap", "first"),
    [(unisono.auto_model, 0), (unisono.auto_model, 1), (nn.parallel.DistributedDataParallel, 0)],
)
@in_ranks()
def test_a_call_and_a_backward_name_each_other(
    rank: int, folder: Path, wrap: Any, first: int
) -> None:
    """Where nothing is compared, as between hosts; torch's own wrapper has no name of ours."""
    start(folder, rank, 2, 30, is_compared=False)
    model = wrap(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    begun = folder / "begun"
    loss.register_hook(lambda _: begun.touch() if rank != first else None)
    if rank != first:
        if rank == 0:
            begun.touch()
        with pytest.raises(RuntimeError):  # when the first has left
            unisono.barrier() if rank == 0 else loss.backward()
        return
    until_there(begun)
    with fast_clock(30), pytest.raises(CollectiveTimeoutError) as caught:
        unisono.barrier() if rank == 0 else loss.backward()
    said = str(caught.value)
    assert f"rank {rank} never" not in said
    assert re.search(rf"rank {1 - rank} never.*: it is at .*:\d+ \(.*loss.backward\(\)", said)
    gradients = "gradients of backward of Linear (model 1), bucket 0"
    if rank == 0:
        assert "rank 0 waits in barrier at " in said
        assert (f"its last collective was {gradients} at " in said) == (wrap is unisono.auto_model)
    else:
        assert "its last collective was barrier at " in said
        assert f"rank 1 of 2: {gradients}: not done after 30 s" in said


@in_ranks(4)
def test_those_on_another_line_of_the_same_collective_are_not_called_late(
    rank: int, folder: Path
) -> None:
    late = [folder / f"late{rank}" for rank in (0, 2)]
    start(folder, rank, 4, 30, is_compared=False)
    unisono.barrier()
    some = unisono.new_group([0, 2, 3])
    unisono.barrier(group=some)
    if rank % 2 == 0:
        with fast_clock(), pytest.raises(CollectiveTimeoutError) as caught:
            if rank == 0:
                unisono.all_reduce(torch.ones(BIG), group=some)
            else:
                unisono.all_reduce(torch.ones(BIG), group=some)
        assert str(caught.value).count(" never ") == 1
        assert str(caught.value).startswith("rank 3 never")
        (folder / f"late{rank}").touch()
    until_there(*late)


@pytest.mark.parametrize("backend", ["gloo", "gloo, nothing compared", "threads", "mpi4py"])
def test_who_waits_long_is_told_once_who_is_missing_and_where_that_is(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, is_on_data_plane = backend.partition(",")
    require_backend(model)
    if is_on_data_plane:
        monkeypatch.setenv("UNISONO_DEBUG", "0")
        monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")

    def fn(rank: int) -> list[str]:
        begin = f"rank {rank} " if model == "threads" else ""  # threads have one logger
        unisono.barrier()
        with fast_clock(), heard(tmp_path / f"warned{rank}", begin) as said:
            if rank == 1:
                until_there(tmp_path / "warned0", tmp_path / "warned2")
            unisono.all_reduce_(torch.ones(BIG)) if is_on_data_plane else unisono.barrier()
        return said

    first, late, third = unisono.spawn(model, fn, nproc_per_node=3, timeout=600)
    assert [len(first), late, len(third)] == [1, [], 1]
    for said in (first[0], third[0]):
        assert said.count(" never ") == 1
        assert "in until_there" in said
        if is_on_data_plane:
            assert "all_reduce SUM is still waiting: rank 1 never arrived: it is at " in said
        elif model != "threads":
            start = "rank 0 of 3 is still waiting: rank 1 never reached barrier: it is at "
            assert said.startswith(start)
            assert "  ranks 0, 2 wait in barrier at " in said
            assert "  its last collective was barrier at " in said
            assert "round" not in said
        else:
            assert "still waits in " in said
            assert "rank 1 never" in said


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
    assert re.match(r"rank 1 never reached barrier: it is at .*:\d+ \(done\.wait\(\)\)\n", said)
    # deadline() began a little before barrier did.
    assert re.search(r"rank 0 waited (30|2\d(\.\d)?) s in barrier at ", said)
    assert "in late" in said


@in_ranks(4, killed=2)
def test_a_death_is_noticed_while_the_leader_is_elsewhere(rank: int, folder: Path) -> None:
    start(folder, rank, 4)
    unisono.barrier()
    if rank == 0:
        until_there(folder / "known1", folder / "known3")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerFailedError, match="rank 2") as caught:
        unisono.barrier()
    (folder / f"known{rank}").touch()
    assert caught.value.rank == 2


@in_ranks()
def test_two_threads_in_collectives_of_one_group_are_refused(rank: int, folder: Path) -> None:
    start(folder, rank, 2)
    unisono.barrier()
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(CollectiveError) as caught:
            unisono.all_reduce(1)
            if rank == 1:
                unisono.barrier()
        said.append(str(caught.value))

    if rank == 1:
        until_there(folder / "refused")
        wait()
    else:
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: said, LIMIT_S)
        (folder / "refused").touch()
        for thread in threads:
            thread.join()
        assert len(said) == 2
    for text in said:
        assert "two threads called collectives of one group at once" in text
        assert "all_reduce SUM at " in text
