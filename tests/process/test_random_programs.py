"""Random programs give what plain python gives, and a failure in their midst is named."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import unisono
from tests.support.random_programs.draws import FAMILIES, LAST, scene_programs
from tests.support.random_programs.programs import (
    FAULTS,
    Step,
    alike,
    expected,
    programs,
    run,
    run_until,
)
from tests.support.random_programs.scenes import play
from tests.support.requirements import require_backend
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, WorkerFailedError

SIZE = 3
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
FEW = settings(
    deadline=None, derandomize=True, database=None, max_examples=40, suppress_health_check=CHECKS
)
BACKENDS = ("threads", "gloo", "mpi4py")
COUNT = int(os.environ.get("UNISONO_PROGRAMS", "0"))  # of all together; 0 for a few of each
SEED = int(os.environ.get("UNISONO_SEED", random.SystemRandom().randrange(2**32) if COUNT else 0))
END_S = 20.0  # a failed job is over long before; the machine may be busy


@pytest.fixture(params=["serial", "threads", "gloo"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerPool, int]]:
    size = 1 if request.param == "serial" else SIZE
    options: dict[str, Any] = {} if size == 1 else {"timeout": 30}
    with WorkerPool(request.param, nproc_per_node=size, **options) as made:
        yield made, size


@pytest.mark.timeout(300)
@FEW
@given(data=st.data())
def test_a_program_gives_what_plain_python_gives(
    pool: tuple[WorkerPool, int], data: st.DataObject
) -> None:
    program = data.draw(programs(pool[1]))
    found = pool[0].run(run, program)
    for rank, results in enumerate(found):
        for step, result in zip(program, results, strict=True):
            wanted = expected(step, rank)
            assert alike(result, wanted), f"rank {rank}, {step}: {result!r} is not {wanted!r}"


def _worlds() -> list[tuple[str, str]]:
    """List backends and families; the replicas of MPI take seconds to come, so one test has all."""
    families = [*FAMILIES, *LAST, "all"]
    worlds = [(backend, family) for backend in BACKENDS[:2] for family in families]
    worlds += [(BACKENDS[2], family) for family in (families if COUNT else ("all", *LAST))]
    cant = {("threads", "threads")}  # a thread that a replica starts isn't a replica
    return [world for world in worlds if world not in cant]


WORLDS = _worlds()
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
TIMEOUT_S = 8.0  # a rank that isn't told of another's error waits so long; all else is far faster


class Ranks:
    """Warm replicas that play programs; new ones after a program that left them out of step."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._pool = self._made()

    def _made(self) -> WorkerPool:
        return WorkerPool(self._backend, SIZE, timeout=TIMEOUT_S, deadline_s=10 * TIMEOUT_S)

    def judge(self, program: list[Any], is_last: bool) -> str | None:
        """Play a program; give what is wrong with it, None if nothing is."""
        try:
            found = self._pool.run(play, program)
        except (WorkerFailedError, CollectiveTimeoutError) as error:
            self.close()
            self._pool = self._made()
            return f"the ranks ended: {error}"
        faults = (
            scene.fault(list(row))
            for scene, row in zip(program, zip(*found, strict=True), strict=True)
        )
        for i, fault in enumerate(faults):
            if fault is not None:
                self.close()
                self._pool = self._made()
                return f"step {i + 1} of {len(program)}: {fault}"
        if is_last:
            self.close()
            self._pool = self._made()
        return None

    def close(self) -> None:
        self._pool.close()


@contextmanager
def ranks_of(backend: str) -> Iterator[Ranks]:
    require_backend(backend)
    ranks = Ranks(backend)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.timeout(600 + COUNT)
@pytest.mark.parametrize(("backend", "family"), WORLDS)
def test_a_program_is_right_or_refused_on_every_rank(backend: str, family: str) -> None:
    """UNISONO_PROGRAMS=2000 plays as many in all; UNISONO_SEED plays those of a failure again."""
    with ranks_of(backend) as ranks:

        @seed(SEED)
        @settings(FEW, derandomize=False, max_examples=COUNT // len(WORLDS) or 12, phases=PHASES)
        @given(scene_programs(SIZE, backend, family))
        def check(program: list[Any]) -> None:
            fault = ranks.judge(program, family in LAST)
            listing = "\n".join(f"  {i + 1}. {str(step)[:600]}" for i, step in enumerate(program))
            assert fault is None, (
                f"on {SIZE} ranks of {backend}, with UNISONO_SEED={SEED}:\n{listing}\n"
                f"{fault[:2000]}"
            )

        check()


def check_is_named(backend: str, program: list[Step], at: int, victim: int, fault: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(
            backend, run_until, (program, at, victim, fault), nproc_per_node=SIZE, timeout=60
        )
    assert time.monotonic() - start < END_S
    assert caught.value.rank == victim
    assert f"rank {victim} of {SIZE} {FAULTS[fault].says}" in str(caught.value)


@pytest.mark.timeout(300)
@FEW
@given(programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1))
def test_a_replica_that_raises_anywhere_is_named(program: list[Step], at: int, victim: int) -> None:
    check_is_named("threads", program, at, victim, "raise")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
@settings(FEW, max_examples=4)
@given(programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1))
def test_a_process_that_fails_anywhere_is_named(
    fault: str, program: list[Step], at: int, victim: int
) -> None:
    check_is_named("gloo", program, at, victim, fault)
