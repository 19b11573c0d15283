"""Random programs give what plain python gives, and a failure in their midst is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from _programs import FAULTS, Step, alike, expected, programs, run, run_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unisono
from unisono import WorkerPool
from unisono.errors import WorkerFailedError

SIZE = 3
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
FEW = settings(
    deadline=None, derandomize=True, database=None, max_examples=40, suppress_health_check=CHECKS
)
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
