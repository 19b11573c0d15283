"""Random programs give what plain Python gives, and a failure in their midst is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

import unisono
from tests.support.random_programs import draws, on_ranks
from tests.support.random_programs.odd_values import ODD
from tests.support.random_programs.on_ranks import FAILURES, Found, GroupKey, Raised, wrong_with
from tests.support.random_programs.steps import Step
from tests.support.requirements import require_backend
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, WorkerFailedError

FEW = settings(
    deadline=None,
    database=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
COUNT = int(os.environ.get("UNISONO_PROGRAMS", "0"))  # of each test; 0 for a few
SIZE = 3
TIMEOUT_S = 1.0  # for ranks that wait for a call that another doesn't make
LATE_S = 8.0  # a rank that doesn't learn of another's error waits so long; all else is faster
END_S = 20.0  # a failed job is over long before; the machine may be busy
ENDS = ("CollectiveMismatchError", "CollectiveTimeoutError", "PeerFailedError")


class Ranks:
    """Warm replicas; new ones after a step that left them out of step."""

    def __init__(self, backend: str) -> None:
        self.backend, self.size = backend, 1 if backend == "serial" else SIZE
        self.has_failed = False
        self.pool = self._made()

    def _made(self) -> WorkerPool:
        limits: Any = {} if self.size == 1 else {"timeout": LATE_S}
        return WorkerPool(self.backend, self.size, deadline_s=10 * LATE_S, **limits)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on every rank."""
        try:
            return self.pool.run(function, *args)
        except (WorkerFailedError, CollectiveTimeoutError) as error:
            self.fail(f"the ranks ended: {error}")

    def check(self, step: Step, found: Sequence[Found]) -> None:
        """Fail for what is wrong with what the ranks found at a step."""
        wrong = wrong_with(step, found)
        if wrong is not None:
            self.fail(f"{step.call} on {self.backend}: {wrong[:2000]}")

    def fail(self, text: str) -> NoReturn:
        self.renew()
        self.has_failed = True
        raise AssertionError(text)

    def renew(self) -> None:
        self.pool.close()
        self.pool = self._made()


@contextmanager
def ranks_of(backend: str) -> Iterator[Ranks]:
    require_backend(backend)
    ranks = Ranks(backend)
    try:
        yield ranks
    finally:
        ranks.pool.close()


def of_several(*unless: str) -> Callable[..., Any]:
    return precondition(lambda self: self.ranks.backend not in ("serial", *unless))


