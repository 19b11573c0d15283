"""One rank as an actor of a Ray cluster, defined without Ray itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.launchers.job.failure import Failure
from unisono.launchers.job.output import Pipes
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.store import host
from unisono.launchers.job.worker import describe
from unisono.launchers.script.script import Script
from unisono.pickling import dumps
from unisono.topology import LaunchPlan, RankInfo

_POLL_S = 0.3


class RankActor:
    """A rank that runs one function, or one program whose output it returns."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def hold_store(self, addr: str) -> int:
        """Host the rendezvous at this node's address; return its port."""
        self._store, plan = host(LaunchPlan(1, master_addr=addr))
        return int(plan.master_port or 0)

    def call(
        self,
        pickled: bytes,
        info: RankInfo,
        environ: Mapping[str, str],
        facts: Mapping[str, str],
        path: Sequence[str],
    ) -> Any:
        """Run a function as rank `info`; return its pickled result, or a `Failure`."""
        # Collective over all ranks of `info`. After a failure this process goes on, so that its
        # connections stay open until the launching process has received this failure. A variable of
        # `environ` that this node has already stays as it is; those of `facts` identify the rank.
        os.environ.update({**environ, **os.environ, **facts})
        sys.path.extend(item for item in path if item not in sys.path)
        try:
            entry: Callable[[RankInfo], Any] = load_from_parent(pickled)
            return dumps(entry(info))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
            failure: Failure = describe(error)
            return failure

    def start(self, script: Script, environ: Mapping[str, str], directory: str) -> None:
        """Start a program."""
        cwd = directory if os.path.isdir(directory) else None
        self._pipes = Pipes()
        variables = {**os.environ, **environ}
        self._process = self._pipes.start(script.rank_argv(os.getpid()), variables, cwd=cwd)

    def poll(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait briefly for lines; return them, and the exit code once the program has ended."""
        assert self._process is not None
        lines = self._pipes.read(_POLL_S)
        return lines, None if self._pipes.open else self._process.wait()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the program."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.send_signal(number)


def rank_infos(nodes: Sequence[str], addr: str, port: int) -> list[RankInfo]:
    """Return the ranks' infos by the nodes of their actors."""
    order = list(dict.fromkeys(nodes))
    return [
        RankInfo(
            rank,
            len(nodes),
            nodes[:rank].count(node),
            nodes.count(node),
            order.index(node),
            len(order),
            addr,
            port,
            source="torchrun",
            store_is_hosted=True,
        )
        for rank, node in enumerate(nodes)
    ]
