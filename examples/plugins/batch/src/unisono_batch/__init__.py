"""Who am I, by the variables of a batch system that numbers the tasks of a job.

Each task has BATCH_TASK (0 to BATCH_TASKS - 1), BATCH_TASKS, BATCH_JOB, and the host and a free
port of task 0 in BATCH_HEAD, as ``node7:29500``.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono import RankInfo
from unisono.errors import EnvironmentDetectionError

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "batch"
EXAMPLES = (
    {"BATCH_TASK": "1", "BATCH_TASKS": "4", "BATCH_JOB": "817", "BATCH_HEAD": "node7:29500"},
    {"BATCH_TASK": "0", "BATCH_TASKS": "1", "BATCH_JOB": "818"},
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read the variables; None if there is neither BATCH_TASK nor BATCH_TASKS."""
    if not any(env.get(name, "").strip() for name in ("BATCH_TASK", "BATCH_TASKS")):
        return None
    world_size = _number(env, "BATCH_TASKS", env.get("BATCH_TASKS"), 1, 1 << 31)
    rank = _number(env, "BATCH_TASK", env.get("BATCH_TASK"), 0, world_size)
    host, _, port = env.get("BATCH_HEAD", "").strip().rpartition(":")
    if world_size > 1 and not host:
        raise _refused(env, "BATCH_HEAD", "should be HOST:PORT of task 0")
    return RankInfo(
        rank,
        world_size,
        master_addr=host or None,
        master_port=_number(env, "BATCH_HEAD", port, 1, 1 << 16) if host else None,
        source=NAME,
        job_id=env.get("BATCH_JOB", "").strip() or None,
    )


def _number(env: Mapping[str, str], name: str, text: str | None, least: int, end: int) -> int:
    digits = (text or "").strip()
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 20
    if not (is_number and least <= int(digits) < end):
        raise _refused(env, name, f"should have a number from {least} to {end - 1}")
    return int(digits)


def _refused(env: Mapping[str, str], name: str, what: str) -> EnvironmentDetectionError:
    value = env.get(name, "").strip() or None
    said = f"{name}={value!r}" if value else f"{name} is not set, and"
    return EnvironmentDetectionError(f"{NAME} environment: {said} {what}", NAME, name, value)
