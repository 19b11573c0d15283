"""The replicas of a pool as the pool's process sees them."""

from __future__ import annotations

import math
import os
import pickle
import secrets
import select
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from typing import Any

from unisono.control.addresses import listen_locally, local_address, peer
from unisono.control.handshake import accept, answer, hang_up
from unisono.deadlines import Recall, limit_of, until_recalled
from unisono.errors import CollectiveTimeoutError, LaunchError
from unisono.launchers.job import channel
from unisono.lifecycle import start
from unisono.pool.worker import CALL, OUTPUT, SECRET_BYTES, STACK, WHERE, serve

_LEAST_S = 0.001
_LEAVE_S = 1.0  # for an idle replica to take its leave, before it is killed
_QUIT_S = 0.3  # for a replica told to abandon its call
_END_S = 10.0  # for the end of those that were told to drop what they do
_Answer = tuple[bytes, bytes]
Frame = tuple[str, int, str, str]


class _Spawning:
    """A spawn within a thread of its own, without a reference to its `Replicas`."""

    def __init__(self, end: socket.socket) -> None:
        self.error: BaseException | None = None
        self.recall = Recall()
        self._end = end

    def run(
        self, backend: str | None, args: tuple[Any, ...], size: int, options: dict[str, Any]
    ) -> None:
        """Make the replicas, and wait for their end."""
        try:
            with until_recalled(self.recall):
                start(backend, serve, args, None, size, prefix_output=False, **options)
        except BaseException as error:  # it is raised where the pool is used
            self.error = error.with_traceback(None)  # whose frames would keep what they hold
        finally:
            self._end.close()


