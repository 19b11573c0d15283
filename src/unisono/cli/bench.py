"""``unisono bench``: how fast each collective is here, by payload and size."""

from __future__ import annotations

import importlib
import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

import unisono
from unisono.cli._tables import Column, folded, show

_SIZES = "4 1K 64K 1M 16M"
_UNITS = {"K": 10, "M": 20, "G": 30}
_COLUMNS = (
    Column("operation"),
    Column("payload", rank=1),
    Column("size", is_number=True),
    Column("median", is_number=True),
    Column("quartiles", is_number=True, rank=2),
    Column("algorithm", is_number=True, rank=4),
    Column("bus", is_number=True, rank=3),
)
_CPU_INFO = Path("/proc/cpuinfo")


def bench(
    backend: Annotated[str | None, typer.Option(help="As in spawn; the best one here.")] = None,
    *,
    nproc_per_node: Annotated[
        int, typer.Option("-n", "--nproc-per-node", min=1, metavar="N", help="Replicas.")
    ] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes of tensors, such as '4 64K 1M'.")] = _SIZES,
    rounds: Annotated[int, typer.Option(min=1, help="Calls, of which the median counts.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw times over sizes (needs matplotlib).")
    ] = None,
) -> int:
    """Measure every collective on tensors of several sizes, and values of the control plane.

    It starts replicas. Times are the median and the quartiles of the slowest rank.
    Algorithm bandwidth is the payload over the median; bus bandwidth is what crosses the slowest
    link for it, as nccl-tests defines it.

    Returns:
        The exit code, 0.
    """
    from unisono.cli._measure import measure
    from unisono.lifecycle import best_backend, spawn

    sizes_bytes = [_bytes(text) for text in sizes.replace(",", " ").split()]
    draw = None if plot is None else _drawing()
    name = best_backend() if backend is None else backend
    rows = spawn(name, measure, (sizes_bytes, rounds, not as_json), nproc_per_node=nproc_per_node)[
        0
    ]
    facts = {"backend": name, "ranks": nproc_per_node, "rounds": rounds, **_machine()}
    if as_json:
        typer.echo(json.dumps({**facts, "figures": rows}, indent=1))
    else:
        _show(rows, facts)
    if plot is not None:
        _draw(draw, rows, plot, facts)
        typer.echo(f"wrote {plot}", err=True)
    return 0


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper())
    number = text[:-1] if unit is not None else text
    if not number.isdecimal() or int(number) < 1:
        raise typer.BadParameter(f"size {text!r} should be such as 4, 64K, 1M or 1G")
    return int(number) << (unit or 0)


def _machine() -> dict[str, Any]:
    """Say what the figures depend on."""
    import torch

    from unisono.accelerators import accelerator_count
    from unisono.topology import usable_cores

    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    devices = accelerator_count()
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "accelerators": devices,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "unisono": unisono.__version__,
    }


def _size(count: float) -> str:
    """Write a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _time(us: float) -> str:
    """Write microseconds with three digits and the unit that suits them."""
    value, unit = (us, "us") if us < 1000 else (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _speed(gb_s: float | None) -> str:
    """Write a bandwidth with the unit that suits it."""
    if gb_s is None:
        return ""
    for factor, unit in ((1, "GB/s"), (1e3, "MB/s"), (1e6, "kB/s")):
        if gb_s * factor >= 1:
            return f"{gb_s * factor:.3g} {unit}"
    return f"{gb_s * 1e9:.3g} B/s"


def _title(facts: dict[str, Any]) -> str:
    ranks = "1 rank" if facts["ranks"] == 1 else f"{facts['ranks']} ranks"
    return f"{facts['backend']}, {ranks}, median of {facts['rounds']}"


def _host(facts: dict[str, Any]) -> str:
    return f"{facts['processor']}, {facts['cores']} cores, load {facts['load']}"


def _versions(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {facts[name]}" for name in ("unisono", "torch", "python"))


def _show(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    cells = [
        [
            row["operation"],
            row["payload"],
            _size(row["bytes"]) if row["bytes"] else "",
            _time(row["us"]),
            f"{_time(row['us_q1'])} to {_time(row['us_q3'])}",
            _speed(row["algorithm_gb_s"]),
            _speed(row["bus_gb_s"]),
        ]
        for row in rows
    ]
    typer.echo(f"{folded(_host(facts))}\n{folded(_versions(facts))}")
    show(_title(facts), _COLUMNS, cells)


def _drawing() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise typer.BadParameter(
            "--plot needs matplotlib: python -m pip install matplotlib"
        ) from error


def _draw(drawing: Any, rows: list[dict[str, Any]], path: Path, facts: dict[str, Any]) -> None:
    """Draw each operation's median over the size, its quartiles as a band."""
    from unisono.cli._measure import BUS

    figure = drawing.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    sizes = sorted({row["bytes"] for row in rows if row["payload"] == "tensor"})
    for operation in BUS:
        points = [r for r in rows if r["operation"] == operation and r["payload"] == "tensor"]
        x = [row["bytes"] for row in points]
        (line,) = axes.plot(x, [row["us"] for row in points], "o-", label=operation)
        bounds = [[row[key] for row in points] for key in ("us_q1", "us_q3")]
        axes.fill_between(x, *bounds, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="size of the result", ylabel="time of a call")
    axes.set_xticks(sizes, [_size(size) for size in sizes], minor=False)
    axes.xaxis.set_minor_locator(importlib.import_module("matplotlib.ticker").NullLocator())
    formatter = importlib.import_module("matplotlib.ticker").FuncFormatter
    axes.yaxis.set_major_formatter(formatter(lambda us, _at: _time(us)))
    axes.yaxis.set_minor_formatter(formatter(lambda us, _at: ""))
    axes.grid(which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="median; the band is half of all calls")
    axes.set_title(_title(facts), loc="left", fontweight="bold")
    figure.supxlabel(f"{_host(facts)}\n{_versions(facts)}", fontsize=8, color="gray")
    figure.savefig(path, dpi=150)
