"""Status pages: files where a rank records its calls, for other processes of its user to read.

A page is a file in memory, so that it can be read without the rank's help, even if the rank is
stopped, runs C code or is dead. Only the rank writes to it, without locks; readers detect and
reject what is half written.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import mmap
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unisono.plugins import load
from unisono.topology import EVERYBODY, members_of_pair, pid_namespace

_log = logging.getLogger(__name__)
# The page, in 8-byte words, in the host's byte order:
#   head     magic of this version; edition: how often the facts were written; the lengths of the
#            facts' even and odd editions
#   facts    JSON about the rank, in two buffers used alternately; `edition` is written afterwards
#   lanes    one for each thread: a head (native thread id), then a ring
#   record   stamp (32, 64, ...), begin, end, number, bytes, text, stamp | state
#   text     UTF-8: name, group, line and file, with a zero after each; zeros fill the rest
# A record is written from its first byte to its last: x86 and `pack_into` keep that order. A reader
# goes from the last to the first: the same stamp at both ends of the record shows that no write
# came between.
_MAGIC = int.from_bytes(b"unisono2", "little")
WORD = 8
_HEAD_BYTES = 64
_FACTS_BYTES = 8192
_LANES_AT = _HEAD_BYTES + 2 * _FACTS_BYTES
_LANES = 8
_RING = 128
_TEXT_BYTES = 208
# Native order and signed: twice as fast as an explicit byte order or unsigned fields.
_RECORD = struct.Struct(f"5q{_TEXT_BYTES}sq")
STEP: int = _RECORD.size // WORD
RING_MASK: int = _RING * STEP - 1
pack_record: Callable[..., None] = _RECORD.pack_into
_LANE_BYTES = _HEAD_BYTES + _RING * _RECORD.size
_PAGE_BYTES = _LANES_AT + _LANES * _LANE_BYTES
_EDITION = 1
END, NUMBER, STATE = 2, 3, STEP - 1
"""Indexes of the words of a record that may change after it is written."""
_LONGEST_NAME = 100  # bytes of a group's name
_BEGINNING = 60  # bytes kept of a longer group name, and at most of a call's name

CALLED, IN_FLIGHT = 0, 1
"""States of a record: the rank is blocked in the call, or waits for it; or the call was started
asynchronously and isn't waited for yet."""

_numbers = itertools.count(1)
_open: weakref.WeakSet[StatusPage] = weakref.WeakSet()


def folder() -> Path | None:
    """Return the folder of this user's pages; None if there are none."""
    # ``UNISONO_STATUS=0`` means none; any other value but 1 is the folder itself.
    setting = os.environ.get("UNISONO_STATUS", "1")
    if setting == "0" or not sys.platform.startswith("linux"):
        return None
    if setting != "1":
        return Path(setting)
    return Path("/dev/shm", f"unisono-{os.getuid()}") if os.path.isdir("/dev/shm") else None


def _is_private(path: Path, *, create: bool) -> bool:
    """Return whether a folder is this user's alone, so that its pages can be trusted."""
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700, parents=True)
        status = path.lstat()  # not `stat`: a link may lead elsewhere
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_ours and not status.st_mode & 0o077:
        return True
    if create:
        _log.warning(
            "%s isn't a folder that only you can access (mode 0700), so unisono top and unisono "
            "where can't see this process: remove it, or name another one in UNISONO_STATUS",
            path,
        )
    return False


