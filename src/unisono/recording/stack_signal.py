"""Stacks of a process for other processes of the same user, written by a signal handler.

    observer:  tgkill(pid, thread, a real-time signal) ──▶ faulthandler's handler, in C, there
    observer:  reads /proc/PID/fd/N                    ◀── appends that thread's stack to a memfd

The handler needs no interpreter lock, so it works while the thread runs a busy loop, waits for a
lock or runs C code. A stopped process answers after it continues. The kernel blocks the signal
while its handler runs, so the text is complete when the signal is unblocked again. Forked processes
share the memory.

Each thread writes only its own stack: reading the stacks of running threads without the interpreter
lock sometimes crashes the process. Before Python 3.11 even a thread's own stack can do so:
faulthandler changes the reference counts of its frames and code there, while other threads in the
same functions change them too. Such processes aren't asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

_RESERVED = 4  # below SIGRTMAX: other runtimes use the highest signals first
_POLL_S = 0.002
_LOCKED_S = 1.0
_MAX_QUIET_POLLS = 20  # polls without an answer: the thread runs no Python
_TGKILL = {"x86_64": 234, "aarch64": 131}  # the number of the system call
_MAX_BYTES = 1 << 20  # of old text, which is removed before the next request
_CHANGES_COUNTS = sys.version_info < (3, 11)  # whether faulthandler changes reference counts
_MASK = re.compile(r"^(SigPnd|ShdPnd|SigBlk|SigCgt|SigIgn):\s*([0-9a-f]+)", re.MULTILINE)
_MEMORY = "unisono-stacks"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # beyond ASCII
_lock = threading.Lock()  # ranks that are threads of one process install at once


def install() -> Mapping[str, int]:
    """Register the handler that writes stacks; return its signal and memory, if any."""
    if not _lock.acquire(timeout=_LOCKED_S):  # a fork may have left it locked
        return {}
    try:
        return _install()
    finally:
        _lock.release()


@cache  # once, for this process and its forks, which inherit the handler and the memory
def _install() -> Mapping[str, int]:
    if _CHANGES_COUNTS or not sys.platform.startswith("linux"):
        return {}
    masks = _masks(Path("/proc/self/status"))
    # -1: without masks, every signal counts as used.
    used = masks.get("SigCgt", -1) | masks.get("SigIgn", -1) | masks.get("SigBlk", -1)
    numbers = range(signal.SIGRTMAX - _RESERVED, signal.SIGRTMIN, -1)
    number = next((number for number in numbers if not used & _bit(number)), None)
    if number is None:
        return {}
    fd = -1
    try:
        fd = os.memfd_create(_MEMORY)  # closed by exec
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # forks append to it, too
        faulthandler.register(number, file=fd, all_threads=False, chain=False)
    except (OSError, RuntimeError):  # no memory, no descriptor, or no signal stack
        if fd >= 0:
            os.close(fd)
        return {}
    return {"signal": number, "stacks_fd": fd, "stacks_inode": os.fstat(fd).st_ino}


def _bit(number: int) -> int:
    return 1 << (number - 1)


def _masks(status: Path) -> dict[str, int]:
    """Return the signal masks of a thread; empty if it has ended."""
    try:
        return {name: int(bits, 16) for name, bits in _MASK.findall(status.read_text())}
    except OSError:
        return {}


def ask(pid: int, facts: Mapping[str, int], thread_id: int, timeout_s: float) -> str | None:
    """Return the stack of a thread of a process of this user; None if it doesn't answer."""
    until = time.monotonic() + timeout_s
    with contextlib.suppress(OSError), _memory(pid, facts) as fd:
        while not _try_lock(fd):  # each observer takes all new text for its answer
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)
        try:
            return _answer(pid, thread_id, facts["signal"], fd, until)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile may hold the descriptor
    return None


def parse(text: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of each call on a stack of `ask`, the innermost first."""
    text = _ESCAPED.sub(lambda m: chr(int(m[1] or m[2] or m[3], 16)), text)
    found = _FRAME.findall(text)
    return [(file, int(line) if line.isdecimal() else 0, name) for file, line, name in found]


@contextlib.contextmanager
def _memory(pid: int, facts: Mapping[str, int]) -> Iterator[int]:
    """Open the memory of a process's stacks; raise OSError if the descriptor is another file."""
    fd = os.open(f"/proc/{pid}/fd/{facts.get('stacks_fd')}", os.O_RDWR | os.O_CLOEXEC)
    try:
        is_named = os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_MEMORY}")
        if not is_named or os.fstat(fd).st_ino != facts["stacks_inode"]:
            raise OSError  # the number now names another file: `ask` returns None
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def texts(
    pid: int, facts: Mapping[str, int], thread_id: int, timeout_s: float, all_threads: bool
) -> dict[int, str] | None:
    """Return the stacks of one thread of a process, or of all; None if it doesn't answer."""
    # The arguments are as in `ask`, but `timeout_s` is the limit for all threads together.
    until = time.monotonic() + timeout_s
    stack = ask(pid, facts, thread_id, timeout_s)
    if stack is None:
        return None
    found = {thread_id: stack}
    with contextlib.suppress(OSError):  # the process has ended
        tasks = os.listdir(f"/proc/{pid}/task") if all_threads else []
        for each in sorted({int(task) for task in tasks} - {thread_id}):
            left_s = until - time.monotonic()
            if left_s > 0 and (text := ask(pid, facts, each, left_s)):
                found[each] = text
    return found


def _answer(pid: int, thread_id: int, number: int, fd: int, until: float) -> str | None:
    """Send a thread the signal; return the text that its handler appends to the memory."""
    task, bit = Path(f"/proc/{pid}/task/{thread_id}/status"), _bit(number)
    masks = _masks(task)
    # Without a handler, the signal would end the process; a library's thread may block it.
    if not masks.get("SigCgt", 0) & ~masks.get("SigBlk", 0) & bit:
        return None
    if os.fstat(fd).st_size > _MAX_BYTES:
        os.ftruncate(fd, 0)
    begin = os.fstat(fd).st_size
    # A pending signal is an earlier observer's: the thread is stopped, or about to write.
    if not masks["SigPnd"] & bit and not _send(pid, thread_id, number):
        return None
    quiet = 0
    while time.monotonic() < until and quiet < _MAX_QUIET_POLLS:
        end, masks = os.fstat(fd).st_size, _masks(task)
        # The text is complete if its end, read before the masks, hasn't moved after them.
        # `SigPnd`: not delivered yet. `SigBlk`: its handler runs, in which the kernel blocks it.
        is_over = not (masks.get("SigPnd", 0) | masks.get("SigBlk", 0)) & bit
        if is_over and end > begin and os.fstat(fd).st_size == end:
            return os.pread(fd, end - begin, begin).decode("utf-8", "replace")
        quiet = quiet + 1 if is_over else 0  # handled, but nothing was written
        time.sleep(_POLL_S)
    return None


def _send(pid: int, thread_id: int, number: int) -> bool:
    """Send a signal to one thread; Python's own function works only within this process."""
    call = _TGKILL.get(platform.machine())
    return call is not None and ctypes.CDLL(None).syscall(call, pid, thread_id, number) == 0
