"""A trace on disk: one file for each rank and process, a line of facts and a line for each call."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import ArgumentError
from unisono.recording import CollectiveRecord
from unisono.topology import boot_id

_FORMAT = 2  # 1 had no overlaps, and is else the same
_SUFFIX = ".unisono.jsonl"
_CACHED = 10_000  # heads of lines


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank's file holds."""

    rank: int
    world_size: int
    job: str
    host: str
    boot: str
    pid: int
    wall_ns: int
    monotonic_ns: int
    records: Sequence[CollectiveRecord]


class TraceFile:
    """The file of one rank that is being written."""

    def __init__(self, folder: Path, record: CollectiveRecord) -> None:
        self._fd = _new_file(folder, record.rank)
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self._groups: dict[str, int] = {}  # the numbers of those that were met last
        self._members: dict[str, Sequence[int]] = {}
        self._heads: dict[tuple[Any, ...], str] = {}
        facts = {
            "unisono_trace": _FORMAT,
            "rank": record.rank,
            "world_size": record.world_size,
            "job": record.job,
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": os.getpid(),
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
        }
        self._write(json.dumps(facts) + "\n")

    def append(self, records: Iterable[CollectiveRecord]) -> None:
        """Write records."""
        lines: list[str] = []
        heads, members = self._heads, self._members
        for record in records:
            (
                name, _, _, _, group, ranks, number, size, dtype, plane, file, line, thread,
                arrival, duration, error, overlap,
            ) = record  # fmt: skip
            if members.get(group) is not ranks:  # ranks themselves take long to compare
                self._meet(group, ranks, lines)
            key = (name, group, size, dtype, plane, file, line, thread, error)
            head = heads.get(key)
            if head is None:
                head = self._new_head(key)
            more = f",{overlap}" if overlap else ""
            lines.append(f"{head},{number},{arrival},{duration}{more}]\n")
        self._write("".join(lines))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _meet(self, group: str, ranks: Sequence[int], lines: list[str]) -> None:
        """Write the line of a group, unless it has its line already."""
        self._members[group] = ranks
        known = (group, tuple(ranks))
        number = self._numbers.get(known)
        if number is None:
            number = self._numbers[known] = len(self._numbers)
            lines.append(json.dumps({"group": number, "name": group, "ranks": list(ranks)}) + "\n")
        if self._groups.get(group) != number:
            self._groups[group] = number
            self._heads.clear()

    def _new_head(self, key: tuple[Any, ...]) -> str:
        """Make what the lines of a call begin with."""
        name, group, *others = key
        if len(self._heads) >= _CACHED:
            self._heads.clear()
        parts = (name, self._groups[group], *others)
        head = self._heads[key] = json.dumps(parts, separators=(",", ":"))[:-1]
        return head

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._fd, data) :]


def _new_file(folder: Path, rank: int) -> int:
    """Make a file that isn't there yet: a rank may have several contexts, a folder several jobs."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    attempt = 0
    while True:
        name = f"rank-{rank}-{socket.gethostname()}-{os.getpid()}-{attempt}{_SUFFIX}"
        try:
            return os.open(folder / name, flags, 0o600)
        except FileExistsError:
            attempt += 1


def read(folder: Path) -> list[RankTrace]:
    """Read what the ranks of a job have written, or of several jobs."""
    # A last line that its rank didn't live to end is left out.
    paths = sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
    traces = [trace for trace in map(_read_file, paths) if trace is not None]
    if not traces:
        raise ArgumentError(
            f"{folder} holds no trace: give the folder that UNISONO_TRACE or idist.trace() named"
        )
    return sorted(traces, key=lambda each: (each.job, each.rank, each.monotonic_ns))


def _read_file(path: Path) -> RankTrace | None:
    lines = path.read_text("utf-8", "replace").split("\n")[:-1]  # each line ends with a newline
    if not lines:
        return None  # its rank ended at that moment
    try:
        facts = json.loads(lines[0])
        if facts.pop("unisono_trace") not in (1, _FORMAT):
            raise ArgumentError(f"{path} is of another version of unisono: read it with that one")
        return RankTrace(**facts, records=list(_records(facts, lines[1:])))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} isn't a trace, or is damaged: {error!r}; remove it") from error


def _records(facts: dict[str, Any], lines: Iterable[str]) -> Iterator[CollectiveRecord]:
    groups: dict[int, tuple[str, tuple[int, ...]]] = {}
    place = (facts["rank"], facts["world_size"], facts["job"])
    for line in lines:
        values = json.loads(line)
        if isinstance(values, dict):
            groups[values["group"]] = (values["name"], tuple(values["ranks"]))
            continue
        (
            name, group, size, dtype, plane, file, at, thread, error, number, arrival, duration,
            *overlap,
        ) = values  # fmt: skip
        yield CollectiveRecord(
            name, *place, *groups[group], number, size, dtype, plane, file, at, thread,
            arrival, duration, error, *overlap,
        )  # fmt: skip
