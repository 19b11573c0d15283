"""State of processes: the state that a worker inherits from this one, and titles of ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from unisono.errors import LaunchError
from unisono.plugins import load

if sys.platform != "win32":  # Windows, where only threads may work
    import resource


def search_path() -> list[str]:
    """Return ``sys.path`` for a process that may have another working directory."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError(
            "the working directory has been removed: change to one that exists"
        ) from error
    return [here if item == "" else item for item in sys.path]


def check_streams() -> None:
    """Raise unless this process's standard streams are open, since workers inherit them."""
    try:
        for fd in range(3):
            os.fstat(fd)
    except OSError as error:
        raise LaunchError(
            "stdin, stdout or stderr (descriptor 0, 1 or 2) of this process is closed: open "
            "os.devnull instead"
        ) from error


def umask() -> int | None:
    """Return this process's umask; None without /proc, where reading it would change it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.partition(":")[2], 8)
    return None


def inherited() -> tuple[object, ...]:
    """Return this process's state that a fork server keeps and passes to its workers."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = (resource.getrlimit(getattr(resource, name)) for name in names)
    user = (os.geteuid(), os.getegid(), *os.getgroups())
    return (frozenset(affinity), os.getpriority(os.PRIO_PROCESS, 0), *limits, *user)


TITLE = "unisono rank "  # the beginning of the titles of all ranks in ps and top


def name_process(rank: int, world_size: int, program: str) -> None:
    """Set this process's title to ``unisono rank 1 of 4: train.py`` if setproctitle is there."""
    title = f"{TITLE}{rank} of {world_size}: {Path(program).name or 'python'}"
    with contextlib.suppress(ImportError):
        load("setproctitle:setproctitle")(title)
    name_thread(rank, world_size)  # top shows the title of the main thread


def name_thread(rank: int, world_size: int) -> None:
    """Set the title of this thread."""
    with contextlib.suppress(ImportError):
        load("setproctitle:setthreadtitle")(f"rank {rank} of {world_size}")
