"""One call of a pool whose replicas answer as a test wants them to."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import pytest

from unisono.errors import WorkerFailedError
from unisono.launchers.job import channel
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.job import Job
from unisono.pool.call import Call

FAILED = channel.ERROR, pickle.dumps(Failure("ValueError: no data", "", None, False, None))
DIED = WorkerFailedError("rank 0 of 2 was ended by SIGKILL", 0, signal="SIGKILL")


class Replicas:
    """Replicas that are at work until they say something, or one of them dies."""

    def __init__(self, news: Iterable[tuple[int, tuple[bytes, bytes]] | Exception]) -> None:
        self._news = iter(news)

    def send(self, rank: int, body: bytes, limit: float | None) -> None:
        """Give a call that nobody reads."""

    def ask(self, ranks: Iterable[int]) -> set[int]:
        return set(ranks)

    def hear(self, busy: Iterable[int], limit: float | None) -> Any:
        news = next(self._news)
        if isinstance(news, Exception):
            raise news
        return news


def run(news: Iterable[Any]) -> tuple[Call, Job[Any]]:
    def too_late(late: list[int]) -> NoReturn:
        raise AssertionError(late)

    calls: dict[int, Iterator[bytes]] = {rank: iter([b"call"]) for rank in range(2)}
    replicas: Any = Replicas(news)
    call = Call(replicas, lambda rank: next(calls[rank], None), too_late, None, is_together=True)
    return call, Job(call, 2)


def test_the_first_failure_stays_when_another_replica_dies_of_it() -> None:
    call, job = run([(1, FAILED), DIED])
    call.begin(job)
    with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised ValueError: no data"):
        job.finish()
    assert not call.replicas_stay
