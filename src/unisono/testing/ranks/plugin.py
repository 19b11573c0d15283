"""What pytest loads: options, the mark ``ranks``, and the fixtures ``world`` and ``ranks``.

It is loaded in every session where unisono is installed, so torch and the rest of unisono wait
until the first test that is marked, or asks for ``ranks``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

PLACE = "_ranks"
"""The parameter that tells how many ranks a test runs in, and on what."""
IN_RANK = "unisono_rank"
"""The option that a rank's own configuration has, and the session's hasn't."""
OF_A_PROCESS = frozenset(
    {
        *("caplog", "capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys"),
        *("monkeypatch", "recwarn"),
    }
)
"""Fixtures that change the whole process, which ranks that are threads share."""
_DEFAULT_ON_PROCESSES = ("gloo",)
_DEFAULT_ON = ("threads", *_DEFAULT_ON_PROCESSES)
_MARK = (
    'ranks(*sizes, on=("threads", "gloo"), timeout=30): run the test\'s body in so many ranks, '
    "once for each size and backend; timeout is in seconds"
)


@dataclass(frozen=True)
class Place:
    """Where a test runs.

    Args:
        size: how many ranks.
        backend: what connects them.
        timeout_s: seconds that the test may take.
    """

    size: int
    backend: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.size}-{self.backend}"


