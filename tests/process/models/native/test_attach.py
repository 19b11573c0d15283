"""A context that the user made by hand, its groups and its forks."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch._dynamo.utils import counters

import unisono
from tests.support.by_hand import (
    TIMEOUT,
    Check,
    by_hand,
    join,
    join_by_tcp,
    leave,
    outcomes,
    prepare,
)
from tests.support.processes import in_fork
from unisono.context import current_model
from unisono.errors import AlreadyInitializedError, ContextError, GroupMembershipError


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


def facts() -> tuple[Any, ...]:
    return (
        unisono.get_rank(),
        unisono.get_world_size(),
        unisono.backend(),
        unisono.model_name(),
        unisono.is_distributed(),
    )


def place() -> list[int]:
    local = [unisono.get_local_rank(), unisono.get_nproc_per_node()]
    return [*local, unisono.get_nnodes(), unisono.get_node_rank()]


SERIAL = (0, 1, None, "serial", False)


def native(rank: int, size: int) -> tuple[Any, ...]:
    return (rank, size, "gloo", "native-dist", True)


# What ranks see of groups that they make one after the other


def forget() -> None:
    """Leave the group, and take back what was said of the next one's local rank."""
    leave()
    unisono.set_local_rank(None)


def the_first_call_sees_a_group(rank: int, size: int, folder: Path) -> None:
    for name, wanted in {"get_rank": rank, "get_world_size": size, "backend": "gloo"}.items():
        join(folder, rank, size, name)
        assert getattr(unisono, name)() == wanted
        leave()


def one_rank_alone_can_ask_for_every_fact(rank: int, size: int, folder: Path) -> None:
    join_by_tcp(folder, rank, "127.0.0.1")
    dist.barrier()
    if rank == 0:  # rank 1 is in the barrier of `leave` meanwhile
        started = time.monotonic()
        found = (*facts(), unisono.get_local_rank(), str(unisono.device()))
        unisono.show_config()
        assert time.monotonic() - started < 5
        assert found == (*native(0, 2), 0, "cpu")
    leave()


def sync_and_set_local_rank_are_those_of_idist(rank: int, size: int, folder: Path) -> None:
    join_by_tcp(folder, rank, "127.0.0.1")
    assert place() == [rank, 2, 1, 0]  # they met on the loopback, so they are on one node
    unisono.set_local_rank(rank + 5)
    assert unisono.get_local_rank() == rank + 5
    unisono.sync()
    assert unisono.get_local_rank() == rank + 5
    unisono.sync(temporary=True)
    assert facts() == native(rank, 2)
    unisono.set_local_rank(7)
    assert unisono.get_local_rank() == 7
    unisono.set_local_rank(None)
    assert unisono.get_local_rank() == rank
    leave()
    unisono.sync()
    assert facts() == SERIAL


def sync_waits_for_what_has_been_started(rank: int, size: int, folder: Path) -> None:
    """Else ranks disagree whether the first call has told them each other's hosts."""
    for attempt in range(5):
        join(folder, rank, size, f"attempt {attempt}")
        handles = [unisono.all_gather(i, async_op=True) for i in range(50)]
        unisono.sync()
        assert [handle.wait() for handle in handles] == [[i] * size for i in range(50)]
        leave()


def the_environment_knows_the_local_rank(rank: int, size: int, folder: Path) -> None:
    whole = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for others in (whole, {}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**others, "LOCAL_RANK": 1 - rank}.items():
                patch.setenv(name, str(value))
            join(folder, rank, size, f"store of {len(others)}")
            assert unisono.get_local_rank() == 1 - rank
            leave()


