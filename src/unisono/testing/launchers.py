"""The laws for launchers, one function each, and their runner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from unisono import facts
from unisono.collectives.gathers import all_gather
from unisono.collectives.groups import barrier
from unisono.deadlines import deadline
from unisono.errors import ArgumentError, CollectiveTimeoutError, PayloadError, WorkerFailedError
from unisono.launchers.job.lifetime import output_redirected
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import ScriptOutcome
from unisono.lifecycle import spawn
from unisono.recording.status_page import is_running, start_ticks
from unisono.registry import find_launcher, find_script_runner
from unisono.testing.environments import UntestableError, check_info, outcome_of, text_of
from unisono.testing.runner import Outcome
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("LAUNCHER_LAWS", "LauncherTrial", "check_launcher")

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)
_MARK = "UNISONO_CHECK_MARK"
_DEADLINES_S = (6.0, 40.0)  # the second is tried if not all ranks had started by the first
_START_S = 60.0  # time for all ranks to start before the interrupt
_GRACE_S = 20.0  # time that a job may take beyond its deadline
_END_S = 5.0  # time for all ranks to end after their job has ended
_POLL_S = 0.05
_TOO_LONG = signal.SIGVTALRM  # raises in a law that exceeds its limit
_EXIT_CODE = 7
_SHOWN_LINES = 15


class _TookTooLongError(BaseException):
    """Raised in the main thread when a law exceeds its time limit."""


@dataclass(frozen=True, slots=True)
class LauncherTrial:
    """A launcher under test, and the options of its jobs."""

    launcher: str
    nproc: int
    backend: str
    options: Mapping[str, Any]
    folder: str

    @property
    def last(self) -> int:
        """The rank that fails in laws about failures."""
        return self.nproc - 1

    @property
    def launcher_arguments(self) -> dict[str, Any]:
        """The arguments of `spawn` that select the launcher."""
        return {"launcher": self.launcher, "launcher_options": dict(self.options)}

    def spawn(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Spawn ranks with this launcher."""
        selected = self.launcher_arguments
        results: list[Any] = spawn(self.backend, fn, args, kwargs, self.nproc, **selected)
        return results

    def launch(self, environ: Mapping[str, str]) -> list[tuple[RankInfo, str | None, str | None]]:
        """Call the launcher directly, with variables for its ranks."""
        launch: Callable[..., list[Any]] = find_launcher(self.launcher)
        return launch(_describe, LaunchPlan(self.nproc), environ=environ, **self.options)

    def fails(
        self, end: Callable[..., object], *args: Any, on_others: Callable[[], object] = barrier
    ) -> WorkerFailedError:
        """Return the error of a job whose last rank calls `end`; it must name that rank."""
        job = partial(self.spawn, _end, self.last, self.folder, end, args, on_others)
        error = _error_of(WorkerFailedError, job)
        assert error.rank == self.last, f"rank {error.rank} is named, not {self.last}: {error}"
        assert f"rank {self.last}" in str(error), f"its text doesn't name the rank: {error}"
        return error

    def signed_in(self) -> list[tuple[int, int]]:
        """List the pid and the sign-in time of each rank that has signed in on this host."""
        words = [file.read_text().split() for file in Path(self.folder).glob("rank-*")]
        here = socket.gethostname()
        return [(int(pid), int(ticks)) for host, pid, ticks in words if host == here]

    def running(self) -> list[int]:
        """List the processes of ranks that have signed in on this host and haven't ended."""
        return [pid for pid, ticks in self.signed_in() if is_running(pid, ticks)]

    def wait_for_ends(self) -> int:
        """Wait until all ranks that have signed in have ended; return their number."""
        # psutil.wait_procs would collect exit codes of children, for which launchers wait.
        limit = time.monotonic() + _END_S
        while (left := self.running()) and time.monotonic() < limit:
            time.sleep(_POLL_S)
        assert not left, f"processes {left} of ranks are left {_END_S:g} s later"
        return len(self.signed_in())

    def clean_up(self) -> None:
        """Stop the ranks left on this host, and remove their files."""
        for pid in self.running():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for file in Path(self.folder).glob("rank-*"):
            file.unlink()


