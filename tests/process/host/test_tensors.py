"""CPU tensors between ranks of one host, through memory: right, bounded, and gone at the end."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.by_hand import by_hand, join, leave, prepare
from tests.support.shared_memory import assert_rows_arrive, mappings, shared_bytes
from unisono.context import communicator
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PayloadError,
    PeerFailedError,
)
from unisono.host import memory

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

MIB = 1 << 20
COUNT = 300_001  # 1.2 MB, not a multiple of anything


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


def has_arena(group: unisono.Group | None = None) -> bool:
    return communicator().control.host(group) is not None


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_of_large_tensors(world_size: int, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, world_size)
        mine = torch.arange(COUNT, dtype=torch.float64) + rank
        every = [torch.arange(COUNT, dtype=torch.float64) + other for other in range(world_size)]
        total, last = torch.stack(every).sum(0), world_size - 1
        assert torch.equal(unisono.all_reduce(mine), total)
        assert has_arena()
        assert torch.equal(mine, every[rank])
        assert torch.equal(unisono.all_reduce(mine, async_op=True).wait(), total)
        assert torch.equal(unisono.all_reduce_(mine.clone()), total)
        torch.testing.assert_close(unisono.all_reduce(mine, "mean"), total / world_size)
        for op in ("min", "max"):
            assert torch.equal(unisono.all_reduce(mine, op), every[0 if op == "min" else last])
        reduced = unisono.reduce(mine, dst=last)
        assert (reduced is None) == (rank != last)
        if reduced is not None:
            assert torch.equal(reduced, total)
        assert torch.equal(unisono.all_gather(mine), torch.cat(every))
        uneven = unisono.all_gather(mine[: COUNT - rank])
        assert torch.equal(uneven, torch.cat([x[: COUNT - r] for r, x in enumerate(every)]))
        assert torch.equal(unisono.broadcast(mine if rank == last else None, src=last), every[last])
        assert torch.equal(unisono.broadcast_(mine.clone(), src=last), every[last])
        assert_rows_arrive(mine, every)
        flags = unisono.all_reduce(torch.arange(COUNT) % (rank + 2) == 0, "and")
        assert flags.dtype is torch.bool
        objects = unisono.all_gather({"rank": rank, "values": mine.numpy()})
        for other, item in enumerate(objects):
            assert item["rank"] == other
            assert (item["values"] == every[other].numpy()).all()
        leave()

    by_hand(fn, world_size)


def no_memory() -> None:
    def refuse(name: str) -> int:
        raise OSError("there is none here")

    os.memfd_create = refuse  # type: ignore[assignment]


def no_room() -> None:
    os.environ["UNISONO_SHARED_BYTES"] = "100000"


@pytest.mark.parametrize("forbid", [no_memory, no_room])
def test_without_memory_the_backend_carries_tensors(
    forbid: Callable[[], None], tmp_path: Path
) -> None:
    def fn(rank: int) -> bool:
        if rank == 0:  # it makes the memory
            forbid()
        join(tmp_path, rank, 2)
        assert torch.equal(unisono.all_reduce(torch.ones(COUNT)), torch.full((COUNT,), 2.0))
        found = has_arena()
        leave()
        return found

    assert by_hand(fn) == [False, False]


def test_inference_mode_leaves_no_trace(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        for count in (1, COUNT):
            with torch.inference_mode():
                apart = torch.ones(count)
                assert unisono.all_reduce(apart)[-1] == 2
                assert unisono.all_reduce(apart, async_op=True).wait()[-1] == 2
                assert unisono.all_gather(apart).sum() == 2 * count
            assert unisono.all_reduce_(apart)[-1] == 2
            assert unisono.all_reduce_(torch.ones(count), async_op=True).wait()[-1] == 2
            unisono.all_reduce_params([apart, torch.ones(count)], op="sum")
            assert apart[-1] == 4
        leave()

    by_hand(fn)


def test_what_has_no_meaning_is_refused_before_anything_moves(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        numbers = torch.ones(COUNT, dtype=torch.complex64)
        for _ in range(2):  # and nothing is broken by it
            with pytest.raises(PayloadError, match="MAX isn't defined on torch.complex64"):
                unisono.all_reduce_(numbers, "MAX")
            with pytest.raises(PayloadError, match="MAX isn't defined on torch.complex64"):
                unisono.all_reduce_params(numbers, op="MAX")
            assert unisono.all_reduce(numbers)[-1] == 2
        leave()

    by_hand(fn)


def test_the_first_call_may_be_one_in_the_background(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        first = unisono.broadcast(torch.full((COUNT,), 7.0 + rank), src=0, async_op=True)
        second = unisono.all_reduce_(torch.ones(COUNT), async_op=True)
        assert first.wait()[-1] == 7
        assert second.wait()[-1] == 2
        leave()

    by_hand(fn)


def test_another_view_of_the_context_looks_after_its_memory(tmp_path: Path) -> None:
    def fn(rank: int) -> int:
        join(tmp_path, rank, 2)
        unisono.all_reduce(torch.ones(COUNT))
        unisono.set_local_rank(rank)
        assert unisono.all_reduce(torch.ones(COUNT))[-1] == 2
        if rank == 1:
            return -1
        with pytest.raises(PeerFailedError) as caught:
            while True:
                unisono.all_reduce_(torch.ones(25 * MIB))
        return caught.value.rank

    assert by_hand(fn, killed=1) == [1, None]


def test_groups_have_memory_of_their_own(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 3)
        pair, all_three = unisono.new_group([0, 2]), unisono.new_group([0, 1, 2])
        mine = torch.full((COUNT,), float(rank + 1))
        if rank != 1:
            assert unisono.all_reduce(mine, group=pair)[-1] == 4
            assert has_arena(pair)
            assert torch.equal(
                unisono.broadcast(mine, src=2, group=pair), torch.full((COUNT,), 3.0)
            )
        assert unisono.all_reduce(mine, group=all_three)[-1] == 6
        results: dict[str, float] = {}

        def work(name: str, group: unisono.Group) -> None:
            for _ in range(30):
                results[name] = float(unisono.all_reduce(mine, group=group)[-1])

        named = {"all": all_three, "pair": pair} if rank != 1 else {"all": all_three}
        threads = [threading.Thread(target=work, args=item) for item in named.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {name: 6.0 if name == "all" else 4.0 for name in named}
        leave()

    by_hand(fn, 3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_hundred_megabytes_need_eight_and_leave_nothing(world_size: int, tmp_path: Path) -> None:
    """Of what all ranks write each sees all; mailboxes are there too."""

    def fn(rank: int) -> tuple[int, int, int]:
        before = shared_bytes()
        unisono.initialize("gloo", **where(tmp_path, rank, world_size))
        unisono.barrier()
        idle = shared_bytes()
        unisono.all_reduce_(torch.ones(25 * MIB))
        unisono.all_gather(torch.ones(MIB))
        used = shared_bytes()
        unisono.finalize()
        gc.collect()
        return used - idle, idle - before, shared_bytes() - before

    for used, idle, left in by_hand(fn, world_size):
        assert used <= 8 * MIB * world_size
        assert idle < MIB
        assert left == 0


def where(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
    return {"init_method": f"file://{folder / 'meeting'}"}


def test_the_order_of_memory_holds_for_large_copies(tmp_path: Path) -> None:
    """32 MB at once: long copies may be written past the cache."""
    count = 8 * MIB

    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        for turn in range(8):
            mine = torch.full((count,), float(2 * turn + rank))
            rows = unisono.all_gather(mine).view(2, count)
            for other, row in enumerate(rows):
                low, high = row.aminmax()
                assert (float(low), float(high)) == (2 * turn + other, 2 * turn + other)
        leave()

    by_hand(fn)


def test_calls_that_differ_are_named(tmp_path: Path) -> None:
    def fn(rank: int) -> list[str]:
        join(tmp_path, rank, 2)
        errors = []
        unisono.all_reduce(torch.ones(COUNT))
        kinds: list[list[Callable[[], Any]]] = [
            [partial(unisono.all_reduce, torch.ones(COUNT)), unisono.barrier],
            [partial(unisono.all_reduce, torch.ones(COUNT + n)) for n in (0, 1)],
            [partial(unisono.all_reduce, torch.ones(COUNT), op) for op in ("SUM", "MIN")],
        ]
        for calls in kinds:
            with pytest.raises(CollectiveMismatchError) as caught:
                calls[rank]()
            errors.append(str(caught.value))
            assert unisono.all_reduce(torch.ones(COUNT))[-1] == 2  # nothing is broken by it
        leave()
        return errors

    for errors in by_hand(fn):
        assert "all_reduce SUM of float32[300001]" in errors[0]
        assert "barrier" in errors[0]
        assert "float32[300002]" in errors[1]
        assert "all_reduce MIN" in errors[2]


def test_a_fork_lets_go_of_it(tmp_path: Path) -> None:
    def fn(rank: int) -> bool:
        join(tmp_path, rank, 2)
        unisono.all_reduce(torch.ones(COUNT))
        here, child = mappings(), os.fork()
        if child == 0:
            gc.collect()
            os._exit(mappings())
        there = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert unisono.all_reduce(torch.ones(COUNT))[-1] == 2
        leave()
        return there < here

    assert by_hand(fn) == [True, True]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV], ids=lambda how: how.name)
def test_a_death_in_the_middle_is_named_on_every_rank(how: signal.Signals, tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3)
        tensor = torch.ones(25 * MIB)
        unisono.all_reduce_(tensor)
        if rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), how)).start()
        with pytest.raises(PeerFailedError) as caught:
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):  # and so it stays
            unisono.all_reduce_(tensor)
        return caught.value.rank

    results: list[Any] = []

    def run() -> None:
        with pytest.raises(AssertionError, match="rank 1:\nit ended without a word"):
            by_hand(lambda rank: (tmp_path / f"{rank}").write_text(str(fn(rank))), 3)
        results.append([(tmp_path / str(rank)).read_text() for rank in (0, 2)])

    run()
    assert results == [["1", "1"]]


def test_a_rank_that_is_stopped_in_the_middle_is_named_at_the_deadline(tmp_path: Path) -> None:
    def fn(rank: int) -> str:
        join(tmp_path, rank, 2)
        tensor = torch.ones(25 * MIB)
        unisono.all_reduce_(tensor)
        if rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            while True:
                unisono.all_reduce_(tensor)
        (tmp_path / "pid").touch()
        with pytest.raises(CollectiveTimeoutError) as caught, unisono.deadline(2):
            while True:
                unisono.all_reduce_(tensor)
        return str(caught.value)

    first = by_hand(fn, killed=1)[0]
    assert "rank 1" in first
    assert "stopped" in first


def test_a_user_s_alarm_in_the_middle_ends_the_context(tmp_path: Path) -> None:
    class AlarmError(Exception):
        pass

    def fn(rank: int) -> str:
        join(tmp_path, rank, 2)
        tensor = torch.ones(25 * MIB)
        unisono.all_reduce_(tensor)

        def ring(*_: object) -> None:
            raise AlarmError

        if rank == 1:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises((AlarmError, CollectiveError)) as caught:
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):
            unisono.all_reduce_(tensor)
        return caught.type.__name__

    first, second = by_hand(fn)
    assert second == "AlarmError"
    assert first != "AlarmError"
