"""Who is missing, and who isn't: all ranks that wait name them, wherever the leader is."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import by_hand, join, leave, prepare
from tests.support.requirements import require_backend
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

BIG = 2_000_000  # elements: more than what travels in a round


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield


def until_there(path: Path) -> None:
    """Compute, in Python, until a file is there."""
    while not path.exists():
        pass


def start(folder: Path, rank: int, size: int, timeout: float, compares: bool = True) -> None:
    if not compares:  # so that what isn't there is missed on the data plane
        os.environ.update(UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
    store = FileStore(str(folder / "store"), size)
    unisono.initialize("gloo", rank=rank, world_size=size, store=store, timeout=timeout)


def test_a_group_goes_on_when_a_rank_outside_of_it_has_finished(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        start(tmp_path, rank, 3, 30, compares=False)
        pair = unisono.new_group([0, 1])
        ended = os.pidfd_open(unisono.all_gather(os.getpid())[2])
        if rank == 2:
            return None
        select.select([ended], [], [])
        if rank == 1:  # long enough for rank 0 to look around
            select.select([], [], [], 1.0)
        found = [
            unisono.all_reduce(torch.ones(BIG), group=pair).sum().item(),
            unisono.all_reduce(torch.ones(BIG), group=pair, async_op=True).wait().sum().item(),
            unisono.all_gather("x", group=pair),
        ]
        with pytest.raises(PeerFailedError, match="rank 2"):
            unisono.all_reduce(torch.ones(BIG))
        return found

    assert by_hand(fn, 3)[:2] == [[2 * BIG, 2 * BIG, ["x", "x"]]] * 2


@pytest.mark.timed
@pytest.mark.parametrize(("size", "compares"), [(3, True), (BIG, True), (BIG, False)])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_rank_that_hangs_is_named_soon_after_the_deadline(
    is_stopped: bool, victim: int, size: int, compares: bool, tmp_path: Path
) -> None:
    done = tmp_path / "done"

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 3, 2, compares)
        pids = unisono.all_gather(os.getpid())
        if rank == victim:
            if is_stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            return until_there(done)
        if is_stopped:
            while psutil.Process(pids[victim]).status() != psutil.STATUS_STOPPED:
                pass
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            unisono.all_reduce(torch.ones(size))
        seconds = time.monotonic() - begin
        other = 1 if victim == 0 else 0
        (tmp_path / f"late{rank}").touch()
        if rank == other:
            until_there(tmp_path / "late2")
            done.touch()
        else:
            until_there(tmp_path / f"late{other}")
        return str(caught.value), seconds

    results = by_hand(fn, 3, killed=victim if is_stopped else -1)
    del results[victim]
    for said, seconds in results:
        assert said.startswith(f"rank {victim} never came")
        assert said.count("never came") == 1
        assert ("stopped by a signal" in said) == is_stopped
        assert ("until_there" in said) != is_stopped
        assert seconds < 4  # the timeout and one second, where nothing else runs


def test_those_on_another_line_of_the_same_collective_are_not_called_late(tmp_path: Path) -> None:
    done = tmp_path / "done"

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 4, 2, compares=False)
        unisono.barrier()
        late = unisono.new_group([0, 2, 3])
        unisono.barrier(group=late)
        if rank == 1:
            return until_there(done)
        if rank == 3:
            return until_there(done)
        with pytest.raises(CollectiveTimeoutError) as caught:
            if rank == 0:
                unisono.all_reduce(torch.ones(BIG), group=late)
            else:
                unisono.all_reduce(torch.ones(BIG), group=late)
        (tmp_path / f"late{rank}").touch()
        until_there(tmp_path / f"late{2 - rank}")
        done.touch()
        return str(caught.value)

    first, _, third, _ = by_hand(fn, 4)
    for said in (first, third):
        assert said.count("never came") == 1
        assert said.startswith("rank 3 never came")


@pytest.mark.timed  # a rank that is a fifth of a second late is told, too
def test_who_waits_long_for_a_large_tensor_is_told_who_is_missing(tmp_path: Path) -> None:
    def fn(rank: int) -> list[str]:
        os.environ.update(UNISONO_WARN_AFTER_S="0.2", UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
        said: list[str] = []
        handler = logging.Handler()
        done = tmp_path / f"done{rank}"

        def keep(record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            done.touch()

        handler.emit = keep  # type: ignore[method-assign]
        logging.getLogger("unisono").addHandler(handler)
        join(tmp_path, rank, 3)
        unisono.barrier()
        if rank == 2:
            until_there(tmp_path / "done0")
            until_there(tmp_path / "done1")
        unisono.all_reduce_(torch.ones(BIG))
        leave()
        return said

    results = by_hand(fn, 3)
    assert [len(said) for said in results] == [1, 1, 0]
    for said in results[:2]:
        assert "all_reduce SUM is still waiting" in said[0]
        assert "rank 2 never came: it is at " in said[0]
        assert said[0].count("never came") == 1
        assert "until_there" in said[0]


@pytest.mark.timed  # a rank that is a fifth of a second late is told, too
@pytest.mark.parametrize("backend", ["threads", "mpi4py"])
def test_models_without_sockets_tell_too_who_is_missing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_WARN_AFTER_S", "0.2")
    if backend == "mpi4py":
        require_backend(backend)

    def fn(rank: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        warned = tmp_path / f"warned{rank}"

        def keep(record: logging.LogRecord) -> None:
            if record.getMessage().startswith(f"rank {rank} "):  # threads share a logger
                said.append(record.getMessage())
                warned.touch()

        handler.emit = keep  # type: ignore[method-assign]
        logging.getLogger("unisono").addHandler(handler)
        unisono.barrier()
        if rank == 1:
            until_there(tmp_path / "warned0")
            until_there(tmp_path / "warned2")
        unisono.barrier()
        logging.getLogger("unisono").removeHandler(handler)
        return said

    first, late, third = unisono.spawn(backend, fn, nproc_per_node=3, timeout=30)
    assert [len(first), late, len(third)] == [1, [], 1]
    for said in (first[0], third[0]):
        assert "still waits in " in said
        assert "rank 1 never came" in said
        assert said.count("never came") == 1
        assert ("until_there" in said) == (backend == "threads")


@pytest.mark.timed  # the text has the seconds
def test_on_threads_too_the_late_are_named_with_their_line() -> None:
    done = threading.Event()

    def late() -> None:
        done.wait()

    def fn(rank: int) -> str:
        if rank == 1:
            late()
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught, unisono.deadline(0.5):
            unisono.barrier()
        done.set()
        return str(caught.value)

    said, _ = unisono.spawn("threads", fn, nproc_per_node=2)
    assert re.match(r"rank 1 never came to barrier: it is at .*:\d+ \(done\.wait\(\)\)\n", said)
    # deadline() began a little before barrier did.
    assert re.search(r"rank 0 waited 0\.(5|4\d+) s in barrier at ", said)
    assert "in late" in said


@pytest.mark.timed
def test_a_death_is_noticed_while_the_leader_is_elsewhere(tmp_path: Path) -> None:
    done = tmp_path / "done"

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 4, 60)
        unisono.barrier()
        if rank == 0:
            until_there(done)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerFailedError, match="rank 2") as caught:
            unisono.barrier()
        seconds = time.monotonic() - begin
        (tmp_path / f"known{rank}").touch()
        if rank == 1:
            until_there(tmp_path / "known3")
            done.touch()
        return caught.value.rank, seconds

    results = by_hand(fn, 4, killed=2)
    del results[2]
    assert [rank for rank, _ in results] == [2, 2, 2]
    assert max(seconds for _, seconds in results[1:]) < 3  # one second where nothing else runs


def test_two_threads_in_collectives_of_one_group_are_refused(tmp_path: Path) -> None:
    def fn(rank: int) -> list[str]:
        start(tmp_path, rank, 2, 20)
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
        while not said:
            select.select([], [], [], 0.01)
        (tmp_path / "refused").touch()
        for thread in threads:
            thread.join()
        return said

    for said in by_hand(fn):
        for text in said:
            assert "two threads called collectives of one group at once" in text
            assert "all_reduce SUM at " in text


@pytest.mark.timed
@pytest.mark.parametrize(("size", "compares"), [(3, True), (BIG, True), (BIG, False)])
def test_a_deadline_holds_for_what_is_started_in_it(
    size: int, compares: bool, tmp_path: Path
) -> None:
    done = tmp_path / "done"

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 2, 60, compares)
        unisono.barrier()
        if rank == 1:
            return until_there(done)
        begin = time.monotonic()
        with unisono.deadline(1):
            handle = unisono.all_reduce(torch.ones(size), async_op=True)
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            handle.wait()
        done.touch()
        return time.monotonic() - begin

    assert by_hand(fn)[0] < 4


@pytest.mark.timed
def test_a_deadline_holds_for_a_group_that_is_made_in_it(tmp_path: Path) -> None:
    done = tmp_path / "done"

    def fn(rank: int) -> Any:
        start(tmp_path, rank, 3, 60)
        unisono.barrier()
        if rank == 1:
            return until_there(done)
        begin = time.monotonic()
        with unisono.deadline(1), pytest.raises(CollectiveError):
            unisono.barrier(group=[0, 1, 2])
        (tmp_path / f"late{rank}").touch()
        until_there(tmp_path / f"late{2 - rank}")
        done.touch()
        return time.monotonic() - begin

    first, _, third = by_hand(fn, 3)
    assert max(first, third) < 5