Law = Callable[[LauncherTrial], None]
LAUNCHER_LAWS: dict[str, Law] = {}


def _law(check: Law) -> Law:
    """Register a law by its function's name."""
    LAUNCHER_LAWS[check.__name__] = check
    return check


def _error_of(kind: type[_E], call: Callable[[], object], what: str = "the job") -> _E:
    """Return the error of a call that must raise `kind`."""
    try:
        result = call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what}: expected {kind.__name__}, got {text_of(error)}") from error
    raise AssertionError(f"{what}: expected {kind.__name__}, but it returned {result!r}")


def _sign_in(folder: str) -> None:
    """Write this rank's host and pid to the folder, if this host can reach it."""
    with contextlib.suppress(OSError):
        unfinished = Path(folder, f"unfinished-{facts.get_rank()}")
        pid = os.getpid()
        unfinished.write_text(f"{socket.gethostname()} {pid} {start_ticks(pid)}")
        # Atomic, so that a reader finds the whole line.
        unfinished.replace(Path(folder, f"rank-{facts.get_rank()}"))


def _facts(local_rank: int) -> SimpleNamespace:
    """Collect the facts of this rank, and the local rank that its function received."""
    return SimpleNamespace(
        rank=facts.get_rank(),
        given_local_rank=local_rank,
        local_rank=facts.get_local_rank(),
        world_size=facts.get_world_size(),
        nproc_per_node=facts.get_nproc_per_node(),
        ranks=all_gather(facts.get_rank()),
        process=(socket.gethostname(), os.getpid()),
    )


def _received(local_rank: int, data: bytes, make: Callable[[int], Any], *, word: str) -> Any:
    """Return values that show whether the arguments have arrived unchanged."""
    return len(data), data[-3:], make(facts.get_rank()), word


def _kinds() -> Sequence[Any]:
    """Return an instance of each kind of class that programs derive from the standard library."""

    class Abstract(ABC):  # noqa: B024 - only its metaclass matters
        def value(self) -> int:
            return 42

    class Items(Mapping[str, _T], Generic[_T]):
        def __getitem__(self, key: str) -> Any:
            return len(key)

        def __iter__(self) -> Iterator[str]:
            return iter(("one", "three"))

        def __len__(self) -> int:
            return 2

    class Speaks(Protocol):
        def value(self) -> str: ...

    class Speaker(Speaks):
        def value(self) -> str:
            return "spoken"

    class Held(contextlib.AbstractContextManager[Any]):
        def __exit__(self, *_: object) -> None: ...

    class Color(Enum):
        RED = 1

    class Point(NamedTuple):
        x: int

    @dataclass
    class Record:
        x: int

    return [Abstract(), Items[int](), Speaker(), Held(), Color.RED, Point(2), Record(3)]


def _use(local_rank: int, kinds: Sequence[Any]) -> tuple[list[object], Sequence[Any]]:
    """Use an instance of each kind; return the results, and the instances."""
    abstract, items, speaker, holder, color, point, record = kinds
    with holder as held:
        found = [type(type(abstract)) is ABCMeta, held is holder, abstract.value(), dict(items)]
    return [*found, speaker.value(), color.name, point.x, record.x], kinds


def _describe(info: RankInfo) -> tuple[RankInfo, str | None, str | None]:
    """Return the rank's facts, and two of its variables."""
    return info, os.environ.get(_MARK), os.environ.get("HOME")


def _end(local_rank: int, victim: int, folder: str, end: Any, args: Any, on_others: Any) -> object:
    """Sign in, then call `end` on the rank `victim`, and `on_others` on every other rank."""
    _sign_in(folder)
    barrier()  # all ranks of the host have signed in before one of them ends
    return end(*args) if facts.get_rank() == victim else on_others()


def _raise() -> NoReturn:
    raise KeyError(f"of rank {facts.get_rank()}")


def _sleep_ignoring_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _sleep(local_rank: int, folder: str) -> None:
    """Sign in once all ranks have started, then sleep until the job is ended."""
    barrier()  # so that no rank is counted before all have started
    _sign_in(folder)
    time.sleep(600)


def _touch(local_rank: int, folder: str, *args: Any) -> None:
    """Leave a file that shows that a rank has begun."""
    Path(folder, "begun").touch()


