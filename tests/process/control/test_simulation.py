"""The simulated control plane does what the real one does, and more ranks than this host has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono

FOLDER = Path(__file__).parents[3] / "benchmarks"
PER_HOST = (64, 8, 3, 1)
ROUNDS = 2
COUNTS = (
    *("sent_bytes", "below", "connections", "mailboxes", "held_bytes", "descriptors", "threads"),
)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("simulation")
    for name in ("simulation", "simulated_kernel", "harness"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("size", [2, 8, 20])
def test_what_is_simulated_is_what_real_ranks_do(simulation: Any, size: int) -> None:
    real = unisono.spawn("gloo", simulation.count, (PER_HOST, ROUNDS), nproc_per_node=size)
    for at, per_host in enumerate(PER_HOST):
        job = simulation.Simulation(size, per_host, ROUNDS)
        job.run()
        for rank, (tallies, simulated) in enumerate(zip(real, job.tallies, strict=True)):
            for name in COUNTS:
                found = getattr(simulated, name)
                assert found == getattr(tallies[at], name), (per_host, rank, name)
            for kind in ("GIVE", "ALL"):  # farewells may come after the other end has left
                assert simulated.messages[kind] == tallies[at].messages[kind]


@pytest.mark.parametrize("dead", [0, 8, 63])
def test_all_other_ranks_name_the_simulated_one_that_died(simulation: Any, dead: int) -> None:
    job = simulation.Simulation(64, 8, ROUNDS, dies=dead)
    job.run()
    assert sorted(job.errors) == [rank for rank in range(64) if rank != dead]
    assert {error.rank for error in job.errors.values()} == {dead}


def test_the_page_shows_what_the_script_prints(simulation: Any) -> None:
    page = (FOLDER.parent / "docs" / "large-jobs.md").read_text()
    for size in (2, 8, 16, 64, 256, 1000):
        job = simulation.Simulation(size, 8, ROUNDS)
        job.run()
        printed = simulation._text([simulation.row_of(job)], "markdown").splitlines()
        head, row = (line.split(" | ")[:8] for line in (printed[0], printed[-1]))
        assert f"\n{' | '.join(head)} |\n" in page
        assert f"\n{' | '.join(row)} |\n" in page
