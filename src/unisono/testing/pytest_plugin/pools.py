"""Warm ranks by backend and number, which run tests until one leaves them unusable."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    UnisonoError,
    UnknownBackendError,
)
from unisono.launchers.job.output import ByThread, RankStream
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.pool.call import PoolCall
from unisono.pool.pool import WorkerPool, end_replicas, outcome
from unisono.testing.pytest_plugin import reports
from unisono.testing.pytest_plugin.body import RankSession, Setting, begin, in_session
from unisono.testing.pytest_plugin.plugin import Place, place_of, timeout_of
from unisono.tracebacks import hides

__tracebackhide__ = hides

_START_S = 120.0  # for ranks to start, and to collect the tests
_THREAD = "unisono-rank-"  # prefix of the names of threads that are ranks
_PLAIN = (type(None), bool, int, float, str)
# Options of the parent's session that don't apply to ranks, which run single tests.
_FALSE_IN_RANKS = (
    "usepdb", "trace", "lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "collectonly",
    "setuponly", "setupshow", "setupplan", "cacheclear", "looponfail",
)  # fmt: skip
_NONE_IN_RANKS = (
    "deselect", "xmlpath", "pastebin", "durations", "numprocesses", "inifilename", "rootdir",
)  # fmt: skip
_OPTIONS_IN_RANKS: dict[str, Any] = {
    **dict.fromkeys(_FALSE_IN_RANKS, False),
    **dict.fromkeys(_NONE_IN_RANKS),
    "keyword": "",
    "markexpr": "",
    "maxfail": 0,
    "dist": "no",
    "continue_on_collection_errors": True,
}


class Pool:
    """Ranks of one backend, with a session of pytest in each while they run."""

    def __init__(
        self, backend: str, size: int, setting: Callable[[], Setting], keeps_failures: bool
    ) -> None:
        self._backend = backend
        self.size = size
        self._setting = setting
        # For the debugger, ranks that a failure left busy are held until the next call.
        self._keeps_failures = keeps_failures
        self._is_held = False
        self._pool = WorkerPool(backend, size)

    @property
    def is_warm(self) -> bool:
        """Whether its ranks are running."""
        return bool(self._pool.pids)

    @property
    def are_threads(self) -> bool:
        """Whether its ranks are running as threads of this process."""
        return {*self._pool.pids} == {os.getpid()}

    def run(self, method: Callable[..., Any], *args: Any, timeout_s: float | None) -> PoolCall:
        """Call a method of every rank's session."""
        if self._is_held:
            self.drop()
        if not self.is_warm:
            begun = outcome(self._pool, begin, (self._setting(),), _START_S)
            if len(begun.answers) < self.size:
                self.drop()
                raise reports.error_of(begun, self.size, "starting the ranks", _START_S)
        keep = self._keeps_failures
        call = outcome(self._pool, in_session, (method, *args), timeout_s, keep=keep)
        self._is_held = not call.replicas_stay
        return call

    def debug(self, rank: int) -> None:
        """Start the debugger at the last failure of a rank."""
        stdin = f"/proc/{os.getpid()}/fd/0"  # the rank opens the stdin of this process
        if not Path(stdin).exists():  # as on macOS, which has no /proc
            stdin = "/dev/tty"
        asked = outcome(self._pool, in_session, (RankSession.debug, stdin), only=[rank], keep=True)
        # Quitting the debugger raises in the rank, and ends the session here.
        failure = asked.failures.get(rank)
        if failure is not None and failure.cause is not None:
            raise pickle.loads(failure.cause)

    def drop(self) -> None:
        """End the ranks, busy or not."""
        self._is_held = False
        end_replicas(self._pool)

    def close(self) -> None:
        """End idle ranks, after their threads and exit handlers."""
        if self._is_held:
            self.drop()
        with contextlib.suppress(UnisonoError):  # threads or exit handlers of a rank have failed
            self._pool.close()
        self._pool = WorkerPool(self._backend, self.size)  # a closed one can't start ranks again