@_law
def results_come_in_the_order_of_ranks(trial: LauncherTrial) -> None:
    """Each rank is a separate process with the right facts; results are in the order of ranks."""
    results = trial.spawn(_facts)
    ranks = list(range(trial.nproc))
    assert [each.rank for each in results] == ranks, f"ranks {[each.rank for each in results]}"
    for each in results:
        who, local_rank, nproc = f"rank {each.rank}", each.local_rank, each.nproc_per_node
        assert each.ranks == ranks, f"all_gather of the ranks returned {each.ranks} on {who}"
        assert each.world_size == trial.nproc, f"{who} has world size {each.world_size}"
        received = f"the function of {who} got local rank {each.given_local_rank}"
        assert each.given_local_rank == local_rank, f"{received}, not {local_rank}"
        assert 0 <= local_rank < nproc, f"{who} has local rank {local_rank} of {nproc}"
    processes = {each.process for each in results}
    assert len(processes) == trial.nproc, "two ranks share a process"
    parent = (socket.gethostname(), os.getpid())
    assert parent not in processes, "a rank is the process that launched the job"


@_law
def arguments_and_closures_arrive(trial: LauncherTrial) -> None:
    """A megabyte, a closure over a local class, and keyword arguments arrive unchanged."""

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    factor = 3
    data = bytes(1 << 20) + b"end"
    results = trial.spawn(_received, data, lambda rank: Local(rank * factor).value, word="é")
    expected = [((1 << 20) + 3, b"end", rank * factor, "é") for rank in range(trial.nproc)]
    assert results == expected, f"got {results!r}, wanted {expected!r}"
    # A closure may also hold a class that isn't local.
    captured = object
    assert trial.spawn(lambda local_rank: captured.__name__) == ["object"] * trial.nproc


@_law
def classes_of_every_kind_arrive(trial: LauncherTrial) -> None:
    """An object of a local class works in a rank and after its return."""
    # Classes derived from those of abc, collections.abc, contextlib, dataclasses, enum and typing.
    kinds = _kinds()
    known, _ = _use(0, kinds)
    for rank, (found, back) in enumerate(trial.spawn(_use, kinds)):
        assert found == known, f"rank {rank} found {found}, not {known}"
        for each, kind in zip(back, kinds, strict=True):
            assert type(each) is type(kind), f"rank {rank}: {each} came back as another class"


@_law
def each_rank_gets_its_facts_and_variables(trial: LauncherTrial) -> None:
    """`entry` gets a complete RankInfo, and its process the variables of `environ` not set yet."""
    ranks = trial.launch({_MARK: "yes", "HOME": "/nowhere"})
    infos = [info for info, _, _ in ranks]
    assert [info.rank for info in infos] == list(range(trial.nproc)), infos
    for info in infos:
        check_info(info)
        assert info.world_size == trial.nproc, info
        has_local = None not in (info.local_rank, info.local_world_size)
        assert has_local, f"no local rank or size: {info}"
    assert len({(info.master_addr, info.master_port) for info in infos}) == 1, infos
    for info, mark, home in ranks:
        assert mark == "yes", f"rank {info.rank} has {_MARK}={mark}"
        # If this process has no HOME, the one of `environ` is right.
        assert home != "/nowhere" or "HOME" not in os.environ, "a variable was overwritten"


@_law
def the_first_failure_is_named_with_its_traceback(trial: LauncherTrial) -> None:
    """The error has rank, traceback and exception of the first failure, not of a waiting rank."""
    error = trial.fails(_raise)
    for part in ("in _raise", "of rank"):
        assert part in error.traceback, f"its traceback isn't the rank's: {error.traceback!r}"
    assert isinstance(error.__cause__, KeyError), f"its cause is {error.__cause__!r}, not KeyError"


@_law
def an_exit_code_or_a_signal_is_named(trial: LauncherTrial) -> None:
    """The error names the rank, and if it is known the exit code, also of 0, or the signal."""
    for code in (_EXIT_CODE, 0):
        error = trial.fails(os._exit, code)
        assert error.exit_code in (code, None), f"exit code {error.exit_code}: {error}"
    error = trial.fails(signal.raise_signal, signal.SIGKILL)
    assert error.signal in ("SIGKILL", None), f"signal {error.signal}: {error}"


