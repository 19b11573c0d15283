"""One call of a pool whose replicas answer as a test wants them to."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from unisono.errors import WorkerFailedError
from unisono.launchers.job.failure import Failure
from unisono.pool.call import PoolCall, once
from unisono.pool.worker import FAILED

FAILURE = Failure("ValueError: no data", "", None, False, None)
DIED = WorkerFailedError("rank 0 of 2 was ended by SIGKILL", 0, signal="SIGKILL")


class Replicas:
    """Replicas that are at work until one of them fails, and another one dies of it."""

    are_processes = True

    def __init__(self) -> None:
        self._news: Iterator[Any] = iter([[(1, FAILED, pickle.dumps(FAILURE))], DIED])

    def send(self, rank: int, body: bytes) -> None:
        """Give a call that nobody reads."""

    def news(self, until: float | None) -> Any:
        news = next(self._news)
        if isinstance(news, Exception):
            raise news
        return news


def test_the_first_failure_stays_when_another_replica_dies_of_it() -> None:
    replicas: Any = Replicas()
    call = PoolCall(replicas, once(b"call", range(2)), None, is_together=True)
    with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised ValueError: no data"):
        call.run(2)
    assert not call.replicas_stay
