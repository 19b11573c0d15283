"""An interrupt at a random moment of every collective, handle, pool call and spawn.

After each the ranks are usable or told why not, within a bound, and no value is wrong.
UNISONO_INTERRUPTS is how many there are for each model, and a tenth of it for spawns and pools (a
few by default), UNISONO_INTERRUPTS_SEED the seed, which a failure names.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

import unisono as idist
from tests.support.interrupts import (
    OPERATIONS,
    Alarm,
    Report,
    Trial,
    alarm,
    interrupted_at,
    run_trial,
)
from tests.support.measures import slack
from tests.support.requirements import require_backend
from unisono.context import communicator
from unisono.errors import UnisonoError, WorkerFailedError
from unisono.launchers import local
from unisono.launchers.job import channel

SEED = int(os.environ.get("UNISONO_INTERRUPTS_SEED", random.SystemRandom().randrange(2**31)))
TIMES = int(os.environ.get("UNISONO_INTERRUPTS", 0))
TIMEOUT_S = 2.0
pytestmark = pytest.mark.timeout(240 + 5 * TIMES)
_ERRORS = (KeyboardInterrupt, Alarm)
_GONE_S = 1.5
_END_S = 10.0  # of an interrupted spawn or call, and of the next one
# What is closed by no statement that an interrupt let it come to is closed with its last name.
_ENDED_LATE = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
BOUND_S = 3 * TIMEOUT_S + 4  # an operation and the next one, each with its last words


def _check(reports: list[tuple[Report, ...]], share: float = 0.25) -> None:
    """Demand that nothing is wrong, and that so large a share of the calls was interrupted."""
    assert len(reports) == len({pair[0].trial.tag for pair in reports})
    bad = [pair for pair in reports if any(r.wrong or r.seconds > BOUND_S for r in pair)]
    assert not bad, f"seed {SEED}: " + "\n".join(map(str, bad[0]))
    interrupted = [report for pair in reports for report in pair if report.was_interrupted]
    assert len(interrupted) >= int(share * len(reports))


def _trials(places: dict[str, int] | None, times: int, seed: int) -> Iterator[Trial]:
    """Draw trials, of alarms where no places are given.

    At its first place a call hasn't begun, which is the program's own mistake.
    """
    chance = random.Random(seed)
    for tag in range(1, times + 1):
        name, victim = chance.choice(list(OPERATIONS)), chance.randrange(2)
        place = chance.randint(2, places[name]) if places else 0
        yield Trial(name, tag, victim, place, chance.uniform(1e-5, 2e-3), chance.choice(_ERRORS))


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
        fn = lambda rank, trial=trial: run_trial(trial, rank)  # noqa: E731
        reports.append(tuple(idist.spawn("threads", fn, nproc_per_node=2, timeout=TIMEOUT_S)))
    _check(reports)


def _store_at(port: int) -> TCPStore:
    limit = timedelta(seconds=60)
    return TCPStore("127.0.0.1", port, None, False, timeout=limit, wait_for_workers=False)


def _in_processes(local_rank: int, port: int, backend: str, times: int, seed: int) -> list[Report]:
    """Make trials of two ranks, which meet between them at a store of the test's own."""
    store, numbers = _store_at(port), itertools.count()

    def begin() -> None:
        options: dict[str, Any] = {"timeout": TIMEOUT_S}
        if backend == "gloo":
            own = PrefixStore(f"context/{next(numbers)}", store)
            options |= {"rank": local_rank, "world_size": 2, "store": own}
        idist.initialize(backend, **options)
        idist.barrier()

    def agree(key: str, word: str) -> list[str]:
        store.set(f"{key}/{local_rank}", word)
        return [store.get(f"{key}/{rank}").decode() for rank in range(2)]

    def run(trials: Iterator[Trial]) -> Iterator[Report]:
        is_new = True
        for trial in trials:
            if is_new:
                begin()
            agree(f"begin/{trial.tag}/{trial.place > 0}", "")
            report = run_trial(trial, local_rank)
            yield report
            is_over = "over" if report.said or report.was_interrupted else ""
            is_new = "over" in agree(f"end/{trial.tag}/{trial.place > 0}", is_over)
            if is_new:
                idist.finalize()
        if not is_new:
            idist.finalize()

    idist.finalize()
    begin()
    every = idist.all_gather(_count(local_rank))
    idist.finalize()
    places = {name: max(each[name] for each in every) for name in OPERATIONS}
    return [*run(_trials(places, times, seed)), *run(_trials(None, times // 2, seed))]


def _spawn(backend: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a function in two ranks; its second argument is the port of a store of this process."""
    require_backend(backend)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return idist.spawn(backend, fn, (store.port, *args), nproc_per_node=2, **options)


@pytest.mark.parametrize(("backend", "times"), [("gloo", 40), ("mpi4py", 10)])
def test_on_processes(backend: str, times: int) -> None:
    sys.stdout.write(f"seed {SEED}\n")  # which pytest shows where the spawn itself fails
    pairs = list(zip(*_spawn(backend, _in_processes, backend, TIMES or times, SEED), strict=True))
    _check(pairs[: TIMES or times])
    _check(pairs[TIMES or times :], 0)  # an alarm may come too late


_SIZE = 4 << 20  # elements: MPI is at work on them when the interrupt comes


def _gather_half_way(local_rank: int, port: int) -> tuple[str, float]:
    """Interrupt rank 0 in a call that rank 1 makes later; give its next error and sum of zeros."""
    store = _store_at(port)
    mine: list[Any] = []
    if local_rank == 0:
        with contextlib.suppress(KeyboardInterrupt), alarm(0.2):
            idist.all_gather(torch.full((_SIZE,), 7.0))
        gc.collect()
        mine = [torch.zeros(2 * _SIZE) for _ in range(4)]
        store.set("interrupted", "")
        store.get("called")
    else:
        store.get("interrupted")
        with contextlib.suppress(UnisonoError):
            idist.all_gather(torch.full((_SIZE,), 9.0))
        store.set("called", "")
    said = ""
    try:
        idist.all_reduce(1)
    except UnisonoError as error:
        said = str(error)
    return said, float(sum(zeros.abs().sum() for zeros in mine))


@pytest.mark.parametrize("backend", ["gloo", "mpi4py"])
def test_memory_of_an_interrupted_call_is_nobody_elses(backend: str) -> None:
    (said, total), _ = _spawn(backend, _gather_half_way, timeout=TIMEOUT_S)
    assert "KeyboardInterrupt interrupted all_gather" in said
    assert total == 0


def _memory_after_the_end(local_rank: int, port: int) -> bool:
    """Interrupt rank 0 in a call of MPI, end the context; tell whether the memory is there yet."""
    store = _store_at(port)
    idist.finalize()  # whose model the launcher holds
    idist.initialize("mpi4py", timeout=TIMEOUT_S)
    if local_rank == 1:
        store.get("over")
        return True
    context, tensor = communicator(), torch.full((_SIZE,), 7.0)
    memory = weakref.ref(tensor)
    with contextlib.suppress(KeyboardInterrupt), alarm(0.2):
        context.model.all_gather(tensor)
    context.control.interrupt("KeyboardInterrupt interrupted it")
    del context, tensor
    idist.finalize()
    gc.collect()
    store.set("over", "")
    return memory() is not None


def test_mpi_has_the_memory_of_an_interrupted_call_after_the_end_of_its_context() -> None:
    """MPI comes back to it in later calls, of any context, and wrote to memory that was free."""
    assert _spawn("mpi4py", _memory_after_the_end, timeout=TIMEOUT_S) == [True, True]


def _leave_alone(local_rank: int, port: int) -> None:
    store = _store_at(port)
    if local_rank == 0:
        store.get("interrupted")
        idist.all_gather(torch.full((_SIZE,), 7.0))
    with contextlib.suppress(KeyboardInterrupt), alarm(0.2):
        idist.all_gather(torch.full((_SIZE,), 7.0))
    store.set("interrupted", "")


@pytest.mark.parametrize("backend", ["gloo", "mpi4py"])
def test_who_waits_for_an_interrupted_rank_that_returned_learns_of_it(backend: str) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"rank 1.*KeyboardInterrupt interrupted all_g"):
        _spawn(backend, _leave_alone)
    assert time.monotonic() - begin < 60  # of 1800 s that the call has


def _group_half_way(local_rank: int, port: int) -> bool:
    """Interrupt rank 1 in a call that rank 0 makes later; tell whether rank 0 has its group."""
    store = _store_at(port)
    if local_rank == 1:
        with contextlib.suppress(KeyboardInterrupt), alarm(0.2):
            idist.new_group([0, 1])
        store.set("interrupted", "")
        store.get("made")
        return False
    store.get("interrupted")
    try:
        group = idist.new_group([0, 1])
        return group.ranks == (0, 1)
    except UnisonoError:
        return False
    finally:
        store.set("made", "")


def test_an_interrupted_new_group_leaves_nobody_in_mpi() -> None:
    begin = time.monotonic()
    assert _spawn("mpi4py", _group_half_way, timeout=TIMEOUT_S) == [False, False]
    assert time.monotonic() - begin < 60


def _square(local_rank: int, base: int) -> int:
    return base * base


def _half(value: int) -> int:
    return value // 2


def _job(base: int) -> Any:
    return idist.spawn("gloo", _square, (base,), nproc_per_node=2)


def _pool(base: int) -> Any:
    with idist.WorkerPool("gloo", nproc_per_node=2) as pool:
        return pool.run(_square, base)


def _interrupt_anywhere(make: Callable[[int], Any], times: int, check: Callable[[], bool]) -> None:
    """Interrupt calls at random places, and check what is true after each."""
    chance, limit_s = random.Random(SEED), slack() * _END_S
    make(3)  # at the first there may be things to load
    with interrupted_at(0) as seen:
        make(3)
    for _ in range(TIMES // 10 or times):
        place = chance.randint(1, seen.seen)
        begin = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place) as places:
            make(3)
        told = f"seed {SEED}: place {place} of {seen.seen}, {places.where}"
        assert check(), told
        assert time.monotonic() - begin < limit_s, told


@_ENDED_LATE
@pytest.mark.parametrize("make", [_job, _pool])
def test_a_job_or_a_pool_that_is_interrupted_leaves_nothing(make: Callable[[int], Any]) -> None:
    """What is left is looked for by the fixtures of this folder, and ranks after each time."""
    environ, before, gone_s = dict(os.environ), _children(), slack() * _GONE_S

    def nothing_is_left() -> bool:
        left = _ranks_left(before, gone_s)
        return not left and dict(os.environ) == environ and make(4) == [16, 16]

    _interrupt_anywhere(make, 6, nothing_is_left)


@_ENDED_LATE
def test_a_call_of_a_pool_that_is_interrupted_leaves_it_usable() -> None:
    with idist.WorkerPool("gloo", nproc_per_node=2) as pool:

        def is_usable() -> bool:
            return pool.run(_square, 4) == [16, 16] and pool.map(_half, [2, 4, 6]) == [1, 2, 3]

        _interrupt_anywhere(lambda value: pool.run(_square, value), 5, is_usable)
        _interrupt_anywhere(lambda value: pool.map(_half, [value] * 4), 5, is_usable)


@_ENDED_LATE
def test_an_interrupt_anywhere_within_close_is_all_that_is_raised() -> None:
    for place in itertools.count(1):
        pool = idist.WorkerPool("threads", nproc_per_node=2)
        assert pool.run(_square, 3) == [9, 9]
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place) as places:
            pool.close()
        if not places.where:
            return
        pool.close()


def test_a_message_that_an_interrupt_tore_is_never_taken_for_another() -> None:
    for place in itertools.count(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            inbox = channel.Inbox(ours)
            for body in (b"first", b"second"):
                channel.send(theirs, channel.RESULT, body)
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(place) as places:
                assert inbox.take() == (channel.RESULT, b"first")
            if not places.where:
                return
            with contextlib.suppress(EOFError):  # else nothing had been taken
                assert inbox.take() == (channel.RESULT, b"first")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _ranks_left(before: set[psutil.Process], within_s: float) -> list[int]:
    """Give the processes of ranks that haven't ended a moment after their job.

    Those of `before` are none, such as multiprocessing's helpers of earlier tests in this session.
    """
    helpers = {helper.process.pid for helper in local._fork_servers[-1:]}
    ranks = [each for each in _children() - before if each.pid not in helpers]
    return [process.pid for process in psutil.wait_procs(ranks, timeout=within_s)[1]]
