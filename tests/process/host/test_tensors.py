"""CPU tensors between ranks of one host, through memory: right, bounded, and gone at the end."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.by_hand import by_hand, join, leave
from tests.support.shared_memory import (
    assert_collectives_are_right,
    host_of,
    mappings,
    shared_bytes,
)
from unisono.context import communicator
from unisono.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ContextError,
    PayloadError,
    PeerFailedError,
)
from unisono.host import memory
from unisono.host.arena import Arena, Layout
from unisono.host.mailbox import MAILBOX_BYTES
from unisono.testing.pytest_plugin.body import World
from unisono.topology import EVERYBODY

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

MIB = 1 << 20
COUNT = 300_001  # 1.2 MB, not a multiple of anything
LONG = 5 * MIB  # of float32 don't fit in a slot


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


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.ranks(2, on="gloo")
def test_a_fork_lets_go_of_it_and_keeps_shared_tensors(world: World) -> None:
    unisono.all_reduce(torch.ones(COUNT))
    mine, here = unisono.shared_empty(COUNT).fill_(world.rank), mappings()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(not (mine[-1] == world.rank and mappings() < here))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert unisono.all_reduce(torch.ones(COUNT))[-1] == 2
    assert unisono.all_reduce_(mine)[-1] == 1


# In processes that end with the test


def no_memory() -> None:
    def refuse(name: str) -> int:
        raise OSError("there is none here")

    os.memfd_create = refuse  # type: ignore[assignment]


def no_room() -> None:
    os.environ["UNISONO_SHARED_BYTES"] = "100000"


class _SmallMap(mmap.mmap):
    """A map that is refused where it's larger than mailboxes."""

    def __new__(cls, fd: int, size_bytes: int, **how: Any) -> _SmallMap:
        if size_bytes > 2 * MAILBOX_BYTES + 4096 - 1:
            raise OSError(errno.ENOMEM, "no room")
        return super().__new__(cls, fd, size_bytes, **how)


def no_map() -> None:
    mmap.mmap = _SmallMap  # type: ignore[assignment,misc]


@pytest.mark.parametrize(
    ("rank_without", "forbid", "has_mailboxes"),
    [(0, no_memory, False), (0, no_room, True), (1, no_map, True)],
)
def test_without_memory_the_backend_carries_tensors(
    rank_without: int, forbid: Callable[[], None], has_mailboxes: bool, tmp_path: Path
) -> None:
    """Those of `shared_empty`, too, which are ordinary ones then. Rank 0 makes the memory."""

    def fn(rank: int) -> None:
        if rank == rank_without:
            forbid()
        join(tmp_path, rank, 2)
        assert torch.equal(unisono.all_reduce(torch.ones(COUNT)), torch.full((COUNT,), 2.0))
        before = mappings()
        mine = unisono.shared_empty(COUNT).fill_(rank + 1)
        assert mappings() == before
        assert torch.equal(unisono.all_reduce_(mine), torch.full_like(mine, 3))
        assert not has_arena()
        control: Any = communicator().control
        assert control.hubs[EVERYBODY].all_share_memory == has_mailboxes
        leave()

    by_hand(fn)


def test_groups_have_memory_of_their_own(tmp_path: Path) -> None:
    """And the first call of a job may be one in the background."""

    def fn(rank: int) -> None:
        join(tmp_path, rank, 3)
        first = unisono.broadcast(torch.full((COUNT,), 7.0 + rank), src=0, async_op=True)
        second = unisono.all_reduce_(torch.ones(COUNT), async_op=True)
        assert first.wait()[-1] == 7
        assert second.wait()[-1] == 3
        pair, all_three = unisono.new_group([0, 2]), unisono.new_group([0, 1, 2])
        mine = torch.full((COUNT,), float(rank + 1))
        shared = unisono.shared_empty(COUNT, group=pair).fill_(rank)
        if rank != 1:
            assert unisono.all_reduce(mine, group=pair)[-1] == 4
            assert has_arena(pair)
            assert unisono.broadcast(mine, src=2, group=pair).eq(3).all()
            assert float(unisono.all_reduce_(shared, group=pair)[-1]) == 2
            host: Any = communicator().control.host(pair)
            assert len(host.shared._entries) == 1
        assert float(unisono.all_reduce_(shared.fill_(rank))[-1]) == 3
        assert unisono.all_reduce(mine, group=all_three)[-1] == 6
        leave()

    by_hand(fn, 3)


