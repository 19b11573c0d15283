"""A kernel in memory: processes, sockets, pipes and polls of many ranks in one process.

The modules of `unisono.control` use this kernel instead of ``os``, ``select``, ``selectors``,
``socket``, ``threading`` and ``time``; apart from that, their real code runs. Each thread of a
simulated process is a real thread that runs only while it has the baton, which it passes on where
it would block. So one thread runs at a time, in the same order in every run. Each thread has a
clock, which advances by a tick whenever it is read, to the sender's time with each message, and to
the end of a wait that times out.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from unisono.control import (
    addresses,
    condition,
    connection,
    handshake,
    hub,
    peers,
    rendezvous,
)
from unisono.host import mailbox

__all__ = ("Kernel", "Process", "Waitable")

_TICK_S = 50e-6
_STACK_BYTES = 1 << 18
_FIRST_PID = 10_000_000  # no process of this machine has it
_MODULES = (addresses, condition, connection, handshake, hub, peers, rendezvous)
_LIBRARIES = ("os", "select", "selectors", "socket", "threading", "time")


class Waitable:
    """Anything that threads can wait for."""

    def __init__(self) -> None:
        self.waiters: list[_Thread] = []


class _Thread:
    """A thread of a simulated process."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process, self.work = process, work
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.now, self.turn = 0.0, 0
        self.is_begun = self.is_waiting = False


class _Ended(BaseException):
    """Raised in a thread whose process has ended."""


class Process(Waitable):
    """A simulated process with its threads and open descriptors.

    Args:
        rank: its rank.
        host: the name of its host.
    """

    def __init__(self, rank: int, host: str) -> None:
        super().__init__()
        self.rank, self.host, self.pid = rank, host, _FIRST_PID + rank
        self.open: dict[int, _Open] = {}
        self.threads: list[_Thread] = []
        self.has_ended = False


class _Open(Waitable):
    """An open descriptor."""

    def __init__(self, kernel: Kernel, owner: Process) -> None:
        super().__init__()
        self.kernel, self.owner = kernel, owner
        self.fd = next(kernel.numbers)
        self.owner.open[self.fd] = kernel.open[self.fd] = self

    def fileno(self) -> int:
        return self.fd if self.fd in self.kernel.open else -1

    def is_readable(self) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        self.kernel.open.pop(self.fd, None)
        self.owner.open.pop(self.fd, None)


class _ProcessHandle(_Open):
    """The descriptor that `pidfd_open` returns."""

    def __init__(self, kernel: Kernel, owner: Process, process: Process) -> None:
        super().__init__(kernel, owner)
        self._process = process
        self.waiters = process.waiters

    def is_readable(self) -> bool:
        return self._process.has_ended


