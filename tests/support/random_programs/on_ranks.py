"""What each rank does at a step of a random program; it needs no hypothesis."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import unisono
from tests.support.faults import FAULTS, Fault
from tests.support.processes import in_fork
from tests.support.random_programs.steps import Raised, Step, attempt, begin, expected, perform
from tests.support.random_programs.values import content, difference, make

Found = Raised | str | None
"""What was wrong with a step on a rank, or the error that it raised."""
GroupKey = tuple[tuple[int, ...], int]
"""Ranks, and which of the groups of these."""
_CHILD_S = 5  # for a fork to learn that it is one; it needs no other process
_ENDS = ("CollectiveMismatchError", "CollectiveTimeoutError", "PeerFailedError")
FAILURES = {
    "raises": FAULTS["raises"],
    "os._exit(3)": Fault(FAULTS["os._exit(3)"].do, "ended with exit code 3"),
    "SIGKILL": FAULTS["SIGKILL"],
}
"""How a rank fails, and what the error says of it by any launcher."""


class _Held(threading.local):
    """What a rank keeps between steps, by number; replicas may be threads."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey | None, Any] = {None: None}
        self.started: dict[int, Callable[[], Found]] = {}


_held = _Held()


def _group(key: GroupKey | None) -> Any:
    """Return the group of a key, made at its first use. Collective over all ranks at creation."""
    if key not in _held.groups and key is not None:
        _held.groups[key] = unisono.new_group(list(key[0]))
    return _held.groups[key]


def play(local_rank: int, program: Sequence[Step], key: GroupKey | None = None) -> list[Found]:
    """Make calls one after the other; return what was wrong with each. Collective."""
    rank, group = unisono.get_rank(), _group(key)
    return [begin(step, rank, group)() for step in program]


def start(local_rank: int, number: int, step: Step, key: GroupKey | None) -> None:
    """Start a call. Collective."""
    _held.started[number] = begin(step, unisono.get_rank(), _group(key))


def wait(local_rank: int, number: int) -> Found:
    """Wait for a call that was started; return what was wrong with it."""
    return _held.started.pop(number)()


def sync(local_rank: int) -> None:
    """Wait for all that is under way on this rank."""
    unisono.sync()


def in_threads(
    local_rank: int,
    ranks: tuple[int, ...],
    turns: Sequence[Sequence[Step]],
    delays_ms: Sequence[Sequence[int]],
) -> list[list[Found]]:
    """Use several groups of the same ranks, each in a thread of its own."""
    rank = unisono.get_rank()
    groups = [_group((ranks, i)) for i in range(len(turns))]
    found: list[list[Found]] = [[] for _ in turns]

    def go(i: int) -> None:
        time.sleep(delays_ms[rank][i] / 1000)  # so that the groups' calls come in any order
        found[i] = [begin(step, rank, groups[i])() for step in turns[i]]

    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(turns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _section(_: Any) -> None:
    with unisono.one_rank_first():
        pass


def _peer() -> int:
    return (unisono.get_rank() + 1) % unisono.get_world_size()


OF_CHILDREN: dict[str, Callable[[Any], Any]] = {
    "new_group": lambda _: unisono.new_group([0]),
    "send": lambda _: unisono.send(1, _peer()),
    "recv": lambda _: unisono.recv(_peer()),
    "section": _section,
    "the parent's handle": lambda handle: handle.wait(),
}


def fork(local_rank: int, ranks: tuple[int, ...], does: Step | str, has_handle: bool) -> str | None:
    """Fork on some ranks, and call something in the children: they get an error that says so."""
    rank, size = unisono.get_rank(), unisono.get_world_size()
    handle = unisono.all_gather(rank, async_op=True) if has_handle else None
    if isinstance(does, str):
        work = partial(OF_CHILDREN[does], handle)
    else:  # made here, for that takes OpenMP's threads, which a fork hasn't
        how = {"async_op": True} if does.is_async else {}
        work = partial(perform, does, make(does.values[rank]), **how)

    def child() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_S)
        got = attempt(work)
        # The parent's operation may have been done before the fork.
        is_done = does == "the parent's handle" and got == list(range(size))
        assert is_done or (isinstance(got, Raised) and got.kind == "ContextError"), got

    code = 0
    if rank in ranks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads
            code = in_fork(child)
    gathered = list(range(size)) if handle is None else handle.wait()
    if code != 0 or gathered != list(range(size)) or unisono.all_reduce(1) != size:
        return f"its fork ended with {code}, and {gathered!r} was gathered"
    return None


def run_until(local_rank: int, program: Sequence[Step], at: int, victim: int, failure: str) -> None:
    """Run a program; at step `at` the rank `victim` fails. Collective over all ranks."""
    rank = unisono.get_rank()
    # Made first: in its own part of that torch waits for a rank that has died until the timeout.
    groups = {step.group: step.group and unisono.new_group(step.group) for step in program}
    for i, step in enumerate(program):
        if i == at and rank == victim:
            FAILURES[failure].do()
        perform(step, make(step.values[rank]), groups[step.group])
    if at >= len(program) and rank == victim:
        FAILURES[failure].do()
    unisono.barrier()


@dataclass(frozen=True)
class CallTooMany:
    """Calls of all ranks, each on a line of its own, and one of a single rank among them.

    Args:
        calls: at least two after the extra one.
        at: before which of them the extra call is.
        extra: what the rank calls there.
        rank: which.
        is_async: whether all calls are started first and waited for then.
    """

    calls: tuple[Step, ...]
    at: int
    extra: Step
    rank: int
    is_async: bool


def play_until_told(
    local_rank: int, program: CallTooMany, timeout_s: float
) -> list[tuple[int, Found]]:
    """Make the calls until one raises; return which ones, and what was wrong. Collective."""
    rank = unisono.get_rank()
    group = unisono.new_group(range(unisono.get_world_size()), timeout=timeout_s)
    calls = list(enumerate(program.calls))
    if rank == program.rank:
        calls.insert(program.at, (len(calls), program.extra))
    how: dict[str, Any] = {"async_op": True} if program.is_async else {}
    started = []
    found: list[tuple[int, Found]] = []
    for i, step in calls:
        # Each call has a place of its own in the source, by which ranks compare their calls.
        source = "\n" * i + f"unisono.{step.call}(value, group=group, **how)"
        where = {"unisono": unisono, "value": make(step.values[rank]), "group": group, "how": how}
        code = compile(source, "program.py", "eval")
        got = attempt(lambda code=code, where=where: eval(code, where))  # type: ignore[misc]
        started.append((i, step, got))
        if not program.is_async and isinstance(got, Raised):
            break
    for i, step, got in started:
        if isinstance(got, unisono.Handle):
            got = attempt(got.wait)
        if isinstance(got, Raised):
            return [*found, (i, got)]
        wrong = difference(content(got), content(expected(step, rank)))
        found.append((i, "it was done alone" if step is program.extra else wrong))
    return found


def wrong_outcome(program: CallTooMany, found: Sequence[list[tuple[int, Found]]]) -> str | None:
    """Return what is wrong with what the ranks found: one was given wrong values, or no error."""
    # Of calls of one kind, one that came together is noticed one call later.
    is_same = program.extra.call == program.calls[program.at].call
    for rank, outcomes in enumerate(found):
        wrong = [(i, one) for i, one in outcomes if isinstance(one, str)]
        if len(wrong) > is_same:
            return f"rank {rank} got wrong values: {wrong}"
        last = outcomes[-1][1]
        if not isinstance(last, Raised) or not last.is_ours or last.kind not in _ENDS:
            return f"rank {rank} got no error of ours at the end: {outcomes}"
    return None
