"""Stacks of a process for others of its user, written by a signal handler without its help.

    observer:  tgkill(pid, thread, a real-time signal) ──▶ faulthandler's handler, in C, there
    observer:  reads /proc/PID/fd/N                    ◀── appends that thread's stack to a memfd

The handler needs no interpreter lock, so it answers in a busy loop, in a lock and in C code. A
process that is stopped answers when it goes on. The kernel keeps the signal blocked while its
handler runs: an unblocked one shows that the text is whole. Forks share the memory.

Each thread writes only its own stack: the stacks of others change while it reads them without the
interpreter lock, which ends the process now and then. Before Python 3.11, so does a thread that
writes its own while others run: faulthandler takes references to frames and code there, and threads
in the same functions share those counts. Such a process isn't asked.
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

_HIGHEST = 4  # below SIGRTMAX: other runtimes take the last ones first
_LOOK_S = 0.002
_LOCKED_S = 1.0
_QUIET = 20  # looks without an answer: the thread runs no Python
_TGKILL = {"x86_64": 234, "aarch64": 131}  # the number of the system call
_MAX_BYTES = 1 << 20  # of old text, before the next one is asked for
_COUNTS = sys.version_info < (3, 11)  # whether faulthandler takes references
_MASK = re.compile(r"^(SigPnd|ShdPnd|SigBlk|SigCgt|SigIgn):\s*([0-9a-f]+)", re.MULTILINE)
_MEMORY = "unisono-stacks"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # beyond ASCII
_lock = threading.Lock()  # ranks that are threads of one process install at once


def install() -> Mapping[str, int]:
    """Register the handler of this process's stacks; return its signal and memory, if any."""
    if not _lock.acquire(timeout=_LOCKED_S):  # a fork may have left it locked
        return {}
    try:
        return _install()
    finally:
        _lock.release()


@cache  # once, for this process and its forks, which inherit the handler and the memory
def _install() -> Mapping[str, int]:
    if _COUNTS or not sys.platform.startswith("linux"):
        return {}
    masks = _masks(Path("/proc/self/status"))
    # -1: unknown masks count as full.
    used = masks.get("SigCgt", -1) | masks.get("SigIgn", -1) | masks.get("SigBlk", -1)
    numbers = range(signal.SIGRTMAX - _HIGHEST, signal.SIGRTMIN, -1)
    number = next((number for number in numbers if not used & _bit(number)), None)
    if number is None:
        return {}
    fd = -1
    try:
        fd = os.memfd_create(_MEMORY)  # closed by exec
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # forks write there, too
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
        while not _is_alone(fd):  # each observer takes the next text for its own thread's
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S)
        try:
            return _answer(pid, thread_id, facts["signal"], fd, until)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile may hold the descriptor
    return None


def parse(text: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of each call on a stack of `ask`, the innermost first."""
    text = _ESCAPED.sub(lambda m: chr(int(m[1] or m[2] or m[3], 16)), text)
    found = _FRAME.findall(text)
    return [(file, int(line) if line.isdecimal() else 0, name) for file, line, name in found]


@contextlib.contextmanager
def _memory(pid: int, facts: Mapping[str, int]) -> Iterator[int]:
    """Open the memory of a process's stacks; raise OSError if the number is another file's."""
    fd = os.open(f"/proc/{pid}/fd/{facts.get('stacks_fd')}", os.O_RDWR | os.O_CLOEXEC)
    try:
        is_named = os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_MEMORY}")
        if not is_named or os.fstat(fd).st_ino != facts["stacks_inode"]:  # a file may have the same
            raise OSError
        yield fd
    finally:
        os.close(fd)


def _is_alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def texts(
    pid: int, facts: Mapping[str, int], thread_id: int, timeout_s: float, all_threads: bool
) -> dict[int, str] | None:
    """Return the stacks of one thread of a process, or of all; None if it doesn't answer."""
    # The arguments are those of `ask`, except that `timeout_s` is for all threads together.
    until = time.monotonic() + timeout_s
    own = ask(pid, facts, thread_id, timeout_s)
    if own is None:
        return None
    found = {thread_id: own}
    with contextlib.suppress(OSError):  # it has ended
        tasks = os.listdir(f"/proc/{pid}/task") if all_threads else []
        for each in sorted({int(task) for task in tasks} - {thread_id}):
            left_s = until - time.monotonic()
            if left_s > 0 and (text := ask(pid, facts, each, left_s)):
                found[each] = text
    return found


def _answer(pid: int, thread_id: int, number: int, fd: int, until: float) -> str | None:
    task, bit = Path(f"/proc/{pid}/task/{thread_id}/status"), _bit(number)
    masks = _masks(task)
    # The default of the signal would end the process; a library's thread may block it.
    if not masks.get("SigCgt", 0) & ~masks.get("SigBlk", 0) & bit:
        return None
    if os.fstat(fd).st_size > _MAX_BYTES:
        os.ftruncate(fd, 0)
    begin = os.fstat(fd).st_size
    # A pending one is an earlier observer's: the thread is stopped, or about to write.
    if not masks["SigPnd"] & bit and not _send(pid, thread_id, number):
        return None
    quiet = 0
    while time.monotonic() < until and quiet < _QUIET:
        end, masks = os.fstat(fd).st_size, _masks(task)
        # The end was read before the masks: if it is the same after them, the text is whole.
        is_over = not (masks.get("SigPnd", 0) | masks.get("SigBlk", 0)) & bit
        if is_over and end > begin and os.fstat(fd).st_size == end:
            return os.pread(fd, end - begin, begin).decode("utf-8", "replace")
        quiet = quiet + 1 if is_over else 0
        time.sleep(_LOOK_S)
    return None


def _send(pid: int, thread_id: int, number: int) -> bool:
    """Send a signal to one thread, which Python does only within its own process."""
    call = _TGKILL.get(platform.machine())
    return call is not None and ctypes.CDLL(None).syscall(call, pid, thread_id, number) == 0
