"""Ranks that another library's launcher makes connect to the process that launched them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from unisono.launchers.job.job import Job
from unisono.launchers.script.remote_workers import LauncherSpec, RemoteWorkers
from unisono.topology import RankInfo

ME = RankInfo(0, 1)


def test_who_proves_itself_is_let_in_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "127.0.0.1")
    with ExitStack() as held, ThreadPoolExecutor(1) as thread:
        workers = RemoteWorkers(LauncherSpec("mine", 1, host="HERE"), b"", {}, held)
        job: Job[Any] = Job(workers, 1)
        link, limit = workers.link, time.monotonic() + 20
        workers._begin -= 1000.0  # the launcher may have waited long, for room or for other nodes
        for each, kind in ((link, b"c"), (replace(link, token="wrong"), b"c"), (link, b"s")):
            assert not workers.workers
            coming = thread.submit(each.connect, kind, ME)
            while not coming.done() and time.monotonic() < limit:
                workers.poll(job, time.monotonic() + 0.1)
            if each is link:
                held.enter_context(coming.result())
            else:
                with pytest.raises(OSError, match="another process listens there"):
                    coming.result()
        while not workers.workers and time.monotonic() < limit:
            workers.poll(job, limit)
        assert [worker.rank for worker in workers.workers] == [0]
        assert not job.is_over_by(time.monotonic() + 0.1)
        workers.workers[0].close()


def test_a_signal_that_comes_before_any_rank_ends_the_job_at_once() -> None:
    with ExitStack() as held:
        workers = RemoteWorkers(LauncherSpec("mine", 1), b"", {}, held)
        job: Job[Any] = Job(workers, 1, grace_s=1000.0)
        job.orders.take(signal.SIGUSR1)
        assert not job.is_over_by(time.monotonic() + 0.1)
        job.orders.take(signal.SIGTERM)
        assert job.is_over_by(time.monotonic() + 20)


def test_what_a_launcher_starts_for_a_rank_imports_no_torch() -> None:
    """It stays beside the rank, which imports it by itself."""
    words = "import sys, unisono.launchers.job.wrapper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True)
