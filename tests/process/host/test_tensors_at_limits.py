"""CPU tensors in shared memory where a program asks for much, or does what it shouldn't."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.process.host.test_tensors import COUNT, MIB, has_arena
from tests.support.by_hand import by_hand, join, leave, prepare
from tests.support.processes import until
from tests.support.shared_memory import shared_bytes
from unisono.context import communicator
from unisono.errors import CollectiveTimeoutError, ContextError
from unisono.host import memory
from unisono.host.mailbox import MAILBOX_BYTES
from unisono.topology import EVERYBODY

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


def test_many_groups_share_one_bound(tmp_path: Path) -> None:
    """What is over the bound goes over the backend."""

    def fn(rank: int) -> tuple[int, int, list[bool]]:
        join(tmp_path, rank, 2)
        tensor = torch.ones(2 * MIB)
        unisono.all_reduce(tensor)
        idle = shared_bytes()
        groups = [unisono.new_group([0, 1]) for _ in range(16)]
        for group in groups:
            assert unisono.all_reduce(tensor, group=group)[-1] == 2
        control = communicator().control
        limit = control.shared_bytes  # type: ignore[attr-defined]
        found = shared_bytes() - idle, limit, [has_arena(group) for group in groups]
        leave()
        return found

    for grown, limit, have in by_hand(fn):
        assert grown <= 64 * MIB
        assert limit <= 64 * MIB
        assert have[0]
        assert not have[-1]


def test_a_rank_without_room_for_it_keeps_the_rest(tmp_path: Path) -> None:
    """Where one rank can't map the tensors' memory, rounds still go through mailboxes."""

    def fn(rank: int) -> tuple[bool, bool]:
        if rank == 1:
            map_it = mmap.mmap

            def refuse(fd: int, size_bytes: int, **how: Any) -> mmap.mmap:
                if size_bytes > 2 * MAILBOX_BYTES + 4096 - 1:
                    raise OSError(errno.ENOMEM, "no room")
                return map_it(fd, size_bytes, **how)

            mmap.mmap = refuse  # type: ignore[assignment,misc]
        join(tmp_path, rank, 2)
        assert unisono.all_reduce(torch.ones(COUNT))[-1] == 2
        control = communicator().control
        hub = control.hubs[EVERYBODY]  # type: ignore[attr-defined]
        found = has_arena(), hub.all_share_memory
        leave()
        return found

    assert by_hand(fn) == [(False, True), (False, True)]


def test_a_deadline_that_passes_on_one_rank_ends_the_wait_of_all(tmp_path: Path) -> None:
    """The third is stopped in the middle; the others don't wait for their own deadlines."""

    def fn(rank: int) -> str:
        join(tmp_path, rank, 3)
        tensor = torch.ones(COUNT)
        unisono.all_reduce_(tensor)
        host = communicator().control.host(None)
        assert host is not None
        unisono.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CollectiveTimeoutError) as caught, unisono.deadline(1 if rank else 1000):
            host.broadcast(tensor, 2)  # as the hook of DistributedDataParallel: nothing is compared
        for _ in range(2):  # and so it stays, at once
            with pytest.raises(CollectiveTimeoutError):
                unisono.all_reduce(1)
        return str(caught.value)

    for text in by_hand(fn, 3, killed=2)[:2]:
        assert "rank 2" in text
        assert "stopped" in text


def test_another_thread_ends_the_context_of_one_that_waits(tmp_path: Path) -> None:
    def fn(rank: int) -> str:
        join(tmp_path, rank, 2)
        tensor = torch.ones(COUNT)
        unisono.all_reduce_(tensor)
        host = communicator().control.host(None)
        assert host is not None
        if rank == 1:
            signal.pause()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                host.broadcast(tensor, 1)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        unisono.finalize()
        thread.join(20)
        assert isinstance(errors[0], ContextError), errors
        return str(errors[0])

    assert "finalize()" in by_hand(fn, killed=1)[0]


def test_two_threads_begin_with_a_group_each(tmp_path: Path) -> None:
    """In another order on each rank: neither group waits for the other to be connected."""

    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        groups = [unisono.new_group([0, 1], timeout=20) for _ in range(2)]
        barriers = [tmp_path / str(at) for at in range(2)]
        errors: list[BaseException] = []

        def begin(at: int) -> None:
            try:
                total = unisono.all_reduce(torch.ones(COUNT), group=groups[at])
                assert total[-1] == 2
            except BaseException as error:
                errors.append(error)

        first, second = (threading.Thread(target=begin, args=(at,)) for at in (rank, 1 - rank))
        first.start()
        barriers[rank].touch()
        until(lambda: all(path.exists() for path in barriers), 20)
        second.start()
        for thread in (first, second):
            thread.join()
        assert not errors, errors
        leave()

    by_hand(fn)
