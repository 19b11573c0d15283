"""A replica that fails, how and whenever, is named with its own cause, and nothing is left."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.faults import FAULTS, HANGS
from tests.support.measures import Clock, Table, says_little
from tests.support.processes import Pipe, gone, python, say
from tests.support.requirements import require_backend
from tests.support.ways import SIZE, Way, check_error, launcher_rank, told
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError

AT_MOST_S = 1.0
TIMEOUT_S = 3.0
LIBRARIES = ("mpi4py", "horovod")
SPAWN, POOL, PARALLEL = Way("spawn"), Way("WorkerPool"), Way("Parallel")
# Every fault by spawn; another way has one of each kind: a report, an exit code, a signal.
KINDS = ("raises", "os._exit(0)", "SIGKILL", "exception that can't be pickled")
RUNNERS = ("spawn", "Parallel", "spawn", "WorkerPool")
ON_LIBRARIES = [Way("spawn", backend) for backend in LIBRARIES]
SET_UP, WAIT, AT_ONCE = "before set-up", "while others wait", "of two ranks at once"
LAST, FINALIZE, LEAD = "after the last collective", "in finalize", "of the leader of a group"
MEET, PART = "while ranks meet", "while ranks part"
CASES = [
    *[(SPAWN, fault, WAIT, (i % SIZE,)) for i, fault in enumerate(FAULTS)],
    *[(POOL, fault, WAIT, (1,)) for fault in KINDS],
    (PARALLEL, "raises", WAIT, (0,)),
    *[
        (Way(RUNNERS[i], backend), fault, WAIT, (i % SIZE,))
        for backend in LIBRARIES
        for i, fault in enumerate(KINDS)
    ],
    *[
        (SPAWN, fault, when, (1,))
        for when in (SET_UP, LAST, FINALIZE)
        for fault in ("raises", "os._exit(3)", "SIGKILL")
    ],
    *[
        (way, fault, when, (1,))
        for when, fault in ((SET_UP, "raises"), (LAST, "SIGKILL"), (FINALIZE, "raises"))
        for way in ON_LIBRARIES
    ],
    *[(way, "SIGKILL", AT_ONCE, (0, 2)) for way in (SPAWN, POOL, *ON_LIBRARIES)],
    (SPAWN, "SIGKILL", LEAD, (1,)),
]
# horovodrun says nothing of a rank that ends with 0: a second is waited for a failure that is.
SLOWER_S = {("horovod", "os._exit(0)"): 2.0}
DELAYS_MS = (0, 2, 5, 10, 15, 20, 30, 50)
WHO = ("the leader", "a member")  # of the control plane: rank 0 leads


@dataclass
class Doomed:
    """What ranks do until one has its fault: at a moment, or some time after it.

    The first moments are when this is unpickled, before there is a context.
    """

    fault: str
    when: str
    victims: tuple[int, ...]
    clock: Clock
    delay_ms: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.when in (SET_UP, MEET) and launcher_rank() in self.victims:
            self.begin()

    def __call__(self, local_rank: int) -> int:
        pair = unisono.new_group([1, 2]) if self.when == LEAD else None
        group = pair if local_rank else None
        if self.when == WAIT and self.fault != "os._exit(0)":  # a rank that ends well leaves it
            subprocess.Popen(["sh", "-c", "sleep 600; true"])
        unisono.barrier(group=group)
        if local_rank in self.victims and self.when == FINALIZE:
            if unisono.model_name() == "native-dist":
                vars(dist)["destroy_process_group"] = self.strike
            else:
                setattr(type(unisono.context.current_model()), "finalize", self.strike)  # noqa: B010
        elif local_rank in self.victims and self.when not in (SET_UP, MEET):
            self.begin()
        while self.when not in (LAST, FINALIZE, PART):
            unisono.all_reduce(torch.ones(1), group=group)
        return local_rank

    def begin(self) -> None:
        """Have the fault, after the delay whatever the main thread is doing then."""
        if self.delay_ms == 0:
            self.strike()
        timer = threading.Timer(self.delay_ms / 1000, self.strike)
        timer.daemon = True
        timer.start()

    def strike(self, *_: object) -> None:
        self.clock.strike()
        FAULTS[self.fault].do()


@pytest.mark.parametrize(("way", "fault", "when", "victims"), CASES, ids=str)
def test_a_fault_is_told_at_once_with_its_own_cause(
    way: Way, fault: str, when: str, victims: tuple[int, ...], clock: Clock, table: Table
) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        way.run(Doomed(fault, when, victims, clock))
    seconds = told(caught.value, clock)
    assert caught.value.rank in victims
    first = check_error(caught.value, caught.value.rank, FAULTS[fault].says)
    limit_s = SLOWER_S.get((way.backend, fault), AT_MOST_S)
    table.add(f"{way}: {fault} {when}", seconds, limit_s, first)


@pytest.mark.parametrize("victim", [0, 1], ids=WHO)
@pytest.mark.parametrize("when", [MEET, PART])
def test_a_death_at_any_moment(when: str, victim: int, clock: Clock, table: Table) -> None:
    """While ranks part, either its work was done by then, or it is the dead one that is named."""

    def die(delay_ms: int) -> None:
        try:
            found = SPAWN.run(Doomed("SIGKILL", when, (victim,), clock, delay_ms))
        except WorkerFailedError as error:
            seconds = told(error, clock)
            first = check_error(error, victim, "was ended by SIGKILL")
            case = f"spawn: SIGKILL of {WHO[victim]} {when}, {len(DELAYS_MS)} moments"
            table.add(case, seconds, AT_MOST_S, first)
        else:
            assert when == PART
            assert delay_ms > 0, "a rank that died before it could return anything wasn't a failure"
            assert found == [0, 1, 2]

    for delay_ms in DELAYS_MS:
        die(delay_ms)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_children_of_a_rank_that_fails_end_unless_they_are_daemons(
    method: str, tmp_path: Path
) -> None:
    """They don't heed SIGTERM."""

    def leaves(local_rank: int, fails: bool, pipe: str) -> None:
        for is_daemon in (False, True):
            words = ["sh", "-c", "trap '' TERM; echo; exec sleep 600"]
            child = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=is_daemon)
            assert child.stdout is not None
            child.stdout.readline()
            say(pipe, child.pid if is_daemon else -child.pid)
        unisono.barrier()
        if fails:
            raise ValueError("mine")

    with Pipe(tmp_path) as pipe:
        for fails in (True, False):
            with contextlib.suppress(WorkerFailedError):
                SPAWN.run(leaves, fails, pipe.path, start_method=method)
            pids = [int(line) for line in pipe.read(2 * SIZE)]
            stay = {abs(pid) for pid in pids if pid > 0 or not fails}
            assert gone({*map(abs, pids)} - stay, 20) == []
            assert set(gone(stay, 0)) == stay


