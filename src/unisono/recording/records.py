"""Records of each rank's collectives, for its status page and for hooks."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unisono import plugins
from unisono.control import signatures
from unisono.errors import EnvironmentDetectionError
from unisono.model.handle import Handle
from unisono.recording import stack_signal
from unisono.recording.status_page import (
    CALLED,
    END,
    NUMBER,
    RING_MASK,
    STATE,
    STEP,
    WORD,
    Lane,
    StatusPage,
    encode_call,
    encode_ranks,
    pack_record,
    short_name,
)
from unisono.topology import EVERYBODY, Group, RankInfo, members_of_pair
from unisono.tracebacks import summary

T = TypeVar("T")
_now = time.monotonic_ns  # global names, as each collective calls these functions
_frame = sys._getframe
_thread_id = threading.get_native_id
_LONGEST_PROGRAM = 200
_LONGEST_ERROR = 500
_LONGEST_JOB = 200
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, dict, list, tuple})
_IN_STEP = "_unisono_in_step"  # attribute of an exception


class CollectiveRecord(NamedTuple):
    """One call of a rank, as passed to hooks.

    Args:
        name: the call, as in ``"all_reduce"``; ``"initialize"``; a section such as
            ``"one_rank_first"``; ``"gradients"`` for one bucket of ``DistributedDataParallel``.
        rank: the rank that made the call.
        world_size: number of ranks of the job.
        job: identifies the job; the same on all its ranks if its launcher or its variables
            define it.
        group: the name of the group; ``"all ranks"`` for all.
        ranks: global ranks of the group, in its order.
        number: count of this rank's calls over the group, including this one: equal numbers are the
            same call on all ranks; 0 after a call that a hook has rejected, which isn't made.
        size_bytes: bytes of the tensor argument; 0 if there is none.
        dtype: dtype of the tensor argument, as in ``"float32"``; empty if there is none.
        plane: carrier of the call: ``"control"``, ``"memory"`` (shared by the ranks of a host) or
            ``"data"`` (the model's library); empty before the call.
        file: file of the line that made the call.
        line: number of that line.
        thread_id: native id of the thread that made the call.
        arrival_ns: start of the call, in nanoseconds of ``time.monotonic_ns()``.
        duration_ns: nanoseconds until the call was done; -1 before.
        error: the exception that the call raised, in one line; empty if there is none.
        overlap_ns: nanoseconds of the duration in which the rank continued with other work, before
            it waited for the call's handle; 0 for a call that blocks.
    """

    name: str
    rank: int
    world_size: int
    job: str
    group: str
    ranks: Sequence[int]
    number: int
    size_bytes: int
    dtype: str
    plane: str
    file: str
    line: int
    thread_id: int
    arrival_ns: int
    duration_ns: int = -1
    error: str = ""
    overlap_ns: int = 0


Hook = Callable[[CollectiveRecord], object]
_hooks: tuple[tuple[Hook | None, Hook | None], ...] = ()
_BEFORE, _AFTER = 0, 1  # indices of the two hooks in a pair
_lock = threading.Lock()


class _Planes(threading.local):
    """The plane of a thread's current call, as far as is known."""

    plane: str = "control"


_planes = _Planes()
_MAX_SITES = 4096  # a limit, as generated code may have ever new lines


def add_hook(*, before: Hook | None = None, after: Hook | None = None) -> Callable[[], None]:
    """Register functions that are called before and after every collective of this process.

    They run on this rank alone, in the thread that runs the call, so they must not call
    collectives. The call raises their exceptions. Without a hook, no record is created.

    Args:
        before: called with the record when a call begins. If it raises, this rank doesn't make the
            call, nor count it: its next one is matched with the call that the others wait in.
        after: called with the record when the call is done or has failed. If a hook raises, the
            others are still called.

    Returns:
        A function that removes the hooks; a second call does nothing.

    Example:
        >>> import unisono as idist
        >>> seen = []
        >>> remove = idist.add_hook(after=lambda record: seen.append(record.name))
        >>> idist.all_reduce(1)
        1
        >>> remove()
        >>> seen
        ['all_reduce']
    """
    global _hooks
    mine = (before, after)
    with _lock:  # the tuple is replaced: pending calls keep the old one
        _hooks = (*_hooks, mine)

    def remove() -> None:
        global _hooks
        with _lock:
            _hooks = tuple(each for each in _hooks if each is not mine)

    return remove


def _run_hooks(when: int, record: CollectiveRecord) -> None:
    """Run all hooks, even if some raise; raise the first error."""
    errors: list[Exception] = []
    for hooks in _hooks:
        hook = hooks[when]
        try:
            if hook is not None:
                hook(record)
        except Exception as error:  # each hook may raise
            errors.append(error)
    if errors:
        mark_in_step(errors[0])
        try:
            raise errors[0]
        finally:
            errors.clear()  # a cycle otherwise: error, traceback, this frame, the list


def plane_is(plane: str) -> None:
    """Record the plane that carries the tensor of this thread's call."""
    if _hooks:
        _planes.plane = plane


class _Here(threading.local):
    """A thread's state for one log."""

    lane: Lane | None = None
    has_asked: bool = False
    """Whether the thread has asked for a lane, of which a page has few."""


class Token:
    """A call that has begun; in a with statement, the body is the call."""

    # Python creates objects fastest if their class has neither ``__init__`` nor ``__slots__``.

    lane: Lane | None = None
    stamp: int = 0
    record: CollectiveRecord | None = None
    plane: str = ""
    overlap_ns: int | None = 0
    """None until a started call has been waited for."""

    def end(self, error: BaseException | None = None) -> None:
        """Record the end of the call; a second call does nothing."""
        lane, record = self.lane, self.record
        if lane is not None:
            self.lane, signatures.line.known = None, b""
            words, stamp = lane.words, self.stamp
            index = lane.first + (stamp & RING_MASK)
            if words[index] == stamp:  # as `Lane.write`, without a call
                words[index + END] = _now()
        if record is not None:
            self.record = None
            text = "" if error is None else summary(error)[:_LONGEST_ERROR]
            passed_ns, overlap_ns = _now() - record.arrival_ns, self.overlap_ns
            # None: nothing has waited for the call, so it overlapped the whole time.
            overlap_ns = passed_ns if overlap_ns is None else min(overlap_ns, passed_ns)
            # Only the plane and the fields from `duration_ns` on are new.
            facts = (*record[:9], self.plane or _planes.plane, *record[10:14])
            done = (*facts, passed_ns, text, overlap_ns)
            _run_hooks(_AFTER, tuple.__new__(CollectiveRecord, done))  # twice as fast as calling it

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.end(error)

    def carry_out(self, run: Callable[[], T]) -> T:
        """Run the call, and record its end."""
        _planes.plane = "control"
        with self:
            return run()

    def started(self, handle: Handle[T], is_started: bool = True) -> Handle[T]:
        """Record the end of the call when its handle has been waited for."""
        # A call that another thread runs has its plane from there, as `carry_out` ends it.
        if not self.defer_end(_planes.plane if is_started else ""):
            return handle
        return Handle(partial(self.wait, handle.wait), handle.is_completed)

    def defer_end(self, plane: str) -> bool:
        """Defer the end of the call to `wait`; return whether the call is recorded at all."""
        if self is UNRECORDED:
            return False
        self.plane = plane  # by the time of the wait, the thread's may be another call's
        signatures.line.known = b""  # the thread makes other calls before the wait
        return True

    def wait(self, run: Callable[[], T]) -> T:
        """Run a function that waits for the call, and record its end."""
        lane, record = self.lane, self.record  # another thread may end the call meanwhile
        if record is not None:
            self.overlap_ns = _now() - record.arrival_ns
        if lane is not None:
            lane.write(self.stamp, STATE, self.stamp | CALLED)  # the rank now waits in it
        return self.carry_out(run)


UNRECORDED = Token()
"""The token of a call that isn't recorded."""


@dataclass(frozen=True, slots=True)
class _Site:
    """The user's line of a call, for the page and the signatures of calls."""

    code: CodeType
    name: str
    group: str
    file: str
    line: int
    text: bytes
    known: bytes


class CallLog:
    """Records of one rank's calls in one context."""

    def __init__(self, rank: int, world_size: int, job: str, page: StatusPage | None) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self.job: str = job
        self._page = page
        self._numbers: dict[str, int] = {}  # calls so far, by group
        self._members: dict[str, Sequence[int]] = {EVERYBODY: range(world_size)}
        self._here = _Here()
        # A cache: for a frame's line, Python counts from the first line of its code each time.
        self._sites: dict[int, _Site] = {}

    @classmethod
    def of_rank(cls, rank: int, world_size: int, job: str, **facts: Any) -> CallLog:
        """Create a log with a status page."""
        known = {
            "rank": rank,
            "world_size": world_size,
            "job": job,
            "host": socket.gethostname(),
            "program": " ".join(map(str, sys.argv))[:_LONGEST_PROGRAM],
            "cwd": _folder(),
            "thread_id": _thread_id(),
            "groups": {},
        }
        page = StatusPage.make({**known, **stack_signal.install(), **facts})
        return cls(rank, world_size, job, page)

    def begin(
        self, name: str, group: Group | None = None, value: Any = None, state: int = CALLED
    ) -> Token:
        """Record the start of a call, which ends with the token's with block or its `end`."""
        key = EVERYBODY if group is None else group.name
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        if group is not None and number == 1:
            self._record_members(group)
        here = self._here
        lane = here.lane
        if lane is None and self._page is not None and not here.has_asked:
            lane, here.has_asked = self._page.lane(), True
            here.lane = lane
        if lane is None and not _hooks:  # counted above, as on other ranks
            return UNRECORDED
        try:
            frame = _frame(2)  # mostly the user's; else `_site_of` searches for it
        except ValueError:  # there is none: C called the caller, as in autograd's threads
            frame = _frame(1)
        code = frame.f_code
        site = self._sites.get(id(code) + frame.f_lasti)
        # The key isn't unique: an address may be reused, and one place may make several calls.
        if site is None or site.code is not code or site.name != name or site.group != key:
            site = self._site_of(frame, name, key)
        kind = type(value)
        try:
            size = value.nbytes if kind is Tensor else 0 if kind in _PLAIN else _size_of(value)
        except (RuntimeError, TypeError):  # a sparse tensor has no memory, a class may have no hash
            size = 0
        token, now = Token(), _now()
        if lane is not None:
            token.lane, signatures.line.known = lane, site.known
            token.stamp = lane.last = stamp = lane.last + STEP
            offset = (lane.first + (stamp & RING_MASK)) * WORD
            pack_record(lane.memory, offset, stamp, now, 0, number, size, site.text, stamp | state)
        if _hooks:
            if state != CALLED:
                token.overlap_ns = None
            token.record = tuple.__new__(CollectiveRecord, (
                name, self.rank, self.world_size, self.job, key, self._members[key], number,
                size, _dtype_of(value), "", site.file, site.line, _thread_id(), now, -1, "", 0,
            ))  # fmt: skip
            self._run_before_hooks(token, token.record)
        return token

    def _site_of(self, frame: FrameType, name: str, key: str) -> _Site:
        """Return the user's line; cache it if the frame itself is the user's."""
        innermost = signatures.user_frame(frame)
        if innermost is None:
            file, _, number = signatures.carried_line().rpartition(":")
            line = int(number) if number.isdecimal() else 0  # where this thread's call was started
            text = encode_call(name, key, file, line)
            # Nothing known: `signatures.site` finds the carried line by itself.
            return _Site(frame.f_code, name, key, file, line, text, b"")
        code, line = innermost.f_code, innermost.f_lineno or 0  # generated code may lack it
        file = code.co_filename
        text, known = encode_call(name, key, file, line), signatures.encode_site(file, line)
        site = _Site(code, name, key, file, line, text, known)
        if innermost is frame:
            if len(self._sites) >= _MAX_SITES:
                self._sites.clear()
            self._sites[id(code) + frame.f_lasti] = site
        return site

    def _run_before_hooks(self, token: Token, record: CollectiveRecord) -> None:
        _planes.plane = "control"
        try:
            _run_hooks(_BEFORE, record)
        except BaseException as error:  # Ctrl-C in a hook too: the call isn't made, nor counted
            if self._numbers[record.group] == record.number:  # else another thread has made a call
                self._numbers[record.group] -= 1  # as on the other ranks
            if token.lane is not None:
                token.lane.write(token.stamp, NUMBER, 0)
            token.record = record._replace(number=0)
            with suppress(Exception):  # the first hook's error is raised
                token.end(error)
            raise

    def _record_members(self, group: Group) -> None:
        """Record the members of a group at its first call."""
        self._members[group.name] = group.ranks
        if self._page is not None and not members_of_pair(group.name):  # whose name has them
            ranks = {short_name(group.name): encode_ranks(group.ranks)}
            self._page.update(groups={**self._page.facts["groups"], **ranks})

    def forget(self, group: str) -> None:
        """Drop a group that has ended."""
        self._numbers.pop(group, None)
        self._members.pop(group, None)
        if self._page is not None:
            groups = dict(self._page.facts["groups"])
            groups.pop(short_name(group), None)
            self._page.update(groups=groups)

    def close(self) -> None:
        """Remove the page; a second call does nothing."""
        if self._page is not None:
            self._page.close()
            self.disown()

    def become(self, rank: int, world_size: int) -> None:
        """Correct this rank and world size, once its library knows them."""
        if (rank, world_size) != (self.rank, self.world_size):
            self.rank, self.world_size = rank, world_size
            self._members[EVERYBODY] = range(world_size)
            if self._page is not None:
                self._page.update(rank=rank, world_size=world_size)

    def disown(self) -> None:
        """Release the page in a fork of the rank."""
        self._page = None
        self._here = _Here()


def _size_of(value: object) -> int:
    """Return the bytes of a tensor of any class, such as a parameter; 0 for anything else."""
    if not isinstance(value, Tensor):
        return 0
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return value.nbytes
    except Exception:  # a parameter without a shape yet, or any error of a class
        return 0


def _dtype_of(value: object) -> str:
    if type(value) is Tensor:
        return str(value.dtype)[6:]  # after "torch."
    if not isinstance(value, Tensor):
        return ""
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's own code may raise
        return str(value.dtype)[6:]


def mark_in_step(error: Exception) -> None:
    """Mark an error, such as a hook's, that interrupts no collective."""
    with suppress(AttributeError):  # an error without a __dict__
        error.__dict__[_IN_STEP] = True


def is_in_step(error: BaseException) -> bool:
    """Return whether an error was marked as one that interrupts no collective."""
    return _IN_STEP in getattr(error, "__dict__", {})


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def job_of(info: RankInfo | None, own: str = "") -> str:
    """Return the name of a rank's job, the same on all of its ranks if that is known."""
    if info is None:
        with suppress(EnvironmentDetectionError):  # a partial set of variables counts as none
            info = plugins.read_environment(os.environ)
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    ids = (own, "") if info is None else (info.job_id or own, info.private_store)
    name = next(filter(None, (*ids, port and f"{host}:{port}")), "")
    return name[:_LONGEST_JOB] or job_of_process(os.getppid())  # ranks share a parent


def job_of_process(pid: int) -> str:
    """Return the name of a job that only a process identifies."""
    program = Path(str(sys.argv[0]) if sys.argv else "").name or "python"
    return f"{program}-{pid}"[:_LONGEST_JOB]