def test_a_hundred_megabytes_need_eight_and_leave_nothing(tmp_path: Path) -> None:
    """Of what all ranks write each sees all; mailboxes are there too."""
    size = 3

    def fn(rank: int) -> None:
        before = shared_bytes()
        meeting = f"file://{tmp_path / 'meeting'}"
        unisono.initialize("gloo", init_method=meeting, rank=rank, world_size=size)
        unisono.barrier()
        idle = shared_bytes()
        assert unisono.all_reduce_(torch.ones(25 * MIB)).eq(size).all()
        for other, row in enumerate(unisono.all_gather(torch.full((1, 8 * MIB), float(rank)))):
            assert row.eq(other).all()
        used = shared_bytes()
        unisono.finalize()
        gc.collect()
        assert used - idle <= 8 * MIB * size
        assert idle - before < MIB
        assert shared_bytes() == before

    by_hand(fn, size)


@pytest.mark.parametrize("way", ["slots", "shared", "another view"])
def test_a_death_in_the_middle_is_named_on_every_rank(way: str, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 3)
        tensor = unisono.shared_empty(LONG).fill_(0) if way == "shared" else torch.ones(LONG)
        unisono.all_reduce_(tensor)
        if way == "another view":  # of the context, which looks after the same memory
            unisono.set_local_rank(rank)
            unisono.all_reduce_(tensor)
        if rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(PeerFailedError) as caught:
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):  # and so it stays
            unisono.all_reduce_(tensor)
        tensor.fill_(1)
        assert caught.value.rank == 1

    by_hand(fn, 3, killed=1)


def test_a_user_s_alarm_in_the_middle_ends_the_context(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        tensor = torch.ones(LONG)
        unisono.all_reduce_(tensor)

        def ring(*_: object) -> None:
            raise LookupError

        if rank == 1:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(LookupError if rank == 1 else CollectiveError):
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):
            unisono.all_reduce_(tensor)

    by_hand(fn)


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_a_handler_that_calls_a_collective_within_one_is_told(tmp_path: Path, backend: str) -> None:
    """All ranks get the signal, as before a preemption: they would wait for themselves."""

    def fn(rank: int) -> None:
        join(tmp_path, rank, 2, backend=backend)
        call = dist.all_reduce if backend == "unisono" else unisono.all_reduce_
        tensor = torch.ones(LONG)
        call(tensor)
        group: Any = dist.group.WORLD
        control: Any = communicator().control if backend == "gloo" else group._control
        begin = control.begin

        def interrupted(*what: Any) -> Any:
            control.begin = begin
            signal.raise_signal(signal.SIGUSR1)
            return begin(*what)

        told = list[str]()

        def handle(*_: object) -> None:
            with pytest.raises(
                CollectiveError, match="signal handlers and finalizers must not"
            ) as why:
                call(torch.ones(LONG))
            told.append(str(why.value))

        signal.signal(signal.SIGUSR1, handle)
        control.begin = interrupted
        call(tensor)
        assert len(told) == 1
        assert tensor[0] == 4
        leave()

    by_hand(fn)


# Where a program asks for much, or does what it shouldn't


def test_many_groups_share_one_bound(tmp_path: Path) -> None:
    """What is over the bound goes over the backend."""

    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        tensor = torch.ones(2 * MIB)
        unisono.all_reduce(tensor)
        idle = shared_bytes()
        groups = [unisono.new_group([0, 1]) for _ in range(16)]
        for group in groups:
            assert unisono.all_reduce(tensor, group=group)[-1] == 2
        control: Any = communicator().control
        assert shared_bytes() - idle <= 64 * MIB
        assert control.shared_bytes <= 64 * MIB
        assert has_arena(groups[0])
        assert not has_arena(groups[-1])
        leave()

    by_hand(fn)