class _Socket(_Open):
    """A stream socket, or one end of a pipe, which passes data by reference."""

    def __init__(self, kernel: Kernel, owner: Process, family: int = socket.AF_UNIX) -> None:
        super().__init__(kernel, owner)
        self.family = family
        self.peer: _Socket | None = None
        self._inbox: deque[Any] = deque()
        self._is_at_end = False
        self._timeout_s: float | None = None
        self._address: Any = None
        self._backlog: deque[_Socket] = deque()

    def __enter__(self) -> _Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setblocking(self, blocks: bool) -> None:
        self._timeout_s = None if blocks else 0.0

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setsockopt(self, *_: object) -> None:
        """Ignore the option, which changes nothing here."""

    def getsockopt(self, *_: object) -> bytes:
        assert self.peer is not None
        return struct.pack("3i", self.peer.owner.pid, os.getuid(), os.getgid())

    def getsockname(self) -> Any:
        return self._address

    def getpeername(self) -> Any:
        return (self.peer.owner.host, 0) if self.peer is not None else None

    def bind(self, address: Any) -> None:
        self._address = (address[0], self.fd) if isinstance(address, tuple) else address

    def listen(self, _backlog: int = 0) -> None:
        self.kernel.listeners[self._address] = self

    def connect(self, address: Any) -> None:
        listener = self.kernel.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address!r}")
        other = _Socket(self.kernel, listener.owner, self.family)
        self.join(other)
        listener._backlog.append(other)
        self.kernel.wake(listener)

    def join(self, other: _Socket) -> None:
        """Connect both ends."""
        self.peer, other.peer = other, self

    def accept(self) -> tuple[_Socket, Any]:
        if not self._backlog:
            raise BlockingIOError
        return self._backlog.popleft(), None

    def is_readable(self) -> bool:
        return bool(self._inbox or self._backlog or self._is_at_end)

    def send(self, data: Any) -> int:
        if self.peer is None or self.peer.fileno() < 0:
            raise BrokenPipeError("the other end is closed")
        self.peer._inbox.append(data)
        self.kernel.wake(self.peer)
        return len(data) if hasattr(data, "__len__") else 1

    def sendall(self, data: Any) -> None:
        self.send(data)

    def recv(self, size: int) -> bytes:
        data = self.take()
        if len(data) > size:
            self._inbox.appendleft(memoryview(data)[size:])
            data = memoryview(data)[:size]
        return bytes(data)

    def recvmsg(self, size: int, *_: int) -> tuple[bytes, list[Any], int, None]:
        return self.recv(size), [], 0, None

    def take(self) -> Any:
        """Receive the data of one send, b"" at the end of the stream."""
        while not self._inbox:
            if self._is_at_end:
                return b""
            if self._timeout_s == 0.0:
                raise BlockingIOError
            if not self.kernel.wait([self], self._timeout_s):
                raise TimeoutError("timed out")
        return self._inbox.popleft()

    def shutdown(self, _how: int) -> None:
        if self.peer is not None:
            self.peer._is_at_end = True
            self.kernel.wake(self.peer)

    def close(self) -> None:
        super().close()
        if self.kernel.listeners.get(self._address) is self:
            del self.kernel.listeners[self._address]
        self.shutdown(socket.SHUT_RDWR)


class _Mailbox(_Open):
    """One end of a mailbox, like `unisono.host.mailbox`; it passes bodies by reference.

    It counts as an open descriptor, since a memory map of Python keeps one open.
    """

    def __init__(self, kernel: Kernel, owner: Process) -> None:
        super().__init__(kernel, owner)
        self.other = self
        self._frame: tuple[int, int, bytes] | None = None
        self._sleeps = False

    def put(self, kind: int, seq: int, body: bytes) -> bool:
        assert self.other._frame is None, "it would overwrite what nobody has taken"
        self.other._frame = (kind, seq, body)
        return not self.other._sleeps

    def has_frame(self) -> bool:
        return self._frame is not None

    def take(self) -> tuple[int, int, bytes] | None:
        frame, self._frame = self._frame, None
        return frame

    def sleep(self, is_asleep: bool) -> None:
        self._sleeps = is_asleep


def _send_mailbox(sock: _Socket) -> _Mailbox:
    assert sock.peer is not None
    mine, theirs = _Mailbox(sock.kernel, sock.owner), _Mailbox(sock.kernel, sock.peer.owner)
    mine.other, theirs.other = theirs, mine
    sock.send(theirs)
    return mine


