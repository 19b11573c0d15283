"""Hang watchdog: which law each replica runs, and all stacks when one takes too long.

Each replica records the law it has entered in its own file. The process that started them reads
these files. When a law exceeds its time limit, that process requests every replica's stack, by a
signal that is handled in C and so works while the interpreter lock is held; then it
kills the processes. Replicas on other hosts aren't covered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from unisono.host import stack_signal

_POLL_S = 0.1
_ANSWER_S = 3.0  # time for a replica to write its stack
_OURS = " in keep_laws\n"  # this frame and those around it are the kit's


@dataclass(frozen=True, slots=True)
class _Entry:
    """A replica's current law, its start, and the facts needed to read its stack."""

    rank: int
    law: str
    since_s: float
    pid: int
    thread_id: int
    facts: dict[str, int]

    def text(self) -> str:
        stack = stack_signal.ask(self.pid, self.facts, self.thread_id, _ANSWER_S) or ""
        frames = [line for line in stack.partition(_OURS)[0].splitlines() if line[:2] == "  "]
        shown = "\n".join(frames[:-1] if _OURS in stack else frames) or "  (it showed no stack)"
        return f"rank {self.rank}, in {self.law or 'no law any more'}:\n{shown}"


class Board:
    """The file in which a replica records its current law."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"{rank}.rank") if folder and Path(folder).is_dir() else None
        self._rank = rank
        self._facts = {} if self._path is None else stack_signal.install()

    def enter(self, law: str) -> None:
        """Record that this replica enters a law; an empty name after the last."""
        if self._path is None:
            return
        who = os.getpid(), threading.get_native_id(), self._facts
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # the folder is removed with the job
            partial.write_text(json.dumps([self._rank, law, time.monotonic(), *who]))
            partial.replace(self._path)


class Watchdog:
    """Watches the replicas of one job from the process that started them."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-laws-")
        self.folder: str = self._folder.name
        """The folder for the replicas' `Board`."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="unisono-watch", daemon=True)
        self.hung = ""
        """The law that took too long; empty if none did."""
        self.stacks = ""
        """The stacks of all replicas at that time."""

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._folder.cleanup()

    def law_of(self, rank: int) -> str:
        """Return the law that a replica entered last; empty if none."""
        return next((entry.law for entry in self._entries() if entry.rank == rank), "")

    def _entries(self) -> list[_Entry]:
        entries = []
        for path in Path(self.folder).glob("*.rank"):
            with contextlib.suppress(OSError):
                entries.append(_Entry(*json.loads(path.read_text())))
        return sorted(entries, key=lambda entry: entry.rank)

    def _look(self) -> None:
        while not self._is_over.wait(_POLL_S):
            entries, now = self._entries(), time.monotonic()
            late = [each for each in entries if each.law and now - each.since_s > self._limit_s]
            if late:
                self.stacks = "\n".join(entry.text() for entry in entries)
                self.hung = min(late, key=lambda entry: entry.since_s).law
                for pid in {entry.pid for entry in entries} - {os.getpid()}:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                return
