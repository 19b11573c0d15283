"""CPU tensors between ranks of one host, through memory: right, bounded, and gone at the end."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.by_hand import by_hand, join, leave, prepare
from tests.support.shared_memory import assert_collectives_are_right, mappings, shared_bytes
from unisono.context import communicator
from unisono.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PayloadError,
    PeerFailedError,
)
from unisono.host import memory
from unisono.testing.ranks.world import World

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

MIB = 1 << 20
COUNT = 300_001  # 1.2 MB, not a multiple of anything
LONG = 5 * MIB  # of float32 don't fit in a slot


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


def has_arena(group: unisono.Group | None = None) -> bool:
    return communicator().control.host(group) is not None


@pytest.mark.ranks(3, on="gloo")
def test_every_collective_of_large_tensors() -> None:
    assert_collectives_are_right([COUNT], torch.float64)
    assert has_arena()


@pytest.mark.ranks(2, on="gloo")
def test_inference_mode_leaves_no_trace() -> None:
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


@pytest.mark.ranks(2, on="gloo")
def test_what_has_no_meaning_is_refused_before_anything_moves() -> None:
    numbers = torch.ones(COUNT, dtype=torch.complex64)
    for _ in range(2):  # and nothing is broken by it
        with pytest.raises(PayloadError, match="MAX isn't defined on torch.complex64"):
            unisono.all_reduce_(numbers, "MAX")
        with pytest.raises(PayloadError, match="MAX isn't defined on torch.complex64"):
            unisono.all_reduce_params(numbers, op="MAX")
        assert unisono.all_reduce(numbers)[-1] == 2


@pytest.mark.ranks(2, on="gloo")
def test_the_order_of_memory_holds_for_large_copies(world: World) -> None:
    """32 MB at once: long copies may be written past the cache."""
    for turn in range(8):
        mine = torch.full((8 * MIB,), float(2 * turn + world.rank))
        for other, row in enumerate(unisono.all_gather(mine).view(2, -1)):
            assert [*map(float, row.aminmax())] == [2 * turn + other] * 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.ranks(2, on="gloo")
def test_a_fork_lets_go_of_it() -> None:
    unisono.all_reduce(torch.ones(COUNT))
    here, child = mappings(), os.fork()
    if child == 0:
        gc.collect()
        os._exit(mappings())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < here
    assert unisono.all_reduce(torch.ones(COUNT))[-1] == 2


# In processes that end with the test


def test_the_first_call_may_be_one_in_the_background(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        first = unisono.broadcast(torch.full((COUNT,), 7.0 + rank), src=0, async_op=True)
        second = unisono.all_reduce_(torch.ones(COUNT), async_op=True)
        assert first.wait()[-1] == 7
        assert second.wait()[-1] == 2
        leave()

    by_hand(fn)


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
    """Those of `shared_empty`, too, which are ordinary ones then."""

    def fn(rank: int) -> None:
        if rank == 0:  # it makes the memory
            forbid()
        join(tmp_path, rank, 2)
        assert torch.equal(unisono.all_reduce(torch.ones(COUNT)), torch.full((COUNT,), 2.0))
        before = mappings()
        mine = unisono.shared_empty(COUNT).fill_(rank + 1)
        assert mappings() == before
        assert torch.equal(unisono.all_reduce_(mine), torch.full_like(mine, 3))
        assert not has_arena()
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
                unisono.all_reduce_(torch.ones(LONG))
        return caught.value.rank

    assert by_hand(fn, killed=1) == [1, None]


def test_groups_have_memory_of_their_own(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 3)
        pair, all_three = unisono.new_group([0, 2]), unisono.new_group([0, 1, 2])
        mine = torch.full((COUNT,), float(rank + 1))
        shared = unisono.shared_empty(COUNT, group=pair).fill_(rank)
        if rank != 1:
            assert unisono.all_reduce(mine, group=pair)[-1] == 4
            assert has_arena(pair)
            assert torch.equal(
                unisono.broadcast(mine, src=2, group=pair), torch.full((COUNT,), 3.0)
            )
            assert float(unisono.all_reduce_(shared, group=pair)[-1]) == 2
            host: Any = communicator().control.host(pair)
            assert len(host.shared._entries) == 1
        assert float(unisono.all_reduce_(shared.fill_(rank))[-1]) == 3
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


def test_a_hundred_megabytes_need_eight_and_leave_nothing(tmp_path: Path) -> None:
    """Of what all ranks write each sees all; mailboxes are there too."""
    size = 3

    def fn(rank: int) -> None:
        before = shared_bytes()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(LOCAL_WORLD_SIZE=str(size))
        unisono.initialize("gloo", init_method=f"file://{tmp_path / 'meeting'}")
        unisono.barrier()
        idle = shared_bytes()
        unisono.all_reduce_(torch.ones(25 * MIB))
        unisono.all_gather(torch.ones(MIB))
        used = shared_bytes()
        unisono.finalize()
        gc.collect()
        assert used - idle <= 8 * MIB * size
        assert idle - before < MIB
        assert shared_bytes() == before

    by_hand(fn, size)


def dies(rank: int, how: signal.Signals) -> None:
    """Let rank 1 end a moment later."""
    if rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), how)).start()


@pytest.mark.parametrize("is_shared", [False, True], ids=["slots", "shared"])
def test_a_death_in_the_middle_is_named_on_every_rank(is_shared: bool, tmp_path: Path) -> None:
    def fn(rank: int) -> int:
        join(tmp_path, rank, 3)
        tensor = unisono.shared_empty(LONG).fill_(0) if is_shared else torch.ones(LONG)
        unisono.all_reduce_(tensor)
        dies(rank, signal.SIGKILL)
        with pytest.raises(PeerFailedError) as caught:
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):  # and so it stays
            unisono.all_reduce_(tensor)
        tensor.fill_(1)
        return caught.value.rank

    assert by_hand(fn, 3, killed=1) == [1, None, 1]


def test_a_rank_that_is_stopped_in_the_middle_is_named_at_the_deadline(tmp_path: Path) -> None:
    def fn(rank: int) -> str:
        join(tmp_path, rank, 2)
        tensor = torch.ones(LONG)
        unisono.all_reduce_(tensor)
        dies(rank, signal.SIGSTOP)
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
        tensor = torch.ones(LONG)
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
