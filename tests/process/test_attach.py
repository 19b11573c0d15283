"""A context that the user made by hand, or that we made earlier, is seen as it is."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _by_hand import TIMEOUT, by_hand, join, leave, prepare

import unisono
from unisono.errors import ContextError, GroupMembershipError


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield


def facts() -> tuple[Any, ...]:
    return (
        unisono.get_rank(),
        unisono.get_world_size(),
        unisono.backend(),
        unisono.model_name(),
        unisono.is_distributed(),
    )


SERIAL = (0, 1, None, "serial", False)


def native(rank: int, size: int) -> tuple[Any, ...]:
    return (rank, size, "gloo", "native-dist", True)


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [(unisono.get_rank, [0, 1]), (unisono.get_world_size, [2, 2]), (unisono.backend, ["gloo"] * 2)],
)
def test_the_first_call_sees_a_group_made_by_hand(
    ask: Callable[[], Any], wanted: list[Any], tmp_path: Path
) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        found = ask()
        leave()
        return found

    assert by_hand(fn) == wanted


def test_one_rank_alone_can_ask_for_every_fact(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        dist.barrier()
        found = None
        if rank == 0:  # rank 1 is in the barrier of `leave` meanwhile
            unisono.set_local_rank(0)
            started = time.monotonic()
            unisono.sync()
            found = (*facts(), unisono.get_local_rank(), str(unisono.device()))
            unisono.show_config()
            assert time.monotonic() - started < 5
        leave()
        return found

    assert by_hand(fn)[0] == (*native(0, 2), 0, "cpu")


def test_a_group_that_comes_and_goes_is_followed_without_sync(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        seen = [facts()]
        for size in (3, 2, 3):
            if rank < size:
                join(tmp_path, size - 1 - rank, size, f"store {len(seen)}")
                seen.append(facts())
                seen.append(unisono.all_gather(unisono.get_rank()))
                leave()
            else:
                seen += [SERIAL, [0]]
            seen.append(facts())
            seen.append(unisono.all_gather("alone"))
        return seen

    alone = [SERIAL, ["alone"]]
    for rank, seen in enumerate(by_hand(fn, 3)):
        three = [native(2 - rank, 3), [0, 1, 2], *alone]
        two = [native(1 - rank, 2), [0, 1], *alone] if rank < 2 else [SERIAL, [0], *alone]
        assert seen == [SERIAL, *three, *two, *three]


def test_sync_and_set_local_rank_mean_what_they_mean_in_idist(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        seen = []
        join(tmp_path, rank, 2)
        unisono.set_local_rank(rank + 5)
        seen.append(unisono.get_local_rank())
        unisono.sync()
        seen.append(unisono.get_local_rank())
        unisono.sync(temporary=True)
        seen.append(facts())
        unisono.set_local_rank(7)
        seen.append(unisono.get_local_rank())
        unisono.set_local_rank(None)
        with pytest.warns(UserWarning, match="is a guess"):
            seen.append(unisono.get_local_rank())
        leave()
        unisono.sync()
        return [*seen, facts()]

    for rank, seen in enumerate(by_hand(fn)):
        assert seen == [rank + 5, rank + 5, native(rank, 2), 7, rank, SERIAL]


def test_sync_keeps_a_context_that_initialize_made() -> None:
    unisono.initialize("gloo")
    unisono.sync()
    assert facts() == native(0, 1)
    unisono.finalize()


@pytest.mark.parametrize("others", [("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), ()])
def test_the_local_rank_is_what_the_environment_says(
    others: tuple[str, ...], tmp_path: Path
) -> None:
    def fn(rank: int) -> int:
        says = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 9}
        os.environ.update({name: str(says[name]) for name in others})
        os.environ["LOCAL_RANK"] = str(rank + 3)
        join(tmp_path, rank, 2)
        found = unisono.get_local_rank()
        leave()
        return found

    assert by_hand(fn) == [3, 4]


def join_by_tcp(folder: Path, rank: int, host: str) -> None:
    """Make the default group through a store at a port of the kernel's choice."""
    meeting = dist.FileStore(str(folder / "meeting"), 2)
    if rank == 0:
        store = dist.TCPStore(host, 0, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        port = int(meeting.get("port"))
        store = dist.TCPStore(host, port, 2, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def test_ranks_that_met_on_the_loopback_know_that_they_are_on_one_node(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join_by_tcp(tmp_path, rank, "127.0.0.1")
        found = [unisono.get_local_rank(), unisono.get_nproc_per_node()]
        found += [unisono.get_nnodes(), unisono.get_node_rank()]
        leave()
        return found

    assert by_hand(fn) == [[0, 2, 1, 0], [1, 2, 1, 0]]


def test_ranks_that_met_in_a_file_guess_and_say_so_once(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [unisono.get_local_rank(), unisono.get_local_rank(), unisono.get_nnodes()]
        leave()
        return found, [str(item.message) for item in caught]

    for rank, (found, messages) in enumerate(by_hand(fn)):
        assert found == [rank, rank, 1]
        assert len(messages) == 1
        assert "is a guess" in messages[0]
        assert "set_local_rank" in messages[0]


def test_where_the_local_rank_cannot_be_known_the_error_names_both_remedies(
    tmp_path: Path,
) -> None:
    def fn(rank: int) -> Any:
        join_by_tcp(tmp_path, rank, "0.0.0.0")
        found = [facts()]
        for ask in (
            unisono.get_local_rank,
            unisono.get_nproc_per_node,
            unisono.get_nnodes,
            unisono.get_node_rank,
        ):
            with pytest.raises(ContextError, match="set_local_rank.*LOCAL_RANK"):
                ask()
        unisono.show_config()
        unisono.set_local_rank(4)
        found.append(unisono.get_local_rank())
        leave()
        return found

    assert by_hand(fn) == [[native(0, 2), 4], [native(1, 2), 4]]


def test_finalize_lets_go_of_a_group_made_by_hand_and_leaves_it_alive(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        before = unisono.all_gather(rank)
        unisono.finalize()
        x = torch.tensor([rank])
        dist.all_reduce(x)
        with pytest.raises(unisono.errors.AlreadyInitializedError, match="native-dist"):
            unisono.initialize("gloo")
        after = unisono.all_gather(rank)
        leave()
        return before, x.item(), after

    assert by_hand(fn) == [([0, 1], 1, [0, 1])] * 2


def test_a_list_of_ranks_makes_one_group_however_often_it_is_used(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3)
        x = torch.ones(1)
        before = len(dist.distributed_c10d._world.pg_map)
        for _ in range(500):
            unisono.all_reduce(x, group=[0, 1])
            total = unisono.all_reduce(x, group=(1, 0))
        after = len(dist.distributed_c10d._world.pg_map)
        leave()
        return after - before, total.item()

    assert by_hand(fn, 3) == [(1, 2), (1, 2), (1, 1)]


def test_groups_do_not_outlive_their_context(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3, "first")
        old = unisono.new_group([0, 1])
        theirs = dist.new_group([0, 1])
        unisono.all_reduce(1, group=[0, 1])
        leave()
        join(tmp_path, rank, 3, "second")
        for group in (old, theirs):
            with pytest.raises(GroupMembershipError, match="make it again with new_group"):
                unisono.all_reduce(1, group=group)
        found = unisono.all_reduce(1, group=[0, 1])
        leave()
        with pytest.raises(GroupMembershipError, match="finished job"):
            unisono.all_reduce(1, group=old)
        return found

    assert by_hand(fn, 3) == [2, 2, 1]


def test_a_group_of_torch_can_be_the_group(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3)
        pair = dist.new_group([2, 0])
        found = [unisono.all_gather(rank, group=pair), unisono.all_gather(rank, dist.group.WORLD)]
        if rank != 1:
            found.append(unisono.broadcast(rank, src=2, group=pair))
        leave()
        return found

    world = [0, 1, 2]
    assert by_hand(fn, 3) == [[[0, 2], world, 2], [1, world], [[0, 2], world, 2]]


def test_a_new_group_inherits_the_timeout_of_the_job(tmp_path: Path) -> None:
    def timeout_of(group: unisono.Group) -> Any:
        handle: Any = group.handle
        return handle._get_backend(torch.device("cpu")).options._timeout

    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2, "by hand")
        found = [timeout_of(unisono.new_group([0, 1]))]
        leave()
        store = dist.FileStore(str(tmp_path / "ours"), 2)
        unisono.initialize("gloo", rank=rank, world_size=2, store=store, timeout=17)
        found.append(timeout_of(unisono.new_group([0, 1])))
        unisono.finalize()
        return [timeout.total_seconds() for timeout in found]

    assert by_hand(fn) == [[TIMEOUT.total_seconds(), 17]] * 2


@pytest.mark.parametrize("by_whom", ["the user", "initialize"])
def test_a_fork_of_a_replica_knows_the_facts_and_is_refused_collectives(
    by_whom: str, tmp_path: Path
) -> None:
    def fn(rank: int) -> Any:
        if by_whom == "the user":
            join(tmp_path, rank, 2)
            unisono.get_rank()
        else:
            store = dist.FileStore(str(tmp_path / "ours"), 2)
            unisono.initialize("gloo", rank=rank, world_size=2, store=store)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert facts() == native(rank, 2)
                for call in (unisono.barrier, lambda: unisono.all_reduce(torch.ones(1))):
                    with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                        call()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        total = unisono.all_reduce(1)
        leave()
        return os.waitstatus_to_exitcode(status), total

    assert by_hand(fn) == [(0, 2)] * 2
