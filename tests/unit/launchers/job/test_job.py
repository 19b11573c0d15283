"""A job ends its ranks once, however it is left."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

import unisono
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError
from unisono.launchers.job import channel
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.worker import receive_task

RESULT = cloudpickle.dumps(7)
FAILED = Failure("ValueError: no data", "", None, False, None)
News = Callable[[Job[Any]], object]


class Told(JobRanks):
    """Ranks whose only news is what a test has them say; they count how often they are ended."""

    def __init__(self, news: News) -> None:
        self.n_ends = 0
        self.is_cut = False
        self._news = news

    def poll(self, job: Job[Any], until: float) -> None:
        self._news(job)

    def end(self, job: Job[Any]) -> None:
        if self.is_cut:
            raise KeyboardInterrupt
        self.n_ends += 1

    def are_starting(self) -> bool:
        return True


def raises(error: BaseException) -> News:
    def news(_: Job[Any]) -> None:
        raise error

    return news


ERRORS: list[tuple[News, type[BaseException]]] = [
    (lambda job: job.stop(LaunchError("no room")), LaunchError),
    (raises(LaunchError("the replicas have ended")), LaunchError),
    (raises(OSError("no more files")), OSError),
    (raises(KeyboardInterrupt()), KeyboardInterrupt),
    (lambda _: None, CollectiveTimeoutError),  # until a deadline
]
JOINED = [("join", news, error) for news, error in ERRORS]
JOINED += [("join", lambda job: job.fail(0, FAILED), WorkerFailedError)]
SENT = [("send_tasks", news, error) for news, error in ERRORS]


@pytest.mark.parametrize(("call", "news", "raised"), JOINED + SENT)
def test_its_ranks_are_ended_once_after_an_error(
    call: str, news: News, raised: type[BaseException]
) -> None:
    ranks = Told(news)
    job: Job[Any] = Job(ranks, 1)
    limit_s = 0.1 if raised is CollectiveTimeoutError else 60
    with pytest.raises(raised), unisono.deadline(limit_s):
        getattr(job, call)()
    assert ranks.n_ends == 1
    job.terminate()
    assert ranks.n_ends == 1


def test_one_that_may_be_joined_again_goes_on_and_ends_its_ranks_once() -> None:
    ranks = Told(lambda job: job.succeed(0, RESULT))
    job: Job[Any] = Job(ranks, 1)
    with pytest.raises(LaunchError, match="join again"):
        job.join(0)
    assert ranks.n_ends == 0
    assert job.join() == job.join() == [7]
    assert ranks.n_ends == 1


def test_a_worker_of_a_job_that_ends_first_has_no_task() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel.send(ours, channel.END)
        assert receive_task(theirs) is None


def test_an_end_that_was_cut_short_is_made_again() -> None:
    ranks = Told(lambda job: job.succeed(0, RESULT))
    job: Job[Any] = Job(ranks, 1)
    ranks.is_cut = True
    with pytest.raises(KeyboardInterrupt):
        job.join()
    ranks.is_cut = False
    job.terminate()
    assert ranks.n_ends == 1
