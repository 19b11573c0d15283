"""How much memory the container of this process has left: a control group of Linux, or several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """What the files of one version of control groups are called."""

    limit: str
    used: str
    cached: tuple[str, str]  # in memory.stat: pages of files, which the kernel gives back


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def free_bytes(folder: Path = _FOLDER, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes that this process's control groups have left, those around them included."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # Linux alone has it
        return None
    left = [_left(group, names) for line in lines for group, names in _groups(folder, line)]
    return min((each for each in left if each is not None), default=None)


def _groups(folder: Path, line: str) -> Iterator[tuple[Path, _Names]]:
    """Give the folders of a group and of those around it; in a container some aren't there."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    top, names = (folder / "memory", _V1) if controllers else (folder, _V2)
    own = top / path.strip("/")
    for group in (own, *own.parents):
        yield group, names
        if group == top:
            return


def _left(group: Path, names: _Names) -> int | None:
    try:
        limit = (group / names.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((group / names.used).read_text())
        entries = (group / "memory.stat").read_text().splitlines()
        stat = dict(entry.split(" ", 1) for entry in entries)
        return max(0, int(limit) - used + sum(int(stat[name]) for name in names.cached))
    except (OSError, ValueError, KeyError):  # it isn't seen from here
        return None
