"""The laws that every launcher keeps, and what checks them: one function a law."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import psutil

from unisono import facts
from unisono.collectives.gathers import all_gather
from unisono.collectives.groups import barrier
from unisono.deadlines import deadline
from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    LaunchError,
    PayloadError,
    WorkerFailedError,
)
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import Outcome as Ended
from unisono.lifecycle import spawn
from unisono.registry import find_launcher, find_script_runner
from unisono.testing._last_words import Witness, last_lines
from unisono.testing.runner import Outcome, Status
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("LAUNCHER_LAWS", "LauncherTrial", "check_launcher")

_T = TypeVar("_T")
_MARK = "UNISONO_CHECK_MARK"
_BLOCKS_S = (6.0, 40.0)  # deadlines of their law: the second where ranks weren't there by the first
_COME_S = 60.0  # for all ranks to be there before they are interrupted
_GRACE_S = 20.0  # for all ranks to end after it
_GONE_S = 5.0
_LOOK_S = 0.05
_EXIT_CODE = 7
_KINDS = (
    *("ABC", "Mapping", "Iterable", "Protocol", "context manager"),
    *("Enum", "NamedTuple", "dataclass"),
)


class _UntestableError(Exception):
    """Raised where a law can't be checked here; says why."""


class _TookTooLongError(BaseException):
    """Raised in the main thread where a law hangs."""


