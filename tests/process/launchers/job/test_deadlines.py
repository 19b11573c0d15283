"""A deadline around spawn, Parallel or a pool bounds all that is inside; nobody waits forever."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.clock import fast_clock
from tests.support.processes import until
from tests.support.requirements import require_backend
from unisono.errors import CollectiveTimeoutError

BACKENDS = ["threads", "gloo", "mpi4py", "horovod"]


def compute(local_rank: int, over: str) -> None:
    until(Path(over).exists, 600)


def wait_for_others(local_rank: int, over: str) -> None:
    if local_rank == 0:
        unisono.barrier()
    compute(local_rank, over)


def sleep_in_c(local_rank: int, over: str) -> None:
    while not Path(over).exists():
        ctypes.CDLL(None).usleep(100_000)


STUCK: dict[str, Callable[[int, str], None]] = {
    "one waits for another": wait_for_others,
    "all compute": compute,
    "all are in C": sleep_in_c,
}


def run(way: str, backend: str, fn: Any, *args: Any) -> Any:
    if way == "spawn":
        return unisono.spawn(backend, fn, args, nproc_per_node=2)
    if way == "Parallel":
        with unisono.Parallel(backend, nproc_per_node=2) as parallel:
            return parallel.run(fn, *args)
    with unisono.WorkerPool(backend, nproc_per_node=2) as pool:
        return pool.run(fn, *args)


@pytest.mark.parametrize(
    ("way", "stuck"),
    [*(("spawn", stuck) for stuck in STUCK), *(("WorkerPool", stuck) for stuck in STUCK),
     ("Parallel", "one waits for another")],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_a_block_starts_is_over_at_its_deadline(
    backend: str, way: str, stuck: str, tmp_path: Path
) -> None:
    require_backend(backend)
    run(way, backend, abs)  # whatever is made once is there
    over = str(tmp_path / "over")
    rate = 60 if backend == "threads" else 10  # the ranks begin within the deadline
    start = time.monotonic()
    with (
        fast_clock(rate),
        pytest.raises(CollectiveTimeoutError, match=r"rank") as caught,
        unisono.deadline(30),
    ):
        run(way, backend, STUCK[stuck], over)
    assert time.monotonic() - start >= 30 / rate
    Path(over).touch()
    if (backend, way, stuck) == ("gloo", "spawn", "one waits for another"):
        assert "rank 1 never reached barrier" in str(caught.value)  # what a rank waited for


class Slow:
    """What takes long to unpickle: before the replica is there."""

    def __init__(self, over: str) -> None:
        self.over = over

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        compute(0, self.over)

    def __call__(self, local_rank: int) -> None:
        return


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_start_of_replicas_is_over_at_the_deadline(backend: str, tmp_path: Path) -> None:
    require_backend(backend)
    run("spawn", backend, abs)  # horovodrun's own helpers give ranks 5 s to end, twice
    with (
        fast_clock(30),
        pytest.raises(CollectiveTimeoutError, match=r"ranks \[0, 1\] of 2"),
        unisono.deadline(30),
    ):
        run("spawn", backend, Slow(str(tmp_path / "over")))


def test_the_start_of_a_pool_is_over_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = tmp_path / "over"
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import os, time\n"
        f"while os.environ.get('SLOW') and not os.path.exists({str(over)!r}): time.sleep(0.01)\n"
    )
    monkeypatch.setenv("SLOW", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with (
        fast_clock(30),
        unisono.WorkerPool("gloo", nproc_per_node=2, start_method="spawn") as pool,
        pytest.raises(CollectiveTimeoutError, match=r"ranks \[0, 1\] of 2"),
        unisono.deadline(30),
    ):
        pool.run(abs)
    over.touch()


def test_a_block_that_is_over_starts_nothing() -> None:
    told = "nothing was spawned"
    with fast_clock(1e9), unisono.deadline(30), pytest.raises(CollectiveTimeoutError, match=told):
        unisono.spawn("gloo", abs)