LARGE = ", large tensors"
STUCK = [
    (SPAWN, "", list(HANGS)),
    (SPAWN, LARGE, ["SIGSTOP", "a loop in Python"]),
    (POOL, "", ["SIGSTOP", "a call in C that holds the GIL"]),
    (Way("spawn", "horovod"), "", ["SIGSTOP"]),
    (Way("WorkerPool", "horovod"), "", ["a call in C that holds the GIL"]),
    (Way("spawn", "mpi4py"), "", ["SIGSTOP"]),
]


@pytest.mark.parametrize(("way", "what", "hangs"), STUCK, ids=str)
def test_a_rank_that_hangs_is_named_at_the_deadline(
    way: Way,
    what: str,
    hangs: list[str],
    tmp_path: Path,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In jobs that run at once: all last as long as the timeout."""
    require_backend(way.backend)
    if what == LARGE:  # else it is missed before, where calls are compared
        monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")
        monkeypatch.setenv("UNISONO_DEBUG", "0")

    def run(hang: str) -> tuple[str, float, WorkerFailedError]:
        clock = Clock(str(tmp_path / hang))

        def fn(local_rank: int) -> None:
            unisono.barrier()
            if local_rank == 1:
                clock.strike()
                HANGS[hang].do()
            unisono.all_reduce(torch.ones(300_000)) if what == LARGE else unisono.barrier()

        with pytest.raises(WorkerFailedError) as caught:
            way.run(fn, timeout=TIMEOUT_S)
        return hang, told(caught.value, clock), caught.value

    with ThreadPoolExecutor() as jobs:
        for hang, seconds, error in jobs.map(run, hangs):
            named = named_late(error, HANGS[hang].says)
            if what == LARGE:
                assert " of 3: all_reduce SUM: " in str(error)
                assert "rank 2 never" not in str(error)
            case = f"{way}: {hang}{what}, timeout {TIMEOUT_S:g} s"
            table.add(case, seconds, TIMEOUT_S + 1, named)


def named_late(error: WorkerFailedError, says: str) -> str:
    """Fail for an error that doesn't name a late rank and its state; give the line that does."""
    text, cause = str(error), str(error.__cause__)
    says_little(text, error.traceback)
    assert "CollectiveTimeoutError" in text
    assert "rank 1 never" in text
    assert says in text
    says_little(cause, None)
    return next(line for line in text.splitlines() if " never " in line)


def test_a_call_over_the_pools_deadline(clock: Clock, table: Table) -> None:
    def stall(local_rank: int) -> None:
        if local_rank == 1:
            clock.strike()
            os.kill(os.getpid(), signal.SIGSTOP)

    with WorkerPool("gloo", nproc_per_node=SIZE, deadline_s=TIMEOUT_S) as pool:
        pool.run(abs)
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] of 3") as caught:
            pool.run(stall)
        seconds = clock.since()
    says_little(str(caught.value), None)
    table.add("WorkerPool: SIGSTOP, deadline_s 3", seconds, TIMEOUT_S + 1, str(caught.value))