@dataclass(frozen=True, slots=True)
class LauncherTrial:
    """A launcher, and the job that laws let it make."""

    launcher: str
    nproc: int
    backend: str
    options: Mapping[str, Any]
    folder: str

    @property
    def last(self) -> int:
        """The rank that fails where one does."""
        return self.nproc - 1

    def spawn(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Spawn ranks with this launcher."""
        given: dict[str, Any] = {
            "launcher": self.launcher,
            "launcher_options": dict(self.options),
        }
        results: list[Any] = spawn(self.backend, fn, args, kwargs, self.nproc, **given)
        return results

    def launch(self, entry: Callable[[RankInfo], Any], environ: Mapping[str, str]) -> list[Any]:
        """Call the launcher itself."""
        plan = LaunchPlan(self.nproc)
        results: list[Any] = find_launcher(self.launcher)(
            entry, plan, environ=environ, **self.options
        )
        return results

    def fails(self, fn: Callable[..., Any], *args: Any) -> WorkerFailedError:
        """Spawn ranks of which the last one fails; demand that the error names it."""
        try:
            results = self.spawn(fn, self.last, self.folder, *args)
        except WorkerFailedError as error:
            assert error.rank == self.last, f"rank {error.rank} is named, not {self.last}: {error}"
            assert f"rank {self.last}" in str(error), f"its text names no rank: {error}"
            return error
        except LaunchError as error:
            raise AssertionError(f"a WorkerFailedError was due, not {_text(error)}") from error
        raise AssertionError(f"a WorkerFailedError was due, but spawn returned {results!r}")

    def processes(self) -> list[int]:
        """Return the processes of ranks of this host that have said who they are."""
        signed = [file.read_text().split() for file in Path(self.folder).glob("rank-*")]
        return [int(pid) for host, pid in signed if host == socket.gethostname()]

    def nobody_is_left(self) -> None:
        """Demand that all ranks that have said who they are end within seconds."""
        pids, limit = self.processes(), time.monotonic() + _GONE_S
        if not pids:
            raise _UntestableError("no rank could write into a folder of this host")
        while (left := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < limit:
            time.sleep(_LOOK_S)
        assert not left, f"processes {left} of ranks are left {_GONE_S:g} s later"

    def forget(self) -> None:
        """End what ranks of this host left, and forget who they were."""
        for file in Path(self.folder).glob("rank-*"):
            host, pid = file.read_text().split()
            if host == socket.gethostname():
                _kill(int(pid), file.stat().st_mtime)
            file.unlink()


Law = Callable[[LauncherTrial], None]
LAUNCHER_LAWS: dict[str, Law] = {}


def _law(check: Law) -> Law:
    LAUNCHER_LAWS[check.__name__] = check
    return check


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(pid: int, signed_at: float) -> None:
    """Kill a process, unless its number has gone to a later one."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() <= signed_at + 1.0:  # the clocks' grain
            process.kill()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# What ranks run.


def _sign(folder: str) -> None:
    """Write who this rank is, where the folder can be seen from its host."""
    with contextlib.suppress(OSError):
        partial = Path(folder, f"partial-{facts.get_rank()}")
        partial.write_text(f"{socket.gethostname()} {os.getpid()}")
        partial.replace(Path(folder, f"rank-{facts.get_rank()}"))


def _facts(local_rank: int) -> tuple[Any, ...]:
    ranks = all_gather(facts.get_rank())
    where = (facts.get_rank(), local_rank, facts.get_local_rank(), facts.get_world_size())
    return (*where, facts.get_nproc_per_node(), ranks, (socket.gethostname(), os.getpid()))


def _given(local_rank: int, data: bytes, make: Callable[[int], Any], *, word: str) -> Any:
    return len(data), data[-3:], make(facts.get_rank()), word


def _kinds() -> dict[str, Any]:
    """Make one of each kind of class, over those of the standard library, that programs have."""

    class Own(ABC):  # noqa: B024 - its metaclass is what counts
        def value(self) -> int:
            return 42

    class Items(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return len(key)

        def __iter__(self) -> Iterator[str]:
            return iter(("one", "three"))

        def __len__(self) -> int:
            return 2

    class Stream(Iterable[_T], Generic[_T]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(3))

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

    made = (Own(), Items(), Stream[int](), Speaker(), Held(), Color.RED, Point(2), Record(3))
    return dict(zip(_KINDS, made, strict=True))


def _use(local_rank: int, kinds: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    found: list[Any] = [type(type(kinds["ABC"])) is ABCMeta]
    with kinds["context manager"] as held:
        found.append(held is kinds["context manager"])
    found += [kinds["ABC"].value(), dict(kinds["Mapping"]), [*kinds["Iterable"]]]
    found += [kinds["Protocol"].value(), kinds["Enum"].name, kinds["NamedTuple"].x]
    return [*found, kinds["dataclass"].x], dict(kinds)


def _who(info: RankInfo) -> tuple[RankInfo, str | None, str | None]:
    return info, os.environ.get(_MARK), os.environ.get("HOME")


def _end(local_rank: int, who: int, folder: str, end: Callable[..., object], *args: Any) -> None:
    _sign(folder)
    barrier()
    if facts.get_rank() == who:
        end(*args)
    barrier()


def _raise() -> NoReturn:
    raise KeyError(f"of rank {facts.get_rank()}")


def _return_a_lock(local_rank: int, who: int, folder: str) -> Any:
    barrier()
    return threading.Lock() if facts.get_rank() == who else None


def _fail_among_sleepers(local_rank: int, who: int, folder: str) -> None:
    _sign(folder)
    barrier()
    if facts.get_rank() == who:
        raise ValueError("while others sleep")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _sleep(local_rank: int, folder: str) -> None:
    barrier()
    _sign(folder)
    time.sleep(600)


def _touch(local_rank: int, folder: str, *args: Any) -> None:
    Path(folder, "begun").touch()


# The laws.


@_law
def results_come_in_the_order_of_ranks(trial: LauncherTrial) -> None:
    """Each rank is a process of its own that knows its place and the others; results are a list."""
    results = trial.spawn(_facts)
    ranks = list(range(trial.nproc))
    assert [each[0] for each in results] == ranks, f"ranks {[each[0] for each in results]}"
    assert [each[5] for each in results] == [ranks] * trial.nproc, "all_gather of the ranks differs"
    assert {each[3] for each in results} == {trial.nproc}, "world sizes differ"
    for rank, local_rank, known_rank, _, nproc, _, _ in results:
        assert local_rank == known_rank, (
            f"rank {rank} is given {local_rank}, and knows {known_rank}"
        )
        assert 0 <= local_rank < nproc, f"rank {rank} has local rank {local_rank} of {nproc}"
    own = (socket.gethostname(), os.getpid())
    processes = {each[6] for each in results}
    assert len(processes) == trial.nproc, "two ranks share a process"
    assert own not in processes, "a rank is the process that launched the job"


@_law
def arguments_and_closures_arrive(trial: LauncherTrial) -> None:
    """A megabyte, a closure over a class that no module has, and keywords arrive as they were."""

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    factor = 3
    data = bytes(1 << 20) + b"end"
    results = trial.spawn(_given, data, lambda rank: Local(rank * factor).value, word="é")
    expected = [((1 << 20) + 3, b"end", rank * factor, "é") for rank in range(trial.nproc)]
    assert results == expected, f"got {results!r}, wanted {expected!r}"
    captured = object
    assert trial.spawn(lambda local_rank: captured.__name__) == ["object"] * trial.nproc


@_law
def classes_of_every_kind_arrive(trial: LauncherTrial) -> None:
    """An object whose class no module has is in a rank what it is here, and when it comes back."""
    # Classes over those of abc, collections.abc, contextlib, dataclasses, enum and typing.
    kinds = _kinds()
    known = [True, True, 42, {"one": 3, "three": 5}, [0, 1, 2], "spoken", "RED", 2, 3]
    for rank, (found, back) in enumerate(trial.spawn(_use, kinds)):
        assert found == known, f"rank {rank} found {found}, not {known}"
        for name, value in kinds.items():
            assert type(back[name]) is type(value), f"{name} came back as another class"


@_law
def every_rank_is_told_who_it_is(trial: LauncherTrial) -> None:
    """`entry` is called once in each rank with a whole RankInfo, and its results come back."""
    infos = [result[0] for result in trial.launch(_who, {})]
    assert [info.rank for info in infos] == list(range(trial.nproc)), infos
    for info in infos:
        check_info(info)
        assert info.world_size == trial.nproc, info
        assert info.local_rank is not None, f"no local rank: {info}"
        assert info.local_world_size is not None, f"no local world size: {info}"
    assert len({(info.master_addr, info.master_port) for info in infos}) == 1, infos


@_law
def variables_are_handed_over(trial: LauncherTrial) -> None:
    """Ranks have the variables of `environ`; what is set there already stays."""
    results = trial.launch(_who, {_MARK: "yes", "HOME": "/nowhere"})
    for info, mark, home in results:
        assert mark == "yes", f"rank {info.rank} has {_MARK}={mark}"
        assert home != "/nowhere" or "HOME" not in os.environ, "a variable was overwritten"


@_law
def the_first_failure_is_named_with_its_traceback(trial: LauncherTrial) -> None:
    """The error has rank, traceback and exception of who failed, not of one that waits."""
    error = trial.fails(_end, _raise)
    assert "in _raise" in error.traceback, f"its traceback isn't the rank's: {error.traceback!r}"
    assert "of rank" in error.traceback, f"its traceback isn't the rank's: {error.traceback!r}"
    assert isinstance(error.__cause__, KeyError), f"its cause is {error.__cause__!r}, not KeyError"


@_law
def an_exit_code_is_named(trial: LauncherTrial) -> None:
    """A rank that leaves by ``os._exit`` is named, and so is its exit code where it is known."""
    error = trial.fails(_end, os._exit, _EXIT_CODE)
    assert error.exit_code in (_EXIT_CODE, None), f"exit code {error.exit_code}: {error}"


@_law
def an_exit_without_a_result_is_a_failure(trial: LauncherTrial) -> None:
    """Success is a result, never an exit code of 0."""
    error = trial.fails(_end, os._exit, 0)
    assert error.exit_code in (0, None), f"exit code {error.exit_code}: {error}"


@_law
def a_signal_is_named(trial: LauncherTrial) -> None:
    """A rank that a signal ended is named, and so is the signal where it is known."""
    error = trial.fails(_end, signal.raise_signal, signal.SIGKILL)
    assert error.signal in ("SIGKILL", None), f"signal {error.signal}: {error}"


@_law
def a_result_that_cant_travel_is_a_failure(trial: LauncherTrial) -> None:
    """A result that can't be pickled is a failure of its rank."""
    error = trial.fails(_return_a_lock)
    assert "lock" in str(error), f"it doesn't say what can't be pickled: {error}"


@_law
def no_rank_is_left_behind(trial: LauncherTrial) -> None:
    """After a failure all ranks have ended, also those that sleep and don't hear SIGTERM."""
    trial.fails(_fail_among_sleepers)
    trial.nobody_is_left()


@_law
def the_parent_is_left_as_it_was(trial: LauncherTrial) -> None:
    """Variables, directory, search path and signal handlers are as before, after failures too."""
    before = _parent()
    trial.spawn(_facts)
    assert _parent() == before, _change(before, _parent())
    trial.fails(_end, _raise)
    assert _parent() == before, _change(before, _parent())


def _parent() -> dict[str, Any]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    return {
        "variables": dict(os.environ),
        "directory": os.getcwd(),
        "search path": list(sys.path),
        "signal handlers": {number.name: signal.getsignal(number) for number in numbers},
    }


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    names = [name for name in before if before[name] != after[name]]
    if names == ["variables"]:
        pairs = set(before["variables"].items()) ^ set(after["variables"].items())
        return f"variables changed: {sorted({name for name, _ in pairs})}"
    return f"{', '.join(names)} changed"


@_law
def a_deadline_is_kept(trial: LauncherTrial) -> None:
    """The deadline of a block ends the job, and says which ranks weren't done."""
    for block_s in _BLOCKS_S:
        begin = time.monotonic()
        try:
            with deadline(block_s):
                results = trial.spawn(_sleep, trial.folder)
        except CollectiveTimeoutError:
            took = time.monotonic() - begin
            assert took < block_s + _GRACE_S, f"a deadline of {block_s:g} s took {took:.1f} s"
        else:
            raise AssertionError(
                f"a CollectiveTimeoutError was due, but spawn returned {results!r}"
            )
        n_there = len(trial.processes())
        if n_there:
            trial.nobody_is_left()
        if n_there == trial.nproc:
            return
        trial.forget()
    raise _UntestableError(f"{n_there} of {trial.nproc} ranks were there by the deadline")


@_law
def an_interrupt_ends_all_ranks(trial: LauncherTrial) -> None:
    """Ctrl-C while ranks work is KeyboardInterrupt here, and no rank is left."""
    if threading.current_thread() is not threading.main_thread():
        raise _UntestableError("only the main thread is interrupted")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    is_over = threading.Event()
    interrupter = threading.Thread(target=_interrupt, args=(trial, is_over), daemon=True)
    try:
        interrupter.start()
        results = trial.spawn(_sleep, trial.folder)
    except KeyboardInterrupt:
        n_there = len(trial.processes())
        if n_there:
            trial.nobody_is_left()
        if n_there < trial.nproc:
            reason = f"{n_there} of {trial.nproc} ranks of this host were there after {_COME_S:g} s"
            raise _UntestableError(reason) from None
    else:
        raise AssertionError(f"a KeyboardInterrupt was due, but spawn returned {results!r}")
    finally:
        is_over.set()
        interrupter.join()
        signal.signal(signal.SIGINT, before)


def _interrupt(trial: LauncherTrial, is_over: threading.Event) -> None:
    """Interrupt the main thread once all ranks are there, or can't be seen in time."""
    limit = time.monotonic() + _COME_S
    while not is_over.wait(_LOOK_S):
        if len(trial.processes()) == trial.nproc or time.monotonic() > limit:
            os.kill(os.getpid(), signal.SIGINT)
            return


@_law
def wrong_options_are_refused_before_anything_starts(trial: LauncherTrial) -> None:
    """An option that the launcher doesn't name, and one that no launcher takes, are refused."""
    wrong: tuple[dict[str, Any], ...] = (
        {"launcher_options": {**trial.options, "no_such_option": 1}},
        {"no_such_option": 1},
        {"nnodes": 0},
    )
    for each in wrong:
        given = {"launcher": trial.launcher, "launcher_options": dict(trial.options), **each}
        _refused(trial, ArgumentError, trial.backend, given, ())
    _refused(trial, ArgumentError, "threads", {"launcher": trial.launcher}, ())  # has no processes


@_law
def what_cant_be_pickled_is_refused_before_anything_starts(trial: LauncherTrial) -> None:
    """An argument that can't be pickled is a PayloadError here, and no rank begins."""
    given = {"launcher": trial.launcher, "launcher_options": dict(trial.options)}
    _refused(trial, PayloadError, trial.backend, given, (threading.Lock(),))


def _refused(
    trial: LauncherTrial,
    kind: type[Exception],
    backend: str,
    given: Mapping[str, Any],
    more: tuple[Any, ...],
) -> None:
    args = (trial.folder, *more)
    try:
        results = spawn(backend, _touch, args, None, trial.nproc, **given)
    except kind:
        pass
    except Exception as error:
        raise AssertionError(f"{kind.__name__} was due for {given}, not {_text(error)}") from error
    else:
        raise AssertionError(f"{kind.__name__} was due for {given}, but it returned {results!r}")
    assert not Path(trial.folder, "begun").exists(), f"{given}: refused after a rank had begun"


@_law
def a_script_ends_with_the_exit_code_of_its_rank(trial: LauncherTrial) -> None:
    """``unisono run --launcher`` runs a script in every rank, and names the one that failed."""
    if trial.options:
        raise _UntestableError("unisono run hands no launcher_options over")
    code = f"import os, sys; sys.exit({_EXIT_CODE} * (os.environ['RANK'] == '{trial.last}'))"
    run = find_script_runner(trial.launcher)
    ended: Ended = run(Script((sys.executable, "-c", code), trial.nproc))
    assert ended.code == _EXIT_CODE, f"the exit code is {ended.code}, not {_EXIT_CODE}"
    assert ended.failed is not None, "no rank is named"
    assert ended.failed.rank == trial.last, f"rank {ended.failed.rank} is named, not {trial.last}"


def check_info(info: Any) -> None:
    """Demand that a RankInfo has every field in its range."""
    assert isinstance(info, RankInfo), f"got {type(info).__name__}, not RankInfo"
    limits = {
        "world_size": (1, None),
        "rank": (0, info.world_size),
        "local_world_size": (1, info.world_size + 1),
        "local_rank": (0, info.local_world_size or info.world_size),
        "nnodes": (1, info.world_size + 1),
        "node_rank": (0, info.nnodes or info.world_size),
        "master_port": (1, 65536),
    }
    for name, (least, end) in limits.items():
        value = getattr(info, name)
        if value is None and name not in ("rank", "world_size"):
            continue
        assert type(value) is int, f"{name}={value!r} isn't an int"
        assert value >= least, f"{name}={value} is below {least}"
        assert end is None or value < end, f"{name}={value} should be below {end}"
    for name in ("master_addr", "private_store", "job_id"):
        value = getattr(info, name)
        assert value is None or (isinstance(value, str) and value), f"{name}={value!r}"
    assert isinstance(info.source, str) and info.source.strip(), f"source={info.source!r}"
    assert isinstance(info.store_is_hosted, bool), f"store_is_hosted={info.store_is_hosted!r}"
    if info.store_is_hosted:
        assert info.master_addr is not None, "a store is hosted, but there is no master_addr"
        assert info.master_port is not None, "a store is hosted, but there is no master_port"


# The run of the laws.


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Let one law take so long, in the main thread; a timer that ran before goes on after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _give_up)
    before_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before_s:
            left_s = before_s - (time.monotonic() - begin)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, _LOOK_S), interval_s)


