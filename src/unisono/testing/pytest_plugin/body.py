"""The rank's side: a small pytest session within each rank that runs one test at a time.

It collects the same files as the parent's session, so a test and its parameters are found by the
test's id, without pickling. Fixtures run in the rank, with the same lifetime as in the
parent.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from warnings import WarningMessage

import pytest
from _pytest.config import Config, create_terminal_writer
from _pytest.debugging import post_mortem

from unisono import context, facts
from unisono.collectives.gathers import all_gather
from unisono.errors import UnisonoError
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.worker import describe
from unisono.pickling import dumps
from unisono.testing.cases import difference
from unisono.testing.pytest_plugin.plugin import IN_RANK, OF_A_PROCESS
from unisono.topology import named
from unisono.tracebacks import hides

# Plug-ins for the terminal, timing or the whole session, which run in the parent.
_PLUGINS_OF_PARENT = (
    "terminal", "terminalprogress", "junitxml", "pastebin", "faulthandler", "stepwise",
    "doctest", "timeout", "unisono-ranks", "rerunfailures",
)  # fmt: skip
_NOT_LOADED = ("pytest_cov", "xdist", "xdist.looponfail")
# Plug-ins that change the whole process, which thread ranks share with the parent.
_PLUGINS_OF_A_PROCESS = (
    "capture", "logging", "recwarn", "monkeypatch", "assertion", "warnings",
    "unraisableexception", "threadexception", "debugging",
)  # fmt: skip
_CURRENT_TEST = "PYTEST_CURRENT_TEST"  # the variable that pytest sets in each phase of a test
_lock = threading.Lock()
_here = threading.local()  # this rank's session; the rank may be a thread


@dataclass(frozen=True)
class Setting:
    """Settings that the ranks' sessions take over from the parent's."""

    options: Mapping[str, Any]
    root: str
    ini: str | None
    files: Sequence[str]
    base_temporary_dir: str
    parent_pid: int


@dataclass
class RankReport:
    """One rank's report of one test: pytest's reports, serialized, and further facts."""

    phases: list[dict[str, Any]] = field(default_factory=list)
    failed_at: float = 0.0
    is_secondary: bool = False
    has_lost_context: bool = False
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)


class TestFailed(Exception):
    """Raised in a rank whose test didn't pass, so that the job ends without waiting for others."""

    __test__ = False  # pytest would collect it by its name

    def __init__(self, report: RankReport) -> None:
        super().__init__(report)
        self.report = report


@dataclass(frozen=True)
class World:
    """The ranks that run a test: the value of the fixture ``world``.

    Args:
        rank: this rank.
        size: number of ranks.
    """

    rank: int
    size: int

    def same(self, value: object, *, among: Collection[int] | None = None) -> None:
        """Check that a value's type, dtype, shape and bits are the same on all ranks.

        Collective over all ranks.

        Args:
            value: the value on this rank.
            among: the ranks whose values are compared; None compares those of all ranks.
        """
        __tracebackhide__ = hides
        # Pickled, because all_gather joins tensors, and types may differ among ranks.
        pickles = all_gather(dumps(value))
        chosen = range(self.size) if among is None else sorted(among)
        values = {rank: pickle.loads(pickles[rank]) for rank in chosen}
        groups: list[list[int]] = []  # ranks of equal values, which may be unhashable
        for rank in chosen:
            equal = [each for each in groups if not difference(values[rank], values[each[0]])]
            if equal:
                equal[0].append(rank)
            else:
                groups.append([rank])
        if len(groups) > 1:
            shown = "".join(f"\n  {named(group)}: {values[group[0]]!r}" for group in groups)
            where = difference(values[groups[1][0]], values[groups[0][0]])
            raise AssertionError(f"the ranks have different values:{shown}\n  they differ: {where}")

    @contextmanager
    def raises_on(self, rank: int | Collection[int], error: type[BaseException]) -> Iterator[None]:
        """Check that a block raises on certain ranks, and on no others.

        Args:
            rank: the rank that should raise, or several.
            error: the expected error, which ends the block; other errors propagate.

        Raises:
            AssertionError: the block didn't raise on this rank (if it is among `rank`).
        """
        __tracebackhide__ = hides
        if not self.only(rank):
            yield
            return
        try:
            yield
        except error:
            return
        raise AssertionError(f"rank {self.rank} of {self.size} didn't raise {error.__name__}")

    def only(self, rank: int | Collection[int]) -> bool:
        """Return whether this rank is among the given ones: ``if world.only(0): ...``."""
        return self.rank == rank if isinstance(rank, int) else self.rank in rank


