"""``unisono bench``: how fast each collective is here, by payload and size."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import unisono as idist
from unisono.facts import is_main_process
from unisono.lifecycle import best_backend, spawn

__all__ = ("bench", "measure")

# Of the bytes of a payload, what crosses the bus for each rank: github.com/NVIDIA/nccl-tests,
# doc/PERFORMANCE.md. A size is that of the whole result.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
_SIZES = "4 1K 64K 1M 16M"
_UNITS = {"K": 10, "M": 20, "G": 30}


def bench(
    backend: Annotated[str | None, typer.Option(help="As in spawn; the best one here.")] = None,
    *,
    nproc: Annotated[int, typer.Option("-n", "--nproc-per-node", min=1, help="Replicas.")] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes of tensors, such as '4 64K 1M'.")] = _SIZES,
    rounds: Annotated[int, typer.Option(min=1, help="Calls, of which the median counts.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw times over sizes (needs matplotlib).")
    ] = None,
) -> int:
    """Measure every collective on tensors of several sizes, and values of the control plane.

    Local. It starts replicas. Algorithm bandwidth is the payload over the time; bus bandwidth is
    what crosses the slowest link for it, as nccl-tests defines it.

    Returns:
        The exit code, 0.
    """
    wanted = [_bytes(text) for text in sizes.split()]
    name = best_backend() if backend is None else backend
    rows = spawn(name, measure, (wanted, rounds, not as_json), nproc_per_node=nproc)[0]
    facts = {"backend": name, "ranks": nproc, "torch": torch.__version__, "rounds": rounds}
    if plot is not None:
        _draw(rows, plot, f"{name}, {nproc} ranks")
    if as_json:
        typer.echo(json.dumps({**facts, "figures": rows}, indent=1))
    else:
        _show(rows, f"{name}, {nproc} ranks, median of {rounds}")
    return 0


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper())
    number = text[:-1] if unit is not None else text
    if not number.isdecimal() or int(number) < 1:
        raise typer.BadParameter(f"size {text!r} should be such as 4, 64K, 1M or 1G")
    return int(number) << (unit or 0)


def measure(
    _local_rank: int, sizes: list[int], rounds: int, shows_progress: bool
) -> list[dict[str, Any]]:
    """Time everything. Collective over all ranks; rows as ``--json`` prints them."""
    n, rows = idist.get_world_size(), []
    works = [*_values().items(), *_tensors(sizes)]
    is_shown = shows_progress and is_main_process()
    with Progress(console=Console(stderr=True), disable=not is_shown, transient=True) as progress:
        task = progress.add_task("measuring", total=len(works))
        for key, call in works:
            seconds = _time(call, rounds)
            operation, payload, size = key
            row = {"operation": operation, "payload": payload, "bytes": size}
            row |= {"us": seconds * 1e6, "algorithm_gb_s": None, "bus_gb_s": None}
            if payload == "tensor":
                row["algorithm_gb_s"] = size / seconds / 1e9
                row["bus_gb_s"] = size / seconds / 1e9 * _BUS[operation](n)
            rows.append(row)
            progress.advance(task)
    return rows


def _time(call: Callable[[], object], rounds: int) -> float:
    call()
    samples = []
    for _ in range(rounds):
        idist.barrier()
        begin = time.perf_counter()
        call()
        _finish()
        samples.append(time.perf_counter() - begin)
    # The slowest rank's, since that is what a program waits for.
    return float(idist.all_reduce(statistics.median(samples), "MAX"))


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
        whole = torch.zeros(count, device=idist.device())
        part = whole[: count // n].clone()
        shapes = [[count // n]] * n
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(idist.all_reduce_, whole),
            "broadcast": partial(idist.broadcast_, whole),
            "all_gather": partial(idist.all_gather_tensors_with_shapes, part, shapes),
            "reduce_scatter": partial(idist.reduce_scatter, whole),
            "all_to_all": partial(idist.all_to_all, whole),
        }
        works += [((name, "tensor", count * 4), call) for name, call in calls.items()]
    return works


def _show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in ("operation", "payload"):
        table.add_column(column)
    for column in ("bytes", "us", "algorithm GB/s", "bus GB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = [
            "" if row[key] is None else f"{row[key]:.3f}" for key in ("algorithm_gb_s", "bus_gb_s")
        ]
        size = f"{row['bytes']:,}" if row["bytes"] else ""
        table.add_row(row["operation"], row["payload"], size, f"{row['us']:,.1f}", *speeds)
    Console().print(table)


def _draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    try:
        plots = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise typer.BadParameter(
            "--plot needs matplotlib: python -m pip install matplotlib"
        ) from error
    figure = plots.Figure(layout="constrained")
    axes = figure.subplots()
    for operation in _BUS:
        points = [r for r in rows if r["operation"] == operation and r["payload"] == "tensor"]
        axes.plot([r["bytes"] for r in points], [r["us"] for r in points], "o-", label=operation)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds", title=title)
    axes.legend()
    figure.savefig(path)
