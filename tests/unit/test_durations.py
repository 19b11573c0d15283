"""The fast tests stay fast: by the record of the last whole run."""

from __future__ import annotations

import json

import pytest

from tests.support.durations import FAST_S, FAST_SET_S, RECORD, is_fast, record_of, recorded

FOUND = json.loads(RECORD.read_text())


def test_the_fast_tests_take_six_minutes_at_most() -> None:
    sums = FOUND["sessions"]["fast"]
    assert sums["tests"] > 1000
    assert sums["seconds"] <= FAST_SET_S, "let tests be faster, or unmark some"


def test_the_record_names_what_is_slow_and_sums_up_the_rest() -> None:
    sessions = {
        "fast": {
            "tests/a.py::one": (0.25, 0.25),
            "tests/a.py::two[x::y]": (0.5, 0.75),
            "tests/b.py::one": (0.125, 0.125),
        },
        "slow": {"tests/a.py::three": (2 * FAST_S, 2 * FAST_S)},
    }
    record = record_of(sessions)
    assert record["sessions"] == {
        "fast": {"tests": 3, "seconds": 1},
        "slow": {"tests": 1, "seconds": 2},
    }
    assert record["files"] == {
        "tests/a.py": {"others": 0.25, "three": 2.0, "two[x::y]": 0.8},
        "tests/b.py": {"others": 0.12},
    }
    assert recorded(record) == {"tests/a.py::two[x::y]": 0.8, "tests/a.py::three": 2.0}


def test_a_test_is_fast_until_the_record_says_otherwise(request: pytest.FixtureRequest) -> None:
    test = request.node
    assert is_fast(test, {})
    assert is_fast(test, {test.nodeid: FAST_S})
    assert not is_fast(test, {test.nodeid: FAST_S + 0.1})


@pytest.mark.fast
def test_what_is_marked_is_fast_whatever_it_takes(request: pytest.FixtureRequest) -> None:
    assert is_fast(request.node, {request.node.nodeid: 60.0})
