"""Status pages: what a rank is in, where others of its user can read it without its help.

A page is a file in memory, so that it can also be read while the rank is stopped, in C, or dead.
Its owner writes, nobody locks, and a reader never takes half a state for a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import mmap
import os
import re
import stat
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unisono.topology import boot_id

_log = logging.getLogger(__name__)
# The page, in words of 8 bytes, of the host's order:
#   head     magic; edition of the facts; length of facts in even and in odd editions; strings used
#   facts    JSON, twice: an edition is written beside the one before, then its number
#   strings  length (2 bytes) and UTF-8, one after another; a string is named by its offset
#   lanes    one for each thread: a head (native thread id), then a ring
#   record   stamp (8, 16, ...), begin, end, name | file << 32, line | group << 32, number, bytes,
#            stamp | state
# A record is written from its first word to its last: x86 and `pack_into` keep that order. A reader
# goes from the last to the first: the same stamp in both says that nobody has written meanwhile.
_MAGIC = int.from_bytes(b"unisono1", "little")
_WORD = 8
_HEAD_BYTES = 64
_FACTS_BYTES = 4096
_STRINGS_BYTES = 16384
_STRINGS_AT = _HEAD_BYTES + 2 * _FACTS_BYTES
_LANES_AT = _STRINGS_AT + _STRINGS_BYTES
_LANES = 8
_RING = 128
_RECORD = struct.Struct("8q")  # twice as fast as with an order of bytes, or without a sign
_RECORD_BYTES = _RECORD.size
_STEP = _RECORD_BYTES // _WORD
_AROUND = _RING * _STEP - 1
_pack = _RECORD.pack_into
_LANE_BYTES = _HEAD_BYTES + _RING * _RECORD_BYTES
_PAGE_BYTES = _LANES_AT + _LANES * _LANE_BYTES
_EDITION, _USED = 1, 4
_END, _NUMBER, _LAST = 2, 5, 7  # words of a record
_STATES = 3  # bits of the last word
_LONGEST_STRING = 400
_LONGEST_NAME, _BEGINNING = 100, 60  # of a group
_LOW = (1 << 32) - 1

CALLED, IN_FLIGHT, WAITED_FOR = 0, 1, 2
"""States of a record: a call that blocks; one that was started; one that was, and is waited for."""

_NAME = re.compile(r"([0-9]+)-([0-9]+)-[0-9]+")
_numbers = itertools.count(1)
_open: weakref.WeakSet[StatusPage] = weakref.WeakSet()


def folder() -> Path | None:
    """Return the folder of this user's pages; None where there are none."""
    # ``UNISONO_STATUS=0`` means none; any other value but 1 is the folder itself.
    setting = os.environ.get("UNISONO_STATUS", "1")
    if setting == "0":
        return None
    if setting != "1":
        return Path(setting)
    return Path("/dev/shm", f"unisono-{os.getuid()}") if os.path.isdir("/dev/shm") else None


def _private(path: Path, *, makes: bool) -> bool:
    """Return whether a folder is this user's alone, so that nobody else has put pages there."""
    try:
        if makes:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700, parents=True)
        status = path.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    is_private = is_ours and not status.st_mode & 0o077
    if not is_private:
        _warn_of(path)
    return is_private


@cache  # once
def _warn_of(path: Path) -> None:
    _log.warning(
        "%s isn't a folder of yours alone (mode 0700), so unisono top and where don't know of this "
        "process: remove it, or name another one in UNISONO_STATUS",
        path,
    )