class _Library:
    """A module in which the kernel replaces some names."""

    def __init__(self, whole: Any, **names: Any) -> None:
        self._whole = whole
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _Lock:
    """A lock that passes the baton on where it would block."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._freed, self._is_held = kernel, Waitable(), False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._is_held:
            limit_s = None if timeout < 0 else timeout
            if not blocking or not self._kernel.wait([self._freed], limit_s):
                return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self._kernel.wake(self._freed)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Poll:
    """A replacement for the objects of `select.poll` and of selectors."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._watched: dict[int, tuple[_Open, int]] = {}

    def __enter__(self) -> _Poll:
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.clear()

    def register(self, which: Any, mask: int) -> None:
        fd = which if isinstance(which, int) else which.fd
        self._watched[fd] = (self._kernel.open[fd], mask)

    def unregister(self, which: Any) -> None:
        del self._watched[which if isinstance(which, int) else which.fd]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        limit_s = None if timeout_ms is None else timeout_ms / 1000
        return [(opened.fd, mask) for opened, mask in self._ready(limit_s)]

    def select(self, limit_s: float | None = None) -> list[tuple[Any, int]]:
        ready = self._ready(limit_s)
        return [(_Library(None, fileobj=opened), mask) for opened, mask in ready]

    def _ready(self, limit_s: float | None) -> list[tuple[_Open, int]]:
        while True:
            watched = list(self._watched.values())
            ready = [each for each in watched if each[1] & select.POLLOUT or each[0].is_readable()]
            if ready or limit_s == 0:
                return ready
            if not self._kernel.wait([opened for opened, _ in watched], limit_s):
                limit_s = 0


