"""Copies of status pages, with what the kernel says of their processes: they can travel."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from unisono.host.status_page import PageReader, PageRecord

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CONDITIONS = {
    "R": "running",
    "D": "disk",
    "T": "stopped",
    "t": "stopped",
    "Z": "dead",
    "X": "dead",
}
_MOST_BYTES = 1 << 20  # of a copy that has come from elsewhere
_MOST_RECORDS = 32  # of each thread, that travel: they tell who comes late


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the kernel says of a process that runs."""

    condition: str
    thread_id: int
    thread_s: float
    process_s: float
    memory_bytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """What a page said when it was read."""

    facts: Mapping[str, Any]
    records: tuple[PageRecord, ...]
    vitals: Vitals | None


def copied(found: Iterable[PageReader]) -> list[PageCopy]:
    """Copy pages, but for those of ranks that have ended in good order just now."""
    copies = []
    for page in found:
        vitals = _vitals(page) if page.is_alive() else None
        # Who ends in good order takes the page away first.
        if vitals is not None or page.path.exists():
            copies.append(PageCopy(page.facts, tuple(page.records()), vitals))
    return copies


def _vitals(page: PageReader) -> Vitals | None:
    pid = int(page.facts["pid"])
    thread_id = int(page.facts.get("thread_id", 0))
    if not Path(f"/proc/{pid}/task/{thread_id}").exists():  # it has ended, and others go on
        thread_id = pid
    try:
        own = _status(f"/proc/{pid}/task/{thread_id}/stat")
        whole = _status(f"/proc/{pid}/stat")
        n_pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):  # it has just ended
        return None
    condition = _CONDITIONS.get(own[0].decode(), "sleeping")
    memory_bytes, now = n_pages * _PAGE_BYTES, time.monotonic_ns()
    return Vitals(condition, thread_id, _used_s(own), _used_s(whole), memory_bytes, now)


def _status(path: str) -> list[bytes]:
    """Read what follows the name: the state comes first."""
    return Path(path).read_bytes().rpartition(b")")[2].split()


def _used_s(words: list[bytes]) -> float:
    return (int(words[11]) + int(words[12])) / _TICKS_PER_S


def to_plain(copy: PageCopy) -> dict[str, Any]:
    """Make plain data of a copy, with the last calls of each thread and of each group."""
    return {
        "facts": copy.facts,
        "records": [astuple(record) for record in _last(copy.records)],
        "vitals": None if copy.vitals is None else astuple(copy.vitals),
    }


def _last(records: Iterable[PageRecord]) -> list[PageRecord]:
    """Leave out what tells nothing more: another host's page says what is missing by numbers."""
    newest: dict[str, PageRecord] = {}
    threads: dict[int, list[PageRecord]] = {}
    for record in records:
        newest[record.group] = record
        threads.setdefault(record.lane, []).append(record)
    kept = {id(record) for each in threads.values() for record in each[-_MOST_RECORDS:]}
    kept |= {id(record) for record in newest.values()}
    return [record for record in records if id(record) in kept or not record.end_ns]


def from_plain(plain: Mapping[str, Any], shift_ns: int) -> PageCopy:
    """Read what `to_plain` made on another host."""
    facts = dict(plain["facts"])
    facts["made_ns"] = int(facts["made_ns"]) + shift_ns
    facts.update({name: int(facts[name]) for name in ("pid", "rank", "start_ticks", "world_size")})
    records = (PageRecord(*row) for row in plain["records"])
    vitals = None if plain["vitals"] is None else Vitals(*plain["vitals"])
    return PageCopy(facts, tuple(_shifted(record, shift_ns) for record in records), vitals)


def _shifted(record: PageRecord, by_ns: int) -> PageRecord:
    end_ns = record.end_ns + by_ns if record.end_ns else 0
    return replace(record, begin_ns=record.begin_ns + by_ns, end_ns=end_ns)


def packed(plain: Mapping[str, Any]) -> str:
    """Make a short text of plain data."""
    return base64.b64encode(zlib.compress(json.dumps(plain).encode(), 1)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """Read what `packed` made."""
    unpack = zlib.decompressobj()
    try:
        body = unpack.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    plain = json.loads(body)
    if not isinstance(plain, dict):
        raise ValueError("it isn't an object")
    return plain