class Pools:
    """All warm ranks of a session; registered as its plug-in at the first test in ranks."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._pools: dict[tuple[str, int], Pool] = {}
        self._numbers = itertools.count(1)
        self._merged: reports.Merged | None = None  # of the last test
        manager = session.config.pluginmanager
        self._debugger: Any = manager.get_plugin("pdbinvoke")  # of --pdb; it can't debug ranks
        self._is_debugged = self._debugger is not None
        if self._is_debugged:
            manager.unregister(self._debugger)

    def _pool(self, backend: str, size: int) -> Pool:
        if (backend, size) not in self._pools:
            self._pools[backend, size] = Pool(backend, size, self._setting, self._is_debugged)
        return self._pools[backend, size]

    def _temporary(self) -> Path:
        config: Any = self._session.config
        return Path(config._tmp_path_factory.getbasetemp())

    def _setting(self) -> Setting:
        config = self._session.config
        # Ranks needn't collect files without marked tests.
        marked = [item for item in self._session.items if place_of(item) is not None]
        files = dict.fromkeys(str(item.path) for item in marked)
        options = {key: value for key, value in vars(config.option).items() if _is_plain(value)}
        options.pop("file_or_dir", None)  # `Setting.files` takes its place
        temporary = self._temporary() / "ranks"
        temporary.mkdir(exist_ok=True)
        ini = None if config.inipath is None else str(config.inipath)
        return Setting(
            options={**options, **_OPTIONS_IN_RANKS},
            root=str(config.rootpath),
            ini=ini,
            files=tuple(files),
            base_temporary_dir=str(temporary),
            parent_pid=os.getpid(),
        )

    def ranks(self, size: int, *, on: str = "threads", timeout: float | None = None) -> RankPool:
        """Return ranks for functions of a test that stays in the parent."""
        return RankPool(self._pool(on, size), timeout_of(self._session.config, timeout))

    def run_test(self, item: pytest.Function, place: Place) -> None:
        """Run a marked test in its ranks, and raise unless it passes."""
        self._merged = None  # else a test without a report would get that of the last test
        try:
            pool = self._pool(place.backend, place.size)
        except UnknownBackendError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        name = re.sub(r"\W", "_", item.name)[:30]  # as pytest names `tmp_path`
        tmp_path = str(self._temporary() / f"{name}-{next(self._numbers)}")
        limit_s = None if self._is_debugged else place.timeout_s  # a debugger waits for its user
        is_kept = item.config.getoption("capture", "fd") != "no"
        try:
            with _output_of_threads(is_kept) as printed:
                answers = pool.run(RankSession.run, item.nodeid, tmp_path, timeout_s=limit_s)
        except ArgumentError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        except BackendUnavailableError as error:
            raise pytest.skip.Exception(str(error), _use_item_location=True) from None
        self._merged = merged = reports.merge(answers, place, item, printed)
        if merged.has_lost_context and not self._is_debugged:  # a debugger still needs the ranks
            pool.drop()
        merged.raise_unless_passed()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Replace this process's report of a test by the merged report of its ranks."""
        report = yield
        if call.when == "call" and place_of(item) is not None and self._merged is not None:
            self._merged.copy_to(report)
        return report

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        """Start the debugger of ``--pdb`` in a failed rank; for other failures, in this process."""
        if not self._is_debugged:
            return
        place = place_of(node)
        if place is None or call.when != "call":
            self._debugger.pytest_exception_interact(node=node, call=call, report=report)
            return
        manager = node.config.pluginmanager
        capture, terminal = map(manager.get_plugin, ("capturemanager", "terminalreporter"))
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        terminal.ensure_newline()
        report.toterminal(terminal._tw)  # as pytest does before its own debugger
        report._pdbshown = True  # read by pytest's own summary
        failed = [] if self._merged is None else self._merged.failed  # begins with the cause
        wanted = node.config.getoption("ranks_pdb")
        if not failed:
            terminal.write_line("no rank is left to debug: see the report")
            return
        rank = next((one for one in (wanted, 0) if one in failed), failed[0])
        if wanted is not None and rank != wanted:
            terminal.write_line(f"rank {wanted} hasn't failed")
        terminal.write_sep(">", f"entering PDB in rank {rank} of {place.size} ({place.backend})")
        terminal.flush()  # the rank prints to another stream
        self._pool(place.backend, place.size).debug(rank)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Start the debugger at an internal error of pytest."""
        if self._is_debugged:
            self._debugger.pytest_internalerror(excinfo=excinfo)

    @pytest.hookimpl(trylast=True)  # after the session's own teardown
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End fixtures in the ranks whose module or class the session leaves."""
        kept = [] if nextitem is None else [node.nodeid for node in nextitem.listchain()]
        left = {node.nodeid for node in item.listchain()[:-1]}.difference(kept)
        for pool in self._pools.values() if left else ():
            if pool.is_warm:
                _end_fixtures(pool, kept)

    def end_threads(self) -> None:
        """End ranks that are threads, so that this process can have its own context."""
        for pool in self._pools.values():
            if pool.are_threads:
                try:
                    _end_fixtures(pool, [])
                finally:
                    pool.close()

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()


def _end_fixtures(pool: Pool, kept: list[str]) -> None:
    """End the fixtures in a pool's ranks, except those of the nodes in `kept`."""
    answers = pool.run(RankSession.end_fixtures, kept, timeout_s=_START_S)
    if len(answers.answers) < pool.size:
        error = reports.error_of(answers, pool.size, "ending fixtures", _START_S)
        pytest.fail(str(error), pytrace=False)


@dataclass(frozen=True)
class RankPool:
    """Ranks that stay warm: the value of the fixture ``ranks``."""

    _pool: Pool
    _timeout_s: float

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` in every rank, where it may call collectives."""
        pickled = pickle_for_worker((function, args, kwargs))
        answers = self._pool.run(RankSession.call, pickled, timeout_s=self._timeout_s)
        size = self._pool.size
        if len(answers.answers) < size:
            name = str(getattr(function, "__qualname__", function))
            raise reports.error_of(answers, size, name, self._timeout_s)
        # Each rank's list of answers has one item, as each rank had one task.
        return [pickle.loads(answers.answers[rank][0]) for rank in range(size)]


class _ByRank(ByThread):
    """A text stream with a separate target for each rank that is a thread."""

    def __init__(self, stream: TextIO, is_kept: bool) -> None:
        super().__init__(stream)
        self._is_kept = is_kept

    def current(self) -> Any:
        """Return the target of this thread: its rank's, or the stream if it isn't a rank."""
        thread = threading.current_thread().name
        if not thread.startswith(_THREAD):
            return self.stream
        rank = int(thread.removeprefix(_THREAD))
        if rank not in self.streams:  # no lock, as no other thread sets this rank's stream
            self.streams[rank] = io.StringIO() if self._is_kept else RankStream(self.stream, rank)
        return self.streams[rank]


@contextlib.contextmanager
def _output_of_threads(is_kept: bool) -> Iterator[reports.Printed]:
    """Separate the output of thread ranks; keep it, or prefix its lines with the rank."""
    out: Any = _ByRank(sys.stdout, is_kept)
    err: Any = _ByRank(sys.stderr, is_kept)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield {"stdout": out.streams, "stderr": err.streams} if is_kept else {}
        finally:
            for stream in (*out.streams.values(), *err.streams.values()):
                stream.flush()  # writes incomplete lines, which have waited for their end


def _is_plain(value: object) -> bool:
    """Return whether an option consists of plain values, which any process can load."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
