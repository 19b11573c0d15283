"""The lifetime of a process that is one rank, with the exit steps of any other program."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from unisono.at_exit import LastCalls
from unisono.control.absent_ranks import stack_of, warn_after_s
from unisono.deadlines import host_s
from unisono.errors import WorkerFailedError
from unisono.tracebacks import fold, is_full, is_ours

PEERS_S = 5.0  # for other ranks to send their results before this rank's exit ends them
_log = logging.getLogger(__name__)


# The user's function runs in the main thread. A rank's end has an order: threads that aren't
# daemons and work that executors have accepted (the context is alive meanwhile), the context, exit
# handlers, the result. So once the result has been sent, nothing else runs.
_rank_pid: int | None = None  # set in a process that is one rank; forks aren't the rank
_has_function = False  # whether the rank's function has begun


def begin_rank() -> None:
    """Record that this process is one rank, and nothing else."""
    global _rank_pid
    _rank_pid = os.getpid()


@contextlib.contextmanager
def rank_function() -> Iterator[None]:
    """Run the user's function in the block, and wait for its remaining threads."""
    # It waits only if this process is one rank, unlike one with thread replicas, and if the block
    # isn't within the rank's function.
    global _has_function
    is_main = threading.current_thread() is threading.main_thread()
    is_outermost = _rank_pid == os.getpid() and is_main and not _has_function
    _has_function = _has_function or is_outermost
    with forks_end_here():
        yield
    if is_outermost:
        join_threads()


def join_threads() -> None:
    """Wait for threads that aren't daemons and for executors, as interpreters do."""
    shutdown: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]
    with _warned_when_slow():
        shutdown()


def run_exit_handlers() -> None:
    """Run the handlers registered with atexit; their exceptions are printed."""
    # Resources that ranks share end only after the result: see `LastCalls`.
    LastCalls.leave_to_rank()
    with _warned_when_slow():
        atexit._run_exitfuncs()


@contextlib.contextmanager
def _warned_when_slow() -> Iterator[None]:
    """Warn once if the block is slow, and name the threads or the handler that delay it."""
    timer = threading.Timer(host_s(warn_after_s()), _warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warn() -> None:
    main = threading.main_thread()
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
    why = f"threads that aren't daemons: {', '.join(names)}"
    _log.warning(
        "the function of rank %s has returned; its process waits for %s",
        os.environ.get("RANK", "?"),
        why if names else f"an exit handler, which is at {stack_of(main.ident or 0)}",
    )


@contextlib.contextmanager
def forks_end_here() -> Iterator[None]:
    """End a fork of this process that leaves the block, as if the program ended there."""
    # Such a fork isn't the rank, so its result or exception isn't the rank's.
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            _end_fork(error)
        raise
    if os.getpid() != pid:
        _end_fork(None)


def _end_fork(error: BaseException | None) -> NoReturn:
    """Exit as Python would: with the code of this exception, if any."""
    code = 0 if error is None else WorkerFailedError.exit_code_of(error)
    with contextlib.suppress(Exception):  # stderr may be closed, or a user's object
        if code is None and error is not None:  # an exception other than SystemExit
            sys.stderr.write(traceback_of(error))
        elif isinstance(error, SystemExit) and not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    flush()
    # SystemExit may have any integer, of which the system keeps the low byte.
    os._exit(1 if code is None else code & 0xFF)


def flush() -> None:
    """Write out the buffers of stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream may be closed, or a user's object
            stream.flush()


@contextlib.contextmanager
def output_redirected(target: int) -> Iterator[None]:
    """Send the output of this process, C code and children included, to a descriptor."""
    flush()  # earlier output belongs to the former descriptors
    # At the end, in reverse order: flush, restore, close.
    with contextlib.ExitStack() as stack:
        for fd in (1, 2):
            saved = os.dup(fd)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, fd)
            os.dup2(target, fd)
        stack.callback(flush)
        yield


def traceback_of(error: BaseException) -> str:
    """Return an exception's traceback, from the first frame of the user's code on if it has one."""
    frames = None if is_full() else error.__traceback__
    while frames is not None and is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return fold(error, frames or error.__traceback__)
