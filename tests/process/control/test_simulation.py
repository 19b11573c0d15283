"""The simulated control plane does what the real one does, and more ranks than this host has."""

from __future__ import annotations

from pathlib import Path

import pytest

import unisono
from tests.support import simulation

PAGE = Path(__file__).parents[3] / "docs" / "explain" / "memory.md"
PER_HOST = (64, 8, 3, 1)
ROUNDS = 2
COUNTS = (
    *("sent_bytes", "below", "connections", "mailboxes", "held_bytes", "descriptors", "threads"),
)


@pytest.mark.parametrize("size", [2, 8, 20])
def test_what_is_simulated_is_what_real_ranks_do(size: int) -> None:
    real = unisono.spawn("gloo", simulation.count, (PER_HOST, ROUNDS), nproc_per_node=size)
    for at, per_host in enumerate(PER_HOST):
        job = simulation.Simulation(size, per_host, ROUNDS)
        job.run()
        for rank, (tallies, simulated) in enumerate(zip(real, job.tallies, strict=True)):
            for name in COUNTS:
                found = getattr(simulated, name)
                assert found == getattr(tallies[at], name), (per_host, rank, name)
            for kind in ("GIVE", "ALL"):  # departures may come after the other end has left
                assert simulated.messages[kind] == tallies[at].messages[kind]


@pytest.mark.parametrize("dead", [0, 8, 63])
def test_all_other_ranks_name_the_simulated_one_that_died(dead: int) -> None:
    job = simulation.Simulation(64, 8, ROUNDS, dies=dead)
    job.run()
    assert sorted(job.errors) == [rank for rank in range(64) if rank != dead]
    assert {error.rank for error in job.errors.values()} == {dead}


def test_the_page_shows_the_counts() -> None:
    page = PAGE.read_text()
    for size in (2, 8, 16, 64, 256, 1000):
        head, _, row = simulation.table([simulation.simulated(size)]).splitlines()
        for line in (head, row):
            assert f"\n{' | '.join(line.split(' | ')[:8])} |\n" in page
