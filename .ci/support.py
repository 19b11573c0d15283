"""Write the support matrix out of what ``unisono check BACKEND --save FILE`` has found.

    python .ci/support.py FOLDER docs/facts/support.md

One JSON file for each backend; those that aren't there are named on the page as not checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ORDER = ("serial", "threads", "gloo", "mpi4py", "horovod", "xla-cpu", "kvstore")
MARKS = {"passed": "yes", "derived": "derived", "unsupported": "–", "failed": "**FAILED**"}
GROUPS = {
    "contract": "The contract of a model",
    "facts": "Facts and devices",
    "forks": "Forks",
    "recording": "Records, traces and hooks",
    "reductions": "Reductions",
    "groups": "Groups",
    "refusals": "Refusals",
    "sections": "Sections",
    "sharing": "Memory of a host",
    "sums": "Exact sums",
    "training": "Training",
    "transfers": "Gathers, broadcast, scatter, all_to_all, messages",
    "values": "Values",
}
HEAD = """\
# What works where

Made by `nox -s support`, which runs `unisono check` on each backend; not by hand.
To see which backends work on your machine, run `unisono doctor`. `kvstore` is
the plug-in of the tests. A cell sums up all numbers of replicas that were checked:

- **yes**: the law holds.
- **derived**: it holds, by members of the contract that the model leaves to be derived from its
  `all_gather`: correct, and slower than a member of its own could be.
- **–**: the model doesn't declare what the law needs, and refuses it with `UnsupportedOperation`.
- **FAILED**: it doesn't hold; see the end of the page.
"""


def main() -> int:
    folder, page = Path(sys.argv[1]), Path(sys.argv[2])
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    reports = [found[name] for name in ORDER if name in found]
    missing = [name for name in ORDER if name not in found]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(reports, missing))
    for name in missing:
        print(f"support: {name} wasn't checked: run its session first", file=sys.stderr)
    return int(any(failures(report) for report in reports))


def render(reports: Sequence[dict[str, Any]], missing: Sequence[str]) -> str:
    parts = [HEAD, *environments(reports)]
    if missing:
        parts.append(f"Not checked this time: {', '.join(missing)}.\n")
    cells = [outcomes(report) for report in reports]
    laws = {row["law"]: row["group"] for report in reports for row in report["laws"]}
    if untitled := set(laws.values()) - set(GROUPS):
        sys.exit(f"GROUPS has no title for {', '.join(sorted(untitled))}")
    for group, title in GROUPS.items():
        names = [law for law, its in laws.items() if its == group]
        parts.append(f"## {title}\n\n{table(names, reports, cells)}")
    broken = [text for report in reports for text in failures(report)]
    if broken:
        parts.append("## What failed\n\n" + "\n".join(f"- {text}" for text in broken) + "\n")
    return "\n".join(parts)


def environments(reports: Sequence[dict[str, Any]]) -> list[str]:
    head = ("backend", "model", "replicas", "torch", "declares", "derives from its all_gather")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for report in reports:
        sizes = ", ".join(str(size) for size in sorted({row["nproc"] for row in report["laws"]}))
        cells = (report["backend"], report["model"], sizes, report["torch"])
        lists = (report["capabilities"], derived(report))
        texts = [", ".join(names) or "–" for names in lists]
        lines.append(f"| {' | '.join((*cells, *texts))} |")
    return ["\n".join(lines) + "\n"]


def derived(report: dict[str, Any]) -> list[str]:
    """List the members that the model leaves to the contract, as far as laws have used them."""
    reasons = [row["reason"] for row in report["laws"] if row["status"] == "derived"]
    return sorted({name for reason in reasons for name in reason[len("derived: ") :].split(", ")})


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    """Sum up the numbers of replicas: the worst counts."""
    ranking = list(MARKS)
    worst: dict[str, str] = {}
    for row in report["laws"]:
        law, status = row["law"], row["status"]
        worst[law] = max(worst.get(law, status), status, key=ranking.index)
    return worst


def table(
    names: Sequence[str], reports: Sequence[dict[str, Any]], cells: Sequence[dict[str, str]]
) -> str:
    head = f"| law | {' | '.join(report['backend'] for report in reports)} |"
    lines = [head, "|---" * (len(reports) + 1) + "|"]
    for name in names:
        marks = [MARKS[found[name]] if name in found else "" for found in cells]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def failures(report: dict[str, Any]) -> list[str]:
    who = report["backend"]
    return [
        f"{who}, {row['nproc']} replicas, {row['law']}: {row['reason'].partition(chr(10))[0]}"
        for row in report["laws"]
        if row["status"] == "failed"
    ]


if __name__ == "__main__":
    sys.exit(main())