def test_an_exit_handler_that_hangs_is_waited_for_as_long_as_the_user_says(table: Table) -> None:
    def fn(local_rank: int) -> int:
        if local_rank == 1:
            atexit.register(signal.pause)
        return local_rank

    start = time.monotonic()
    job = unisono.spawn("gloo", fn, nproc_per_node=3, join=False)
    with pytest.raises(LaunchError, match=r"ranks \[1\] haven't finished") as caught:
        job.join(TIMEOUT_S)
    job.terminate()
    seconds = time.monotonic() - start
    table.add("spawn: an exit handler hangs, timeout 3 s", seconds, 9.0, str(caught.value))


KILLERS = ("raises", "os._exit(3)", "SIGKILL", "SIGSEGV")


def in_forty_jobs(job: Callable[[int], object]) -> int:
    """Run jobs; fail if anything grows after the eighth. Gives by how much memory did."""
    process, sizes = psutil.Process(), []
    for number in range(40):
        job(number)
        sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    memory: int = sizes[-1][0] - sizes[8][0]
    assert sizes[-1][1:] == sizes[8][1:], "descriptors and threads"
    assert memory < 4 << 20, f"32 jobs took {memory} bytes"
    return memory


def test_forty_failures_are_forty_originals_and_nothing_grows(clock: Clock, table: Table) -> None:
    """Of both ranks and of four kinds in turns."""

    def fn(local_rank: int, fault: str, victim: int) -> NoReturn:
        if local_rank == victim:
            clock.strike()
            FAULTS[fault].do()
        unisono.barrier()
        raise AssertionError(f"a barrier without rank {victim}")

    def job(number: int) -> None:
        fault, victim = KILLERS[number % 4], (number // 4 + number) % 2
        with pytest.raises(WorkerFailedError) as caught:
            unisono.spawn("gloo", fn, (fault, victim), nproc_per_node=2)
        seconds = clock.since()
        first = check_error(caught.value, victim, FAULTS[fault].says, 2)
        assert isinstance(caught.value.__cause__, ArithmeticError) == (fault == "raises")
        table.add("spawn: 40 failures, the slowest", seconds, AT_MOST_S, first)

    in_forty_jobs(job)


def test_forty_jobs_and_nothing_grows(table: Table) -> None:
    start = time.monotonic()
    grown = in_forty_jobs(lambda _: unisono.spawn("gloo", unisono.all_gather, nproc_per_node=2))
    said = f"(32 jobs took {grown >> 10} KiB)"
    table.add("40 jobs, each", (time.monotonic() - start) / 40, 2, said)


def test_rank_0_leaves_first_and_the_others_go_on(tmp_path: Path) -> None:
    """It is its parent that hosts the rendezvous: a group is made when rank 0 is long gone."""

    def fn(local_rank: int, left: str) -> Any:
        group = unisono.new_group([1, 2])
        unisono.barrier()
        if local_rank == 0:
            unisono.finalize()
            say(left, "gone")
            return None
        if local_rank == 1:
            Path(left).read_text()
        unisono.barrier(group=group)
        return unisono.all_gather(local_rank, group=group)

    os.mkfifo(tmp_path / "left")
    assert SPAWN.run(fn, str(tmp_path / "left")) == [None, [1, 2], [1, 2]]


def test_150_mib_of_one_rank_arrive(table: Table) -> None:
    def fn(local_rank: int) -> Any:
        unisono.barrier()
        start = time.monotonic()
        found = unisono.all_gather(bytes(150 << 20) if local_rank == 1 else b"")
        return time.monotonic() - start, [len(each) for each in found]

    results = SPAWN.run(fn)
    assert [sizes for _, sizes in results] == [[0, 150 << 20, 0]] * SIZE
    seconds = max(seconds for seconds, _ in results)
    table.add("spawn: 150 MiB from one of three ranks", seconds, 3.5, "(no error)")


LOUD = """
import sys, unisono

def speak(local_rank):
    for _ in range(20):
        sys.stdout.write(("x" * 1023 + "\\n") * 1024)
    unisono.barrier()
    if local_rank == 1:
        raise ArithmeticError("after 20 MB")

def by_pool():
    with unisono.WorkerPool("gloo", 2) as pool:
        pool.run(speak)

for call in (lambda: unisono.spawn("gloo", speak, nproc_per_node=2), by_pool):
    try:
        call()
    except unisono.errors.WorkerFailedError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
"""


def test_megabytes_of_output(table: Table) -> None:
    start = time.monotonic()
    done = python("-c", LOUD)
    assert done.stdout.count("x") == 2 * 2 * 20 * 1024 * 1023
    assert done.stderr == "rank 1 of 2 raised ArithmeticError: after 20 MB\n" * 2
    seconds = time.monotonic() - start
    table.add("spawn, WorkerPool: 20 MB of output, then raises", seconds, 30, done.stderr)
