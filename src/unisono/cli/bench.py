"""``unisono bench``: the time of each collective on this machine, by payload and size."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

import unisono as idist
from unisono.cli._tables import Column, show, wrapped
from unisono.lifecycle import best_backend
from unisono.topology import usable_cores

_UNITS = {"K": 10, "M": 20, "G": 30}
_COLUMNS = (
    Column("operation"),
    Column("payload", drop_order=1),
    Column("bytes", is_number=True),
    Column("median us", is_number=True),
    Column("quartiles us", is_number=True, drop_order=2),
    Column("algorithm GB/s", is_number=True, drop_order=4),
    Column("bus GB/s", is_number=True, drop_order=3),
)
# The share of a payload's bytes that crosses the bus for each rank, from doc/PERFORMANCE.md of
# github.com/NVIDIA/nccl-tests, which counts the bytes of the whole result.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def bench(
    backend: Annotated[
        str | None,
        typer.Option(help="Backend, as for unisono.spawn. Default: the best one available."),
    ] = None,
    *,
    nproc_per_node: Annotated[
        int, typer.Option("-n", "--nproc-per-node", min=1, metavar="N", help="Replicas.")
    ] = 2,
    sizes: Annotated[
        str, typer.Option(help="Bytes of tensors, such as '4 64K 1M'.")
    ] = "4 1K 64K 1M 16M",
    rounds: Annotated[int, typer.Option(min=1, help="Calls, of which the median counts.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Measure every collective on tensors of several sizes, and several on Python values.

    The control plane carries the Python values. Starts replicas. Times are the median and the
    quartiles of the slowest rank. Algorithm bandwidth is the payload divided by the median; bus
    bandwidth is the traffic of the slowest link divided by the median, as nccl-tests defines it.

    Returns:
        The exit code, 0.
    """
    sizes_bytes = [_bytes(text) for text in sizes.replace(",", " ").split()]
    name = best_backend() if backend is None else backend
    arguments = (sizes_bytes, rounds, not as_json)
    # All ranks return the same rows: each call's times are those of its slowest rank.
    rows, *_ = idist.spawn(name, _measure, arguments, nproc_per_node=nproc_per_node)
    load = round(os.getloadavg()[0], 1)
    facts = {"backend": name, "ranks": nproc_per_node, "rounds": rounds}
    facts |= {"machine": platform.machine(), "cores": usable_cores(), "load": load}
    facts |= {"unisono": idist.__version__, "torch": torch.__version__}
    if as_json:
        typer.echo(json.dumps({**facts, "figures": rows}, indent=1))
        return 0
    typer.echo(wrapped(", ".join(f"{name} {value}" for name, value in facts.items())))
    show(f"{name}, ranks: {nproc_per_node}", _COLUMNS, [_cells(row) for row in rows])
    return 0


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper())
    number = text[:-1] if unit is not None else text
    if not number.isdecimal() or int(number) < 1:
        raise typer.BadParameter(f"size {text!r} should be such as 4, 64K, 1M or 1G")
    return int(number) << (unit or 0)  # a unit is a power of two


def _cells(row: dict[str, Any]) -> list[str]:
    quartiles = f"{row['us_q1']:.1f} to {row['us_q3']:.1f}"
    speeds = [row["algorithm_gb_s"], row["bus_gb_s"]]
    size = str(row["bytes"] or "")
    texts = ["" if speed is None else f"{speed:.3g}" for speed in speeds]
    return [row["operation"], row["payload"], size, f"{row['us']:.1f}", quartiles, *texts]


def _measure(
    _local_rank: int, sizes: list[int], rounds: int, shows_progress: bool
) -> list[dict[str, Any]]:
    """Measure all calls; return the rows that ``--json`` prints."""
    n, rows = idist.get_world_size(), []
    works = track(
        [*_calls_with_values(), *_calls_with_tensors(sizes)],
        "measuring",
        console=Console(stderr=True),
        disable=not (shows_progress and idist.is_main_process()),
        transient=True,
    )
    for operation, payload, size, call in works:
        low, seconds, high = _quartiles_s(call, rounds)
        # For a Python value, `size` counts its contents, not the bytes sent, so no bandwidth is
        # computed.
        speed = size / seconds / 1e9 if payload == "tensor" else None
        rows.append(
            {
                "operation": operation,
                "payload": payload,
                "bytes": size,
                "us": seconds * 1e6,
                "us_q1": low * 1e6,
                "us_q3": high * 1e6,
                "algorithm_gb_s": speed,
                "bus_gb_s": None if speed is None else speed * _BUS[operation](n),
            }
        )
    return rows


def _quartiles_s(call: Callable[[], object], rounds: int) -> list[float]:
    """Time a call; return the quartiles of the rank whose median is the largest."""
    call()  # not measured, because the first call may set up connections
    samples = []
    for _ in range(rounds):
        idist.barrier()  # else a rank's time would contain its wait for a late one
        begin = time.perf_counter()
        call()
        # A call on these devices returns before it is done.
        if idist.device().type in ("cuda", "xpu"):
            torch.accelerator.synchronize()
        samples.append(time.perf_counter() - begin)
    several = samples if rounds > 1 else samples * 2  # quantiles() needs two
    quartiles = statistics.quantiles(several, n=4, method="inclusive")
    return max(idist.all_gather(quartiles), key=lambda each: each[1])


Work = tuple[str, str, int, Callable[[], object]]  # operation, payload, its bytes, call


def _calls_with_values() -> list[Work]:
    metrics = {f"metric{i}": i * 0.5 for i in range(20)}
    return [
        ("barrier", "", 0, idist.barrier),
        ("all_gather", "str", 20, partial(idist.all_gather, "twenty characters ok")),
        ("broadcast", "str", 20, partial(idist.broadcast, "twenty characters ok")),
        ("all_reduce", "float", 8, partial(idist.all_reduce, 0.5)),
        ("all_reduce", "dict of 20 floats", 160, partial(idist.all_reduce, metrics)),
        ("all_gather", "str", 5000, partial(idist.all_gather, "x" * 5000)),
    ]


def _calls_with_tensors(sizes: list[int]) -> Iterator[Work]:
    n = idist.get_world_size()
    for size in sizes:
        # The calls below divide the tensor equally among the ranks, each of which gets at least one
        # float32 of 4 bytes.
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
        for name, call in calls.items():
            yield name, "tensor", count * 4, call
