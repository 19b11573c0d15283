"""The pytest plug-in: options, the mark ``ranks``, and the fixtures ``world`` and ``ranks``.

It is loaded in every session where unisono is installed, so torch and the rest of unisono are
imported by the first test that is marked, or uses ``ranks``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from unisono.tracebacks import hides

IN_RANK = "unisono_rank"
"""An option that is set only in a rank's configuration."""
OF_A_PROCESS = frozenset({
    "caplog", "capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys",
    "monkeypatch", "recwarn",
})  # fmt: skip
"""Fixtures that change the whole process, which thread ranks share."""
_PLACE = "_ranks"  # the parameter with a test's `Place`
_MARK = (
    'ranks(*sizes, on=("threads", "gloo"), timeout=30): run the test\'s body in this many ranks, '
    "once for each size and backend; timeout is in seconds"
)


@dataclass(frozen=True)
class Place:
    """Number of ranks, backend and time limit of a test."""

    size: int
    backend: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.size}-{self.backend}"


def place_of(item: object) -> Place | None:
    """Return the size and backend that a test runs with; None for a test in the parent."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(_PLACE)


def timeout_of(config: pytest.Config, given: float | None) -> float:
    """Return a test's time limit in seconds: `given`, else the option's, else the ini file's."""
    limits = (given, config.getoption("ranks_timeout"), config.getini("ranks_timeout"))
    return float(next(limit for limit in limits if limit is not None))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of the ini file."""
    group = parser.getgroup("ranks", "tests in several ranks (unisono)")
    group.addoption(
        "--ranks-on",
        metavar="BACKENDS",
        help="backends of tests marked ranks, such as threads,gloo; overrides those of the mark",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit of a test marked ranks, unless its mark sets one (default: 30)",
    )
    group.addoption(
        "--ranks-pdb",
        type=int,
        metavar="N",
        help="the rank in which --pdb starts the debugger (default: 0, else the first that failed)",
    )
    parser.addini("ranks_on", "backends of tests marked ranks", type="args", default=[])
    parser.addini("ranks_timeout", "time limit of a test marked ranks, in seconds", default="30")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and in the parent the hooks that run marked tests in ranks."""
    config.addinivalue_line("markers", _MARK)
    if not hasattr(config.option, IN_RANK):  # a rank runs the body itself
        config.pluginmanager.register(_Session(), "unisono-ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Hide our frames in the traceback of a failure, except those of laws and kits."""
    if call.excinfo is not None:
        for name, module in [*sys.modules.items()]:
            if name.startswith("unisono.") and not name.startswith("unisono.testing."):
                getattr(module, "__dict__", {}).setdefault("__tracebackhide__", hides)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test per size and backend, by the marks of the test, its class or module."""
    # The nearest node comes first, and its marks replace those of class and module.
    found = [*metafunc.definition.iter_markers_with_node("ranks")]
    # Reversed, because pytest lists the lowest decorator first.
    marks = [mark for node, mark in reversed(found) if node is found[0][0]]
    places = {str(place): place for mark in marks for place in _places(mark, metafunc)}
    if places:
        metafunc.fixturenames.append(_PLACE)
        metafunc.parametrize(_PLACE, list(places.values()), ids=list(places))


def _places(mark: pytest.Mark, metafunc: pytest.Metafunc) -> Iterator[Place]:
    """Yield a place for each size and backend of a mark; fail the test if its mark is wrong."""
    problem = ""
    unknown = sorted(set(mark.kwargs) - {"on", "timeout"})
    if unknown:
        problem = f"mark ranks has no {', '.join(unknown)}: its keywords are on and timeout"
    elif not mark.args or not all(type(size) is int and size > 0 for size in mark.args):
        given = ", ".join(map(repr, mark.args))
        problem = f"mark ranks({given}) needs numbers of ranks, such as ranks(1, 2)"
    if problem:
        pytest.fail(f"{metafunc.definition.name}: {problem}", pytrace=False)
    timeout_s = timeout_of(metafunc.config, mark.kwargs.get("timeout"))
    for size in mark.args:
        for backend in _backends(mark, metafunc):
            yield Place(size, backend, timeout_s)


def _backends(mark: pytest.Mark, metafunc: pytest.Metafunc) -> list[str]:
    """List a test's backends: by option, mark, ini file or default."""
    config = metafunc.config
    for given in (config.getoption("ranks_on"), mark.kwargs.get("on"), config.getini("ranks_on")):
        parts: Iterable[str] = [given] if isinstance(given, str) else given or ()
        names = [name for part in parts for name in part.replace(",", " ").split()]
        if names:
            return names
    # Such fixtures affect the whole process, and thread ranks share one process.
    is_for_processes = not OF_A_PROCESS.isdisjoint(metafunc.fixturenames)
    return ["gloo"] if is_for_processes else ["threads", "gloo"]


@pytest.fixture
def world() -> Any:
    """Return the `World` of a test marked ``ranks``: this rank, the size, and shared assertions."""
    # In a rank, the fixture of its `RankSession` replaces this one.
    pytest.fail(
        "the fixture world is for tests that run in ranks: mark this one @pytest.mark.ranks(2)",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Any:
    """Return a factory of ranks for a test that runs in the parent.

    ``ranks(3, on="gloo", timeout=10).run(work, 5)`` runs ``work(5)`` in three ranks, which
    stay warm for the next test, and returns their results by rank. Fixtures of any scope and
    hypothesis tests may use it.
    """
    session = request.config.pluginmanager.get_plugin("unisono-ranks")
    if session is None:
        pytest.fail(
            "the fixture ranks is for tests of the parent: remove the mark ranks from this test, "
            "or use the fixture world",
            pytrace=False,
        )
    return session.pools(request.session).ranks


class _Session:
    """The plug-in's hooks in the parent session, which run marked tests in ranks."""

    def __init__(self) -> None:
        self._pools: Any = None

    def pools(self, session: pytest.Session) -> Any:
        """Return the warm pools of this session; the first call imports torch."""
        if self._pools is None:
            pools: Any = importlib.import_module("unisono.testing.pytest_plugin.pools")
            self._pools = pools.Pools(session)
            session.config.pluginmanager.register(self._pools)
        return self._pools

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Drop the fixtures of a marked test, which its ranks set up; else end thread ranks."""
        if place_of(item) is not None:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                pytest.fail(
                    "mark ranks isn't for tests of hypothesis, since each rank would draw "
                    "different examples: remove the mark, and pass the drawn values to a function "
                    "with the fixture ranks, as in ranks(2).run(work, x)",
                    pytrace=False,
                )
            item.fixturenames = []  # type: ignore[attr-defined]
            return
        if self._pools is not None:
            self._pools.end_threads()
        # pytest doesn't parametrize some kinds of tests, so a marked one may have no place.
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
        return True  # pytest itself doesn't run the body

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        """Close the ranks after the last test, before other plug-ins finish the session."""
        try:
            return (yield)
        finally:
            if self._pools is not None:
                self._pools.close()