class StatusPage:
    """The page of one rank, for writing."""

    def __init__(self, path: Path, memory: mmap.mmap, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts: dict[str, Any] = dict(facts)
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        # By lane, the thread that writes to it: weak, so that an ended thread's lane is free.
        self._owners: list[Callable[[], threading.Thread | None]] = [lambda: None] * _LANES
        self._lock = threading.RLock()  # a signal's handler may make a call meanwhile
        self._pid = os.getpid()  # a fork must not remove its parent's page
        self.update()
        self._words[0] = _MAGIC  # last: readers reject a page without it
        _open.add(self)

    @classmethod
    def make(cls, facts: Mapping[str, Any]) -> StatusPage | None:
        """Create a page; return None if that fails."""
        directory, pid, namespace, fd = folder(), os.getpid(), pid_namespace(), -1
        # Readers find the process by its pid and the namespace of that, so both must be known.
        if directory is None or not namespace or not _is_private(directory, create=True):
            return None
        path = directory / f"{pid}-{start_ticks(pid)}-{next(_numbers)}"
        try:
            _sweep(directory)
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
        process = {"pid": pid, "pid_namespace": namespace, "start_ticks": start_ticks(pid)}
        return cls(path, memory, {**facts, **process, "made_ns": time.monotonic_ns()})

    def update(self, **facts: Any) -> None:
        """Update facts."""
        with self._lock:
            self.facts.update(facts)
            edition = self._words[_EDITION] + 1
            text = json.dumps(self.facts).encode()
            if len(text) > _FACTS_BYTES:  # without the facts that may be long
                text = json.dumps({**self.facts, "groups": {}, "program": "", "cwd": ""}).encode()
            start = _HEAD_BYTES + edition % 2 * _FACTS_BYTES
            self._memory[start : start + len(text)] = text
            self._words[_EDITION + 1 + edition % 2] = len(text)
            self._words[_EDITION] = edition  # last: readers look at the new facts from now on

    def lane(self) -> Lane | None:
        """Claim for the current thread a lane that no live thread uses; None if all are in use."""
        thread = threading.current_thread()
        with self._lock:
            for index, owner in enumerate(self._owners):
                former = owner()
                if former is None or not former.is_alive():
                    self._owners[index] = weakref.ref(thread)
                    return Lane(self, index)
        return None

    def close(self) -> None:
        """Remove the page, if called in the process that created it; a second call does nothing."""
        if os.getpid() == self._pid:
            _open.discard(self)
            with contextlib.suppress(OSError):
                self.path.unlink()


class Lane:
    """The records of one thread in a page, which `CallLog.begin` and `Token.end` write."""

    # Attributes instead of methods: each collective would call two more functions.
    __slots__ = ("first", "last", "memory", "words")

    def __init__(self, page: StatusPage, index: int) -> None:
        head = (_LANES_AT + index * _LANE_BYTES) // WORD
        self.memory: mmap.mmap = page._memory
        self.words: memoryview = page._words
        self.first: int = head + _HEAD_BYTES // WORD
        stamps = self.words[self.first : self.first + _RING * STEP : STEP]
        # Stamps only grow, even from one thread of a lane to the next.
        self.last: int = max(stamps)
        self.words[head] = threading.get_native_id()

    def write(self, stamp: int, word: int, value: int) -> None:
        """Set a word of a record unless the record has been overwritten; safe in any thread."""
        index = self.first + (stamp & RING_MASK)
        if self.words[index] == stamp:
            self.words[index + word] = value


CallKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call of a rank, as recorded in its page."""

    name: str
    context: str
    group: str
    ranks: tuple[int, ...]
    number: int
    file: str
    line: int
    begin_ns: int
    end_ns: int = 0
    size_bytes: int = 0
    thread_id: int = 0
    is_blocking: bool = True

    @property
    def key(self) -> CallKey:
        """The context and group in which the call is numbered."""
        return self.context, self.group


class PageReader:
    """The page of one rank, for reading."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the path may be a pipe
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
            raise ValueError(f"{path} isn't a status page of this version")
        self.path = path
        self.facts: dict[str, Any] = self._read_facts()

    def _read_facts(self) -> dict[str, Any]:
        """Read the newest edition; retry if another was written meanwhile."""
        while True:
            # An edition's place is overwritten only after the next edition has been published.
            edition = self._words[_EDITION]
            start = _HEAD_BYTES + edition % 2 * _FACTS_BYTES
            text = self._memory[start : start + self._words[_EDITION + 1 + edition % 2]]
            if self._words[_EDITION] == edition:
                return dict(json.loads(text))

    def is_alive(self) -> bool:
        """Return whether the process that wrote the page still runs."""
        return is_running(self.facts["pid"], self.facts["start_ticks"])

    def calls(self) -> list[ObservedCall]:
        """Return the last 128 calls of each thread, in the order in which they began."""
        # Pages list only groups of some ranks.
        groups = {name: decode_ranks(each) for name, each in self.facts["groups"].items()}
        groups[EVERYBODY] = tuple(range(self.facts["world_size"]))
        found = [
            call
            for lane in range(_LANES)
            for index in range(_RING)
            if (call := self._call(lane, index, groups)) is not None
        ]
        return sorted(found, key=lambda call: call.begin_ns)

    def _call(
        self, lane: int, index: int, groups: Mapping[str, tuple[int, ...]]
    ) -> ObservedCall | None:
        """Read one record; return None if there is none, or if it is just being written."""
        start = _LANES_AT + lane * _LANE_BYTES
        first = start + _HEAD_BYTES + index * _RECORD.size
        last = self._words[first // WORD + STATE]
        stamp, begin, end, number, size, text, _ = _RECORD.unpack_from(self._memory, first)
        # In a whole record the stamp at the end, read first, equals the one at the beginning.
        if not 0 < stamp == last & ~IN_FLIGHT == self._words[first // WORD]:
            return None
        name, group, line, file = text.decode("utf-8", "replace").split("\0")[:4]
        context = f"{self.facts.get('model', '')} {self.facts.get('backend', '')}"
        ranks = groups.get(group) or members_of_pair(group)  # of send or recv
        return ObservedCall(
            name, context, group, ranks, number, file, int(line), begin, end, size,
            self._words[start // WORD], not last & IN_FLIGHT,
        )  # fmt: skip


def pages() -> list[PageReader]:
    """Read all pages of this user on this host, those of dead processes too."""
    # Containers and hosts may share the folder and number their processes alike. Pages of another
    # container or host are left out, as the state of its processes isn't known here.
    directory = folder()
    if directory is None or not _is_private(directory, create=False):
        return []
    found = []
    for path in sorted(directory.iterdir()):
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile, or isn't a page
            found.append(PageReader(path))
    here = pid_namespace()
    return [page for page in found if page.facts.get("pid_namespace") == here]


def encode_call(name: str, group: str, file: str, line: int) -> bytes:
    """Encode a call's name, group and source position for a record; a long path loses its start."""
    head = name.encode("utf-8", "replace")[:_BEGINNING]
    head += f"\0{short_name(group)}\0{line}\0".encode("utf-8", "replace")
    return head + file.encode("utf-8", "replace")[len(head) - _TEXT_BYTES :]


def short_name(group: str) -> str:
    """Return a group's name as pages store it; a long name is cut and a digest added."""
    # Some names hold all ranks of their group.
    name = group.encode("utf-8", "replace")
    if len(name) <= _LONGEST_NAME:
        return group
    digest = hashlib.blake2b(name, digest_size=8).hexdigest()
    return f"{name[:_BEGINNING].decode('utf-8', 'ignore')}... {digest}"


def encode_ranks(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Encode ranks compactly: the facts lack room for the full rank lists of many large groups."""
    if len(ranks) > 2:
        # At least 1, as torch's groups may be in any order, and a range accepts no step of 0.
        even_range = range(ranks[0], ranks[-1] + 1, max(ranks[1] - ranks[0], 1))
        if tuple(even_range) == tuple(ranks):
            return {"range": [even_range.start, even_range.stop, even_range.step]}
    return list(ranks)


def decode_ranks(written: list[int] | dict[str, list[int]]) -> tuple[int, ...]:
    """Decode ranks from `encode_ranks`."""
    return tuple(range(*written["range"]) if isinstance(written, dict) else written)


def _sweep(directory: Path) -> None:
    """Remove the pages of dead processes once their whole job is dead."""
    with contextlib.suppress(OSError):
        pids = {path.name.partition("-")[0] for path in directory.iterdir()}
        # Mostly every process lives: then no page needs to be opened.
        if all(_exists(int(pid)) for pid in pids if pid.isdecimal()):
            return
        found = pages()
        living = {page.facts.get("job") for page in found if _exists(page.facts["pid"])}
        # Reports on a living job need the pages of its dead ranks.
        for page in found:
            if page.facts.get("job") not in living:
                page.path.unlink(missing_ok=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:  # the name of a file may have any number
        return isinstance(error, PermissionError)  # the process is another user's
    return True


@cache  # by pid, as a fork is another process
def start_ticks(pid: int) -> int:
    """Return a time when process `pid`, the caller, is alive, in units of 10 ms since the boot.

    It identifies the process when pids are reused.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 10_000_000


def is_running(pid: int, ticks: int) -> bool:
    """Return whether the process that had `pid` at `ticks` still runs; a zombie doesn't."""
    with contextlib.suppress(load("psutil:Error")):
        boot_s, process = load("psutil:boot_time")(), load("psutil:Process")(pid)
        # In units of 10 ms, as `ticks`.
        since = round((process.create_time() - boot_s) * 100)
        # A process that began after `ticks` has reused the pid.
        return bool(since <= ticks and process.status() != "zombie")
    return False


def close_all(job: str | None = None) -> None:
    """Remove the pages of this process; with `job`, only those of that job."""
    for page in list(_open):
        if job is None or page.facts.get("job") == job:
            page.close()
