"""What ranks made of one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unisono.errors import LaunchError
from unisono.launchers.job.failure import Fault
from unisono.pool.replicas import Frame

__all__ = ("Answers",)


@dataclass
class Answers:
    """What ranks made of one call.

    Args:
        values: what it returned, by rank.
        failures: how it failed, by rank.
        stacks: where ranks were that didn't end, by rank.
        late: ranks that weren't done in time.
        error: why the ranks are lost, such as the death of one.
    """

    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Fault | LaunchError | None] = field(default_factory=dict)
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    error: LaunchError | None = None