class Replicas:
    """One set of replicas: the thread that spawned them, and a connection to each."""

    # They end with it, also where nobody stops them.

    def __init__(
        self,
        size: int,
        backend: str | None,
        has_prefix: bool,
        options: dict[str, Any],
        limit: float | None = None,
    ) -> None:
        self._size = size
        self._sockets: dict[int, socket.socket] = {}
        self._inboxes: dict[int, channel.Inbox] = {}
        self._computing: set[int] = set()
        self._outputs: dict[int, list[tuple[int, int]]] = {}
        self._outputs_at_start = _outputs()
        self._ended, end = socket.socketpair()
        self._spawning = _Spawning(end)
        self.is_late: bool = False
        """Whether replicas were still at their end when the block's deadline was over."""
        self.ending_error: BaseException | None = None
        """Why a replica that had left its last call couldn't end in good order."""
        self._secret = secrets.token_bytes(SECRET_BYTES)
        with ExitStack() as stack:
            listener, address = _listener(stack)
            args = (address, self._secret, os.getpid(), has_prefix)
            self._thread = threading.Thread(
                target=self._spawning.run,
                args=(backend, args, size, options),
                name="unisono-pool-spawn",
                daemon=True,
            )
            try:
                self._thread.start()
                self._welcome(listener, size, limit)
            except BaseException:  # Ctrl-C too: no replica is left behind
                self._spawning.recall.now()
                listener.close()  # a replica that waits to be let in leaves
                if self._thread.is_alive():  # else it begins with the recall, if ever
                    self.stop(is_orderly=False)
                raise
        self.are_processes: bool = os.getpid() not in self.pids
        weakref.finalize(self, _hang_up_at_home, self._all_sockets(), os.getpid())

    def _welcome(self, listener: socket.socket, size: int, limit: float | None) -> None:
        """Let the replicas in, which know the secret, until the limit."""

        def admit(sock: socket.socket) -> int | None:
            hello = answer(sock, self._secret, 4)
            return None if hello is None else int.from_bytes(hello, "little")

        until = math.inf if limit is None else limit
        with closing(accept(listener, admit, set(), until, self._ended)) as replicas:
            for sock, rank in replicas:
                sock.setblocking(True)
                self._sockets[rank] = sock
                self._inboxes[rank] = channel.Inbox(sock)
                if len(self._sockets) == size:
                    return
        if limit is not None and time.monotonic() >= limit and self._thread.is_alive():
            late = [rank for rank in range(size) if rank not in self._sockets]
            raise CollectiveTimeoutError(
                f"the replicas of ranks {late} of {size} weren't there when the deadline was over"
            )
        raise self._why()

    def _all_sockets(self) -> list[socket.socket]:
        return [*self._sockets.values(), self._ended]

    def _why(self) -> BaseException:
        self._thread.join(_END_S)
        error, self._spawning.error = self._spawning.error, None
        return error or LaunchError("the replicas of the pool have ended")

    @property
    def pids(self) -> list[int | None]:
        """Process of each replica, by rank; the pool's own where it is a thread of that."""
        return [peer(self._sockets[rank]).pid for rank in range(self._size)]

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send replicas that are processes a signal."""
        _kill([peer(self._sockets[rank]).pid for rank in ranks], number)

    def has_ended(self) -> bool:
        """Return whether a replica is gone."""
        return not self._thread.is_alive() or any(map(_is_closed, self._sockets.values()))

    def send(self, rank: int, body: bytes, limit: float | None) -> None:
        """Give a replica its next call; nothing more once the limit has passed."""
        sock = self._sockets[rank]
        with suppress(OSError):  # `hear` says why it is gone, or late
            sock.settimeout(None if limit is None else max(_LEAST_S, limit - time.monotonic()))
            self._send_output(rank)
            channel.send(sock, CALL, body)
        sock.setblocking(True)

    def _send_output(self, rank: int) -> None:
        """Let a replica print where this process does by now, if that isn't where it did before."""
        now = _outputs()
        if now is not None and now != self._outputs.get(rank, self._outputs_at_start):
            channel.send(self._sockets[rank], OUTPUT)
            socket.send_fds(self._sockets[rank], [b"o"], [1, 2])
            self._outputs[rank] = now

    def ask(self, ranks: Iterable[int]) -> set[int]:
        """Ask replicas what they do."""
        # Local; never waits.
        computing, self._computing = self._computing, set()
        for rank in ranks:
            with suppress(OSError):  # it doesn't even read: then it says nothing
                self._sockets[rank].send(channel.head(WHERE), socket.MSG_DONTWAIT)
        return computing | {rank for rank in ranks if self._inboxes[rank].is_within}

    def stacks(self, ranks: Iterable[int], within_s: float) -> dict[int, list[Frame]]:
        """Ask replicas at work where they are."""
        # Their answers to the call that they run are lost.
        stacks: dict[int, list[Frame]] = {}
        waiting = set(ranks)
        for rank in waiting:
            with suppress(OSError):
                self._sockets[rank].send(channel.head(STACK), socket.MSG_DONTWAIT)
        limit = time.monotonic() + within_s
        with suppress(Exception):  # they may end meanwhile
            while waiting and (heard := self.hear(waiting, limit)) is not None:
                rank, (kind, body) = heard
                waiting.discard(rank)
                if kind == STACK:
                    stacks[rank] = pickle.loads(body)
        return stacks

    def hear(self, busy: Iterable[int], limit: float | None) -> tuple[int, _Answer] | None:
        """Wait for the next answer; None once the limit has passed."""
        with selectors.DefaultSelector() as selector:
            for rank in busy:
                selector.register(self._sockets[rank], selectors.EVENT_READ, rank)
            selector.register(self._ended, selectors.EVENT_READ)
            while limit is None or time.monotonic() < limit:
                left = None if limit is None else max(0.0, limit - time.monotonic())
                ranks = [key.data for key, _ in selector.select(left)]
                for rank in [rank for rank in ranks if rank is not None]:
                    try:
                        answer = self._inboxes[rank].take()
                    except EOFError:  # its end is seen, and told, by those who made it
                        selector.unregister(self._sockets[rank])
                        continue
                    if answer is not None and answer[0] != WHERE:
                        return rank, answer
                    if answer is not None and not answer[1]:
                        self._computing.add(rank)
                if None in ranks:
                    raise self._why()
        return None

    def stop(self, is_orderly: bool) -> bool:
        """End the replicas: in their own time, or at once; processes that don't go are killed."""
        # Local; harmless the second time. What they still do in their own time is waited for as
        # long as the block's deadline allows: threads that aren't daemons, exit handlers.
        if any(sock.fileno() < 0 for sock in self._all_sockets()):
            _hang_up(self._all_sockets())  # it is what Ctrl-C left undone the first time
            return not self._thread.is_alive()
        is_recalled = len(self._sockets) < self._size
        if is_recalled:
            self._spawning.recall.now()  # those that aren't there yet can't be told
        was_whole = is_orderly and not self.has_ended()
        for sock in self._sockets.values():
            with suppress(OSError):
                if is_orderly:
                    sock.setblocking(False)
                    channel.send(sock, channel.END)
                else:
                    sock.shutdown(socket.SHUT_WR)
        has_killed = self._see_off(_LEAVE_S if is_orderly else _QUIT_S)
        pids = {peer(sock).pid for sock in self._sockets.values()} - {os.getpid()}
        if is_orderly and pids:  # threads and exit handlers end in their own time, as spawn's do
            self._thread.join(limit_of(None))
            self.is_late = self._thread.is_alive()
            _kill(pids if self.is_late else ())
        self._thread.join(_END_S if pids or is_orderly or is_recalled else _QUIT_S)
        _hang_up(self._all_sockets())
        if was_whole and not has_killed:
            self.ending_error = self._spawning.error
        return not self._thread.is_alive()

    def _see_off(self, patience_s: float) -> bool:
        """Wait until replicas close their connections; kill those that don't, and tell so."""
        until = time.monotonic() + patience_s
        waiting = select.poll()
        sockets = {sock.fileno(): sock for sock in self._sockets.values()}
        for sock in sockets.values():
            waiting.register(sock, 0)  # an end alone is reported
        waiting.register(self._ended, select.POLLIN)
        while sockets and (left := until - time.monotonic()) > 0:
            for fd, _ in waiting.poll(left * 1000):
                if fd == self._ended.fileno():
                    return False
                waiting.unregister(fd)
                del sockets[fd]
        _kill({peer(sock).pid for sock in sockets.values()} - {os.getpid()})
        return bool(sockets)


def _outputs() -> list[tuple[int, int]] | None:
    """Tell which files stdout and stderr are; None where one is closed."""
    try:
        stats = [os.fstat(fd) for fd in (1, 2)]
    except OSError:
        return None
    return [(stat.st_dev, stat.st_ino) for stat in stats]


def _listener(stack: ExitStack) -> tuple[socket.socket, str]:
    try:
        listener, address = listen_locally(stack)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(local_address(address))
            peer(probe)  # a sandbox may forbid to ask
            listener.accept()[0].close()
    except OSError as error:
        raise LaunchError(
            "a pool talks to its replicas over Unix-domain sockets and asks the kernel who is at "
            f"the other end, which can't be done here: {error}. Use spawn, or allow both"
        ) from error
    return listener, address


def _hang_up(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        hang_up(sock)


def _hang_up_at_home(sockets: list[socket.socket], owner: int) -> None:
    """Hang up, but in a fork of the owner: what that shuts down is shut down for both."""
    if os.getpid() == owner:
        _hang_up(sockets)


def _kill(pids: Iterable[int | None], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _is_closed(sock: socket.socket) -> bool:
    """Return whether the other side is gone; between calls it has nothing to say."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
