"""A trace of the calls of this process's ranks, written while they run."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.autograd import profiler

from unisono.errors import ArgumentError
from unisono.recording.records import CollectiveRecord, add_hook
from unisono.recording.trace_file import TraceFile

_log = logging.getLogger(__name__)
_EVERY_S = 0.25  # until a call is written
_MOST_WAITING = 1_000_000  # calls; if they are faster than the disk, the oldest are dropped
_LONGEST_END_S = 5.0  # for a disk that hangs
_VARIABLE = "UNISONO_TRACE"


@contextmanager
def trace(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Trace the collectives that this rank calls within the block.

    Each rank writes its own file into the folder, which all ranks may share;
    ``python -m unisono trace FOLDER --out job.json`` merges them into one file for Perfetto, and
    ``--summary`` reports which rank waited for which. A rank that is killed loses a second at most.
    If the files can't be written any more, this is logged once as a warning, and the program
    continues. While ``torch.profiler`` runs, the calls are in its profile, too.

    The variable ``UNISONO_TRACE`` does the same for a whole job.

    Args:
        folder: created if it doesn't exist.

    Yields:
        The folder.

    Raises:
        ArgumentError: the folder can't be created (only on ranks where that fails).

    Example:
        >>> import tempfile
        >>> import unisono as idist
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with idist.trace(folder) as path:
        ...         total = idist.all_reduce(1)
        ...     len(list(path.iterdir()))
        1
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"trace({str(folder)!r}): the folder can't be made ({error}); name another"
        ) from error
    tracer = _hold(path.resolve())  # resolved: replicas may spell the folder they share differently
    try:
        yield path
    finally:
        _release(tracer)


def begin_if_asked() -> None:
    """Start tracing this process, once, if ``UNISONO_TRACE`` names a folder."""
    # The trace goes on until the process exits.
    global _is_asked
    folder = os.environ.get(_VARIABLE, "").strip()
    if folder and not _is_asked:
        _is_asked = True
        atexit.register(_release, _hold(Path(folder).resolve()))


class _Tracer:
    """Writes the calls of all ranks of this process into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holders = 0
        self.reset()
        self._remove = add_hook(before=self._begin, after=self._end)

    def reset(self) -> None:
        """Drop pending calls and open files without writing them, such as after a fork."""
        self._waiting: deque[CollectiveRecord] = deque(maxlen=_MOST_WAITING)
        # By rank, world size and job.
        self._files: dict[tuple[int, int, str], TraceFile] = {}
        # Open ranges of the profiler, by thread, begin and name of the call.
        self._ranges: dict[tuple[int, int, str], Any] = {}
        self._writing = threading.Lock()  # a thread of the parent may have held the old one
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def _begin(self, record: CollectiveRecord) -> None:
        if profiler._is_profiler_enabled:
            entered: Any = profiler.record_function(f"unisono.{record.name}")
            entered.__enter__()
            self._ranges[record.thread_id, record.arrival_ns, record.name] = entered

    def _end(self, record: CollectiveRecord) -> None:
        if self._ranges:
            # There is no range if the profiler was started within the call.
            entered = self._ranges.pop((record.thread_id, record.arrival_ns, record.name), None)
            if entered is not None:
                entered.__exit__(None, None, None)
        self._waiting.append(record)
        if self._thread is None:
            self._start_thread()

    def _start_thread(self) -> None:
        with self._writing:
            # Meanwhile another thread may have started it, or the trace may have ended.
            if self._thread is None and not self._is_over.is_set():
                thread = threading.Thread(target=self._run, name="unisono-trace", daemon=True)
                with suppress(RuntimeError):  # if no thread can start, `stop` writes the calls
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            self.flush()

    def flush(self) -> None:
        """Write pending calls; an error ends the trace."""
        with self._writing:
            try:
                self._write()
            except Exception as error:  # no error may end the traced program
                self._remove()
                self._is_over.set()
                self._waiting.clear()
                _log.warning(
                    "the trace in %s ends here, the program goes on: %s: %s",
                    self.folder,
                    type(error).__name__,
                    error,
                )

    def _write(self) -> None:
        """Append the pending calls to the files of their ranks."""
        by_rank: dict[tuple[int, int, str], list[CollectiveRecord]] = {}
        for _ in range(len(self._waiting)):  # not until it is empty: calls go on meanwhile
            record = self._waiting.popleft()
            by_rank.setdefault((record.rank, record.world_size, record.job), []).append(record)
        for key, records in by_rank.items():
            if key not in self._files:
                # `trace` has made its folder, but nobody that of `UNISONO_TRACE`.
                self.folder.mkdir(parents=True, exist_ok=True)
                self._files[key] = TraceFile(self.folder, records[0])
            self._files[key].append(records)

    def stop(self) -> None:
        """Write pending calls and stop."""
        self._remove()  # first, so that no call follows the last write
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LONGEST_END_S)
            if self._thread.is_alive():  # it holds the lock that `flush` would wait for
                return
        self.flush()
        for file in self._files.values():
            file.close()


_tracers: dict[Path, _Tracer] = {}
_lock = threading.Lock()
_is_asked = False


def _hold(folder: Path) -> _Tracer:
    """Return a folder's tracer, which replicas that are threads of this process share."""
    with _lock:
        tracer = _tracers.get(folder)
        if tracer is None:
            tracer = _tracers[folder] = _Tracer(folder)
        tracer.holders += 1
        return tracer


def _release(tracer: _Tracer) -> None:
    with _lock:
        tracer.holders -= 1
        if tracer.holders:
            tracer.flush()  # at the end of a block its calls are on disk
            return
        _tracers.pop(tracer.folder, None)
    tracer.stop()  # without the lock, as it may take seconds


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held the old one
    for tracer in _tracers.values():
        tracer.reset()


os.register_at_fork(after_in_child=_after_fork)
