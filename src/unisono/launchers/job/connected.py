"""Workers that another library's launcher makes, on this host or on others: they connect here."""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from typing import Any

from unisono.control.addresses import peer
from unisono.control.handshake import answer
from unisono.errors import LaunchError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.job import Job
from unisono.launchers.job.process_state import directory, search_path
from unisono.launchers.job.store import private_folder
from unisono.launchers.job.worker import Task
from unisono.launchers.job.worker_handles import Worker, Workers
from unisono.topology import RankInfo

_START_S = 300.0  # until every rank has come, which includes importing torch there
_HELLO_S = 5.0  # for the whole proof of one connection: the next ones wait meanwhile
_POLL_S = 0.1  # between two looks at the launcher
_LONGEST_FOLDER = 70  # a Unix socket's whole path has 107 bytes


def listen_privately(n_ranks: int, held: ExitStack) -> tuple[socket.socket, str]:
    """Listen on a Unix socket in a folder of mode 0700, until `held` is closed."""
    path = str(Path(held.enter_context(private_folder(longest=_LONGEST_FOLDER)), "link"))
    listener = held.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(2 * n_ranks)
    return listener, path


class ConnectedWorkers(Workers):
    """Workers that connect to this process: each its status socket, and its channel."""

    def __init__(
        self,
        infos: Sequence[RankInfo],
        entry: bytes,
        listener: socket.socket,
        held: ExitStack,
        stop_limit_s: float,
        token: str = "",
    ) -> None:
        super().__init__(len(infos), held, stop_limit_s)
        self._infos, self._entry = infos, entry
        self._listener, self._token = listener, token
        self._arrivals: dict[int, dict[str, socket.socket]] = {}

    def ended_early(self) -> LaunchError | None:
        """Say why, where the launcher itself has ended."""
        return None

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait a little for news of any worker or of the launcher."""
        error = self.ended_early()
        super().poll(job, min(until, time.monotonic() + (_POLL_S if error is None else 0.0)))
        if error is not None and self.is_idle and not job.failures:
            job.stop(error)

    def see_out(self, job: Job[Any]) -> None:
        """Tell all that everybody is done, and wait for their last calls."""
        for worker in self.workers:
            with contextlib.suppress(OSError):  # it has ended
                messages.send(worker.channel, messages.DONE)
        super().see_out(job)

    def end(self, job: Job[Any]) -> None:
        """End all workers that have come, within seconds."""
        super().end(job)
        for arrival in self._arrivals.values():
            for sock in arrival.values():
                sock.close()

    def _register(self, job: Job[Any], selector: BaseSelector) -> None:
        super()._register(job, selector)
        if self._listener.fileno() >= 0:
            selector.register(self._listener, EVENT_READ, partial(self._welcome, job))

    def _look_after(self, job: Job[Any]) -> None:
        super()._look_after(job)
        here = {worker.rank for worker in self.workers}
        missing = [info.rank for info in self._infos if info.rank not in here]
        if missing and time.monotonic() > self._begin + _START_S:
            job.stop(LaunchError(f"ranks {missing} didn't come in {_START_S:g} s"))

    def _welcome(self, job: Job[Any]) -> None:
        """Accept a rank that proves itself; its hello is the first pickle that is read."""
        sock, _ = self._listener.accept()
        sock.settimeout(_HELLO_S)
        with contextlib.suppress(OSError):
            kind = self._kind_of(sock)
            message = messages.receive(sock) if kind else None
            if message is not None:
                sock.settimeout(None)
                self._seat(job, kind, sock, *pickle.loads(message[1]))
                return
        sock.close()

    def _kind_of(self, sock: socket.socket) -> str:
        """Return which of a rank's two connections this is; empty for a stranger's."""
        if sock.family == socket.AF_UNIX and not peer(sock).is_own_user:
            return ""
        kind = answer(sock, self._token.encode(), 1, time.monotonic() + _HELLO_S)
        return "" if kind is None else kind.decode(errors="replace")

    def _seat(
        self,
        job: Job[Any],
        kind: str,
        sock: socket.socket,
        rank: int | None,
        size: int | None,
        environ: dict[str, str],
    ) -> None:
        if rank is None or size != self.world_size:
            sock.close()
            made = "no rank" if rank is None else f"rank {rank} of {size}"
            job.stop(
                LaunchError(
                    f"{self.world_size} ranks were asked for, but the launcher made a process that "
                    f"its variables say is {made}: is it the right one?"
                )
            )
            return
        arrival = self._arrivals.setdefault(rank, {})
        arrival[kind] = sock
        if len(arrival) < 2:
            return
        del self._arrivals[rank]
        info, path = self._infos[rank], search_path()
        task = Task(self._entry, info, environ, path, list(sys.argv), directory())
        body = pickle.dumps(task)
        message = memoryview(messages.head(messages.TASK, len(body)) + body)
        self.workers.append(Worker(rank, arrival["c"], arrival["s"], message))
        if len(self.workers) == self.world_size:  # a kill of this process now leaves no file
            self._held.close()
