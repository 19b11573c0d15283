"""The tree of the control plane for 2 to 10,000 ranks, without sockets: depth and messages.

python benchmarks/tree.py [--per-host 8] [--fan-out 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys

from unisono.control.tree import FAN_OUT, links

SIZES = (2, 8, 16, 64, 256, 1024, 4096, 10_000)


def measure(size: int, per_host: int, fan_out: int) -> dict[str, float]:
    """Lay out one job; give the depth and what a round costs a rank at most and in the mean."""
    hosts = [rank // per_host for rank in range(size)]
    ups: list[int | None] = []
    messages = []
    for place in _sample(size, per_host):
        part = links(hosts, place, fan_out)
        ups.append(part.up)
        messages.append(2 * len(part.downs) + 2 * (part.up is not None))
    depth, place = 0, size - 1
    while (up := links(hosts, place, fan_out).up) is not None:
        depth, place = depth + 1, up
    return {
        "ranks": size,
        "hosts": len(set(hosts)),
        "depth": depth,
        "most messages of a rank": max(messages),
        "messages a rank, mean": 2 * 2 * (size - 1) / size,
    }


def _sample(size: int, per_host: int) -> list[int]:
    """Take the leaders that have most below them, and the last rank."""
    return sorted({*range(0, min(size, 40 * per_host), per_host), size - 1})


def main() -> int:
    """Compute and print."""
    parser = argparse.ArgumentParser(description="Depth and messages of the control plane's tree.")
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--fan-out", type=int, default=FAN_OUT)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(size, arguments.per_host, arguments.fan_out) for size in SIZES]
    if arguments.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print("   ".join(f"{name} {value:g}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