class Kernel:
    """The kernel of all simulated processes."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.open: dict[int, _Open] = {}
        self.listeners: dict[Any, _Socket] = {}
        self.numbers: Iterator[int] = itertools.count(1 << 20)
        self._ready: deque[_Thread] = deque()
        self._timers: list[tuple[float, int, _Thread, int]] = []
        self._count = itertools.count()
        self._current: _Thread | None = None
        self._driver = _thread.allocate_lock()
        self._error: BaseException | None = None
        self.n_events = 0
        """How often one thread has passed the baton to another."""

    @property
    def process(self) -> Process:
        """The process that runs now."""
        assert self._current is not None
        return self._current.process

    def begin(self, process: Process, work: Callable[[], None]) -> None:
        """Start one more thread in a process."""
        thread = _Thread(process, work)
        process.threads.append(thread)
        thread.now = 0.0 if self._current is None else self._current.now
        self._ready.append(thread)

    def run(self) -> None:
        """Run until all threads have ended.

        Raises:
            RuntimeError: some threads wait for an event that never happens.
        """
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._driver.acquire()
            self._pass_on()
            self._driver.acquire()
            self._driver.release()
        finally:
            threading.stack_size(before)
        if self._error is not None:
            raise self._error
        waiting = [process.rank for process in self.processes if process.threads]
        if waiting:
            raise RuntimeError(f"ranks {waiting[:8]} wait for an event that never happens")

    def end(self, process: Process) -> None:
        """Let a process die: close all its descriptors, and end its other threads."""
        process.has_ended = True
        self.wake(process)
        others = [thread for thread in process.threads if thread.is_waiting]
        for thread in others:
            thread.is_waiting = False
        self._ready.extend(others)
        for opened in list(process.open.values()):
            opened.close()

    def wait(self, waitables: Iterable[Waitable], limit_s: float | None) -> bool:
        """Wait until one of them is woken; return whether one was within the limit."""
        thread = self._current
        assert thread is not None
        waitables = list(waitables)
        for waitable in waitables:
            waitable.waiters.append(thread)
        thread.turn += 1
        thread.is_waiting = True
        until = None if limit_s is None else thread.now + limit_s
        if until is not None:
            heapq.heappush(self._timers, (until, next(self._count), thread, thread.turn))
        self._switch(thread)
        for waitable in waitables:
            waitable.waiters.remove(thread)
        return until is None or thread.now < until

    def wake(self, waitable: Waitable) -> None:
        """Wake the threads that wait for something, so that they check it again."""
        now = 0.0 if self._current is None else self._current.now
        for thread in waitable.waiters:
            if thread.is_waiting:
                thread.is_waiting = False
                thread.now = max(thread.now, now)
                self._ready.append(thread)

    def _switch(self, thread: _Thread) -> None:
        if self._pass_on() is not thread:
            thread.baton.acquire()
        self._current = thread
        if thread.process.has_ended:
            raise _Ended

    def _pass_on(self) -> _Thread | None:
        """Let the next thread run, or the driver if no thread can run."""
        thread = self._next()
        self.n_events += 1
        if thread is None:
            self._driver.release()
        elif not thread.is_begun:
            thread.is_begun = True
            _thread.start_new_thread(self._run, (thread,))
        elif thread is not self._current:
            thread.baton.release()
        return thread

    def _next(self) -> _Thread | None:
        while not self._ready and self._timers:
            end, _, thread, turn = heapq.heappop(self._timers)
            if thread.is_waiting and thread.turn == turn:
                thread.is_waiting = False
                thread.now = max(thread.now, end)
                self._ready.append(thread)
        return self._ready.popleft() if self._ready else None

    def _run(self, thread: _Thread) -> None:
        self._current = thread
        try:
            thread.work()
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        thread.process.threads.remove(thread)
        self._pass_on()

    def _monotonic(self) -> float:
        thread = self._current
        assert thread is not None
        thread.now += _TICK_S
        return thread.now

    def _thread_of(self, target: Callable[..., None], **_: object) -> Any:
        process = self.process
        return _Library(None, start=lambda: self.begin(process, target))

    def _socketpair(self) -> tuple[_Socket, _Socket]:
        one, other = _Socket(self, self.process), _Socket(self, self.process)
        one.join(other)
        return one, other

    def _pipe(self) -> tuple[int, int]:
        reader, writer = _Socket(self, self.process), _Socket(self, self.process)
        writer.join(reader)
        return reader.fd, writer.fd

    def _close(self, fd: int) -> None:
        self.open[fd].close()

    def _write(self, fd: int, data: bytes) -> int:
        opened = self.open[fd]
        assert isinstance(opened, _Socket)
        return opened.send(data)

    def _pidfd_open(self, pid: int) -> int:
        return _ProcessHandle(self, self.process, self.processes[pid - _FIRST_PID]).fd

    def _libraries(self) -> dict[str, Any]:
        def poll() -> _Poll:
            return _Poll(self)

        def sleep(seconds: float) -> None:
            self.wait((), seconds)

        def new_socket(family: int, *_: object) -> _Socket:
            return _Socket(self, self.process, family)

        def here(*_: object) -> str:
            return self.process.host

        return {
            "os": _Library(
                os,
                **{"environ": {}, "getpid": lambda: self.process.pid, "sched_yield": lambda: None},
                **{"pipe": self._pipe, "close": self._close, "write": self._write},
                pidfd_open=self._pidfd_open,
            ),
            "select": _Library(select, poll=poll),
            "selectors": _Library(selectors, DefaultSelector=poll),
            "socket": _Library(
                socket, socket=new_socket, socketpair=self._socketpair, gethostname=here
            ),
            "threading": _Library(threading, Thread=self._thread_of, Lock=lambda: _Lock(self)),
            "time": _Library(time, monotonic=self._monotonic, sleep=sleep),
        }

    @contextmanager
    def under(self, **names: Any) -> Iterator[None]:
        """Run the control plane's modules on this kernel within the block.

        Args:
            names: names of `unisono.control.rendezvous`, and their values within the block.
        """
        libraries = self._libraries()
        changes = [
            (module, name, libraries[name])
            for module in _MODULES
            for name in _LIBRARIES
            if hasattr(module, name)
        ]
        mailboxes = _Library(mailbox, send=_send_mailbox, receive=_Socket.take)
        names = {"mailbox": mailboxes, **names}
        names["host_of_this_process"] = lambda: self.process.host
        changes += [(rendezvous, name, new) for name, new in names.items()]
        changes.append((addresses, "_address_to", libraries["socket"].gethostname))
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        for module, name, new in changes:
            setattr(module, name, new)
        try:
            yield
        finally:
            for module, name, old in before:
                setattr(module, name, old)