def _give_up(*_: object) -> NoReturn:
    raise _TookTooLongError


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

    Each law has ranks of its own. If the launcher's library ends this process in the midst
    of a law, a process of ours says so on stderr, with what was printed last.

    Args:
        launcher: its name, as `spawn` takes it.
        nproc: number of ranks.
        backend: what the ranks use.
        laws: names; all laws if None.
        timeout_s: seconds that one law may take; heeded in the main thread.
        options: its ``launcher_options``.

    Returns:
        One outcome for each law, in order; ``"unsupported"`` where it can't be checked here.

    Raises:
        ArgumentError: there is no such launcher.
        BackendUnavailableError: it can't be used here.
    """
    find_launcher(launcher)
    done = []
    with Witness(f"launcher {launcher} with {backend}") as witness:
        for name in LAUNCHER_LAWS if laws is None else laws:
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="unisono-laws-") as folder:
                trial = LauncherTrial(launcher, nproc, backend, options or {}, folder)
                try:
                    output = witness.enter(name, folder)
                    status, reason = _check(LAUNCHER_LAWS[name], trial, output, timeout_s)
                finally:
                    witness.leave()
                    trial.forget()
            seconds = time.perf_counter() - begin
            done.append(Outcome(name, nproc, status, reason, seconds))
    return done


@contextlib.contextmanager
def _output_in(file: Path) -> Iterator[None]:
    """Let what ranks and their launchers print go to a file: failures are what laws provoke."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(1), os.dup(2)]
    try:
        with file.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, fd in enumerate(before, 1):
            os.dup2(fd, target)
            os.close(fd)


def _check(law: Law, trial: LauncherTrial, output: Path, timeout_s: float) -> tuple[Status, str]:
    with _output_in(output):
        status, reason = _ended(law, trial, timeout_s)
    if status == "failed":
        reason += "".join(f"\n  {line}" for line in last_lines(trial.folder))
    return status, reason


def _ended(law: Law, trial: LauncherTrial, timeout_s: float) -> tuple[Status, str]:
    try:
        with _limited(timeout_s):
            law(trial)
    except _UntestableError as error:
        return "unsupported", str(error)
    except _TookTooLongError as error:
        stack = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return "failed", f"it wasn't done after {timeout_s:g} s\n{stack}"
    except SystemExit as error:
        return "failed", f"it would have ended this process: SystemExit({error.code!r})"
    except Exception as error:
        return "failed", str(error) if isinstance(error, AssertionError) else _text(error)
    return "passed", ""
