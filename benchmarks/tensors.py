"""How fast CPU tensors travel between the ranks of one host, ours and others', over their size.

Each collective of ours takes turns in the same processes with gloo's own, with Open MPI's where
mpi4py is there (mpiexec starts the ranks then), and for the first dtype with those of ignite and
mmengine where these are installed. All write to memory that is there already where their API lets
them; a call of the facade that returns a tensor makes a new one. A time is that of the slowest
rank. Meanwhile each rank copies the same tensor as well: what memory gives, measured in the same
rounds.

    python benchmarks/tensors.py [--ranks 2 4] [--sizes 4 64 1024 16384 102400] [--rounds 11]
                                 [--dtypes float32 bfloat16 int64] [--calls all_reduce ...]
                                 [--json | --markdown] [--plot out.svg]
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from harness import Timing, Work, interleave, parser, ratio_report, short, show
from torch import Tensor

import unisono

KIB = 1024
SIZES = (4, 64, 1024, 16384, 102400)
CALLS = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"),
    *("reduce", "gather", "scatter"),
)
LONGEST_OF_ALL_KIB = 16384  # above, only all_reduce is measured: its goals go on
SHARED = "unisono, shared_empty"
SHARED_CALL = "all_reduce from shared_empty"
COPY = "copy"
GLOO: dict[tuple[str, int], tuple[float, float]] = {
    ("all_reduce", 64): (8, 15),
    ("all_reduce", 1024): (5, 5),
    ("all_reduce", 16384): (3, 3),
    ("all_reduce", 102400): (3, 2.5),
    ("all_gather", 1024): (5, 6),
    ("all_gather", 16384): (5, 4),
    ("reduce_scatter", 1024): (5, 6),
    ("reduce_scatter", 16384): (5, 4),
    ("broadcast", 1024): (2.5, 2.5),
    ("broadcast", 16384): (2, 4),
    ("all_to_all", 1024): (4, 2),
    ("all_to_all", 16384): (1.7, 2),
}
"""How many times faster than gloo with 2 and with 4 ranks, for float32, by call and KiB."""
GLOO_SHARED = {1024: (8, 8), 16384: (7, 6), 102400: (7, 6)}
"""The same of `all_reduce` of what `shared_empty` gave, by KiB."""
OPEN_MPI = {16384: (1.5, 1.5)}
"""The same of `all_reduce` over Open MPI."""
MPI_TYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T"}
Calls = dict[str, Callable[[], object]]
K = TypeVar("K")
Found = Mapping[tuple[str, str, int], Mapping[str, Timing]]
"""Timings by library, for each call, dtype and KiB."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ours(tensor: Tensor) -> Calls:
    """Give our collectives of a tensor [n * k]."""
    size, is_first = unisono.get_world_size(), unisono.get_rank() == 0
    rows = tensor.view(size, -1) if is_first else None
    return {
        "all_reduce": partial(unisono.all_reduce_, tensor),
        "all_gather": partial(unisono.all_gather, tensor),
        "reduce_scatter": partial(unisono.reduce_scatter, tensor),
        "broadcast": partial(unisono.broadcast_, tensor),
        "all_to_all": partial(unisono.all_to_all, tensor),
        "reduce": partial(unisono.reduce, tensor),
        "gather": partial(unisono.gather, tensor),
        "scatter": partial(unisono.scatter, rows),
    }


def shared(tensor: Tensor) -> Calls:
    """Give our sum of a tensor that lies in memory that all ranks share, where there is that."""
    make: Any = getattr(unisono, "shared_empty", None)
    if make is None:
        return {}
    return {"all_reduce": partial(unisono.all_reduce_, make(len(tensor), dtype=tensor.dtype))}


