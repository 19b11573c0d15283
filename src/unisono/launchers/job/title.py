"""What ps and top call the process of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

OF_RANKS = "unisono rank "
"""What the titles of all ranks begin with."""

_PR_SET_NAME = 15
_LONGEST_NAME = 15
_ARG_START, _ARG_END = 48 - 3, 49 - 3  # fields of /proc/self/stat, after the name in brackets


def title_of(rank: int, world_size: int, program: str) -> str:
    """Write the title of a rank: ``unisono rank 1 of 4: train.py``."""
    return f"{OF_RANKS}{rank} of {world_size}: {Path(program).name or 'python'}"


def name_process(rank: int, world_size: int, program: str) -> None:
    """Name this process after its rank, in the list of processes too if there is room."""
    # Local; does nothing where the system isn't Linux. The memory of the command line is what
    # the kernel shows; Python has copied what it needs of it.
    if sys.platform != "linux":
        return
    name_thread(rank, world_size)
    title = os.fsencode(title_of(rank, world_size, program))
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if start and end - start > len(title):
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, title, len(title))


def name_thread(rank: int, world_size: int) -> None:
    """Name this thread, which in the main thread is what top shows of the process."""
    if sys.platform == "linux":
        text = f"rank {rank} of {world_size}"
        name = text if len(text) <= _LONGEST_NAME else f"rank {rank}"
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
