"""The trace of a rank on disk, in Chrome's JSON."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import ArgumentError
from unisono.recording.records import CollectiveRecord
from unisono.topology import EVERYBODY, boot_id

_FORMAT = 3
_SUFFIX = ".unisono.json"
_CACHED = 10_000  # at most so many beginnings of lines
_US = 1000  # nanoseconds

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The calls in the file of one rank, and the clock of its host."""

    rank: int
    world_size: int
    job: str
    boot: str
    pid: int
    wall_ns: int
    monotonic_ns: int
    records: Sequence[CollectiveRecord]


class TraceFile:
    """The file of one rank that is being written."""

    # Perfetto and Chrome read an array without its end, so each write leaves a readable file.

    def __init__(self, folder: Path, record: CollectiveRecord) -> None:
        prefix = f"rank-{record.rank}-{socket.gethostname()}-{os.getpid()}-"
        self._fd, _ = tempfile.mkstemp(_SUFFIX, prefix, folder)
        # Beginnings of lines, by the key of `append`, each with the ranks whose id is in the key.
        self._heads: dict[tuple[Any, ...], tuple[str, Sequence[int]]] = {}
        facts = {
            "unisono_trace": _FORMAT,
            "rank": record.rank,
            "world_size": record.world_size,
            "job": record.job,
            "boot": boot_id(),
            "pid": os.getpid(),
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
        }
        args = {"name": f"rank {record.rank}", **facts}
        event = {"ph": "M", "name": "process_name", "pid": record.rank + 1, "args": args}
        self._write(f"[\n{json.dumps(event)},\n")

    def append(self, records: Iterable[CollectiveRecord]) -> None:
        """Write records."""
        lines: list[str] = []
        heads = self._heads
        for record in records:
            (
                name, _, _, _, group, ranks, number, size, dtype, plane, file, line, thread,
                arrival, duration, error, overlap,
            ) = record  # fmt: skip
            # The key has the ranks' id, as comparing them is slow; the cached head keeps the ranks,
            # so that no others get that id.
            key = (name, group, id(ranks), size, dtype, plane, file, line, thread, error)
            head, _ = heads.get(key) or self._new_head(key, record)
            # Formatted by hand, for speed; `e-3` makes nanoseconds exact microseconds.
            more = f',"overlap_us":{overlap}e-3' if overlap else ""
            lines.append(f'{head}{number}{more}}},"ts":{arrival}e-3,"dur":{duration}e-3}},\n')
        self._write("".join(lines))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _new_head(
        self, key: tuple[Any, ...], record: CollectiveRecord
    ) -> tuple[str, Sequence[int]]:
        """Build the beginning of the lines of a call: all but its number and its times."""
        if len(self._heads) >= _CACHED:
            self._heads.clear()
        args = args_of(record)
        if record.group != EVERYBODY:
            args["ranks"] = list(record.ranks)
        event = {"ph": "X", "cat": "call", "name": record.name, "pid": record.rank + 1}
        event |= {"tid": record.thread_id, "args": args}
        # The two braces stay open for what `append` adds to `args` and to the event.
        text = json.dumps(event, separators=(",", ":")).removesuffix("}}") + ',"number":'
        head = self._heads[key] = (text, record.ranks)
        return head

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:  # `os.write` may write only a part
            data = data[os.write(self._fd, data) :]


def args_of(record: CollectiveRecord) -> Event:
    """Return the facts that a viewer shows beside a call."""
    facts: Event = {"group": record.group, "bytes": record.size_bytes, "dtype": record.dtype}
    facts |= {"plane": record.plane, "line": f"{record.file}:{record.line}"}
    return {**facts, "error": record.error} if record.error else facts


def read(folder: Path) -> list[RankTrace]:
    """Read the files of one job or several, without an incomplete last line."""
    paths = sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
    traces = [trace for trace in map(_read_file, paths) if trace is not None]
    if not traces:
        raise ArgumentError(
            f"{folder} holds no trace: give the folder that UNISONO_TRACE or idist.trace() named"
        )
    return sorted(traces, key=lambda each: (each.job, each.rank, each.monotonic_ns))


def _read_file(path: Path) -> RankTrace | None:
    # The first line is the opening bracket; the last one is empty, or not yet complete.
    lines = path.read_text("utf-8", "replace").split("\n")[1:-1]
    if not lines:
        return None  # its rank ended before it had written a line
    try:
        facts, *calls = (json.loads(line.removesuffix(",")) for line in lines)
        facts = facts["args"]
        if facts.pop("unisono_trace") != _FORMAT:
            raise ArgumentError(f"{path} is of another version of unisono: read it with that one")
        del facts["name"]
        return RankTrace(**facts, records=list(_records(facts, calls)))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} isn't a trace, or is damaged: {error!r}; remove it") from error


def _records(facts: Mapping[str, Any], calls: Iterable[Event]) -> Iterator[CollectiveRecord]:
    rank_facts = (facts["rank"], facts["world_size"], facts["job"])
    everybody = tuple(range(facts["world_size"]))
    for call in calls:
        args = call["args"]
        file, _, line = args["line"].rpartition(":")
        ranks = tuple(args.get("ranks", everybody))  # left out if they are all
        times = (call["ts"], call["dur"], args.get("overlap_us", 0))  # in microseconds
        arrival_ns, duration_ns, overlap_ns = (round(each * _US) for each in times)
        yield CollectiveRecord(
            call["name"], *rank_facts, args["group"], ranks, args["number"], args["bytes"],
            args["dtype"], args["plane"], file, int(line), call["tid"], arrival_ns, duration_ns,
            args.get("error", ""), overlap_ns,
        )  # fmt: skip