class Programs(RuleBasedStateMachine):
    """Calls of all ranks, over groups made on the way, blocking or not; several ranks are warm.

    What is refused is refused on every rank at once: after each step the ranks are in step.
    """

    groups: Bundle[GroupKey | None] = Bundle("groups")
    handles: Bundle[int] = Bundle("handles")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.numbers, self.forks = ranks, count(), 0
        self.left: dict[int, Step] = {}
        self.keys: list[GroupKey] = []
        self.ranks.has_failed = False

    def start(self, step: Step, group: GroupKey | None = None) -> int:
        number = next(self.numbers)
        self.ranks.run(on_ranks.start, number, step, group)
        self.left[number] = step
        return number

    @initialize(target=groups)
    def world(self) -> Any:
        return None

    @rule(target=groups, data=st.data())
    def new_group(self, data: st.DataObject) -> Any:
        ranks = data.draw(draws.some_of(self.ranks.size, 2))
        self.keys.append((ranks, sum(others == ranks for others, _ in self.keys)))
        return self.keys[-1]

    @rule(target=handles, group=groups, data=st.data(), is_async=st.booleans())
    def call(self, group: GroupKey | None, data: st.DataObject, is_async: bool) -> Any:
        step = data.draw(draws.steps(self.ranks.size, None if group is None else group[0]))
        number = self.start(replace(step, is_async=is_async), group)
        if is_async:
            return number
        self.wait_for(number)
        return multiple()

    @rule(number=consumes(handles), is_synced=st.booleans())
    def wait(self, number: int, is_synced: bool) -> None:
        if is_synced:
            self.ranks.run(on_ranks.sync)
        self.wait_for(number)

    def wait_for(self, number: int) -> None:
        self.ranks.check(self.left.pop(number), self.ranks.run(on_ranks.wait, number))

    @of_several()
    @rule(data=st.data())
    def unusual_tensors(self, data: st.DataObject) -> None:
        kinds = sorted(ODD.keys() - ({"dtensor"} if self.ranks.backend != "gloo" else set()))
        self.wait_for(self.start(data.draw(draws.odd_tensors(SIZE, kinds) | draws.overlaps(SIZE))))

    @of_several()
    @rule(step=draws.means(SIZE) | draws.reductions(SIZE, ["all_reduce", "all_reduce_", "reduce"]))
    def arithmetic(self, step: Step) -> None:
        self.wait_for(self.start(step))

    @of_several()
    @rule(step=draws.misfits(SIZE) | draws.raising_values(SIZE))
    def refused(self, step: Step) -> None:
        self.wait_for(self.start(step))

    @of_several()
    @precondition(lambda self: self.forks < 3)  # where ranks are threads it copies all of pytest
    @rule(
        ranks=draws.some_of(SIZE),
        step=st.none() | draws.steps(SIZE),
        is_async=st.booleans(),
    )
    def fork(self, ranks: tuple[int, ...], step: Step | None, is_async: bool) -> None:
        self.forks += 1
        step = step and replace(step, is_async=is_async)
        found = self.ranks.run(on_ranks.fork, ranks, step)
        self.ranks.check(Step("fork", (None,) * SIZE), found)

    @of_several("threads")  # a thread that a replica which is a thread starts isn't a replica
    @rule(data=st.data(), ranks=draws.some_of(SIZE, 2))
    def threads(self, data: st.DataObject, ranks: tuple[int, ...]) -> None:
        one = st.lists(draws.steps(SIZE, ranks), min_size=1, max_size=4)
        turns = data.draw(st.lists(one, min_size=2, max_size=3))
        delays = data.draw(st.tuples(*[st.tuples(*[st.integers(0, 5)] * len(turns))] * SIZE))
        found = self.ranks.run(on_ranks.in_threads, ranks, turns, delays)
        for i, calls in enumerate(turns):
            for j, step in enumerate(calls):
                self.ranks.check(step, [one[i][j] for one in found])

    def teardown(self) -> None:
        if not self.ranks.has_failed:
            for number in list(self.left):
                self.wait_for(number)
            self.wait_for(self.start(Step("all_gather", tuple(range(self.ranks.size)))))


@pytest.mark.timeout(600 + COUNT)
@pytest.mark.parametrize(
    ("backend", "count"), [("serial", 10), ("threads", 40), ("gloo", 25), ("mpi4py", 10)]
)
def test_a_program_is_right_or_refused_on_every_rank(backend: str, count: int) -> None:
    """UNISONO_PROGRAMS=2000 plays as many; --hypothesis-seed plays those of a failure again."""
    how = settings(FEW, max_examples=COUNT or count, stateful_step_count=20)
    with ranks_of(backend) as ranks:
        factory: Any = partial(Programs, ranks)
        run_state_machine_as_test(factory, settings=how)


@pytest.mark.timeout(600 + COUNT)
@pytest.mark.parametrize("backend", ["threads", "gloo", "mpi4py"])
def test_a_call_too_many_is_an_error_on_every_rank(backend: str) -> None:
    with ranks_of(backend) as ranks:

        @settings(FEW, max_examples=COUNT or 12)
        @given(draws.calls_too_many(SIZE))
        def check(drawn: tuple[list[list[Step]], Step, bool]) -> None:
            programs, extra, is_same = drawn
            found = ranks.run(on_ranks.play_until_told, programs, TIMEOUT_S)
            ranks.renew()
            for program, outcomes in zip(programs, found, strict=True):
                last = outcomes[-1]
                assert isinstance(last, Raised)
                assert last.is_ours
                assert last.kind in ENDS
                done = zip(program, outcomes[:-1], strict=False)
                wrong = [one for step, one in done if one is not None or step == extra]
                # Of calls of one kind, one that came together is noticed one call later.
                assert len(wrong) <= is_same

        check()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "fault", "count"),
    [("threads", "raises", 40), *(("gloo", fault, 4) for fault in FAILURES)],
)
def test_a_rank_that_fails_anywhere_is_named(backend: str, fault: str, count: int) -> None:
    @settings(FEW, max_examples=count)
    @given(draws.programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1))
    def check(program: list[Step], at: int, victim: int) -> None:
        args = (program, at, victim, fault)
        start = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            unisono.spawn(backend, on_ranks.run_until, args, nproc_per_node=SIZE, timeout=60)
        assert time.monotonic() - start < END_S
        assert caught.value.rank == victim
        assert f"rank {victim} of {SIZE} {FAILURES[fault].says}" in str(caught.value)

    check()
