"""KeyboardInterrupt at random moments of every collective and handle.

After each the ranks are usable or told why not, within a bound, and no value is wrong.
UNISONO_INTERRUPTS is how many there are for each model (a few by default), UNISONO_INTERRUPTS_SEED
the seed, which a failure names.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from _interrupts import OPERATIONS, Report, Trial, interrupted_at, run_trial
from torch._C._distributed_c10d import PrefixStore, TCPStore

import unisono as idist
from _needs import require_backend

SEED = int(os.environ.get("UNISONO_INTERRUPTS_SEED", random.SystemRandom().randrange(2**31)))
TIMES = int(os.environ.get("UNISONO_INTERRUPTS", 0))
TIMEOUT_S = 2.0
BOUND_S = 3 * TIMEOUT_S + 4  # an operation and the next one, each with its last words


def _check(reports: list[tuple[Report, ...]]) -> None:
    assert len(reports) == len({pair[0].trial.tag for pair in reports})
    bad = [pair for pair in reports if any(r.wrong or r.seconds > BOUND_S for r in pair)]
    assert not bad, f"seed {SEED}: " + "\n".join(map(str, bad[0]))
    interrupted = [report for pair in reports for report in pair if report.was_interrupted]
    assert len(interrupted) >= len(reports) // 4


def _trials(places: dict[str, int], times: int, seed: int) -> Iterator[Trial]:
    """Draw trials; at its first place a call hasn't begun, which is the program's own mistake."""
    chance = random.Random(seed)
    for tag in range(1, times + 1):
        name = chance.choice(list(places))
        yield Trial(name, tag, chance.randrange(2), chance.randint(2, places[name]))


def _alarms(times: int, seed: int) -> Iterator[Trial]:
    chance = random.Random(seed)
    for tag in range(1, times + 1):
        name = chance.choice(list(OPERATIONS))
        yield Trial(name, tag, chance.randrange(2), 0, chance.uniform(1e-5, 2e-3))


def _count(rank: int) -> dict[str, int]:
    """Count the places of every operation, the second time, for the first one connects."""
    places = {}
    for name, operation in OPERATIONS.items():
        for _ in range(2):
            with interrupted_at(0) as seen:
                operation.call(rank, 1)
        places[name] = seen.seen
    return places


def test_on_threads() -> None:
    places = idist.spawn("threads", _count, nproc_per_node=2)
    reports = []
    for trial in _trials(places[0], TIMES or 1000, SEED):
        options: dict[str, Any] = {"nproc_per_node": 2, "timeout": TIMEOUT_S}
        reports.append(tuple(idist.spawn("threads", _swapped, (trial,), **options)))
    _check(reports)


def _swapped(rank: int, trial: Trial) -> Report:
    return run_trial(trial, rank)


class _Ranks:
    """Two ranks that meet at a store of the test's own between trials, in a new context each."""

    def __init__(self, rank: int, port: int, backend: str) -> None:
        limit = timedelta(seconds=60)
        self._store = TCPStore(
            "127.0.0.1", port, None, False, timeout=limit, wait_for_workers=False
        )
        self._rank, self._backend = rank, backend
        self._contexts = 0

    def begin(self) -> None:
        self._contexts += 1
        options: dict[str, Any] = {"timeout": TIMEOUT_S}
        if self._backend == "gloo":
            store = PrefixStore(f"context/{self._contexts}", self._store)
            options |= {"rank": self._rank, "world_size": 2, "store": store}
        idist.initialize(self._backend, **options)
        idist.barrier()

    def agree(self, key: str, word: str) -> list[str]:
        """Tell the other rank a word and wait for its word."""
        self._store.set(f"{key}/{self._rank}", word)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(2)]

    def run(self, trials: Iterator[Trial]) -> list[Report]:
        reports, is_new = [], True
        for trial in trials:
            if is_new:
                self.begin()
            self.agree(f"begin/{trial.tag}/{trial.place > 0}", "")
            report = run_trial(trial, self._rank)
            reports.append(report)
            is_over = "over" if report.said or report.was_interrupted else ""
            is_new = "over" in self.agree(f"end/{trial.tag}/{trial.place > 0}", is_over)
            if is_new:
                idist.finalize()
        if not is_new:
            idist.finalize()
        return reports


def _in_processes(local_rank: int, port: int, backend: str, times: int, seed: int) -> list[Report]:
    idist.finalize()
    ranks = _Ranks(local_rank, port, backend)
    ranks.begin()
    mine = _count(local_rank)
    every = idist.all_gather(mine)
    idist.finalize()
    places = {name: max(each[name] for each in every) for name in mine}
    found = ranks.run(_trials(places, times, seed))
    return found + ranks.run(_alarms(times // 2, seed))


@pytest.mark.parametrize(("backend", "times"), [("gloo", 40)])
def test_on_processes(backend: str, times: int) -> None:
    require_backend(backend)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    args = (store.port, backend, TIMES or times, SEED)
    found = idist.spawn(backend, _in_processes, args, nproc_per_node=2)
    half = TIMES or times
    _check(list(zip(*(each[:half] for each in found), strict=True)))
    alarms = list(zip(*(each[half:] for each in found), strict=True))
    bad = [pair for pair in alarms if any(r.wrong or r.seconds > BOUND_S for r in pair)]
    assert not bad, f"seed {SEED}: " + "\n".join(map(str, bad[0]))
