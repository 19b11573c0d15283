"""Ranks that another library's launcher makes connect to the process that launched them."""

from __future__ import annotations

import pickle
import time
from contextlib import ExitStack, suppress
from typing import Any

from unisono.launchers.job.connected import ConnectedWorkers, listen_privately
from unisono.launchers.job.job import Job
from unisono.launchers.job.wrapper import _connect
from unisono.topology import RankInfo

HELLO = pickle.dumps((0, 1, {}))


def test_who_shows_the_token_is_let_in_and_nobody_else() -> None:
    with ExitStack() as held:
        listener, path = listen_privately(1, held)
        infos = [RankInfo(0, 1)]
        workers = ConnectedWorkers(infos, b"", listener, held, 1.0, "token")
        job: Job[Any] = Job(workers, 1)
        for shown in ("tokenc", "wrongc", "tokens"):
            assert not workers.workers
            sock = held.enter_context(_connect(path, "", shown, HELLO))
            sock.settimeout(20)
            workers.poll(job, time.monotonic() + 20)
            if shown[:-1] != "token":
                with suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        assert [worker.rank for worker in workers.workers] == [0]
        workers.workers[0].close()
