"""What ranks made of one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unisono.errors import LaunchError
from unisono.launchers.job.failure import Fault
from unisono.pool.replicas import Frame


@dataclass
class Answers:
    """What ranks made of one call."""

    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Fault | LaunchError | None] = field(default_factory=dict)
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    error: LaunchError | None = None
