"""Checks of laws that run in this process rather than in replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from unisono.testing.runner import Outcome, Status
from unisono.topology import RankInfo


class UntestableError(Exception):
    """Raised where a law cannot be checked."""


def text_of(error: BaseException) -> str:
    """Return the text of a law's error, without the name of AssertionError."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def outcome_of(name: str, nproc: int, check: Callable[[], None]) -> Outcome:
    """Check one law, and return its outcome."""
    begin = time.perf_counter()
    status: Status = "passed"
    reason = ""
    try:
        check()
    except UntestableError as error:
        status, reason = "unsupported", str(error)
    except Exception as error:
        status, reason = "failed", text_of(error)
    return Outcome(name, nproc, status, reason, time.perf_counter() - begin)


def check_info(info: Any) -> None:
    """Check that every field of a RankInfo is in its range."""
    assert isinstance(info, RankInfo), f"got {type(info).__name__}, not RankInfo"
    limits = {
        "world_size": (1, None),
        "rank": (0, info.world_size),
        "local_world_size": (1, info.world_size + 1),
        "local_rank": (0, info.local_world_size or info.world_size),
        "nnodes": (1, info.world_size + 1),
        "node_rank": (0, info.nnodes or info.world_size),
        "master_port": (1, 65536),
    }
    for name, (least, end) in limits.items():
        value = getattr(info, name)
        if value is None and name not in ("rank", "world_size"):
            continue
        assert type(value) is int, f"{name}={value!r} isn't an int"
        assert value >= least, f"{name}={value} is below {least}"
        assert end is None or value < end, f"{name}={value} should be below {end}"
    for name in ("master_addr", "private_store", "job_id"):
        value = getattr(info, name)
        assert value is None or (isinstance(value, str) and value), f"{name}={value!r}"
    assert isinstance(info.source, str) and info.source.strip(), f"source={info.source!r}"
    assert isinstance(info.store_is_hosted, bool), f"store_is_hosted={info.store_is_hosted!r}"
    for name in ("master_addr", "master_port") if info.store_is_hosted else ():
        assert getattr(info, name) is not None, f"a store is hosted, but there is no {name}"
