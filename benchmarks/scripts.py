"""How long a script takes to start and to end, as a user waits for it and in seconds of the CPU.

Each turn is a whole command. Time on the CPU is that of the command and of all its processes; a
rank's end is the difference between a script that ends and one that leaves by `os._exit`.

    python benchmarks/scripts.py [--nproc-per-node 4] [--rounds 5] [--json | --markdown]

With `--starts N` programs in others' shapes are started N times each by both instead, and it prints
how many of these starts had exit code 0, the numbers of all the others, and an abort at their end.
The exit code is 1 where one of ours hasn't.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness import Timing, Work, parser, ratio_report, show, show_json

TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
SCRIPTS = {
    "torch": TORCH,
    "no end": f"import os\n{TORCH}os._exit(0)",
    "plain": "import json",
}
FOLDER = Path(__file__).resolve().parents[1]
THIRD_PARTY = {
    "nanoGPT's shape": FOLDER / "benchmarks" / "programs" / "characters.py",
    "DDP tutorial's shape": FOLDER / "docs/coming-from/programs/torch_distributed/train.py",
}
START = "One interpreter imports torch and ranks are forks of it; below that are gloo and the end."
END = "The script's own objects, and what importing its modules has left to do."
# Printed if gloo's thread aborts a process of plain torch at its exit.
ABORTED = "terminate called without an active exception"


def command(way: str, size: int) -> list[str]:
    """Give the beginning of a command line."""
    if way == "torchrun":
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    else:
        words = ["-m", "unisono", "run", *(["--fresh"] if way == "fresh" else []), f"-n{size}"]
    return [sys.executable, *words]


def run(words: list[str]) -> tuple[float, float]:
    """Run a command; give the microseconds that passed, and those of all its processes' CPU."""
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    process = subprocess.Popen(words, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    passed = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}:\n{said.decode()}")
    return passed * 1e6, (used.ru_utime + used.ru_stime) * 1e6


def measure(size: int, rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Run each script in each way, in turns; give the times by way and script."""
    turns = [(way, script) for script in SCRIPTS for way in ("unisono", "torchrun", "fresh")]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {turn: [] for turn in turns}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            Path(folder, f"start {name}.py").write_text(text)
        for i in range(rounds):
            for way, name in turns[i % len(turns) :] + turns[: i % len(turns)]:
                words = [*command(way, size), str(Path(folder, f"start {name}.py"))]
                times[way, name].append(run(words))
    return times


def works(times: dict[tuple[str, str], list[tuple[float, float]]], size: int) -> list[Work]:
    """Judge what was measured."""

    def timings(script: str, which: int) -> dict[str, Timing]:
        names = {"unisono": "unisono", "torchrun": "torchrun", "--fresh": "fresh"}
        return {
            name: Timing(tuple(each[which] for each in times[way, script]))
            for name, way in names.items()
        }

    def ends() -> dict[str, Timing]:
        whole, without = timings("torch", 1), timings("no end", 1)
        return {
            name: Timing(
                tuple(max(1.0, us / size) for us in whole[name].over(without[name]).rounds)
            )
            for name in whole
        }

    goal = 3.8 if size >= 4 else 2.5
    of_torchrun = {"peer": "torchrun"}
    return [
        Work(
            "a script of torch.distributed", timings("torch", 0), goal, bound=START, **of_torchrun
        ),
        Work("the same, CPU", timings("torch", 1), bound=START, **of_torchrun),
        Work("a rank's end, CPU", ends(), limit_us=60_000, bound=END, **of_torchrun),
        Work("a script without torch", timings("plain", 0), 1, bound=START, **of_torchrun),
        Work("the same, CPU", timings("plain", 1), bound=START, **of_torchrun),
    ]


def start_often(starts: int, size: int, how: str) -> int:
    """Start each program in turns, count how it ended, and print the table."""
    rows, notes, is_right = [], [], True
    for name, program in THIRD_PARTY.items():
        codes: dict[str, list[int]] = {"unisono": [], "torchrun": []}
        printed: dict[str, list[str]] = {way: [] for way in codes}
        aborts: Counter[str] = Counter()
        for _ in range(starts):
            for way in codes:
                words = [*command(way, size), str(program)]
                done = subprocess.run(words, capture_output=True, text=True)
                codes[way].append(done.returncode)
                # Ours has the rank before each line.
                lines = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
                printed[way].append("\n".join(sorted(lines)))
                aborts[way] += ABORTED in done.stderr
        (usual, _), *_ = Counter(printed["unisono"] + printed["torchrun"]).most_common(1)
        for way in codes:
            passed, equal = codes[way].count(0), printed[way].count(usual)
            rows.append([name, way, str(starts), str(passed), str(equal), str(aborts[way])])
            is_right &= way != "unisono" or passed == equal == starts
            failed = Counter(code for code in codes[way] if code)
            notes += [f"{name}, {way}: exit code {code}: {n}" for code, n in failed.items()]
    head = ("program", "by", "starts", "exit code 0", "the same numbers", "aborts at exit")
    title, facts = "Programs in others' shapes", {"ranks": size}
    if how == "json":
        show_json(title, [dict(zip(head, row, strict=True)) for row in rows], facts)
    else:
        show(title, head, rows, notes, facts, how=how)
    return int(not is_right)


def main() -> int:
    """Measure and print."""
    made = parser("Until a script has ended that torch.distributed's ranks run.", 5)
    made.add_argument("--nproc-per-node", type=int, default=4)
    made.add_argument("--starts", type=int, help="start programs in others' shapes so often")
    arguments = made.parse_args()
    size = arguments.nproc_per_node
    if arguments.starts:
        return start_often(arguments.starts, size, arguments.how)
    found = works(measure(size, arguments.rounds), size)
    about = {"ranks": size, "rounds": arguments.rounds}
    return ratio_report("Scripts", found, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
