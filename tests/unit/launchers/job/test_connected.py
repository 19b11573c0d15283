"""Ranks that another library's launcher makes connect to the process that launched them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from unisono.launchers.job.connected import ConnectedWorkers, listen_privately
from unisono.launchers.job.job import Job
from unisono.launchers.job.wrapper import _connect
from unisono.topology import RankInfo

HELLO = pickle.dumps((0, 1, {}))


def test_who_proves_itself_is_let_in_and_nobody_else() -> None:
    with ExitStack() as held, ThreadPoolExecutor(1) as thread:
        listener, path = listen_privately(1, held)
        workers = ConnectedWorkers([RankInfo(0, 1)], b"", listener, held, 1.0, "token")
        job: Job[Any] = Job(workers, 1)
        for token, kind in (("token", b"c"), ("wrong", b"c"), ("token", b"s")):
            assert not workers.workers
            coming = thread.submit(_connect, path, "", token, kind, HELLO)
            workers.poll(job, time.monotonic() + 20)
            if token == "token":
                held.enter_context(coming.result())
            else:
                with pytest.raises(RuntimeError, match="another process listens in place"):
                    coming.result()
        assert [worker.rank for worker in workers.workers] == [0]
        workers.workers[0].close()


def test_what_a_launcher_starts_for_a_rank_imports_no_torch() -> None:
    """It stays beside the rank, which imports it by itself."""
    words = "import sys, unisono.launchers.job.wrapper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True)