@_law
def a_result_that_cant_travel_is_a_failure(trial: LauncherTrial) -> None:
    """A result that cannot be pickled is a failure of its rank."""
    # The rank fails after its function has returned, so other ranks in a barrier would hang.
    error = trial.fails(threading.Lock, on_others=facts.get_rank)  # a lock can't be pickled
    assert "lock" in str(error), f"it doesn't say what can't be pickled: {error}"


@_law
def no_rank_is_left_behind(trial: LauncherTrial) -> None:
    """After a failure all ranks have ended, including sleeping ones that ignore SIGTERM."""
    trial.fails(_raise, on_others=_sleep_ignoring_sigterm)
    if not trial.wait_for_ends():  # ranks on other hosts can't sign in
        raise UntestableError("no rank could write into a folder of this host")


@_law
def the_parent_is_left_as_it_was(trial: LauncherTrial) -> None:
    """Variables, directory, search path and signal handlers are unchanged, also after failures."""
    before = _state_of_parent()
    for run in (partial(trial.spawn, _facts), partial(trial.fails, _raise)):
        run()
        after = _state_of_parent()
        names = [name for name in before | after if before.get(name) != after.get(name)]
        assert not names, f"changed: {', '.join(sorted(names))}"


def _state_of_parent() -> dict[str, Any]:
    """Return the state of this process that a launcher mustn't change."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    return {
        **{f"variable {name}": text for name, text in os.environ.items()},
        **{f"handler of {number.name}": signal.getsignal(number) for number in numbers},
        "directory": os.getcwd(),
        "search path": list(sys.path),
    }


@_law
def a_deadline_is_kept(trial: LauncherTrial) -> None:
    """The deadline of a block ends the job in CollectiveTimeoutError, and no rank is left."""
    for block_s in _DEADLINES_S:
        begin = time.monotonic()
        with deadline(block_s):
            _error_of(CollectiveTimeoutError, partial(trial.spawn, _sleep, trial.folder))
        took = time.monotonic() - begin
        assert took < block_s + _GRACE_S, f"a deadline of {block_s:g} s took {took:.1f} s"
        n_started = trial.wait_for_ends()
        if n_started == trial.nproc:  # else the deadline passed before all had started
            return
        trial.clean_up()
    raise UntestableError(f"only {n_started} of {trial.nproc} ranks had started by the deadline")


@_law
def an_interrupt_ends_all_ranks(trial: LauncherTrial) -> None:
    """Ctrl-C raises KeyboardInterrupt in the parent, and no rank is left."""
    if threading.current_thread() is not threading.main_thread():
        raise UntestableError("Ctrl-C interrupts only the main thread")
    is_over = threading.Event()

    def interrupt() -> None:
        limit = time.monotonic() + _START_S
        while not is_over.wait(_POLL_S):
            if len(trial.signed_in()) == trial.nproc or time.monotonic() > limit:
                os.kill(os.getpid(), signal.SIGINT)
                return

    # The caller may have its own handler, as pytest does, or ignore Ctrl-C, as a background job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt, daemon=True)
    try:
        interrupter.start()
        _error_of(KeyboardInterrupt, partial(trial.spawn, _sleep, trial.folder))
    finally:
        is_over.set()  # a late interrupt would be raised in the caller
        interrupter.join()
        signal.signal(signal.SIGINT, before)
    n_started = trial.wait_for_ends()
    if n_started < trial.nproc:
        started = f"only {n_started} of {trial.nproc} ranks"
        raise UntestableError(f"{started} had started on this host after {_START_S:g} s")


@_law
def wrong_calls_are_refused_before_anything_starts(trial: LauncherTrial) -> None:
    """An unknown option is an ArgumentError, what can't be pickled a PayloadError."""
    _refused(trial, ArgumentError, launcher_options={**trial.options, "no_such_option": 1})
    _refused(trial, ArgumentError, no_such_option=1)
    _refused(trial, ArgumentError, nnodes=0)
    _refused(trial, ArgumentError, backend="threads", launcher_options={})  # threads need none
    _refused(trial, PayloadError, threading.Lock())