class StatusPage:
    """The page of one rank, which it writes."""

    def __init__(self, path: Path, memory: mmap.mmap, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts: dict[str, Any] = dict(facts)
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._ids: dict[str, int] = {}
        self._owners: list[weakref.ref[threading.Thread]] = []
        self._lock = threading.RLock()  # a signal's handler may call something meanwhile
        self._pid = os.getpid()
        self._words[_USED] = _WORD  # offset 0 is the empty string
        self.update()
        self._words[0] = _MAGIC
        _open.add(self)

    @classmethod
    def make(cls, facts: Mapping[str, Any]) -> StatusPage | None:
        """Make a page; None where there can be none."""
        place, ticks = folder(), start_ticks(os.getpid())
        if place is None or not ticks or not _private(place, makes=True):
            return None
        _sweep(place)
        path = place / f"{os.getpid()}-{ticks}-{next(_numbers)}"
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(fd, 0, _PAGE_BYTES)  # else a full file system ends the process
            memory = mmap.mmap(fd, _PAGE_BYTES)
        except OSError:
            if fd >= 0:
                path.unlink(missing_ok=True)
            return None
        finally:
            if fd >= 0:
                os.close(fd)
        own = {"pid": os.getpid(), "start_ticks": ticks, "made_ns": time.monotonic_ns()}
        return cls(path, memory, {**facts, **own, "pids": _pids()})

    def update(self, **facts: Any) -> None:
        """Change facts."""
        with self._lock:
            self.facts.update(facts)
            edition = self._words[_EDITION] + 1
            text = json.dumps(self.facts).encode()
            if len(text) > _FACTS_BYTES:  # what grows with the job's size goes first
                text = json.dumps({**self.facts, "groups": {}, "program": "", "cwd": ""}).encode()
            start = _HEAD_BYTES + edition % 2 * _FACTS_BYTES
            self._memory[start : start + len(text)] = text
            self._words[_EDITION + 1 + edition % 2] = len(text)
            self._words[_EDITION] = edition

    def name_of(self, text: str) -> int:
        """Return the number of a string in this page, 0 once there is no more room."""
        known = self._ids.get(text)
        if known is not None:
            return known
        body = text.encode("utf-8", "replace")[-_LONGEST_STRING:]
        with self._lock:
            at = self._words[_USED]
            if at + 2 + len(body) > _STRINGS_BYTES:
                return 0
            self._words[_USED] = at + 2 + len(body)
            start = _STRINGS_AT + at
            self._memory[start : start + 2] = len(body).to_bytes(2, "little")
            self._memory[start + 2 : start + 2 + len(body)] = body
            self._ids[text] = at
        return at

    def words_of(self, name: str, file: str, line: int, group: str) -> tuple[int, int]:
        """Return the words of a record that say what is called, and where."""
        return (
            self.name_of(name) | self.name_of(file) << 32,
            line | self.name_of(short_name(group)) << 32,
        )

    def lane(self) -> Lane | None:
        """Return a lane for this thread: a new one, or that of a thread that has ended."""
        thread = threading.current_thread()
        with self._lock:
            for place, owner in enumerate(self._owners):
                former = owner()
                if former is None or not former.is_alive():
                    self._owners[place] = weakref.ref(thread)
                    return Lane(self, place)
            if len(self._owners) == _LANES:
                return None
            self._owners.append(weakref.ref(thread))
            return Lane(self, len(self._owners) - 1)

    def close(self) -> None:
        """Remove the page, in the process that made it; harmless the second time."""
        if os.getpid() == self._pid:
            _open.discard(self)
            with contextlib.suppress(OSError):
                self.path.unlink()


class Lane:
    """The records of one thread in a page."""

    __slots__ = ("_first", "_last", "_memory", "_start", "_words")

    def __init__(self, page: StatusPage, place: int) -> None:
        start = _LANES_AT + place * _LANE_BYTES
        self._memory, self._words = page._memory, page._words
        self._start = start + _HEAD_BYTES
        self._first = self._start // _WORD
        stamps = self._words[self._first : self._first + _RING * _STEP : _STEP]
        self._last = max(stamps)  # of the thread that had it before
        self._words[start // _WORD] = threading.get_native_id()

    def begin(
        self, names: int, place: int, number: int, size: int, begin_ns: int, state: int
    ) -> int:
        """Write that a call has begun; give what `end` takes."""
        self._last = stamp = self._last + _STEP
        at = self._start + (stamp & _AROUND) * _WORD
        _pack(self._memory, at, stamp, begin_ns, 0, names, place, number, size, stamp | state)
        return stamp

    def end(self, stamp: int, end_ns: int) -> None:
        """Write that it is over, unless others have overwritten it; safe in any thread."""
        at = self._first + (stamp & _AROUND)
        if self._words[at] == stamp:
            self._words[at + _END] = end_ns

    def refuse(self, stamp: int) -> None:
        """Write that it isn't made: it has no number; safe in any thread."""
        at = self._first + (stamp & _AROUND)
        if self._words[at] == stamp:
            self._words[at + _NUMBER] = 0

    def wait(self, stamp: int) -> None:
        """Write that what was started is waited for now; safe in any thread."""
        at = self._first + (stamp & _AROUND)
        if self._words[at] == stamp:
            self._words[at + _LAST] = stamp | WAITED_FOR


@dataclass(frozen=True, slots=True)
class PageRecord:
    """A call, as its rank's page has it."""

    lane: int
    thread_id: int
    index: int
    name: str
    file: str
    line: int
    group: str
    number: int
    size_bytes: int
    begin_ns: int
    end_ns: int
    state: int


class PageReader:
    """The page of one rank, as another process sees it."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # it may be a pipe
        fd = os.open(path, flags)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or status.st_size != _PAGE_BYTES:
                raise ValueError(f"{path} isn't a status page of this user")
            self._memory = mmap.mmap(fd, _PAGE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        if self._words[0] != _MAGIC:
            raise ValueError(f"{path} isn't a status page")
        self.path = path
        self.facts: dict[str, Any] = self._read_facts()

    def _read_facts(self) -> dict[str, Any]:
        while True:
            edition = self._words[_EDITION]
            start = _HEAD_BYTES + edition % 2 * _FACTS_BYTES
            length = min(self._words[_EDITION + 1 + edition % 2], _FACTS_BYTES)
            text = self._memory[start : start + length]
            if self._words[_EDITION] == edition:
                facts = json.loads(text)
                if not isinstance(facts, dict):
                    raise ValueError(f"{self.path} has no facts")
                return facts

    def is_alive(self) -> bool:
        """Return whether the process that wrote it still runs."""
        return is_running(self.facts.get("pid", 0), self.facts.get("start_ticks", 0))

    def records(self) -> list[PageRecord]:
        """Read the last 128 calls of each thread, in the order in which they began."""
        found = [record for lane in range(_LANES) for record in self._lane(lane)]
        return sorted(found, key=lambda record: record.begin_ns)

    def _lane(self, lane: int) -> list[PageRecord]:
        start = _LANES_AT + lane * _LANE_BYTES
        thread_id = self._words[start // _WORD]
        found = []
        for at in range(start + _HEAD_BYTES, start + _LANE_BYTES, _RECORD_BYTES):
            last = self._words[at // _WORD + _LAST]
            _, begin, end, names, line, number, size, _ = _RECORD.unpack_from(self._memory, at)
            if 0 < self._words[at // _WORD] == last & ~_STATES:
                name, file, group = map(self._string, (names & _LOW, names >> 32, line >> 32))
                record = PageRecord(
                    lane, thread_id, last // _STEP, name, file, line & _LOW, group, number, size,
                    begin, end, last & _STATES,
                )  # fmt: skip
                found.append(record)
        return found

    def _string(self, at: int) -> str:
        if not 0 < at < _STRINGS_BYTES:
            return ""
        start = _STRINGS_AT + at
        length = int.from_bytes(self._memory[start : start + 2], "little")
        return self._memory[start + 2 : start + 2 + length].decode("utf-8", "replace")


def pages() -> list[PageReader]:
    """Read all pages of this user on this host, those of dead processes too."""
    # Containers and hosts may share the folder and number their processes alike: what another
    # one has written is left out, as nothing can be known of its processes here.
    place = folder()
    if place is None or not _private(place, makes=False):
        return []
    found = []
    for path in sorted(place.iterdir()):
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile, or isn't a page
            found.append(PageReader(path))
    here = _pids()
    return [page for page in found if page.facts.get("pids") == here]


def _pids() -> int:
    """Name the space that process ids belong to: hosts and containers have one each."""
    # The inode alone is the same on all hosts, outside of containers.
    try:
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        inode = 0
    digest = hashlib.blake2b(f"{boot_id()} {inode}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def short_name(group: str) -> str:
    """Return the name of a group as pages have it: of a long one its beginning, and a digest."""
    # Some names hold all ranks of their group.
    if len(group) <= _LONGEST_NAME:
        return group
    digest = hashlib.blake2b(group.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return f"{group[:_BEGINNING]}... {digest}"


def shortened(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Write ranks into facts, where there is no room for those of many large groups."""
    # `ranks_of` reads them.
    if len(ranks) > 2:
        evenly = range(ranks[0], ranks[-1] + 1, max(ranks[1] - ranks[0], 1))
        if tuple(evenly) == tuple(ranks):
            return {"range": [evenly.start, evenly.stop, evenly.step]}
    return list(ranks)


def ranks_of(written: list[int] | dict[str, list[int]]) -> tuple[int, ...]:
    """Read what `shortened` has written."""
    return tuple(range(*written["range"]) if isinstance(written, dict) else written)


def _sweep(place: Path) -> None:
    """Remove the pages of dead processes once nothing lives of their job."""
    with contextlib.suppress(OSError):
        names = [_NAME.fullmatch(path.name) for path in place.iterdir()]
        if all(is_running(int(name[1]), int(name[2])) for name in names if name):
            return
        readers = pages()
        living = {reader.facts.get("job") for reader in readers if reader.is_alive()}
        for reader in readers:
            if reader.facts.get("job") not in living:
                reader.path.unlink(missing_ok=True)


def start_ticks(pid: int) -> int:
    """Give when a process began, in clock ticks since the host did; 0 where it isn't known."""
    # With its id it tells a process from a later one that has the same id.
    return _status(pid)[1]


def start_ticks_of(status: bytes) -> int:
    """Take it out of the text of ``/proc/PID/stat``."""
    return int(status.rpartition(b")")[2].split()[19])


def is_running(pid: int, ticks: int) -> bool:
    """Return whether a process runs that began then; a zombie doesn't."""
    state, began = _status(pid)
    return began == ticks != 0 and state not in (b"Z", b"X")


def _status(pid: int) -> tuple[bytes, int]:
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
        return status.rpartition(b")")[2].split()[0], start_ticks_of(status)
    except (OSError, IndexError, ValueError):  # it is gone; Linux alone has it
        return b"", 0


def close_all(job: str | None = None) -> None:
    """Take away the pages of this process; with `job`, those of that job alone."""
    for page in list(_open):
        if job is None or page.facts.get("job") == job:
            page.close()
