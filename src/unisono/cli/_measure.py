"""What ``unisono bench`` measures in each replica."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import unisono as idist

# Of the bytes of a payload, what crosses the bus for each rank: github.com/NVIDIA/nccl-tests,
# doc/PERFORMANCE.md. A size is that of the whole result.
BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def measure(
    _local_rank: int, sizes: list[int], rounds: int, shows_progress: bool
) -> list[dict[str, Any]]:
    """Time everything. Collective over all ranks; rows as ``--json`` prints them."""
    n, rows = idist.get_world_size(), []
    works = [*_values().items(), *_tensors(sizes)]
    is_shown = shows_progress and idist.is_main_process()
    with Progress(console=Console(stderr=True), disable=not is_shown, transient=True) as progress:
        task = progress.add_task("measuring", total=len(works))
        for key, call in works:
            low, seconds, high = _time(call, rounds)
            operation, payload, size = key
            row = {"operation": operation, "payload": payload, "bytes": size}
            row |= {"us": seconds * 1e6, "us_q1": low * 1e6, "us_q3": high * 1e6}
            row |= {"algorithm_gb_s": None, "bus_gb_s": None}
            if payload == "tensor":
                row["algorithm_gb_s"] = size / seconds / 1e9
                row["bus_gb_s"] = size / seconds / 1e9 * BUS[operation](n)
            rows.append(row)
            progress.advance(task)
    return rows


def _time(call: Callable[[], object], rounds: int) -> list[float]:
    """Give quartiles in seconds, of the rank whose median is the largest."""
    call()
    samples = []
    for _ in range(rounds):
        idist.barrier()
        begin = time.perf_counter()
        call()
        _finish()
        samples.append(time.perf_counter() - begin)
    quartiles = (
        statistics.quantiles(samples, n=4, method="inclusive") if rounds > 1 else samples * 3
    )
    # The slowest rank's, since that is what a program waits for.
    return max(idist.all_gather(quartiles), key=lambda each: each[1])


def _finish() -> None:
    if idist.device().type in ("cuda", "xpu"):
        torch.accelerator.synchronize()


def _values() -> dict[tuple[str, str, int], Callable[[], object]]:
    metrics = {f"metric{i}": i * 0.5 for i in range(20)}
    return {
        ("barrier", "", 0): idist.barrier,
        ("all_gather", "str", 20): lambda: idist.all_gather("twenty characters ok"),
        ("broadcast", "str", 20): lambda: idist.broadcast("twenty characters ok"),
        ("all_reduce", "float", 8): lambda: idist.all_reduce(0.5),
        ("all_reduce", "dict of 20 floats", 160): lambda: idist.all_reduce(metrics),
        ("all_gather", "str", 5000): lambda: idist.all_gather("x" * 5000),
    }


def _tensors(sizes: list[int]) -> list[tuple[tuple[str, str, int], Callable[[], object]]]:
    n, works = idist.get_world_size(), []
    for size in sizes:
        count = max(n, size // 4 // n * n)
        tensor = torch.zeros(count, device=idist.device())
        part = tensor[: count // n].clone()
        shapes = [[count // n]] * n
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(idist.all_reduce_, tensor),
            "broadcast": partial(idist.broadcast_, tensor),
            "all_gather": partial(idist.all_gather_tensors_with_shapes, part, shapes),
            "reduce_scatter": partial(idist.reduce_scatter, tensor),
            "all_to_all": partial(idist.all_to_all, tensor),
        }
        works += [((name, "tensor", count * 4), call) for name, call in calls.items()]
    return works
