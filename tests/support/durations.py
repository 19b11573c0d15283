"""Durations of tests in the last whole run, and the tests that belong to the fast set.

    python -m tests.support.durations FOLDER

collects the files of a whole run in FOLDER, which `Durations` has written for each session, in
tests/durations.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

FAST_S = 1.0
"""Tests that take longer aren't in the fast set, unless they are marked `fast`."""
FAST_SET_S = 360.0
"""Limit of the fast set's durations in sum; two processes need half of this time."""
RECORD = Path(__file__).parents[1] / "durations.json"
_SHOWN_S = 0.5  # tests below this are summed as the "others" of their file
_OTHERS = "others"
_SHARED = "seconds of shared fixtures"
Sessions: TypeAlias = "dict[str, dict[str, tuple[float, float]]]"
"""By session and test: the seconds that it took, and that it would take without other tests."""


def recorded(record: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each test in the record."""
    return {
        f"{file}::{name}": seconds
        for file, tests in record["files"].items()
        for name, seconds in tests.items()
        if name != _OTHERS
    }


def is_fast(item: pytest.Item, slow: dict[str, float]) -> bool:
    """Return whether a test is in the fast set, by its record; tests without a record are."""
    if item.get_closest_marker("fast") is not None:
        return True
    if any(item.get_closest_marker(name) for name in ("timed", "real")):
        return False
    return slow.get(item.nodeid, 0.0) <= FAST_S


class SharedSetUp:
    """A pytest plug-in that adds to each test the time of its module's and session's fixtures.

    Otherwise only the first test that uses a fixture would be slow; without it, the next one.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                key = (fixturedef.baseid, fixturedef.argname)
                self._seconds[key] = time.perf_counter() - begin

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Function
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        shared = sum(
            seconds
            for (base, name), seconds in self._seconds.items()
            if item.nodeid.startswith(base) and name in item.fixturenames
        )
        report.user_properties.append((_SHARED, shared))
        return report


class Durations:
    """A pytest plug-in that writes the durations of this session's tests."""

    def __init__(self, folder: Path, session: str) -> None:
        self._path = folder / f"{session}.{os.getpid()}.json"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._alone: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call":
            shared = dict(report.user_properties).get(_SHARED, 0.0)
            self._alone[report.nodeid] = report.duration + float(str(shared))

    def pytest_sessionfinish(self) -> None:
        took = self._seconds  # also of skipped tests, which aren't written
        rows = {test: (took[test], max(took[test], alone)) for test, alone in self._alone.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(rows))


def written(folder: Path) -> Sessions:
    """Return each test's durations by session; the first run counts if a test was run twice."""
    sessions: Sessions = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        tests = sessions.setdefault(path.name.partition(".")[0], {})
        for test, (took, alone) in json.loads(path.read_text()).items():
            tests.setdefault(test, (took, alone))
    return sessions


def record_of(sessions: Sessions) -> dict[str, Any]:
    """Make the record: sums by session, and the slow tests of each file."""
    files: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for session, tests in sessions.items():
        if session.startswith("pythons"):  # it repeats tests of other sessions
            continue
        for test, (took, alone) in tests.items():
            file, _, name = test.partition("::")
            if alone >= _SHOWN_S:
                files[file][name] = max(round(alone, 1), files[file].get(name, 0.0))
            else:
                files[file][_OTHERS] = round(files[file].get(_OTHERS, 0.0) + took, 2)
    sums = {
        name: {"tests": len(tests), "seconds": round(sum(took for took, _ in tests.values()))}
        for name, tests in sorted(sessions.items())
    }
    return {
        "sessions": sums,
        "files": {file: dict(sorted(files[file].items())) for file in sorted(files)},
    }


def main() -> int:
    sessions = written(Path(sys.argv[1]))
    if "fast" not in sessions:
        print(f"{sys.argv[1]} has no session `fast`: run `python -m nox -t all` first")
        return 1
    record = record_of(sessions)
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    for name, facts in record["sessions"].items():
        print(f"{name:<20} {facts['tests']:>5} tests {facts['seconds']:>6} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
