"""Titles of ranks' processes and threads in ps and top, where setproctitle is installed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from unisono.plugins import load

OF_RANKS = "unisono rank "
"""The beginning of the titles of all ranks."""


def name_process(rank: int, world_size: int, program: str) -> None:
    """Set the title of this process to ``unisono rank 1 of 4: train.py``."""
    title = f"{OF_RANKS}{rank} of {world_size}: {Path(program).name or 'python'}"
    with contextlib.suppress(ImportError):
        load("setproctitle:setproctitle")(title)
    name_thread(rank, world_size)


def name_thread(rank: int, world_size: int) -> None:
    """Set the title of this thread; that of the main thread is the process's name in top."""
    with contextlib.suppress(ImportError):
        load("setproctitle:setthreadtitle")(f"rank {rank} of {world_size}")
