"""Random programs give what plain Python gives, and a failure in their midst is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

import unisono
from tests.support.random_programs.draws import calls_too_many, programs
from tests.support.random_programs.machine import SIZE, Calls, Programs, Ranks
from tests.support.random_programs.on_ranks import (
    FAILURES,
    CallTooMany,
    play_until_told,
    run_until,
    wrong_outcome,
)
from tests.support.random_programs.steps import Step
from tests.support.requirements import require_backend
from unisono.errors import WorkerFailedError

FEW = settings(
    deadline=None,
    database=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
COUNT = int(os.environ.get("UNISONO_PROGRAMS", "0"))  # of each test; 0 for a few
TIMEOUT_S = 1.0  # for ranks that wait for a call that another doesn't make
END_S = 20.0  # a failed job is over long before; the machine may be busy


@contextmanager
def ranks_of(backend: str) -> Iterator[Ranks]:
    require_backend(backend)
    ranks = Ranks(backend, 1 if backend == "serial" else SIZE)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.timeout(600 + COUNT)
@pytest.mark.parametrize(
    ("backend", "machine", "count"),
    [
        ("serial", Calls, 10),
        ("threads", Programs, 40),
        ("gloo", Programs, 25),
        ("mpi4py", Programs, 10),
    ],
)
def test_a_program_is_right_or_refused_on_every_rank(
    backend: str, machine: type[Calls], count: int
) -> None:
    """UNISONO_PROGRAMS=2000 plays as many; --hypothesis-seed plays those of a failure again."""
    how = settings(FEW, max_examples=COUNT or count, stateful_step_count=20)
    with ranks_of(backend) as ranks:
        factory: Any = partial(machine, ranks)
        run_state_machine_as_test(factory, settings=how)


@pytest.mark.timeout(600 + COUNT)
@pytest.mark.parametrize("backend", ["threads", "gloo", "mpi4py"])
def test_a_call_too_many_is_an_error_on_every_rank(backend: str) -> None:
    with ranks_of(backend) as ranks:

        @settings(FEW, max_examples=COUNT or 12)
        @given(calls_too_many(SIZE))
        def check(program: CallTooMany) -> None:
            found = ranks.run(play_until_told, program, TIMEOUT_S)
            ranks.renew()
            assert wrong_outcome(program, found) is None

        check()


def check_is_named(backend: str, program: list[Step], at: int, victim: int, fault: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(
            backend, run_until, (program, at, victim, fault), nproc_per_node=SIZE, timeout=60
        )
    assert time.monotonic() - start < END_S
    assert caught.value.rank == victim
    assert f"rank {victim} of {SIZE} {FAILURES[fault].says}" in str(caught.value)


@pytest.mark.timeout(300)
@settings(FEW, max_examples=40)
@given(programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1))
def test_a_replica_that_raises_anywhere_is_named(program: list[Step], at: int, victim: int) -> None:
    check_is_named("threads", program, at, victim, "raises")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAILURES)
@settings(FEW, max_examples=4)
@given(programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1))
def test_a_process_that_fails_anywhere_is_named(
    fault: str, program: list[Step], at: int, victim: int
) -> None:
    check_is_named("gloo", program, at, victim, fault)
