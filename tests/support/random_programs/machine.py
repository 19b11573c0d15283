"""Random programs as a state machine: each rule is a step of all ranks, which are warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
)

from tests.support.random_programs import draws, on_ranks
from tests.support.random_programs.odd_tensors import ODD
from tests.support.random_programs.on_ranks import Found, GroupKey
from tests.support.random_programs.steps import Step, wrong_with
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, WorkerFailedError

SIZE = 3
_IS_LARGE = st.sampled_from([False, False, True])
_TIMEOUT_S = 8.0  # a rank that doesn't learn of another's error waits so long; all else is faster


class Ranks:
    """Warm replicas; new ones after a step that left them out of step."""

    def __init__(self, backend: str, size: int) -> None:
        self.backend, self.size = backend, size
        self._pool = self._made()
        self.has_failed = False

    def _made(self) -> WorkerPool:
        limits: Any = {} if self.size == 1 else {"timeout": _TIMEOUT_S}
        return WorkerPool(self.backend, self.size, deadline_s=10 * _TIMEOUT_S, **limits)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on every rank."""
        try:
            return self._pool.run(function, *args)
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
        self.close()
        self._pool = self._made()

    def close(self) -> None:
        self._pool.close()


class Calls(RuleBasedStateMachine):
    """Right calls of all ranks, over groups that are made on the way, blocking or not."""

    groups: Bundle[GroupKey | None] = Bundle("groups")
    handles: Bundle[int] = Bundle("handles")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.numbers = ranks, count()
        self.left: dict[int, Step] = {}
        self.keys: list[GroupKey] = []
        self.ranks.has_failed = False

    def play(self, step: Step, group: GroupKey | None = None) -> None:
        found = self.ranks.run(on_ranks.play, [step], group)
        self.ranks.check(step, [one for [one] in found])

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

    @rule(group=groups, data=st.data(), is_large=_IS_LARGE)
    def call(self, group: GroupKey | None, data: st.DataObject, is_large: bool) -> None:
        self.play(self.drawn(data, group, is_large), group)

    @rule(target=handles, group=groups, data=st.data(), is_large=_IS_LARGE)
    def call_async(self, group: GroupKey | None, data: st.DataObject, is_large: bool) -> int:
        step = self.drawn(data, group, is_large)
        return self.start(replace(step, is_async=True), group)

    def drawn(self, data: st.DataObject, group: GroupKey | None, is_large: bool) -> Step:
        draw = draws.large_steps if is_large else draws.steps
        return data.draw(draw(self.ranks.size, None if group is None else group[0]))

    @rule(number=consumes(handles))
    def wait(self, number: int) -> None:
        self.ranks.check(self.left.pop(number), self.ranks.run(on_ranks.wait, number))

    @rule()
    def sync(self) -> None:
        self.ranks.run(on_ranks.sync)

    def teardown(self) -> None:
        if self.ranks.has_failed:
            return
        for number in list(self.left):
            self.wait(number)
        self.play(Step("all_gather", tuple(range(self.ranks.size))))


class Programs(Calls):
    """Steps of every kind, those included that are refused on every rank at once.

    After each the ranks are in step.
    """

    forks = 0

    @rule(data=st.data())
    def unusual_tensors(self, data: st.DataObject) -> None:
        left_out = set() if self.ranks.backend == "gloo" else {"dtensor"}
        kinds = tuple(sorted(ODD.keys() - left_out))
        self.play(data.draw(draws.odd_tensors(SIZE, kinds) | draws.overlaps(SIZE)))

    @rule(step=draws.means(SIZE) | draws.limits(SIZE))
    def arithmetic(self, step: Step) -> None:
        self.play(step)

    @rule(step=draws.misfits(SIZE) | draws.raising_values(SIZE))
    def refused(self, step: Step) -> None:
        self.play(step)

    @precondition(lambda self: self.forks < 3)  # where ranks are threads it copies all of pytest
    @rule(
        ranks=draws.some_of(SIZE),
        does=draws.steps(SIZE)
        | draws.large_steps(SIZE)
        | st.sampled_from(sorted(on_ranks.OF_CHILDREN)),
        is_async=st.booleans(),
        has_handle=st.booleans(),
    )
    def fork(
        self, ranks: tuple[int, ...], does: Step | str, is_async: bool, has_handle: bool
    ) -> None:
        self.forks += 1
        if isinstance(does, Step):
            does = replace(does, is_async=is_async)
        has_handle = has_handle or does == "the parent's handle"
        found = self.ranks.run(on_ranks.fork, ranks, does, has_handle)
        self.ranks.check(Step("fork", (None,) * SIZE), found)

    # A thread that a replica which is a thread starts isn't a replica.
    @precondition(lambda self: self.ranks.backend != "threads")
    @rule(data=st.data(), ranks=draws.some_of(SIZE, 2))
    def threads(self, data: st.DataObject, ranks: tuple[int, ...]) -> None:
        one = st.lists(
            draws.steps(SIZE, ranks) | draws.large_steps(SIZE, ranks), min_size=1, max_size=4
        )
        turns = data.draw(st.lists(one, min_size=2, max_size=3))
        delays = data.draw(st.tuples(*[st.tuples(*[st.integers(0, 5)] * len(turns))] * SIZE))
        found = self.ranks.run(on_ranks.in_threads, ranks, turns, delays)
        for i, calls in enumerate(turns):
            for j, step in enumerate(calls):
                self.ranks.check(step, [one[i][j] for one in found])
