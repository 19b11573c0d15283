"""The replica's side of a pool: takes calls from a socket until the pool closes it."""

from __future__ import annotations

import linecache
import math
import os
import pickle
import queue
import socket
import threading
import traceback
from contextlib import suppress

from unisono import context
from unisono.control.addresses import local_address
from unisono.control.handshake import call
from unisono.errors import CollectiveError, LaunchError, PayloadError
from unisono.launchers.job import channel
from unisono.launchers.job.lifetime import flush, forks_end_here
from unisono.launchers.job.output import begin_lines_with_rank
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.worker import describe
from unisono.model.contract import ComputationModel
from unisono.pickling import dumps
from unisono.tracebacks import frame_of, hides

__tracebackhide__ = hides

CALL = b"c"
BROKEN = b"b"  # an error that leaves the context unusable
WHERE = b"w"  # asks, and says, whether the replica is where it may wait for another one
STACK = b"s"  # asks for, and gives, the frames of what the replica runs, outermost first
OUTPUT = b"o"  # then one byte, with descriptors for stdout and stderr from the next call on
SECRET_BYTES = 32
_END = None
_WAITING = ("unisono.", "torch.distributed.")


def serve(local_rank: int, address: str, secret: bytes, owner: int, has_prefix: bool) -> None:
    """Run what the pool sends, in order."""
    # Local, but for what the functions do.
    model = context.current_model()
    rank = model.topology.rank
    is_process = os.getpid() != owner
    if has_prefix and is_process:
        begin_lines_with_rank(rank)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(local_address(address))
        hello = rank.to_bytes(4, "little")
        if not call(sock, secret, hello, math.inf):  # else a stranger's calls would run
            raise LaunchError("another process listens in place of the pool")
        calls: queue.SimpleQueue[bytes | list[int] | None] = queue.SimpleQueue()
        pool = _Pool(sock)
        threading.Thread(
            target=_listen, args=(pool, calls, model, is_process), name="unisono-pool", daemon=True
        ).start()
        while (order := calls.get()) is not _END:
            if isinstance(order, list):
                _print_to(order, is_process)
            else:
                pool.tell(*_outcome(local_rank, order, is_process))


def _print_to(fds: list[int], is_process: bool) -> None:
    """Let stdout and stderr be what those of the pool's process are by now."""
    for target, fd in enumerate(fds, 1):
        if is_process:  # a thread's are the pool's anyway
            os.dup2(fd, target)
        os.close(fd)


class _Pool:
    """The pool as a replica's two threads see it: the one that serves, and the one that listens."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._server = threading.get_ident()

    def tell(self, kind: bytes, body: bytes) -> None:
        """Send one message."""
        with self._lock:
            channel.send(self._sock, kind, body)

    def hear(self) -> tuple[bytes, bytes] | None:
        """Receive one message, but answer those that ask where this replica is."""
        while (message := channel.receive(self._sock)) is not None and message[0] in (WHERE, STACK):
            with suppress(OSError):
                if message[0] == STACK:
                    self.tell(STACK, pickle.dumps(_stack(self._server)))
                else:
                    self.tell(WHERE, b"w" if _may_wait(self._server) else b"")
        return message

    def descriptors(self) -> list[int]:
        """Receive what comes after `OUTPUT`."""
        return list(socket.recv_fds(self._sock, 1, 2)[1])


def _may_wait(thread_id: int) -> bool:
    """Return whether a call is within anything that may wait for other ranks."""
    frame, may_wait = frame_of(thread_id), False
    while frame is not None and frame.f_code is not _outcome.__code__:
        may_wait = may_wait or str(frame.f_globals.get("__name__")).startswith(_WAITING)
        frame = frame.f_back
    return may_wait and frame is not None


def _stack(thread_id: int) -> list[tuple[str, int, str, str]]:
    """Give file, line, function and source of each frame of a call, outermost first."""
    frames = []
    for frame, line in traceback.walk_stack(frame_of(thread_id)):
        if frame.f_code is _outcome.__code__:
            break
        code = frame.f_code
        source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        frames.append((code.co_filename, line, code.co_name, source))
    return frames[::-1]


def _outcome(local_rank: int, body: bytes, is_process: bool) -> tuple[bytes, bytes]:
    """Run one call; give the kind and the body of its answer."""
    try:
        fn, args, kwargs, takes_rank = load_from_parent(body, defines=is_process)
        with forks_end_here():
            result = fn(local_rank, *args, **kwargs) if takes_rank else fn(*args, **kwargs)
        try:
            return channel.RESULT, dumps(result)
        except Exception as error:  # an object's own __reduce__ may raise anything
            kind = type(result).__qualname__
            raise PayloadError(f"the result, a {kind}, can't be pickled: {error}") from error
    except BaseException as error:  # SystemExit too: the pool decides what it means
        is_lost = leaves_out_of_step(error) or context.current().interrupted is not None
        return BROKEN if is_lost else channel.ERROR, dumps(describe(error))
    finally:
        flush()


def leaves_out_of_step(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, left the ranks out of step."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CollectiveError) and not error.is_in_step:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _listen(
    pool: _Pool,
    calls: queue.SimpleQueue[bytes | list[int] | None],
    model: ComputationModel,
    is_process: bool,
) -> None:
    """Take calls in; once the pool is gone or gave up, leave whatever this replica is doing."""
    while (message := pool.hear()) is not None and message[0] in (CALL, OUTPUT):
        calls.put(message[1] if message[0] == CALL else pool.descriptors())
    if message is not None:
        calls.put(_END)
    elif is_process:
        os._exit(1)
    else:
        model.abort()
        calls.put(_END)
