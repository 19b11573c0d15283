"""Contexts and jobs within, beside and after each other."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.measures import Table
from unisono.errors import AlreadyInitializedError, ContextError, UnisonoError


def free() -> None:
    """Start a context without peers."""
    unisono.initialize("gloo", rank=0, world_size=1)


def test_initialize_twice_is_refused_and_again_it_works_after_finalize_and_a_failure(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/store"
    with pytest.raises(UnisonoError):
        unisono.initialize("gloo", rank=0, world_size=2, init_method=url, timeout=1)
    assert not unisono.is_distributed()
    for number in range(5):
        free()
        with pytest.raises(AlreadyInitializedError):
            free()
        assert unisono.all_gather(number) == [number]
        unisono.finalize()
        unisono.finalize()


def test_a_stale_file_of_a_rendezvous_ends_at_the_timeout(tmp_path: Path, table: Table) -> None:
    url = f"file://{tmp_path}/store"

    def crash(local_rank: int) -> None:
        unisono.finalize()
        unisono.initialize("gloo", rank=local_rank, world_size=2, init_method=url, timeout=20)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UnisonoError):
        unisono.spawn("gloo", crash, nproc_per_node=2)
    start = time.monotonic()
    with pytest.raises(ContextError, match="rank 0 of 2") as caught:
        unisono.initialize("gloo", rank=0, world_size=2, init_method=url, timeout=2)
        unisono.barrier()
    # 10 s are gloo's own, for an address at which nobody listens any more.
    seconds = time.monotonic() - start
    table.add("stale file://, timeout 2 s", seconds, 11, str(caught.value))


def test_spawn_inside_spawn_and_after_initialize() -> None:
    def outer(local_rank: int) -> Any:
        inner = unisono.spawn("gloo", lambda rank: unisono.all_gather(rank), nproc_per_node=2)
        return inner, unisono.all_gather(local_rank)

    free()
    try:
        assert unisono.spawn("gloo", outer, nproc_per_node=2) == [([[0, 1]] * 2, [0, 1])] * 2
        assert unisono.get_world_size() == 1
    finally:
        unisono.finalize()


def test_a_parent_that_used_openmp_can_spawn() -> None:
    """As in a notebook: a fork would hang in the first product of matrices."""
    torch.set_num_threads(2)
    square = torch.ones(600, 600)
    product = square @ square
    total = unisono.spawn("gloo", lambda rank: float((square @ square).sum()), nproc_per_node=2)
    assert total == [float(product.sum())] * 2


def test_twenty_jobs_at_once_outlive_their_threads(table: Table) -> None:
    jobs: dict[int, Any] = {}

    def begin(number: int) -> None:
        fn = lambda rank: unisono.all_reduce(number)  # noqa: E731
        jobs[number] = unisono.spawn("gloo", fn, nproc_per_node=2, join=False)

    start = time.monotonic()
    threads = [threading.Thread(target=begin, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: job.join(60) for number, job in jobs.items()} == {
        number: [2 * number] * 2 for number in range(20)
    }
    table.add("20 jobs at once", time.monotonic() - start, 30, "(20 succeed)")


def test_a_group_has_the_timeout_of_its_job(tmp_path: Path, table: Table) -> None:
    os.mkfifo(tmp_path / "over")

    def fn(local_rank: int) -> Any:
        unisono.barrier(group=[0, 1])
        if local_rank == 1:
            return (tmp_path / "over").read_text()
        start = time.monotonic()
        with pytest.raises(UnisonoError) as caught:
            unisono.all_reduce(torch.ones(100_000), group=[0, 1])
        seconds = time.monotonic() - start
        (tmp_path / "over").write_text("over")
        return seconds, str(caught.value)

    (seconds, text), over = unisono.spawn("gloo", fn, nproc_per_node=2, timeout=2)
    assert over == "over"
    assert "all_reduce SUM" in text
    table.add("a rank that never comes to a group, timeout 2 s", seconds, 3, text)
