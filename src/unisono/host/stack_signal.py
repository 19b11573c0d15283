"""The stacks of a process, for others of the same user, without its help: by a signal.

    the asker: tgkill(pid, thread, a real-time signal) ──▶ faulthandler's handler, in C, there
    the asker: reads /proc/PID/fd/N                    ◀── appends that thread's stack to a memfd

The handler needs no interpreter lock, so it answers in a busy loop, in a lock and in C code. A
process that is stopped answers when it goes on. The kernel keeps the signal blocked while its
handler runs: from that the asker knows that the text is whole.

Each thread tells its own stack alone. The stacks of others change while it reads them without the
interpreter lock: that ends the process now and then. Before Python 3.11, so does a thread that
tells its own while others run: faulthandler takes references to frames and code there, and threads
in the same functions share those counts. Such a process is asked while its other threads rest.
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
from pathlib import Path

_HIGHEST = 4  # below SIGRTMAX: the last ones are what other runtimes take first
_LOOK_S = 0.002
_QUIET = 20  # looks without an answer: the thread runs no Python
_LOCKED_S = 1.0
_TGKILL = {"x86_64": 234, "aarch64": 131}  # the number of the system call
_MOST_BYTES = 1 << 20  # of old text, before the next one is asked for
_COUNTS = sys.version_info < (3, 11)  # whether faulthandler takes references
_REST_S = 0.1  # for a moment in which no other thread runs, for all but a rank's own thread
_AT_REST = 4  # looks after the first: longer than 5 ms, when a thread asks again for the lock
_MASK = re.compile(r"^(SigPnd|ShdPnd|SigBlk|SigCgt|SigIgn):\s*([0-9a-f]+)", re.MULTILINE)
_RUNS = b"\nState:\tR"
_COUNTED = b"\nvoluntary_ctxt_switches:"  # and what follows: the last lines
_STATUS_BYTES = 1 << 14
_MEMORY = "unisono-stacks"
_installed: dict[int, dict[str, int]] = {}
_lock = threading.Lock()


def install() -> dict[str, int]:
    """Let others of this user ask this process for its stacks."""
    # Once for each process; a forked child needs its own.
    if not _lock.acquire(timeout=_LOCKED_S):  # a fork may have left it locked
        return {}
    try:
        facts = _installed.get(os.getpid())
        if facts is None:
            facts = _register()
            for inherited in _installed.values():
                _close(inherited)
            _installed.clear()
            _installed[os.getpid()] = facts
    finally:
        _lock.release()
    return dict(facts)


def _register() -> dict[str, int]:
    if not sys.platform.startswith("linux"):
        return {}
    number = _free_signal(next(iter(_installed.values()), {}))
    if number is None:
        return {}
    fd = -1
    try:
        fd = os.memfd_create(_MEMORY)  # closed by exec
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(number, file=fd, all_threads=False, chain=False)
    except (OSError, RuntimeError):  # no memory, no descriptor, or no signal stack
        if fd >= 0:
            os.close(fd)
        return {}
    inode = os.fstat(fd).st_ino
    return {"signal": int(number), "stacks_fd": fd, "stacks_inode": inode, "at_rest": int(_COUNTS)}


def _free_signal(inherited: Mapping[str, int]) -> int | None:
    """Choose a real-time signal that nothing in this process uses; a child keeps its parent's."""
    if inherited:
        return inherited["signal"]
    masks = _masks(Path("/proc/self/status"))
    used = masks.get("SigCgt", -1) | masks.get("SigIgn", -1) | masks.get("SigBlk", -1)
    numbers = range(signal.SIGRTMAX - _HIGHEST, signal.SIGRTMIN, -1)
    return next((number for number in numbers if not used & _bit(number)), None)


def _close(inherited: Mapping[str, int]) -> None:
    """Close the parent's memory in a child, unless its number is something else's by now."""
    with contextlib.suppress(OSError, KeyError):
        if os.fstat(inherited["stacks_fd"]).st_ino == inherited["stacks_inode"]:
            os.close(inherited["stacks_fd"])


def _bit(number: int) -> int:
    return 1 << (number - 1)


def _masks(status: Path) -> dict[str, int]:
    """Read the sets of signals of a thread; empty where it has ended."""
    try:
        return {name: int(bits, 16) for name, bits in _MASK.findall(status.read_text())}
    except OSError:
        return {}


def ask(pid: int, facts: Mapping[str, int], thread_id: int, timeout_s: float) -> str | None:
    """Ask a thread of a process of this user for its stack."""
    until = time.monotonic() + timeout_s
    return _ask(pid, facts, thread_id, until, until)


