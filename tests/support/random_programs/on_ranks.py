"""Functions with which ranks run the steps of random programs, without hypothesis."""

from __future__ import annotations

import importlib
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import unisono
from tests.support.faults import FAULTS, Fault
from tests.support.processes import in_fork
from tests.support.random_programs.steps import BASIC, Step, wrong
from tests.support.random_programs.values import content, difference, make
from unisono.errors import UnisonoError

GroupKey = tuple[tuple[int, ...], int]
"""Ranks, and a number that distinguishes several groups of these ranks."""
_CHILD_S = 5  # time for the call of a fork, which fails without other processes
FAILURES = {
    "raises": FAULTS["raises"],
    "os._exit(3)": Fault(FAULTS["os._exit(3)"].do, "ended with exit code 3"),
    "SIGKILL": FAULTS["SIGKILL"],
}
"""Failures of a rank, with words that the error of any launcher has."""


@dataclass(frozen=True)
class Raised:
    """An error that a call raised on a rank."""

    kind: str
    text: str
    is_ours: bool


Found = Raised | str | None
"""The error that a step raised on a rank, a text that describes what was wrong, or None."""


def _attempt(work: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        is_ours = isinstance(error, UnisonoError)
        text = str(error) if is_ours else "".join(traceback.format_exception(error)[-3:])
        return Raised(type(error).__name__, text[:600], is_ours)


def _perform(step: Step, value: Any, group: Any = None) -> Any:
    """Make the call of a step with a value, in `group` or one of the step's ranks."""
    module = "unisono.compat.mmengine" if step.call.startswith("mm.") else "unisono"
    given = [] if step.call == "barrier" else [value]
    if step.call in ("reduce", "gather", "scatter") or "broadcast" in step.call:
        given.append(step.root)
    how = dict(step.options)
    if "reduce" in step.call and step.call != "reduce_mean":
        how["op"] = step.op
    if step.call in BASIC:
        how["group"] = list(step.group) if group is None and step.group is not None else group
    if step.is_async:
        how["async_op"] = True
    call = getattr(importlib.import_module(module), step.call.removeprefix("mm."))
    if step.call == "all_reduce_grads":
        given = [[nn.Parameter(torch.zeros_like(grad)) for grad in value]]
        for param, grad in zip(given[0], value, strict=True):
            param.grad = grad
    code = compile("\n" * step.line + "call(*given, **how)", "program.py", "eval")
    return eval(code, {"call": call, "given": given, "how": how})


def begin(step: Step, rank: int, group: Any = None) -> Callable[[], Found]:
    """Make the call of a step on this rank; return a function that waits for it and checks it.

    Collective over the step's group.
    """
    value, is_read = make(step.values[rank]), step.ends not in ("raises", "reads")
    before = content(value) if is_read else None
    started = _attempt(lambda: _perform(step, value, group))

    def finish() -> Found:
        got = _attempt(lambda: _waited(started))
        if not is_read:
            return got if isinstance(got, Raised) else None
        after = content(value)
        if isinstance(got, Raised):
            changed = got.is_ours and difference(after, before)
            return f"{got!r}, but its value changed: {changed}" if changed else got
        if step.ends == "refused":
            return None  # there is nothing to compare with: `wrong_with` reports it
        got = content(value if step.is_in_place and got is None else got)
        return wrong(step, rank, got) or difference(after, got if step.is_in_place else before)

    return finish


def _waited(started: Any) -> Any:
    if isinstance(started, unisono.Handle):
        started.is_completed()
        return started.wait()
    return started


def wrong_with(step: Step, found: Sequence[Found]) -> str | None:
    """Return what is wrong with the outcomes of a step on all ranks, None if nothing is."""
    for rank, one in enumerate(found):
        if isinstance(one, str) or (isinstance(one, Raised) and not _may_raise(step, rank, one)):
            return f"rank {rank}: {one!r}"
    raised = [isinstance(found[rank], Raised) for rank in step.members]
    if step.ends == "reads" or all(raised):
        return None
    if any(raised):
        return f"not refused on every rank: {found!r}"
    return "not refused" if step.ends in ("refused", "raises") else None


def _may_raise(step: Step, rank: int, error: Raised) -> bool:
    """Return whether a step may raise this error, after which the ranks are in step."""
    if step.ends == "right" or not error.is_ours or rank not in step.members:
        return False
    # The rank whose own argument is wrong may get an ArgumentError for it.
    is_own = step.ends == "raises" and rank == step.root and step.call == "all_reduce_params"
    kinds = ("PayloadError", "CollectiveMismatchError")
    return step.ends == "reads" or error.kind in kinds or (is_own and error.kind == "ArgumentError")


class _Held(threading.local):
    """A rank's groups and started calls between steps; for each thread, as ranks may be threads."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey | None, Any] = {None: None}
        self.started: dict[int, Callable[[], Found]] = {}


_held = _Held()


def _group(key: GroupKey | None) -> Any:
    """Return the group of a key. The first use makes the group, collectively over all ranks."""
    if key not in _held.groups and key is not None:
        _held.groups[key] = unisono.new_group(list(key[0]))
    return _held.groups[key]


def play(local_rank: int, program: Sequence[Step]) -> list[Found]:
    """Make calls one after the other; return what was wrong with each. Collective."""
    return [begin(step, unisono.get_rank())() for step in program]


def start(local_rank: int, number: int, step: Step, key: GroupKey | None) -> None:
    """Start a call. Collective."""
    _held.started[number] = begin(step, unisono.get_rank(), _group(key))


def wait(local_rank: int, number: int) -> Found:
    """Wait for a call that was started; return what was wrong with it."""
    return _held.started.pop(number)()


def sync(local_rank: int) -> None:
    """Wait for all asynchronous calls of this rank."""
    unisono.sync()


def in_threads(
    local_rank: int,
    ranks: tuple[int, ...],
    turns: Sequence[Sequence[Step]],
    delays_ms: Sequence[Sequence[int]],
) -> list[list[Found]]:
    """Use several groups of the same ranks, each in a separate thread."""
    rank = unisono.get_rank()
    groups = [_group((ranks, i)) for i in range(len(turns))]

    def go(i: int) -> list[Found]:
        time.sleep(delays_ms[rank][i] / 1000)  # so that the groups' calls come in any order
        return [begin(step, rank, groups[i])() for step in turns[i]]

    with ThreadPoolExecutor(len(turns)) as pool:
        return list(pool.map(go, range(len(turns))))


def fork(local_rank: int, ranks: tuple[int, ...], step: Step | None) -> str | None:
    """Fork on some ranks; a child's call, or its wait for the parent's handle, must raise."""
    rank, size = unisono.get_rank(), unisono.get_world_size()
    handle = unisono.all_gather(rank, async_op=True)
    # Made before the fork, because it uses OpenMP's threads, which a fork lacks.
    value = None if step is None else make(step.values[rank])

    def child() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_S)
        got = _attempt(lambda: handle.wait() if step is None else _perform(step, value))
        # The parent's operation may have been done before the fork.
        is_done = step is None and got == list(range(size))
        assert is_done or (isinstance(got, Raised) and got.kind == "ContextError"), got

    code = 0
    if rank in ranks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns if a process with threads forks
            code = in_fork(child)
    gathered = handle.wait()
    if code != 0 or gathered != list(range(size)) or unisono.all_reduce(1) != size:
        return f"its fork ended with {code}, and {gathered!r} was gathered"
    return None


def run_until(local_rank: int, program: Sequence[Step], at: int, victim: int, failure: str) -> None:
    """Run a program; at step `at` the rank `victim` fails. Collective over all ranks."""
    rank = unisono.get_rank()
    # Made first, because in `new_group` torch would wait for a dead rank until the timeout.
    groups = {step.group: step.group and unisono.new_group(step.group) for step in program}
    for i, step in enumerate(program):
        if i == at and rank == victim:
            FAILURES[failure].do()
        _perform(step, make(step.values[rank]), groups[step.group])
    if at >= len(program) and rank == victim:
        FAILURES[failure].do()
    unisono.barrier()


def play_until_told(
    local_rank: int, programs: Sequence[Sequence[Step]], timeout_s: float
) -> list[Found]:
    """Make each rank's calls until one raises; return what was wrong with each. Collective."""
    rank = unisono.get_rank()
    group = unisono.new_group(range(unisono.get_world_size()), timeout=timeout_s)
    found: list[Found] = []
    begun = (begin(step, rank, group) for step in programs[rank])
    for finish in list(begun) if programs[rank][0].is_async else begun:
        found.append(finish())
        if isinstance(found[-1], Raised):
            break
    return found