def ranks_that_met_in_a_file_guess_and_say_so_once(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size)
    unisono.set_local_rank(1 - rank)
    assert unisono.get_local_rank() == 1 - rank  # which is none
    unisono.set_local_rank(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [unisono.get_local_rank(), unisono.get_local_rank(), unisono.get_nnodes()]
    leave()
    assert found == [rank, rank, 1]
    (message,) = (str(item.message) for item in caught)
    assert "is a guess" in message
    assert "set_local_rank" in message


def an_unknown_local_rank_has_two_remedies(rank: int, size: int, folder: Path) -> None:
    join_by_tcp(folder, rank, "0.0.0.0")
    assert facts() == native(rank, 2)
    for name in ("local_rank", "nproc_per_node", "nnodes", "node_rank"):
        with pytest.raises(ContextError, match=r"sync\(\).*LOCAL_RANK"):
            getattr(unisono, f"get_{name}")()
    unisono.show_config()
    unisono.set_local_rank(4)
    assert unisono.get_local_rank() == 4
    forget()


def first_of_the_node() -> None:
    with unisono.one_rank_first(local=True):
        pass


def the_first_collective_call_finds_the_nodes(rank: int, size: int, folder: Path) -> None:
    calls: list[Callable[[], Any]] = [
        unisono.sync,
        lambda: unisono.all_reduce(1),
        lambda: unisono.all_reduce(torch.ones(300_000)),
        unisono.barrier,
        lambda: unisono.auto_dataloader([1, 2, 3, 4], batch_size=4, num_workers=2),
        first_of_the_node,
    ]
    for turn, call in enumerate(calls):
        join_by_tcp(folder, rank, "0.0.0.0", f"meeting {turn}")
        call()
        assert place() == [rank, 2, 1, 0]
        unisono.set_local_rank(5)
        assert place() == [5, 2, 1, 0]
        forget()


def finalize_leaves_a_group_alive(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size)
    assert unisono.all_gather(rank) == [0, 1]
    unisono.finalize()
    x = torch.tensor([rank])
    dist.all_reduce(x)
    assert x.item() == 1
    with pytest.raises(AlreadyInitializedError, match="native-dist"):
        unisono.initialize("gloo")
    assert unisono.all_gather(rank) == [0, 1]
    leave()


def what_is_under_way_keeps_its_place(rank: int, size: int, folder: Path) -> None:
    """When the context is looked for again."""
    ways: list[Callable[[], None]] = [unisono.sync, lambda: unisono.set_local_rank(0)]
    for turn, look_again in enumerate(ways):
        for is_connected in (True, False):
            join(folder, rank, size, f"store {turn} {is_connected}")
            if is_connected:
                unisono.barrier()
            handles = [unisono.all_gather(i, async_op=True) for i in range(50)]
            big = unisono.all_reduce(torch.full((2_000_000,), 1.0), async_op=True)
            look_again()
            gc.collect()  # nobody but the handles has the view that they began on
            assert unisono.all_gather("after") == ["after", "after"]
            assert torch.equal(big.wait(), torch.full((2_000_000,), 2.0))
            assert [handle.wait() for handle in handles] == [[i, i] for i in range(50)]
            forget()


def a_compiled_function_may_make_the_first_call(rank: int, size: int, folder: Path) -> None:
    """At one break of its graph, whatever the length; nothing but the function is compiled."""
    join(folder, rank, size)
    sum_ = torch.compile(lambda x: unisono.all_reduce(x * 2) + 1, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [sum_(torch.ones(n)).tolist() for n in (3, 4, 5)] == [[5.0] * n for n in (3, 4, 5)]
    seen: Any = counters
    assert len(seen["graph_break"]) == 1, seen["graph_break"]
    assert seen["frames"]["total"] <= 4  # before and after the break, for one length and for any
    assert unisono.all_reduce(1) == size
    leave()


# What three ranks see of groups within it


def a_list_of_ranks_makes_one_group(rank: int, size: int, folder: Path) -> None:
    """And a new group inherits the timeout of the job."""
    join(folder, rank, size)
    x = torch.ones(1)
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(500):
        unisono.all_reduce(x, group=[0, 1])
        total = unisono.all_reduce(x, group=(1, 0))
    made = len(dist.distributed_c10d._world.pg_map) - before
    assert (made, total.item()) == ((1, 2) if rank < 2 else (0, 1))
    handle: Any = unisono.new_group([0, 1, 2]).handle
    assert handle._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    leave()


def groups_do_not_outlive_their_context(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size, "first")
    old = unisono.new_group([0, 1])
    theirs = dist.new_group([0, 1, 2])
    unisono.all_reduce(1, group=[0, 1])
    leave()
    join(folder, rank, size, "second")
    for group in (old, theirs):
        with pytest.raises(GroupMembershipError, match="create it again with new_group"):
            unisono.all_reduce(1, group=group)
    assert unisono.all_reduce(1, group=[0, 1]) == (2 if rank < 2 else 1)
    leave()
    with pytest.raises(GroupMembershipError, match="finished job"):
        unisono.all_reduce(1, group=old)


def a_group_of_torch_can_be_the_group(rank: int, size: int, folder: Path) -> None:
    """And so can what torch gives to a rank that is no member."""
    join(folder, rank, size)
    pair = dist.new_group([2, 0])
    assert unisono.all_gather(rank, dist.group.WORLD) == [0, 1, 2]
    if rank != 1:
        assert unisono.all_gather(rank, group=pair) == [0, 2]
        assert unisono.broadcast(rank, src=2, group=pair) == 2
    assert unisono.all_gather(rank, group=dist.new_group([1])) == ([1] if rank == 1 else rank)
    leave()


def a_group_of_torch_keeps_its_order(rank: int, size: int, folder: Path) -> None:
    """On every plane: with small values, with tensors in memory, and by torch itself."""
    join(folder, rank, size)
    ranks = [2, 0, 1]
    with suppress(TypeError):  # of torch before 2.13, which sorts them
        group = dist.new_group(ranks, sort_ranks=False)
        place = ranks.index(rank)
        assert unisono.all_gather(f"of {rank}", group=group) == ["of 2", "of 0", "of 1"]
        for n in (3, 300_000):
            assert unisono.all_gather(torch.full((n,), rank), group=group)[::n].tolist() == ranks
            parts = torch.arange(3).repeat_interleave(n)
            part = unisono.reduce_scatter(parts, group=group)
            assert part.tolist() == [3 * place] * n
            assert unisono.broadcast_(torch.full((n,), rank), 0, group)[0] == 0
        items = [f"to {each}" for each in ranks] if rank == 1 else None
        assert unisono.scatter(items, src=1, group=group) == f"to {rank}"
    leave()


def a_fork_knows_the_facts_and_no_collective(rank: int, size: int, folder: Path) -> None:
    def look() -> None:
        assert (unisono.get_rank(), unisono.get_world_size()) == (rank, size)
        assert unisono.is_distributed()
        with pytest.raises(ContextError, match=f"fork of rank {rank}"):
            unisono.barrier()

    join(folder, rank, size)
    unisono.get_rank()
    assert in_fork(look) == 0
    assert unisono.all_reduce(1) == size
    leave()
    store = FileStore(str(folder / "ours"), size)
    unisono.initialize("gloo", rank=rank, world_size=size, store=store)
    assert in_fork(look) == 0
    assert unisono.all_reduce(1) == size
    unisono.finalize()


OF_TWO: list[Check] = [
    the_first_call_sees_a_group,
    one_rank_alone_can_ask_for_every_fact,
    sync_and_set_local_rank_are_those_of_idist,
    sync_waits_for_what_has_been_started,
    the_environment_knows_the_local_rank,
    ranks_that_met_in_a_file_guess_and_say_so_once,
    an_unknown_local_rank_has_two_remedies,
    the_first_collective_call_finds_the_nodes,
    finalize_leaves_a_group_alive,
    what_is_under_way_keeps_its_place,
    a_compiled_function_may_make_the_first_call,
]
OF_THREE: list[Check] = [
    a_list_of_ranks_makes_one_group,
    groups_do_not_outlive_their_context,
    a_group_of_torch_can_be_the_group,
    a_group_of_torch_keeps_its_order,
    a_fork_knows_the_facts_and_no_collective,
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed, by the name of the check."""
    two = outcomes(OF_TWO, 2, tmp_path_factory.mktemp("job"))
    return two | outcomes(OF_THREE, 3, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", [check.__name__ for check in OF_TWO + OF_THREE])
def test_a_group_made_by_hand_is_a_context(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


def test_a_group_that_comes_and_goes_is_followed_without_sync(tmp_path: Path) -> None:
    def assert_alone() -> None:
        assert facts() == SERIAL
        assert unisono.all_gather("alone") == ["alone"]

    def fn(rank: int) -> None:
        assert_alone()
        for turn, size in enumerate((3, 2, 3)):
            if rank < size:
                join(tmp_path, size - 1 - rank, size, f"store {turn}")
                assert facts() == native(size - 1 - rank, size)
                assert unisono.all_gather(unisono.get_rank()) == list(range(size))
                leave()
            assert_alone()

    by_hand(fn, 3)


def test_threads_that_ask_first_get_one_view_of_a_context(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 1)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as threads:
            for _ in range(100):
                unisono.sync()
                ready = threading.Barrier(4)

                def ask(_: int, ready: threading.Barrier = ready) -> int:
                    ready.wait()
                    return id(current_model())

                assert len({*threads.map(ask, range(4))}) == 1
        leave()

    by_hand(fn, 1)
