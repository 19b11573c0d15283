"""Hang watchdog: which law each replica runs, and all stacks when one takes too long.

Each replica says on a board, a file of its own in a folder of the job, which law it has entered.
The process that started them reads the board; when a law is over its time it asks every process
for the stacks of its threads, by a signal that is answered in C, so that a held interpreter lock
doesn't hide where it is held. Then it ends the processes. Replicas on other hosts can't be asked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_ASK = getattr(signal, "SIGUSR1", None)  # what makes a process show its stacks
_POLL_S = 0.1
_ANSWER_S = 3.0  # for a process to write its stacks
_OURS = "keep_laws"  # frames below this one are the kit's


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one replica has written: the law it is in, since when, and which thread it is."""

    rank: int
    law: str
    since_s: float
    pid: int
    thread: int


def _answer_in(folder: str) -> int | None:
    """Open a file for this process's stacks, shown on demand; None if a thread has done so."""
    if _ASK is None:
        return None
    try:
        stacks = os.open(
            Path(folder, f"{os.getpid()}.stacks"), os.O_CREAT | os.O_EXCL | os.O_WRONLY
        )
    except FileExistsError:
        return None
    faulthandler.register(_ASK, file=stacks, all_threads=True)
    return stacks


class Board:
    """A replica's own place on the board."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"{rank}.rank") if folder and Path(folder).is_dir() else None
        if self._path is not None:
            _answer_in(folder)

    def enter(self, law: str) -> None:
        """Say that this replica enters a law; an empty name says that it is done."""
        if self._path is None:
            return
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # the folder ends with the job
            text = f"{law} {time.monotonic()} {os.getpid()} {threading.get_ident()}"
            partial.write_text(text)
            partial.replace(self._path)


class Watch:
    """Watches the board of one job from the process that started it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-laws-")
        self._stacks: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="unisono-watch", daemon=True)
        self.hung = ""
        """The law that took too long; empty if none did."""
        self.stacks = ""
        """Where every replica stood then."""

    @property
    def folder(self) -> str:
        """What replicas give to their `Board`."""
        return self._folder.name

    def __enter__(self) -> Watch:
        self._stacks = _answer_in(self.folder)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._stacks is not None and _ASK is not None:
            faulthandler.unregister(_ASK)
            os.close(self._stacks)
        self._folder.cleanup()

    def law_of(self, rank: int) -> str:
        """Tell which law a replica was in last; empty if none."""
        return next((entry.law for entry in self._entries() if entry.rank == rank), "")

    def _entries(self) -> list[_Entry]:
        entries = []
        for path in Path(self.folder).glob("*.rank"):
            with contextlib.suppress(OSError, ValueError):  # it is being replaced
                law, since, pid, thread = path.read_text().split(" ")
                entries.append(_Entry(int(path.stem), law, float(since), int(pid), int(thread)))
        return sorted(entries, key=lambda entry: entry.rank)

    def _look(self) -> None:
        while not self._is_over.wait(_POLL_S):
            late = [
                entry
                for entry in self._entries()
                if entry.law and time.monotonic() - entry.since_s > self._limit_s
            ]
            if late:
                first = min(late, key=lambda entry: entry.since_s)
                self.stacks = self._ask(self._entries())
                self.hung = first.law
                self._end(self._entries())
                return

    def _ask(self, entries: list[_Entry]) -> str:
        """Let every process show its stacks, and give those of the replicas."""
        if _ASK is None:
            return "(stacks can't be had on this platform)"
        pids = {entry.pid for entry in entries}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, _ASK)
        shown = {pid: self._answer(pid) for pid in pids}
        return "\n".join(
            f"rank {entry.rank}, in {entry.law or 'no law any more'}:\n"
            f"{_stack_of(entry, shown[entry.pid])}"
            for entry in entries
        )

    def _answer(self, pid: int) -> str:
        path, text = Path(self.folder, f"{pid}.stacks"), ""
        limit = time.monotonic() + _ANSWER_S
        while time.monotonic() < limit:
            before, text = text, path.read_text() if path.exists() else ""
            if text and text == before:
                break
            time.sleep(_POLL_S)
        return text

    @staticmethod
    def _end(entries: list[_Entry]) -> None:
        for pid in {entry.pid for entry in entries} - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _stack_of(entry: _Entry, text: str) -> str:
    """Cut the frames of one replica's thread out of what its process has shown."""
    head = f"0x{entry.thread:016x}"
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if head in line and "hread" in line]
    if not starts:
        return text.strip() or "  (it showed no stack)"
    frames = []
    for line in lines[starts[0] + 1 :]:
        if not line.startswith("  ") or f" in {_OURS}" in line:
            break
        frames.append(line)
    return "\n".join(frames)