def _refused(trial: LauncherTrial, kind: type[Exception], *more: Any, **options: Any) -> None:
    """Check that `spawn` raises `kind` before a rank begins, for these arguments and options."""
    given = {"backend": trial.backend, **trial.launcher_arguments, **options}
    args = (trial.folder, *more)
    call = partial(spawn, fn=_touch, args=args, nproc_per_node=trial.nproc, **given)
    _error_of(kind, call, str(given))
    assert not Path(trial.folder, "begun").exists(), f"{given}: refused after a rank had begun"


@_law
def a_script_ends_with_the_exit_code_of_its_rank(trial: LauncherTrial) -> None:
    """``unisono run --launcher`` runs a script in every rank; its result names the failed rank."""
    if trial.options:
        raise UntestableError("unisono run can't pass launcher_options")
    code = f"import os, sys; sys.exit({_EXIT_CODE} * (os.environ['RANK'] == '{trial.last}'))"
    run = find_script_runner(trial.launcher)
    ended: ScriptOutcome = run(Script((sys.executable, "-c", code), trial.nproc))
    assert ended.code == _EXIT_CODE, f"the exit code is {ended.code}, not {_EXIT_CODE}"
    assert ended.failed is not None, "no rank is named"
    assert ended.failed.rank == trial.last, f"rank {ended.failed.rank} is named, not {trial.last}"


def check_launcher(
    launcher: str,
    nproc: int = 2,
    *,
    backend: str = "gloo",
    laws: Iterable[str] | None = None,
    timeout_s: float = 120.0,
    options: Mapping[str, Any] | None = None,
) -> list[Outcome]:
    """Check laws on a launcher with a number of ranks.

    Each law has separate ranks.

    Args:
        launcher: its name, as `spawn` takes it.
        nproc: number of ranks.
        backend: the ranks' backend.
        laws: names; all laws if None.
        timeout_s: seconds that one law may take; applies in the main thread only.
        options: its ``launcher_options``.

    Returns:
        One outcome for each law, in order; ``"unsupported"`` if it can't be checked here.

    Raises:
        ArgumentError: the launcher is unknown.
        BackendUnavailableError: the launcher can't be used here.
    """
    find_launcher(launcher)  # raises before any law has begun
    done = []
    for name in LAUNCHER_LAWS if laws is None else laws:
        with tempfile.TemporaryDirectory(prefix="unisono-laws-") as folder:
            trial = LauncherTrial(launcher, nproc, backend, options or {}, folder)
            try:
                check = partial(_check, LAUNCHER_LAWS[name], trial, timeout_s)
                done.append(outcome_of(name, nproc, check))
            finally:
                trial.clean_up()
    return done


def _check(law: Law, trial: LauncherTrial, timeout_s: float) -> None:
    """Check a law; if it is broken, the error has the last output of ranks and launcher."""
    output = Path(trial.folder, "output")
    try:
        # Laws provoke failures, whose output would hide what `check_launcher` reports.
        with output.open("wb") as file, output_redirected(file.fileno()), _limited(timeout_s):
            law(trial)
    except UntestableError:  # a law that can't be checked isn't broken
        raise
    except _TookTooLongError as error:
        stack = "".join(traceback.format_tb(error.__traceback__)[-6:])
        reason = f"it wasn't done after {timeout_s:g} s\n{stack}"
    except SystemExit as error:
        reason = f"it would have ended this process: SystemExit({error.code!r})"
    except Exception as error:
        reason = text_of(error)
    else:
        return
    lines = output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    raise AssertionError("\n  ".join([reason, *(["printed last:", *lines] if lines else [])]))


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit the time of one law; only in the main thread, where a signal handler can end it."""
    # A thread measures the time: the one timer of setitimer may be in use by the caller, for
    # example by pytest-timeout.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise _TookTooLongError

    handler = signal.signal(_TOO_LONG, stop)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), _TOO_LONG))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:  # not an ExitStack, of which the signal could skip a callback
        try:
            timer.cancel()
            timer.join()  # a signal that was already sent arrives while this handler is set
        finally:
            signal.signal(_TOO_LONG, handler)