def _ask(
    pid: int, facts: Mapping[str, int], thread_id: int, until: float, rest_until: float
) -> str | None:
    number, link = facts.get("signal"), f"/proc/{pid}/fd/{facts.get('stacks_fd')}"
    with contextlib.suppress(OSError):
        if number is None or not _is_memory(link, facts):  # nothing else is opened
            return None
        with open(link, "r+b", buffering=0) as file:
            fd = file.fileno()
            if not _is_memory(f"/proc/self/fd/{fd}", facts):  # another one has its number by now
                return None
            with _alone(fd, until) as is_alone:
                needs_no_rest = not facts.get("at_rest")
                if is_alone and (needs_no_rest or _others_rest(pid, thread_id, rest_until)):
                    return _answer(pid, thread_id, number, fd, until)
    return None


def _is_memory(link: str, facts: Mapping[str, int]) -> bool:
    """Tell whether a descriptor is what a process has said: an inode alone may be a file's, too."""
    is_named = os.readlink(link).startswith(f"/memfd:{_MEMORY}")
    return is_named and os.stat(link).st_ino == facts.get("stacks_inode")


def _others_rest(pid: int, thread_id: int, until: float) -> bool:
    """Wait for a moment in which no other thread of the process runs; False if none comes."""
    before, n_same = None, 0
    while (now := _runs(pid, thread_id)) != {}:
        n_same = n_same + 1 if now is not None and now == before else 0
        if n_same == _AT_REST:
            return True
        if time.monotonic() > until:
            return False
        before = now
        time.sleep(_LOOK_S)
    return True  # it has no other


def _runs(pid: int, thread_id: int) -> dict[str, bytes] | None:
    """Read how often the other threads of a process have run so far; None if one does now."""
    # The asker may be one of them: nobody else is in the functions that it runs. One file is open
    # at a time: the asker may be a rank that needs its descriptors.
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        if int(task) not in (thread_id, threading.get_native_id()):
            status = _status(f"/proc/{pid}/task/{task}/status")
            if _RUNS in status:
                return None
            if status:  # else it ends
                found[task] = status.rpartition(_COUNTED)[2]
    return found


def _status(path: str) -> bytes:
    """Read the status of a thread, several times as fast as `Path` does; empty if it has ended."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _STATUS_BYTES)
        finally:
            os.close(fd)
    return b""


@contextlib.contextmanager
def _alone(fd: int, until: float) -> Iterator[bool]:
    """Be the one asker of a process: each takes what is appended next for its own thread's."""
    while not (is_alone := _locked(fd)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    try:
        yield is_alone
    finally:
        if is_alone:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile may hold the descriptor


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def texts(
    pid: int, facts: Mapping[str, int], thread_id: int, timeout_s: float, all_threads: bool
) -> dict[int, str] | None:
    """Ask a process for the stacks of one thread, or of all, one after the other."""
    # The arguments are those of `ask`, but that the process has `timeout_s` for all threads.
    until = time.monotonic() + timeout_s
    own = _ask(pid, facts, thread_id, until, until)
    if own is None:
        return None
    found = {thread_id: own}
    for each in threads(pid, facts) if all_threads else []:
        if each != thread_id and time.monotonic() < until:
            text = _ask(pid, facts, each, until, min(until, time.monotonic() + _REST_S))
            found |= {each: text} if text else {}
    return found


def threads(pid: int, facts: Mapping[str, int]) -> list[int]:
    """List the threads of a process that may be asked: a library's thread may block the signal."""
    bit = _bit(facts.get("signal", 0) or 1)
    try:
        tasks = sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [each for each in tasks if not _masks(_task(pid, each)).get("SigBlk", -1) & bit]


def _task(pid: int, thread_id: int) -> Path:
    return Path(f"/proc/{pid}/task/{thread_id}/status")


def _answer(pid: int, thread_id: int, number: int, fd: int, until: float) -> str | None:
    task, bit = _task(pid, thread_id), _bit(number)
    masks = _masks(task)
    if not masks.get("SigCgt", 0) & bit:  # its default would end the process
        return None
    if os.fstat(fd).st_size > _MOST_BYTES:
        os.ftruncate(fd, 0)
    begin = os.fstat(fd).st_size
    # If it is pending, somebody asked before: the thread is stopped, or about to tell.
    if not masks["SigPnd"] & bit and not _send(pid, thread_id, number):
        return None
    quiet = 0
    while time.monotonic() < until and quiet < _QUIET:
        end, masks = os.fstat(fd).st_size, _masks(task)
        is_over = not (masks.get("SigPnd", 0) | masks.get("SigBlk", 0)) & bit
        if is_over and end > begin and os.fstat(fd).st_size == end:
            return os.pread(fd, end - begin, begin).decode("utf-8", "replace")
        quiet = quiet + 1 if is_over else 0
        time.sleep(_LOOK_S)
    return None


def _send(pid: int, thread_id: int, number: int) -> bool:
    """Send a signal to one thread, which Python does for the threads of its own process alone."""
    call = _TGKILL.get(platform.machine())
    return call is not None and ctypes.CDLL(None).syscall(call, pid, thread_id, number) == 0
