"""What averaging the parameters of a ResNet-50 costs over one all_reduce of as many bytes.

Two replicas on gloo; 161 tensors, 25.6 million float32. The peer is ``torch.distributed`` on a flat
buffer that is there already, so without any copy, and without the division that makes a mean; below
it ``mmengine.dist.all_reduce_params(coalesce=True)`` where mmengine is installed. All take turns in
the same processes. Beside the times stands the memory that averaging keeps.

    python benchmarks/averaging.py [--rounds 15] [--json | --markdown]
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import Figure, Timing, interleave, parser, report

import unisono
from unisono.context import current

LIMIT = 1.25
BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))


def shapes() -> list[tuple[int, ...]]:
    """List the shapes of a ResNet-50's parameters."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, count in BLOCKS:
        for i in range(count):
            found += [(planes, width, 1, 1), (planes,), (planes,)]
            found += [(planes, planes, 3, 3), (planes,), (planes,)]
            found += [(4 * planes, planes, 1, 1), (4 * planes,), (4 * planes,)]
            if i == 0:
                found += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*found, (1000, width), (1000,)]


def mmengine() -> Any:
    """Give mmengine.dist, None if it isn't installed."""
    if importlib.util.find_spec("mmengine") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("mmengine.dist")


def measure(local_rank: int, rounds: int) -> tuple[dict[str, Timing], float, int, int]:
    """Time the averaging and its peers. Collective over all ranks."""
    torch.set_num_threads(1)
    tensors = [torch.randn(shape) for shape in shapes()]
    count = sum(tensor.numel() for tensor in tensors)
    flat = torch.randn(count)
    calls: dict[str, Callable[[], object]] = {
        "unisono": partial(unisono.all_reduce_params, tensors, op="mean"),
        "one all_reduce": partial(dist.all_reduce, flat),
    }
    peer = mmengine()
    if peer is not None:
        calls["mmengine"] = partial(peer.all_reduce_params, tensors, coalesce=True, op="mean")
    timings = interleave(rounds, calls, 1)
    kept = sum(buffer.nbytes for buffer in current().flat_buffers.values())
    return timings, kept / 2**20, len(tensors), count


def main() -> int:
    """Measure and print."""
    arguments = parser(
        "What averaging a ResNet-50's parameters costs over one all_reduce.", 15
    ).parse_args()
    found = unisono.spawn("gloo", measure, (arguments.rounds,), nproc_per_node=2)
    timings, kept_mib, count, numbers = found[0]
    in_ms = {
        name: Timing(tuple(value / 1000 for value in timing.rounds))
        for name, timing in timings.items()
    }
    ours = in_ms.pop("unisono")
    figures = [
        Figure(f"mean of {count} tensors", ours, name, timing, unit="ms")
        for name, timing in in_ms.items()
    ]
    # Round by round, for on a busy machine a slow round is slow for all.
    pairs = zip(ours.rounds, in_ms["one all_reduce"].rounds, strict=True)
    ratio = statistics.median(mine / other for mine, other in pairs)
    notes = [
        f"{count} tensors, {numbers / 1e6:.1f} M float32; averaging keeps {kept_mib:.1f} MiB.",
        f"{'met' if ratio <= LIMIT else 'MISSED'}: {ratio:.2f} times one all_reduce of a flat "
        f"buffer, the median of the rounds; the goal is {LIMIT}.",
    ]
    is_slower = "mmengine" in in_ms and ours.median >= in_ms["mmengine"].median
    if "mmengine" in in_ms:
        notes.append(f"{'MISSED' if is_slower else 'met'}: faster than mmengine.")
    about = {"torch": torch.__version__, "rounds": arguments.rounds}
    report("Averaging", figures, notes, about, how=arguments.how)
    return int(ratio > LIMIT or is_slower)


if __name__ == "__main__":
    sys.exit(main())
