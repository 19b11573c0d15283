"""Capture of a rank's output in a cell: a file for each rank, which the notebook reads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from unisono.launchers.job.lifetime import flush
from unisono.launchers.job.output import ByThread


@contextmanager
def by_thread() -> Iterator[None]:
    """Capture the output of ranks that are threads of this process in a block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = ByThread(before[0]), ByThread(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def captured(path: str, is_process: bool) -> Iterator[None]:
    """Append this rank's output to a file; of a process also that of C code and children."""
    with ExitStack() as stack:
        how = {"encoding": "utf-8", "errors": "backslashreplace"}
        file = stack.enter_context(Path(path).open("a", buffering=1, **how))
        stack.enter_context(_descriptors(file.fileno()) if is_process else _streams(file))
        yield


@contextmanager
def _descriptors(target: int) -> Iterator[None]:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    flush()
    with ExitStack() as stack:
        for fd in (1, 2):
            saved = os.dup(fd)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, fd)
            os.dup2(target, fd)
        stack.callback(flush)
        yield


@contextmanager
def _streams(file: TextIO) -> Iterator[None]:
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, ByThread)]
    own = threading.get_ident()
    for stream in streams:
        stream.streams[own] = file
    try:
        yield
    finally:
        for stream in streams:
            stream.streams.pop(own, None)
