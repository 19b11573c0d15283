"""A context that the user made by hand, or that we made earlier, is seen as it is."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.by_hand import by_hand, join, join_by_tcp, leave, prepare
from unisono.context import current_model
from unisono.errors import ContextError


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
        join_by_tcp(tmp_path, rank, "127.0.0.1")
        dist.barrier()
        found = None
        if rank == 0:  # rank 1 is in the barrier of `leave` meanwhile
            started = time.monotonic()
            found = (*facts(), unisono.get_local_rank(), str(unisono.device()))
            unisono.show_config()
            assert time.monotonic() - started < 5
        leave()
        return found

    assert by_hand(fn)[0] == (*native(0, 2), 0, "cpu")


def test_a_group_that_comes_and_goes_is_followed_without_sync(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        seen: list[Any] = [facts()]
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
        seen: list[Any] = []
        join_by_tcp(tmp_path, rank, "127.0.0.1")
        unisono.set_local_rank(rank + 5)
        seen.append(unisono.get_local_rank())
        unisono.sync()
        seen.append(unisono.get_local_rank())
        unisono.sync(temporary=True)
        seen.append(facts())
        unisono.set_local_rank(7)
        seen.append(unisono.get_local_rank())
        unisono.set_local_rank(None)
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


def test_set_local_rank_takes_the_place_of_a_guess(tmp_path: Path) -> None:
    def fn(rank: int) -> int:
        join(tmp_path, rank, 2)
        unisono.set_local_rank(1 - rank)
        found = unisono.get_local_rank()
        leave()
        return found

    assert by_hand(fn) == [1, 0]


@pytest.mark.parametrize(
    "others",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        (),
    ],
)
def test_the_local_rank_is_what_the_environment_says(
    others: tuple[str, ...], tmp_path: Path
) -> None:
    def fn(rank: int) -> int:
        says = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(says[name]) for name in others})
        os.environ["LOCAL_RANK"] = str(1 - rank)
        join(tmp_path, rank, 2)
        found = unisono.get_local_rank()
        leave()
        return found

    assert by_hand(fn) == [1, 0]


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
        found: list[Any] = [facts()]
        for ask in (
            unisono.get_local_rank,
            unisono.get_nproc_per_node,
            unisono.get_nnodes,
            unisono.get_node_rank,
        ):
            with pytest.raises(ContextError, match=r"sync\(\).*LOCAL_RANK"):
                ask()
        unisono.show_config()
        unisono.set_local_rank(4)
        found.append(unisono.get_local_rank())
        leave()
        return found

    assert by_hand(fn) == [[native(0, 2), 4], [native(1, 2), 4]]


def loaded() -> None:
    unisono.auto_dataloader([1, 2, 3, 4], batch_size=4, num_workers=2)


def first_of_the_node() -> None:
    with unisono.one_rank_first(local=True):
        pass


@pytest.mark.parametrize(
    "call",
    [
        unisono.sync,
        lambda: unisono.all_reduce(1),
        lambda: unisono.all_reduce(torch.ones(300_000)),
        unisono.barrier,
        loaded,
        first_of_the_node,
    ],
)
def test_the_first_collective_call_finds_out_which_ranks_share_a_node(
    call: Callable[[], Any], tmp_path: Path
) -> None:
    def fn(rank: int) -> Any:
        join_by_tcp(tmp_path, rank, "0.0.0.0")
        call()
        seen = [unisono.get_local_rank(), unisono.get_nproc_per_node()]
        seen += [unisono.get_nnodes(), unisono.get_node_rank()]
        unisono.set_local_rank(5)
        seen += [unisono.get_local_rank(), unisono.get_nnodes()]
        leave()
        return seen

    assert by_hand(fn) == [[0, 2, 1, 0, 5, 1], [1, 2, 1, 0, 5, 1]]


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


@pytest.mark.parametrize("look_again", [unisono.sync, lambda: unisono.set_local_rank(0)])
@pytest.mark.parametrize("is_connected", [True, False])
def test_what_is_under_way_keeps_its_place_when_the_context_is_looked_for_again(
    look_again: Callable[[], None], is_connected: bool, tmp_path: Path
) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        if is_connected:
            unisono.barrier()
        handles = [unisono.all_gather(i, async_op=True) for i in range(50)]
        big = unisono.all_reduce(torch.full((2_000_000,), 1.0), async_op=True)
        look_again()
        gc.collect()  # nobody but the handles has the view that they began on
        after = unisono.all_gather("after")
        different = big.wait().unique()  # type: ignore[no-untyped-call]
        found = [handle.wait() for handle in handles], different.tolist(), after
        leave()
        return found

    wanted = [[i, i] for i in range(50)], [2.0], ["after", "after"]
    assert by_hand(fn) == [wanted] * 2


def test_threads_that_ask_first_get_one_view_of_a_context(tmp_path: Path) -> None:
    def fn(rank: int) -> int:
        join(tmp_path, rank, 1)
        sys.setswitchinterval(1e-6)
        most = 0
        for _ in range(100):
            unisono.sync()
            views: set[int] = set()
            ready = threading.Barrier(4)

            def ask(ready: threading.Barrier = ready, views: set[int] = views) -> None:
                ready.wait()
                views.add(id(current_model()))

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            most = max(most, len(views))
        leave()
        return most

    assert by_hand(fn, 1) == [1]
