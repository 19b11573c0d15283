"""Contexts and jobs within, beside and after each other."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.support.measures import Table
from tests.support.processes import in_fork
from unisono import WorkerPool
from unisono.errors import AlreadyInitializedError, ContextError, UnisonoError


def free() -> None:
    """Start a context without peers."""
    unisono.initialize("gloo", rank=0, world_size=1)


def test_initialize_twice_is_refused_and_harmless() -> None:
    free()
    with pytest.raises(AlreadyInitializedError):
        free()
    assert unisono.all_gather(1) == [1]
    unisono.finalize()
    unisono.finalize()


def test_initialize_again_after_finalize_and_after_a_failure(tmp_path: Path) -> None:
    for _ in range(5):
        free()
        assert unisono.all_reduce(2) == 2
        unisono.finalize()
    url = f"file://{tmp_path}/store"
    with pytest.raises(UnisonoError):
        unisono.initialize("gloo", rank=0, world_size=2, init_method=url, timeout=1)
    assert not unisono.is_distributed()
    free()
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


def test_a_fork_after_initialize_is_told_at_once() -> None:
    def fn(local_rank: int) -> int:
        unisono.barrier()

        def look() -> None:
            with pytest.raises(UnisonoError):
                unisono.all_reduce(torch.ones(100_000))

        code = in_fork(look)
        unisono.barrier()
        return code

    start = time.monotonic()
    assert unisono.spawn("gloo", fn, nproc_per_node=2, timeout=20) == [0, 0]
    assert time.monotonic() - start < 20


def test_a_job_of_a_thread_outlives_the_thread() -> None:
    jobs: list[Any] = []

    def start() -> None:
        fn = lambda rank: unisono.all_gather(rank)  # noqa: E731
        jobs.append(unisono.spawn("gloo", fn, nproc_per_node=2, join=False))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert jobs[0].join(60) == [[0, 1]] * 2


def test_twenty_jobs_at_once(table: Table) -> None:
    results: dict[int, Any] = {}

    def job(number: int) -> None:
        results[number] = unisono.spawn(
            "gloo", lambda rank: unisono.all_reduce(number), nproc_per_node=2
        )

    threads = [threading.Thread(target=job, args=(number,)) for number in range(20)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [2 * number] * 2 for number in range(20)}
    table.add("20 jobs at once", time.monotonic() - start, 30, "(20 succeed)")


def test_a_module_that_imports_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1':\n    time.sleep(2)\n"
        "def fn(local_rank):\n    import unisono\n    return unisono.all_gather(local_rank)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_module  # type: ignore[import-not-found]

    assert unisono.spawn("gloo", slow_module.fn, nproc_per_node=2) == [[0, 1]] * 2


def test_forty_jobs_and_nothing_grows(table: Table) -> None:
    process = psutil.Process()
    sizes = []
    start = time.monotonic()
    for _ in range(40):
        assert unisono.spawn("gloo", lambda rank: unisono.all_gather(rank), nproc_per_node=2)
        sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    memory, descriptors, threads = (
        last - first for first, last in zip(sizes[8], sizes[-1], strict=True)
    )
    assert (descriptors, threads) == (0, 0)
    assert memory < 4 << 20
    said = f"(32 jobs took {memory >> 10} KiB)"
    table.add("40 jobs, each", (time.monotonic() - start) / 40, 2, said)


def test_ten_thousand_calls_with_a_list_of_ranks_make_one_group() -> None:
    def fn(local_rank: int) -> Any:
        process = psutil.Process()
        unisono.all_reduce(1, group=[0, 1])
        before = process.num_fds(), process.num_threads()
        for _ in range(10_000):
            unisono.all_reduce(1, group=[0, 1])
        return before == (process.num_fds(), process.num_threads())

    with WorkerPool("gloo", nproc_per_node=3, timeout=60) as pool:
        assert pool.run(fn) == [True] * 3


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