def begin(local_rank: int, setting: Setting) -> None:
    """Start this rank's session."""
    with _lock:  # ranks that are threads import the same test modules
        _here.session = RankSession(setting)


def in_session(local_rank: int, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of this rank's session."""
    return method(_here.session, *arguments)


class RankSession:
    """A pytest session without terminal or main loop that runs one test at a time."""

    def __init__(self, setting: Setting) -> None:
        self.is_process: bool = os.getpid() != setting.parent_pid
        self._model = context.current_model()  # a test may replace it: see `run`
        self._report = RankReport()
        self._tmp_path = Path()
        # Of the last test, for `debug`.
        self._failure: pytest.ExceptionInfo[BaseException] | None = None
        self._errors: dict[str, str] = {}  # by file, why it can't be collected
        # From here on hooks are called, which use the attributes above.
        self._config = self._configured(setting)
        self._session = pytest.Session.from_config(self._config)
        self._config.hook.pytest_sessionstart(session=self._session)
        self._items = {
            item.nodeid: item for item in self._session.perform_collect(list(setting.files))
        }

    def _configured(self, setting: Setting) -> Config:
        rank = facts.get_rank()
        options = {**setting.options, IN_RANK: rank}
        # pytest deletes an existing base directory, so each rank's session has its own.
        name = f"{facts.get_world_size()}-{facts.backend()}-rank{rank}-{os.getpid()}"
        options["basetemp"] = str(Path(setting.base_temporary_dir, name))
        # pytest would warn that this package is already imported.
        ignored = "ignore::pytest.PytestAssertRewriteWarning"
        options["pythonwarnings"] = [*(options.get("pythonwarnings") or ()), ignored]
        off = list(_NOT_LOADED)
        if not self.is_process:
            off += _PLUGINS_OF_A_PROCESS
            options["assertmode"] = "plain"  # the parent has rewritten the modules' assertions
            # The parent has extended the search path of this process.
            options["override_ini"] = [*(options.get("override_ini") or ()), "pythonpath="]
        elif options.get("capture") == "fd":
            options["capture"] = "sys"
        arguments = [f"-pno:{name}" for name in off]
        arguments += ["-c", setting.ini] if setting.ini else []
        arguments += [f"--rootdir={setting.root}", *setting.files]
        config = Config.fromdictargs(options, arguments)
        for name in _PLUGINS_OF_PARENT:
            plugin = config.pluginmanager.get_plugin(name)
            if plugin is not None:
                config.pluginmanager.unregister(plugin)
        if not self.is_process:
            config.pluginmanager.register(_Refused())
        config.pluginmanager.register(_NoTerminal(config), "terminalreporter")
        config.pluginmanager.register(self, "unisono-rank")
        config._do_configure()
        return config

    def run(self, nodeid: str, tmp_path: str) -> RankReport:
        """Run one test with its fixtures."""
        item = self._items.get(nodeid)
        if item is None:
            file = nodeid.partition("::")[0]
            if file in self._errors:
                raise UnisonoError(f"this rank can't collect {file}:\n{self._errors[file]}")
            raise UnisonoError(
                f"this rank collects no test {nodeid}: the tests of a file and their parameters "
                "must be the same in every process"
            )
        self._report, self._failure, self._tmp_path = RankReport(), None, Path(tmp_path)
        # Module and class fixtures are closed only when the parent's session leaves that module or
        # class, not after each test.
        self._session._setupstate.teardown_exact(item)
        # Passed as the next item so that pytest keeps the module's and class's fixtures.
        around: Any = item.parent
        item.ihook.pytest_runtest_protocol(item=item, nextitem=around)
        # If a test finalized or replaced its rank's context, that rank can't run another test.
        self._report.has_lost_context = context.current_model() is not self._model
        if any(phase["outcome"] != "passed" for phase in self._report.phases):
            raise TestFailed(self._report)
        return self._report

    def call(self, pickled: bytes) -> Any:
        """Run a function sent by the parent."""
        function, args, kwargs = load_from_parent(pickled, defines=self.is_process)
        return function(*args, **kwargs)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """Ignore the error if another rank of this process has deleted pytest's variable."""
        # pytest deletes PYTEST_CURRENT_TEST last, so the teardown is complete.
        try:
            return (yield)
        except KeyError as error:
            if error.args != (_CURRENT_TEST,):
                raise
        return None

    def end_fixtures(self, kept: Sequence[str]) -> None:
        """Close the fixtures of all modules and classes except those in `kept`."""
        state = self._session._setupstate
        nodes = [node for node in state.stack if node.nodeid in kept]
        next_test: Any = SimpleNamespace(listchain=lambda: nodes)  # teardown reads nothing else
        state.teardown_exact(next_test if kept else None)

    def debug(self, stdin: str) -> None:
        """Start the debugger at the last failure; a process rank reads from `stdin`."""
        if self._failure is None:
            return
        # pytest's `post_mortem` takes an exception since Python 3.13, and a traceback before.
        at = self._failure.value if sys.version_info >= (3, 13) else self._failure.tb
        if not self.is_process:
            post_mortem(at)  # threads use the parent's terminal
            return
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        saved = os.dup(0)
        _read_from(os.open(stdin, os.O_RDONLY))
        try:
            post_mortem(at)
        finally:
            _read_from(saved)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record why a file can't be collected."""
        if report.failed:
            self._errors[report.nodeid] = str(report.longrepr)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Record when and why this rank failed."""
        del item
        report = yield
        # Only the first failure counts, as one in teardown may follow from it.
        if report.failed and call.excinfo is not None and not self._report.failed_at:
            self._report.failed_at = time.monotonic()
            self._report.is_secondary = describe(call.excinfo.value).is_secondary
            self._failure = call.excinfo
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a report for the parent."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._report.phases.append(data)

    def pytest_warning_recorded(self, warning_message: WarningMessage) -> None:
        """Record a warning for the parent's summary."""
        text, line = str(warning_message.message), warning_message.lineno
        known = (text, warning_message.category, warning_message.filename, line)
        self._report.warnings.append(known)

    @pytest.fixture
    def world(self) -> World:
        """Return the `World` of the test."""
        return World(facts.get_rank(), facts.get_world_size())

    @pytest.fixture
    def tmp_path(self) -> Path:
        """Return a directory that all ranks of the test share."""
        self._tmp_path.mkdir(parents=True, exist_ok=True)
        return self._tmp_path


def _read_from(fd: int) -> None:
    """Redirect stdin to a descriptor, and close the descriptor."""
    os.dup2(fd, 0)
    os.close(fd)


class _NoTerminal:
    """Terminal reporter without output; pytest 8's comparisons use its writer."""

    def __init__(self, config: Config) -> None:
        self._tw = create_terminal_writer(config, io.StringIO())


def _refused(name: str) -> Any:
    """Make a fixture of this name that fails the test."""

    @pytest.fixture(name=name)
    def refuse(_: object) -> None:
        pytest.fail(
            f"the fixture {name} affects the whole process, and thread ranks share one process: "
            'run the test with process ranks, as with @pytest.mark.ranks(2, on="gloo")',
            pytrace=False,
        )

    return refuse


# A plug-in that replaces pytest's fixtures of these names in thread ranks.
_Refused = type("_Refused", (), {name: _refused(name) for name in OF_A_PROCESS})
