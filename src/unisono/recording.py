"""What each rank calls: one record for each collective, for its status page and for hooks."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from unisono import plugins
from unisono.control.signatures import OUR_FRAMES, carried_line
from unisono.errors import EnvironmentDetectionError
from unisono.host import stack_signal
from unisono.host.status_page import CALLED, Lane, StatusPage, shortened
from unisono.model.handle import Handle
from unisono.topology import EVERYBODY, Group, RankInfo, members_of_pair, pair
from unisono.tracebacks import hides, summary

__all__ = (
    "CallLog",
    "CollectiveRecord",
    "Token",
    "add_hook",
    "is_of_a_hook",
    "job_of",
    "plane_is",
)

__tracebackhide__ = hides

T = TypeVar("T")
_PASSED = (*OUR_FRAMES, f"{Path(torch.__file__).parent}{os.sep}")
_LONGEST_PROGRAM = 200
_LONGEST_ERROR = 500
_LONGEST_JOB = 200
_OF_A_HOOK = "_unisono_hook"  # attribute of an exception


class CollectiveRecord(NamedTuple):
    """One call of a rank, as hooks get it.

    Args:
        name: the call, as in ``"all_reduce"``; ``"initialize"``; a section such as
            ``"one_rank_first"``; ``"gradients"`` for one bucket of ``DistributedDataParallel``.
        rank: the rank that made it.
        world_size: number of ranks of the job.
        job: tells the job from others; the same on all its ranks where its launcher or its
            variables say it.
        group: the name of the group; ``"all ranks"`` for all.
        ranks: global ranks of the group, ascending.
        number: how many calls of the group this rank has made, with this one: equal numbers are the
            same call on all ranks.
        size_bytes: of the tensor that was given; 0 for anything else.
        dtype: its dtype, as in ``"float32"``; empty for anything else.
        plane: what carried it: ``"control"``, ``"memory"`` (which the ranks of a host share) or
            ``"data"`` (the model's library); empty before the call.
        file: of the line that made the call.
        line: its number.
        thread_id: native id of the thread that made it.
        arrival_ns: when it was made, in nanoseconds of ``time.monotonic_ns()``.
        duration_ns: nanoseconds until it was done; -1 before.
        error: the exception that it raised, in one line; empty where there is none.
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


Hook = Callable[[CollectiveRecord], object]
_before: tuple[Hook, ...] = ()
_after: tuple[Hook, ...] = ()
_lock = threading.Lock()


class _Planes(threading.local):
    plane: str = "control"


_planes = _Planes()
_Code: TypeAlias = "tuple[CodeType, str, dict[int, int] | None]"
# Python looks for the line of a frame from the first line of its code on, at every call.
_codes: dict[int, _Code] = {}
_MOST_CODES = 4096


def add_hook(*, before: Hook | None = None, after: Hook | None = None) -> Callable[[], None]:
    """Have functions called around every collective of this process.

    Local. They run on this rank alone, in the thread that carries the call out, so they mustn't
    call collectives; their exceptions are the call's. Where there is no hook, no record is made.

    Args:
        before: called with the record when a call begins.
        after: called with the record when it is done, or has failed.

    Returns:
        A function that takes the hooks back; harmless the second time.

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
    global _before, _after
    mine = [None if each is None else partial(each) for each in (before, after)]
    with _lock:  # tuples are replaced: who calls them now goes on with the old ones
        _before = (*_before, *(each for each in mine[:1] if each is not None))
        _after = (*_after, *(each for each in mine[1:] if each is not None))

    def remove() -> None:
        global _before, _after
        with _lock:
            _before = tuple(each for each in _before if each is not mine[0])
            _after = tuple(each for each in _after if each is not mine[1])

    return remove


def plane_is(plane: str) -> None:
    """Take note of what carries the tensor of the call that this thread is in. Local."""
    if _after:
        _planes.plane = plane


class _Here(threading.local):
    """What a thread keeps for one log."""

    lane: Lane | None = None
    has_asked: bool = False


class Token:
    """A call that has begun."""

    __slots__ = ("lane", "plane", "record", "stamp")

    def __init__(self, lane: Lane | None, stamp: int) -> None:
        self.lane: Lane | None = lane
        self.stamp: int = stamp
        self.record: CollectiveRecord | None = None
        self.plane: str = ""

    def end(self, error: BaseException | None = None) -> None:
        """Take note that the call is over. Local; harmless the second time."""
        lane, record = self.lane, self.record
        if lane is None and record is None:
            return
        now = time.monotonic_ns()
        self.lane = self.record = None
        if lane is not None:
            lane.end(self.stamp, now)
        if record is not None and _after:
            text = "" if error is None else summary(error)[:_LONGEST_ERROR]
            plane, passed_ns = self.plane or _planes.plane, now - record.arrival_ns
            known = (*record[:9], plane, *record[10:14])  # up to its dtype, and up to its arrival
            _tell(_after, CollectiveRecord(*known, passed_ns, text))

    def carry_out(self, run: Callable[[], T]) -> T:
        """Run what the call is, which is over then. Local, but for what is run."""
        _planes.plane = "control"
        try:
            value = run()
        except BaseException as error:
            self.end(error)
            raise
        self.end()
        return value

    def started(self, handle: Handle[T], is_started: bool = True) -> Handle[T]:
        """Let the call be over once its handle has been waited for.

        Local.

        Args:
            handle: of the call.
            is_started: whether the library has begun it, so that its plane is known.
        """
        if self is _NOTHING:
            return handle
        self.plane = _planes.plane if is_started else ""

        def wait() -> T:
            lane = self.lane  # the thread that carries it out may end it meanwhile
            if lane is not None:
                lane.wait(self.stamp)
            return self.carry_out(handle.wait)

        return Handle(wait, handle.is_completed)


_NOTHING = Token(None, 0)


class CallLog:
    """The calls of one rank in one context.

    Args:
        rank: the rank.
        world_size: number of ranks.
        job: as `job_of` gives it.
        page: where they can be read by others; None for nowhere.
    """

    def __init__(self, rank: int, world_size: int, job: str, page: StatusPage | None) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self.job: str = job
        self._page = page
        self._numbers: dict[str, int] = {}
        self._members: dict[str, Sequence[int]] = {EVERYBODY: range(world_size)}
        self._here = _Here()

    @classmethod
    def of_rank(cls, rank: int, world_size: int, job: str, **facts: Any) -> CallLog:
        """Make a log with a page of its own.

        Local.

        Args:
            rank: the rank.
            world_size: number of ranks.
            job: as `job_of` gives it.
            facts: what else others can read, such as the backend.
        """
        known = {
            "rank": rank,
            "world_size": world_size,
            "job": job,
            "host": socket.gethostname(),
            "program": " ".join(map(str, sys.argv))[:_LONGEST_PROGRAM],
            "cwd": _folder(),
            "thread_id": threading.get_native_id(),
            "groups": {},
        }
        page = StatusPage.make({**known, **stack_signal.install(), **facts})
        return cls(rank, world_size, job, page)

    def begin(
        self,
        name: str,
        group: Group | None = None,
        value: object = None,
        state: int = CALLED,
    ) -> Token:
        """Take note of a call that begins.

        Local.

        Args:
            name: the call.
            group: the ranks that take part.
            value: what was given; of a tensor its size is noted.
            state: whether it blocks, or is started.

        Returns:
            What is told when it is over.
        """
        key = EVERYBODY if group is None else group.name
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        if group is not None and number == 1:
            self._meet(group)
        here = self._here
        lane = here.lane
        if lane is None and not here.has_asked:
            lane = self._first_of(here)
        if lane is None and not _before and not _after:
            return _NOTHING
        file, line = _line_of_call()
        size = _size_of(value) if type(value) is Tensor else 0
        now, stamp = time.monotonic_ns(), 0
        if lane is not None:
            stamp = lane.begin(name, file, line, key, number, size, now, state)
        token = Token(lane, stamp)
        if _before or _after:
            dtype = _dtype_of(value) if isinstance(value, Tensor) else ""
            token.record = CollectiveRecord(
                name, self.rank, self.world_size, self.job, key, self._members[key], number,
                size, dtype, "", file, line, threading.get_native_id(), now,
            )  # fmt: skip
            self._tell_before(token, token.record)
        return token

    def _first_of(self, here: _Here) -> Lane | None:
        """Give this thread its lane in the page, if there is one."""
        here.has_asked = True
        here.lane = None if self._page is None else self._page.lane()
        return here.lane

    def _tell_before(self, token: Token, record: CollectiveRecord) -> None:
        _planes.plane = "control"
        try:
            _tell(_before, record)
        except BaseException:  # Ctrl-C in a hook too: the call isn't made, so its record ends
            token.record = None
            token.end()
            raise

    def _meet(self, group: Group) -> None:
        """Take note of the members of a group that was made."""
        self._members[group.name] = group.ranks
        if self._page is not None and not members_of_pair(group.name):  # whose name says it
            groups = {**self._page.facts["groups"], group.name: shortened(group.ranks)}
            self._page.update(groups=groups)

    @contextmanager
    def call(self, name: str, group: Group | None = None, value: object = None) -> Iterator[None]:
        """Record what the body does as one call. Local. The arguments are those of `begin`."""
        token = self.begin(name, group, value)
        try:
            yield
        except BaseException as error:
            token.end(error)
            raise
        token.end()

    def message(
        self, name: str, src: int, dst: int, value: object = None
    ) -> AbstractContextManager[None]:
        """Record what the body does as a message between two ranks. Local."""
        return self.call(name, pair(src, dst), value)

    def update(self, **facts: Any) -> None:
        """Change what others can read of this rank. Local."""
        if self._page is not None:
            self._page.update(**facts)

    def close(self) -> None:
        """Take the page away. Local; harmless the second time."""
        if self._page is not None:
            self._page.close()
            self.disown()

    def become(self, rank: int, world_size: int) -> None:
        """Correct who this rank is, once its library knows. Local."""
        if (rank, world_size) != (self.rank, self.world_size):
            self.rank, self.world_size = rank, world_size
            self._members[EVERYBODY] = range(world_size)
            self.update(rank=rank, world_size=world_size)

    def disown(self) -> None:
        """Let go of the page: what goes on is a fork of the rank. Local."""
        self._page = None
        self._here = _Here()


def _size_of(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except RuntimeError:  # a sparse one has no memory of its own
        return 0


def _line_of_call() -> tuple[str, int]:
    """Give the user's line: that of the innermost frame that isn't ours."""
    try:
        frame = sys._getframe(3)  # this function and the two above it are ours
    except ValueError:  # and there are no others: C called it, as autograd's threads do
        frame = sys._getframe(2)
    while True:
        code, lasti = frame.f_code, frame.f_lasti
        known = _codes.get(id(code))
        if known is None or known[0] is not code:
            known = _note(code)
        lines = known[2]
        if lines is not None:
            line = lines.get(lasti)
            if line is None:
                line = lines[lasti] = frame.f_lineno or 0  # what a program has made may lack it
            return known[1], line
        if frame.f_back is None:
            file, _, text = carried_line().rpartition(":")  # of the thread that started it
            return (file, int(text)) if text.isdecimal() else (file, 0)
        frame = frame.f_back


def _note(code: CodeType) -> _Code:
    """Keep what is asked of the code of a frame: its file, and lines by place unless it is ours."""
    file = code.co_filename
    is_ours = file == "<string>" or file.startswith(_PASSED)  # that is a process that we started
    if len(_codes) >= _MOST_CODES:
        _codes.clear()
    known = _codes[id(code)] = (code, file, None if is_ours else {})
    return known


def _dtype_of(tensor: Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():  # whose own code may raise
        return str(tensor.dtype)[6:]


def _tell(hooks: tuple[Hook, ...], record: CollectiveRecord) -> None:
    try:
        for hook in hooks:
            hook(record)
    except Exception as error:
        with suppress(AttributeError):  # a class without room for it
            error.__dict__[_OF_A_HOOK] = True
        raise


def is_of_a_hook(error: BaseException) -> bool:
    """Tell whether a hook raised it, which leaves no collective half-way. Local."""
    return _OF_A_HOOK in getattr(error, "__dict__", {})


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def job_of(info: RankInfo | None, own: str = "") -> str:
    """Name the job that a rank belongs to, alike on all of its ranks where that can be known.

    Local.

    Args:
        info: what a launcher says of this rank; None to ask the environment.
        own: a name that all ranks have been given; empty for none.

    Returns:
        At most 200 characters. Where nothing tells, the program and the process that started it.
    """
    if info is None:
        with suppress(EnvironmentDetectionError):  # a partial set of variables is as good as none
            info = plugins.read_environment(os.environ)
    if info is not None and info.job_id:
        name = info.job_id
    elif own:
        name = own
    elif info is not None and info.private_store:
        name = info.private_store
    elif os.environ.get("MASTER_PORT"):
        name = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"
    else:
        name = f"{Path(str(sys.argv[0]) if sys.argv else '').name or 'python'}-{os.getppid()}"
    return name[:_LONGEST_JOB]
