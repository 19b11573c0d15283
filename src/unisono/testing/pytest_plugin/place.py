"""Where a test runs: shared by the session's plug-in and the sessions in ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

PLACE = "_ranks"
"""The name of the parameter with a test's `Place`."""
IN_RANK = "unisono_rank"
"""An option that only the configuration within a rank has."""
OF_A_PROCESS = frozenset(
    {
        *("caplog", "capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys"),
        *("monkeypatch", "recwarn"),
    }
)
"""Fixtures that change the whole process, which thread ranks share."""


@dataclass(frozen=True)
class Place:
    """Number of ranks, backend and time limit of a test."""

    size: int
    backend: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.size}-{self.backend}"


def place_of(item: object) -> Place | None:
    """Return where a test runs; None for a test in the parent."""
    callspec = getattr(item, "callspec", None)
    place = None if callspec is None else callspec.params.get(PLACE)
    return place if isinstance(place, Place) else None


def timeout_of(config: pytest.Config, given: float | None) -> float:
    """Return a test's time limit in seconds: `given`, else the ini file's value."""
    return float(config.getini("ranks_timeout") if given is None else given)