def gloo(tensor: Tensor) -> Calls:
    """Give those of `torch.distributed`, into memory that is there already."""
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    whole, part = tensor.new_empty(size * len(tensor)), tensor.new_empty(len(tensor) // size)
    mine, into = tensor.clone(), torch.empty_like(tensor)
    parts = list(torch.split(whole, len(tensor))) if is_first else None
    rows = list(torch.split(tensor, len(part))) if is_first else None
    return {
        "all_reduce": partial(dist.all_reduce, mine),
        "all_gather": partial(_all_gather, whole, tensor),
        "reduce_scatter": partial(_reduce_scatter, part, tensor),
        "broadcast": partial(dist.broadcast, mine, 0),
        "all_to_all": partial(dist.all_to_all_single, into, tensor),
        "reduce": partial(dist.reduce, mine, 0),
        "gather": partial(dist.gather, tensor, parts, 0),
        "scatter": partial(dist.scatter, part, rows, 0),
    }


def of_library(module: str, tensor: Tensor) -> Calls:
    """Give those of a library over `torch.distributed`, none where it isn't installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return {}
    library = importlib.import_module(module)
    names = ("all_reduce", "all_gather", "broadcast")
    return {name: partial(getattr(library, name), tensor.clone()) for name in names}


def open_mpi(tensor: Tensor) -> Calls:
    """Give those of MPI, on the tensors' own memory; none where mpi4py isn't installed."""
    if not has_mpi():
        return {}
    mpi = importlib.import_module("mpi4py.MPI")
    world, size = mpi.COMM_WORLD, dist.get_world_size()
    mine, whole, into = (
        [t.view(torch.uint8).numpy(), mpi.BYTE]
        for t in (tensor.clone(), tensor.new_empty(size * len(tensor)), torch.empty_like(tensor))
    )
    part = [tensor.new_empty(len(tensor) // size).view(torch.uint8).numpy(), mpi.BYTE]
    calls: Calls = {
        "all_gather": partial(world.Allgather, mine, whole),
        "broadcast": partial(world.Bcast, mine, 0),
        "all_to_all": partial(world.Alltoall, mine, into),
        "gather": partial(world.Gather, mine, whole if world.rank == 0 else None, 0),
        "scatter": partial(world.Scatter, mine if world.rank == 0 else None, part, 0),
    }
    if tensor.dtype in MPI_TYPES:
        of_type = getattr(mpi, MPI_TYPES[tensor.dtype])
        values, result, slot = ([buffer, of_type] for buffer, _ in (mine, into, part))
        calls["all_reduce"] = partial(world.Allreduce, mpi.IN_PLACE, values)
        calls["reduce_scatter"] = partial(world.Reduce_scatter_block, values, slot)
        calls["reduce"] = partial(world.Reduce, values, result if world.rank == 0 else None)
    return calls


def has_mpi() -> bool:
    """Tell whether MPI can be measured, too."""
    return importlib.util.find_spec("mpi4py") is not None and shutil.which("mpiexec") is not None


def libraries(tensor: Tensor, *, has_all: bool) -> dict[str, Calls]:
    """Give each library's collectives of a tensor, ours first."""
    found = {"unisono": ours(tensor), "gloo": gloo(tensor)}
    if has_all:
        found["ignite"] = of_library("ignite.distributed", tensor)
        found["mmengine"] = of_library("mmengine.dist", tensor)
    found["mpi4py"] = open_mpi(tensor)
    copied, into = tensor.clone(), torch.empty_like(tensor)
    found[COPY] = dict.fromkeys(CALLS, partial(into.copy_, copied))
    return found


def measure(
    local_rank: int,
    rounds: int,
    sizes: Sequence[int],
    dtypes: Sequence[str],
    names: Sequence[str],
) -> Found:
    """Time every call, dtype and size. Collective over all ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers'
    size = unisono.get_world_size()
    found: dict[tuple[str, str, int], Mapping[str, Timing]] = {}
    for name in dtypes:
        dtype = getattr(torch, name)
        for kib in sizes:
            tensor = torch.ones(kib * KIB // dtype.itemsize // size * size, dtype=dtype)
            by_library = libraries(tensor, has_all=name == dtypes[0])
            for call in names if kib <= LONGEST_OF_ALL_KIB else ("all_reduce",):
                calls = {peer: made[call] for peer, made in by_library.items() if call in made}
                found[call, name, kib] = interleave(rounds, calls, max(1, min(40, 1024 // kib)))
    for kib in (
        sizes if "all_reduce" in names else ()
    ):  # last: all calls look for shared tensors now
        tensor = torch.ones(kib * KIB // 4)
        calls = shared(tensor)
        if calls and kib in GLOO_SHARED:
            copied = partial(torch.empty_like(tensor).copy_, tensor.clone())
            both = {SHARED: calls["all_reduce"], "gloo": gloo(tensor)["all_reduce"], COPY: copied}
            found[SHARED_CALL, "float32", kib] = interleave(rounds, both, max(1, 1024 // kib))
    if has_mpi():
        importlib.import_module("mpi4py.MPI").Finalize()
    return found


def slowest(ranks: Sequence[Mapping[K, Mapping[str, Timing]]]) -> dict[K, dict[str, Timing]]:
    """Give the time of the slowest rank, round by round."""

    def of(key: K, library: str) -> Timing:
        rounds = (found[key][library].rounds for found in ranks)
        return Timing(tuple(map(max, zip(*rounds, strict=True))))

    return {key: {name: of(key, name) for name in ranks[0][key]} for key in ranks[0]}


def label(kib: int) -> str:
    """Write a size as people do."""
    return f"{kib} KB" if kib < KIB else f"{kib // KIB} MB"


def bound(call: str, ranks: int, nbytes: int, copied: Timing) -> str:
    """Say what memory allows: how fast a rank copied meanwhile, and what it has to move."""
    part = {"all_gather": (1 + ranks) / 2, "reduce_scatter": (1 + 1 / ranks) / 2, "broadcast": 0.5}
    count = part.get(call, 1)  # of copies, each of which reads and writes a tensor
    speed = nbytes / copied.median / 1000
    return (
        f"In the same rounds each rank copied {short(speed)} GB/s, so to read what it gives and to "
        f"write what it gets takes {in_time(count * copied.median)}; the rest is the way through "
        "the blocks that ranks share, barriers, comparing the calls, and new memory for results."
    )


def in_time(us: float) -> str:
    """Write a time as people do."""
    return f"{short(us)} us" if us < 1000 else f"{short(us / 1000)} ms"


def goals(found: Found, ranks: int) -> list[Work]:
    """List the works that have goals for this number of ranks."""
    works: list[Work] = []
    at = {2: 0, 4: 1}.get(ranks)
    for (call, dtype, kib), timings in found.items():
        if dtype != "float32" or at is None:
            continue
        rows = [("", "unisono", "gloo", GLOO.get((call, kib)))]
        if call == SHARED_CALL:
            rows = [("", SHARED, "gloo", GLOO_SHARED.get(kib))]
        if call == "all_reduce":
            rows.append((" over Open MPI", "unisono", "mpi4py", OPEN_MPI.get(kib)))
        others = {k: t for k, t in timings.items() if k not in ("unisono", SHARED, COPY)}
        for what, mine, peer, limits in rows:
            if limits is None or mine not in timings or peer not in timings:
                continue
            why = bound(call, ranks, kib * KIB, timings[COPY])
            both = {mine: timings[mine], **others}
            name = f"{call} of {label(kib)}{what}"
            works.append(Work(name, both, limits[at], bound=why, peer=peer))
    return works


def everything(found: Found) -> list[Work]:
    """List all that was measured, without goals, against gloo."""
    return [
        Work(f"{call} {dtype} {label(kib)}", timings, peer="gloo")
        for (call, dtype, kib), timings in found.items()
    ]


def show_times(found: Found, about: Mapping[str, Any], how: str) -> None:
    """Print how many times faster than gloo each call is, with a column for each size."""
    sizes = list(dict.fromkeys(kib for _, _, kib in found))
    rows = []
    for call, dtype in dict.fromkeys((call, dtype) for call, dtype, _ in found):
        cells = [found.get((call, dtype, kib)) for kib in sizes]
        rows.append((f"{call} {dtype}", *(_cell(cell) for cell in cells)))
    notes = ["Our time, and how many times faster than gloo that is, by the medians."]
    show("Tensors over their size", ("call", *map(label, sizes)), rows, notes, about, how=how)


def _cell(timings: Mapping[str, Timing] | None) -> str:
    if timings is None:
        return ""
    work = Work("", timings, peer="gloo")
    return f"{in_time(work.ours.median)}, {work.ratio:.1f}"


def plot(results: Mapping[int, Found], path: str) -> None:
    """Draw speed over size of `all_reduce` of float32, and of a copy, for each number of ranks."""
    plots = importlib.import_module("matplotlib.figure")
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    grey = dict.fromkeys(names, "#808080")  # readable on white and on black
    plots.mpl.rcParams.update({**grey, "axes.titlecolor": "#808080", "legend.framealpha": 0})
    figure = plots.Figure(figsize=(5 * len(results), 4), layout="constrained")
    grid = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (ranks, found) in zip(grid, results.items(), strict=True):
        rows = {
            kib: timings
            for (call, dtype, kib), timings in found.items()
            if (call, dtype) == ("all_reduce", "float32")
        }
        rows = {kib: {**found.get((SHARED_CALL, "float32", kib), {}), **rows[kib]} for kib in rows}
        for name in (COPY, SHARED, "unisono", "mpi4py", "gloo"):
            lines = [
                (kib, kib * KIB / row[name].median / 1000)
                for kib, row in rows.items()
                if name in row
            ]
            if not lines:
                continue
            style = {"color": "grey", "linestyle": "--"} if name == COPY else {"marker": "o"}
            text = "memory: a copy by each rank" if name == COPY else name
            axes.plot(*zip(*lines, strict=True), label=text, **style)
        axes.set(xscale="log", yscale="log", title=f"all_reduce of float32, {ranks} ranks")
        axes.set_xticks(list(rows), [label(kib) for kib in rows])
        axes.minorticks_off()
    grid[0].set(ylabel="GB/s of each rank's tensor")
    grid[-1].legend()
    figure.savefig(path, transparent=True)


def main() -> int:
    """Measure and print."""
    made = parser("How fast CPU tensors travel between the ranks of one host.", 11)
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="in KiB")
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int64"])
    made.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    made.add_argument("--plot", help="draw it to this file, as matplotlib can")
    arguments = made.parse_args()
    results: dict[int, Found] = {}
    code = 0
    how: dict[str, Any] = {"launcher": "mpi"} if has_mpi() else {}
    for ranks in arguments.ranks:
        options = (arguments.rounds, arguments.sizes, arguments.dtypes, arguments.calls)
        found = slowest(unisono.spawn("gloo", measure, options, nproc_per_node=ranks, **how))
        results[ranks] = found
        about = {"torch": torch.__version__, "ranks": ranks, "rounds": arguments.rounds}
        works = goals(found, ranks)
        if arguments.how == "json":
            works += everything(found)
        code |= ratio_report("Tensors", works, about, how=arguments.how)
        if arguments.how != "json":
            print()
            show_times(found, about, arguments.how)
            print()
    if arguments.plot:
        plot(results, arguments.plot)
    return code


if __name__ == "__main__":
    sys.exit(main())