def place_of(item: pytest.Item) -> Place | None:
    """Tell where a test runs; None for a test of the parent's own."""
    callspec = getattr(item, "callspec", None)
    place = None if callspec is None else callspec.params.get(PLACE)
    return place if isinstance(place, Place) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of the ini file."""
    group = parser.getgroup("ranks", "tests in several ranks (unisono)")
    group.addoption(
        "--ranks-on",
        metavar="BACKENDS",
        help="backends of tests marked ranks, such as threads,gloo; it replaces what the mark says",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        metavar="SECONDS",
        help="seconds that a test marked ranks may take, unless its mark says it (default: 30)",
    )
    group.addoption(
        "--ranks-pdb",
        type=int,
        metavar="N",
        help="the rank in which --pdb starts the debugger (default: 0, else the first that failed)",
    )
    parser.addini("ranks_on", "backends of tests marked ranks", type="args", default=[])
    parser.addini("ranks_timeout", "seconds that a test marked ranks may take", default="30")


@pytest.hookimpl(trylast=True)  # after pytest's own debugger
def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark; in the session itself, take over the tests that bear it."""
    config.addinivalue_line("markers", _MARK)
    if not hasattr(config.option, IN_RANK):
        session = _Session()
        config.pluginmanager.register(session, "unisono-ranks")
        debugger = config.pluginmanager.get_plugin("pdbinvoke")
        if debugger is not None:
            config.pluginmanager.unregister(debugger)
            config.pluginmanager.register(_Debugger(debugger, session), "pdbinvoke")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each size and backend."""
    marks = _marks(metafunc.definition)
    places = {str(place): place for mark in marks for place in _places(mark, metafunc)}
    if places:
        metafunc.fixturenames.append(PLACE)
        metafunc.parametrize(PLACE, list(places.values()), ids=list(places))


def _marks(test: pytest.Item) -> list[pytest.Mark]:
    """Return all marks of the test itself, else of its class, else of its module."""
    for node in reversed(test.listchain()):
        own = [mark for mark in reversed(node.own_markers) if mark.name == "ranks"]
        if own:
            return own
    return []


def _places(mark: pytest.Mark, metafunc: pytest.Metafunc) -> Iterator[Place]:
    config, test = metafunc.config, metafunc.definition.name
    unknown = sorted(set(mark.kwargs) - {"on", "timeout"})
    if unknown:
        text = f"{test}: mark ranks takes on and timeout, not {', '.join(unknown)}"
        pytest.fail(text, pytrace=False)
    sizes = [size for size in mark.args if type(size) is int and size > 0]
    if not sizes or len(sizes) < len(mark.args):
        given = ", ".join(map(repr, mark.args))
        text = f"{test}: mark ranks({given}) needs numbers of ranks, such as ranks(1, 2)"
        pytest.fail(text, pytrace=False)
    timeout_s = mark.kwargs.get("timeout", config.getoption("ranks_timeout"))
    if timeout_s is None:
        timeout_s = config.getini("ranks_timeout")
    for size in sizes:
        for backend in _backends(mark, metafunc):
            yield Place(size, backend, float(timeout_s))


def _backends(mark: pytest.Mark, metafunc: pytest.Metafunc) -> list[str]:
    """Tell on what a test runs: option, mark, ini file, default."""
    config = metafunc.config
    for given in (config.getoption("ranks_on"), mark.kwargs.get("on"), config.getini("ranks_on")):
        names = _names(given or ())
        if names:
            return names
    needs_process = not OF_A_PROCESS.isdisjoint(metafunc.fixturenames)
    return list(_DEFAULT_ON_PROCESSES if needs_process else _DEFAULT_ON)


def _names(given: str | Iterable[str]) -> list[str]:
    parts = [given] if isinstance(given, str) else given
    return [name for part in parts for name in part.replace(",", " ").split()]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """The ranks of a test that is marked ``ranks``, as its body sees them: a `World`.

    What its methods do with other ranks, they say.
    """
    if not hasattr(request.config.option, IN_RANK):
        pytest.fail(
            "the fixture world is for tests that run in ranks: mark this one @pytest.mark.ranks(2)",
            pytrace=False,
        )
    return importlib.import_module("unisono.testing.ranks.world").World.here()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Any:
    """Ranks for a test that stays in the parent.

    ``ranks(3, on="gloo", timeout=10).run(work, 5)`` runs ``work(5)`` in three ranks, which
    stay warm for the next test, and gives what each returned, by rank. Fixtures of any scope may
    use it, and tests of hypothesis.
    """
    session = request.config.pluginmanager.get_plugin("unisono-ranks")
    if session is None:
        pytest.fail(
            "the fixture ranks is for tests of the parent: take the mark ranks from this test, "
            "or use its world",
            pytrace=False,
        )
    return session.pools(request.session).ranks


class _Session:
    """What this plug-in does in the session itself: it lets ranks run what is marked."""

    def __init__(self) -> None:
        self._pools: Any = None

    def pools(self, session: pytest.Session) -> Any:
        """Return the warm pools of this session; torch is imported here, at the first."""
        if self._pools is None:
            module = importlib.import_module("unisono.testing.ranks.pools")
            self._pools = module.Pools(session)
        return self._pools

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave a marked test's fixtures to its ranks; let others be alone here."""
        if place_of(item) is not None:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                pytest.fail(
                    "mark ranks isn't for tests of hypothesis: each rank would draw examples of "
                    "its own. Take the mark away, and give what is drawn to a function: "
                    "ranks(2).run(work, x), with the fixture ranks",
                    pytrace=False,
                )
            item.fixturenames = []  # type: ignore[attr-defined]
            return
        if self._pools is not None:
            self._pools.end_threads()
        if item.get_closest_marker("ranks") is not None:
            pytest.fail(
                "mark ranks is for functions and for methods of plain classes: this test is "
                f"a {type(item).__name__}",
                pytrace=False,
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> object:
        """Run a marked test's body in its ranks."""
        place = place_of(pyfuncitem)
        if place is None:
            return None
        self.pools(pyfuncitem.session).run_test(pyfuncitem, place)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Report what the ranks did in place of what this process did for them."""
        report = yield
        if call.when == "call" and place_of(item) is not None and self._pools is not None:
            self._pools.fill(item, report)
        return report

    @pytest.hookimpl(trylast=True)  # after what the session itself has set up
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End the fixtures of modules and classes in the ranks where the next test is elsewhere."""
        if self._pools is not None:
            self._pools.leave(item, nextitem)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        """End the ranks after the last test, before what others make of the session."""
        try:
            return (yield)
        finally:
            if self._pools is not None:
                self._pools.close()

    def debug(self, item: pytest.Item, place: Place) -> None:
        """Let the user look at a failure in a rank."""
        if self._pools is not None:
            self._pools.debug(item, place)


class _Debugger:
    """What ``--pdb`` calls: pytest's own debugger, but for what failed in ranks."""

    def __init__(self, own: Any, session: _Session) -> None:
        self._own = own
        self._session = session

    def pytest_exception_interact(
        self,
        node: pytest.Item | pytest.Collector,
        call: pytest.CallInfo[Any],
        report: pytest.CollectReport | pytest.TestReport,
    ) -> None:
        """Show the failure, and start the debugger in the rank where it is."""
        place = place_of(node) if isinstance(node, pytest.Item) else None
        if place is None or call.when != "call":
            self._own.pytest_exception_interact(node=node, call=call, report=report)
            return
        assert isinstance(node, pytest.Item)
        capture: Any = node.config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        terminal: Any = node.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        report.toterminal(terminal._tw)
        report._pdbshown = True  # type: ignore[union-attr]  # what pytest's own summary looks at
        self._session.debug(node, place)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Let the user look at an error of pytest's own."""
        self._own.pytest_internalerror(excinfo=excinfo)
