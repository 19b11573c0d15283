"""What a process has from the one that started it, as the parent has it when it calls."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import resource

_FACT = re.compile(r"^(Uid|Threads):\s*([0-9]+)", re.MULTILINE)
_TASKS_OF_RANK = 10
_UMASK = re.compile(r"^Umask:\s*([0-7]+)", re.MULTILINE)


def directory() -> str:
    """Name this process's working directory, for others, even where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return f"/proc/{os.getpid()}/cwd"


def has_directory() -> bool:
    """Return whether this process's working directory is still there."""
    with contextlib.suppress(FileNotFoundError):
        return bool(os.getcwd())
    return False


def search_path() -> list[str]:
    """Give ``sys.path`` for a process that may have another working directory."""
    here = directory()
    return [here if item == "" else item for item in sys.path]


@contextlib.contextmanager
def streams_filled() -> Iterator[None]:
    """Put the null device where stdin, stdout or stderr are closed: no socket comes there then."""
    # A daemon may have closed them; what replicas print is lost then.
    filled: list[io.FileIO] = []  # a file closes itself where an interrupt leaves nobody to do it
    try:
        while (null := io.FileIO(os.devnull, "r+")).fileno() <= 2:
            filled.append(null)
            os.set_inheritable(null.fileno(), True)
        null.close()
        yield
    finally:
        for null in filled:
            null.close()


def why_aborted() -> str:
    """Say what may have let a rank abort: libraries do where they can't have one more thread."""
    # Empty where the user may have as many as there can be.
    if sys.platform == "win32" or os.geteuid() == 0:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    n_tasks = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended
            facts = dict(_FACT.findall(status.read_text()))
            if facts.get("Uid") == str(os.getuid()):
                n_tasks += int(facts.get("Threads", 0))
    if limit == resource.RLIM_INFINITY or n_tasks + _TASKS_OF_RANK <= limit:
        return ""
    return (
        f"; this user may have {limit} processes and threads at a time and has {n_tasks} now, "
        f"where a rank takes about {_TASKS_OF_RANK}: raise ulimit -u"
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the system keeps for a process and hands on to its children."""

    # A worker comes from a helper process that is older than the call. What the worker may not
    # have, such as a higher hard limit than its helper's, it goes without.

    umask: int | None = None
    affinity: frozenset[int] | None = None
    niceness: int | None = None
    limits: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Surroundings:
        """Read those of this process, which stay as they are."""
        if sys.platform == "win32":
            return cls()
        facts: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # without /proc it could only be read by changing it
            umask = _UMASK.search(Path("/proc/self/status").read_text())
            facts["umask"] = int(umask[1], 8) if umask else None
        if hasattr(os, "sched_getaffinity"):
            facts["affinity"] = frozenset(os.sched_getaffinity(0))
        facts["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
        numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
        return cls(**facts, limits={number: resource.getrlimit(number) for number in numbers})

    def enter(self) -> None:
        """Give this process what differs."""
        if sys.platform == "win32":
            return
        if self.umask is not None:
            os.umask(self.umask)
        if self.affinity is not None and self.affinity != os.sched_getaffinity(0):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.affinity)
        if self.niceness is not None and self.niceness != os.getpriority(os.PRIO_PROCESS, 0):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        for number, limit in self.limits.items():
            if limit != resource.getrlimit(number):
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(number, limit)
