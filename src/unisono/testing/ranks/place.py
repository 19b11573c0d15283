"""Where a test runs: what the session's plug-in and the sessions in ranks both look at."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

PLACE = "_ranks"
"""The parameter that has a test's `Place`."""
IN_RANK = "unisono_rank"
"""The option that a rank's own configuration has, and the session's hasn't."""
OF_A_PROCESS = frozenset(
    {
        *("caplog", "capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys"),
        *("monkeypatch", "recwarn"),
    }
)
"""Fixtures that change the whole process, which ranks that are threads share."""


@dataclass(frozen=True)
class Place:
    """How many ranks a test runs in, on which backend, and for how long at most."""

    size: int
    backend: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.size}-{self.backend}"


def place_of(item: object) -> Place | None:
    """Return where a test runs; None for a test of the parent's own."""
    callspec = getattr(item, "callspec", None)
    place = None if callspec is None else callspec.params.get(PLACE)
    return place if isinstance(place, Place) else None


def timeout_of(config: pytest.Config, given: float | None) -> float:
    """Return the seconds that a test may take: what is given, else what the ini file says."""
    return float(config.getini("ranks_timeout") if given is None else given)
