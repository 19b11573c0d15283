"""Twelve kinds of hang on five models: what ``unisono top --once --json`` says, and how soon.

Each job runs until nothing has moved for a moment, then the command is timed. Where a kind can't
hang on a model, the error that the job ends with has to name the rank: why is in
``tests/support/hangs.py``, which has the programs, too.

    python -m benchmarks.hangs [--models gloo threads] [--kinds busy] [--rounds 3] [--save FILE]

One environment may lack a library, and torch_xla needs a torch of its own: ``--save`` adds what was
found to that of other environments, and the table shows all of it; ``--models`` without a name
measures nothing more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import hangs
from tests.support.command import UNISONO, Started
from tests.support.hangs import ENDS, LATE, MODELS, TWELVE
from tests.support.processes import python, until
from tests.support.tops import LIMIT_S, check, job_of_program
from unisono import registry
from unisono.host.status_page import pages
from unisono.observe.verdict import PATIENCE_S

GOAL_S = 2.0
STILL_S = PATIENCE_S + 0.1
STARTED = ("idist.barrier", "idist.all_reduce")  # what all kinds call first


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of one job.

    Args:
        kind: how it hangs.
        backend: where.
        is_right: whether rank 1 was named, with its line where there is one.
        said: the verdict and the place, or the error.
        seconds: of the command; of a job that ends, from its last call to its end.
        ends: why it ends; empty where it hangs.
    """

    kind: str
    backend: str
    is_right: bool
    said: str
    seconds: float
    ends: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it was right, and soon enough."""
        return self.is_right and self.seconds <= GOAL_S


def wait_until_still(job: Started) -> float:
    """Wait until no rank has begun or ended a call for a moment, or the job has ended.

    Returns:
        When the last call began or ended, in seconds of the monotonic clock.
    """
    moved = 0.0

    def is_still() -> bool:
        nonlocal moved
        found = [page.records() for page in pages()]
        times = (max(each.begin_ns, each.end_ns) for records in found for each in records)
        moved = max(moved, max(times, default=0) / 1e9)
        have_begun = [len(records) >= len(STARTED) for records in found]
        is_begun = sum(have_begun) >= hangs.SIZE - 1 and time.monotonic() - moved > STILL_S
        return is_begun or job.process.poll() is not None

    until(is_still, LIMIT_S)
    return moved


def ask(kind: str, backend: str) -> Answer:
    """Have one job hang, with pages of its own, and ask about it."""
    ends = ENDS.get((kind, backend), "")
    with tempfile.TemporaryDirectory(prefix="unisono-hangs-") as folder:
        Path(folder, "pages").mkdir(mode=0o700)
        variables = {"UNISONO_STATUS": str(Path(folder, "pages"))}
        with mock.patch.dict("os.environ", variables), job_of_program(kind, backend) as job:
            moved = wait_until_still(job)
            if ends:
                until(lambda: job.process.poll() is not None, LIMIT_S)
                seconds, text = time.monotonic() - moved, job.out() + job.err()
                is_right = hangs.is_blamed(kind, text)
                return Answer(kind, backend, is_right, error_of(text), seconds, ends)
            begin = time.monotonic()
            done = python(*UNISONO[1:], "top", "--once", "--json")
            seconds = time.monotonic() - begin
            jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
            said = said_of(jobs[0]) if jobs else done.stderr or job.err()[-300:]
            return Answer(kind, backend, is_named(kind, jobs), said, seconds)


def is_named(kind: str, jobs: Sequence[dict[str, Any]]) -> bool:
    """Return whether the one job has the right culprit and line."""
    try:
        (job,) = jobs
        check(kind, job)
    except (AssertionError, ValueError):
        return False
    return True


def said_of(job: Mapping[str, Any]) -> str:
    """Return the verdict and the places in a few words."""
    places = [
        f"rank {each['rank']} at {Path(each['file']).name}:{each['line']} ({each['from']})"
        for each in job["culprits"]
    ]
    return f"{job['verdict']['kind']}: {', '.join(places) or job['verdict']['text']}"


def error_of(text: str) -> str:
    """Return the first line of the error that a job ended with."""
    lines = [line for line in text.splitlines() if "Error: " in line]
    blamed = (line for line in lines if f"Error: rank {LATE} " in line)
    line = next(blamed, lines[-1] if lines else "no error")
    return f"ends with: {line.partition('Error: ')[2] or line}"


def show(answers: Sequence[Answer], missing: Mapping[str, str]) -> int:
    """Print the table and the last line; return the exit code."""
    by_cell: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        by_cell.setdefault((answer.kind, answer.backend), []).append(answer)
    kinds = [kind for kind in TWELVE if any(kind == each for each, _ in by_cell)]
    backends = [each for each in MODELS if any(each == backend for _, backend in by_cell)]
    table = [["", *(MODELS[each] for each in backends)]]
    table += [
        [kind, *(cell(by_cell.get((kind, backend), [])) for backend in backends)] for kind in kinds
    ]
    for row in (table[0], ["---"] * len(table[0]), *table[1:]):  # for a page
        print(f"| {' | '.join(row)} |")
    print("✓ named with its line, ■ the job ends at once and its error names the rank, ✗ not named")
    for backend, reason in missing.items():
        print(f"NOT MEASURED: {MODELS[backend]}: {reason}")
    n_right = sum(all(each.is_good for each in cell) for cell in by_cell.values())
    print(f"\n{n_right} of {len(TWELVE) * len(MODELS)} named within {GOAL_S:g} s")
    return int(n_right < len(by_cell))


def cell(answers: Sequence[Answer]) -> str:
    """Return how often the rank was named, and after how long at most."""
    if not answers:
        return "-"
    n_good = sum(each.is_good for each in answers)
    sign = "✗" if n_good < len(answers) else "■" if answers[0].ends else "✓"
    rounds = f" {n_good}/{len(answers)}" if len(answers) > 1 else ""
    return f"{sign}{rounds} {max(each.seconds for each in answers):.2f} s"


def main() -> int:
    """Measure what is here; the exit code says whether all of it was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=TWELVE, default=list(TWELVE))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    known, path = registry.availability(), options.save
    here = [each for each in options.models if known[each] is None]
    before = json.loads(path.read_text()) if path is not None and path.exists() else []
    answers = [Answer(**each) for each in before if each["backend"] not in here]
    for backend in here:
        for kind in options.kinds * options.rounds:
            answer = ask(kind, backend)
            sign = "named" if answer.is_good else "NOT NAMED"
            words = (kind, MODELS[backend], sign, f"{answer.seconds:.2f} s", answer.said)
            print("  ".join(words), flush=True)
            answers.append(answer)
            if path is not None:  # also for a run that doesn't come to its end
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps([asdict(each) for each in answers], indent=1))
    measured = {each.backend for each in answers}
    missing = {
        each: known[each] or "--models leaves it out" for each in MODELS if each not in measured
    }
    return show(answers, missing)


if __name__ == "__main__":
    sys.exit(main())