def test_a_deadline_that_passes_on_one_rank_ends_the_wait_of_all(tmp_path: Path) -> None:
    """The third is stopped in the middle; the others don't wait for their own deadlines."""

    def fn(rank: int) -> None:
        join(tmp_path, rank, 3)
        tensor = torch.ones(COUNT)
        unisono.all_reduce_(tensor)
        host = host_of()
        unisono.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        with (
            pytest.raises(CollectiveTimeoutError, match=r"rank 2[\s\S]*stopped"),
            unisono.deadline(1 if rank else 1000),
        ):
            host.broadcast(tensor, 2)  # as the hook of DistributedDataParallel: nothing is compared
        for _ in range(2):  # and so it stays, at once
            with pytest.raises(CollectiveTimeoutError):
                unisono.all_reduce(1)

    by_hand(fn, 3, killed=2)


def test_another_thread_ends_the_context_of_one_that_waits(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        tensor = torch.ones(COUNT)
        unisono.all_reduce_(tensor)
        host = host_of()
        if rank == 1:
            signal.pause()
        with pytest.raises(ContextError, match=r"finalize\(\)"), ThreadPoolExecutor() as thread:
            waiting = thread.submit(host.broadcast, tensor, 1)
            unisono.finalize()
            waiting.result(20)

    by_hand(fn, killed=1)


# Copies of 32 MB are seen whole after the barrier that follows them: a litmus, and its mutant

PLAN = Layout(2, 16 * MIB, MIB, False)  # a slot is copied to in one go
ELEMENTS = 8 * MIB  # of float32
TURNS = 12
# Looked at first: what was written last, which a copy past the cache would leave behind.
SPOTS = torch.tensor([ELEMENTS - 1, ELEMENTS - 17, ELEMENTS // 2, 0])


@pytest.fixture
def shared() -> Iterator[str]:
    """The path of memory without a name that other processes can map."""
    made = memory.make(PLAN.size_bytes)
    assert made is not None
    yield f"/proc/{os.getpid()}/fd/{made[0]}"
    os.close(made[0])


def wait(position: int) -> None:
    """Look at nothing while the other rank is late."""


def litmus(path: str, late: int, rank: int) -> list[set[float]]:
    """Write and look in turns; `late` elements are written after the stamp that says all are there.

    Returns:
        What was seen in each of this rank's looks.
    """
    torch.set_num_threads(1 + rank)  # a copy is one thread's, or that of several
    with open(path, "r+b") as file:
        arena = Arena(mmap.mmap(file.fileno(), PLAN.size_bytes), rank, PLAN)
    values, seen = torch.empty(ELEMENTS), list[set[float]]()
    for turn in range(TURNS):
        slot = arena.slots[0][turn & 1].view(torch.float32)
        if rank == turn & 1:
            values.fill_(turn + 1)
            slot[: ELEMENTS - late].copy_(values[: ELEMENTS - late])
            arena.barrier(wait)
            arena.barrier(wait)  # the other rank has looked
            slot[ELEMENTS - late :].copy_(values[ELEMENTS - late :])
        else:
            arena.barrier(wait)
            seen.append({*slot[SPOTS].tolist(), *map(float, slot.aminmax())})
            arena.barrier(wait)
    return seen


def test_large_copies_are_seen_whole(shared: str) -> None:
    seen = by_hand(partial(litmus, shared, 0))
    assert seen[0] == [{float(turn)} for turn in range(2, TURNS + 1, 2)]
    assert seen[1] == [{float(turn)} for turn in range(1, TURNS + 1, 2)]


def test_the_litmus_sees_what_is_written_after_its_stamp(shared: str) -> None:
    for looks in by_hand(partial(litmus, shared, 16)):
        assert all(len(values) > 1 for values in looks), looks
