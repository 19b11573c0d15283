"""Rendezvous of all ranks before torch connects them, under one deadline.

Missing ranks are reported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store

from unisono.control.addresses import (
    LOOPBACK,
    is_loopback,
    own_address,
    own_interface,
    why_unreachable,
)
from unisono.control.stores import host_store, store_at
from unisono.deadlines import end_of_block, format_s, host_s, limit_of
from unisono.errors import ArgumentError, ContextError
from unisono.model.handle import SafeFuture
from unisono.topology import PRIVATE_STORE, RankInfo, named

_log = logging.getLogger(__name__)
_LIMIT_S = 60.0  # for set-up, unless the user sets a timeout
_WARN_AFTER_S = 10.0
_LEAST_S = 5.0  # for torch's own part, even if the last rank was late
_TRY_S = 0.1  # between two attempts
_GRACE_S = 1.0  # for the error of the joining thread
_LOOK_S = 0.0005  # between the first looks for late ranks
_LINGER_S = 3 * _TRY_S  # for the other ranks to read the verdict
_SECRET_BYTES = 32
_ALL = "[]"  # no rank is missing, as JSON
_GLOO = "GLOO_SOCKET_IFNAME"
_SOURCES = {
    "torchrun": "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    "arguments": "rank=, world_size=, MASTER_ADDR and MASTER_PORT",
    "init_method": "rank=, world_size= and init_method=",
    "spawn": "nnodes=, nproc_per_node=, master_addr= and master_port=",
}


def is_one_host(info: RankInfo) -> bool:
    """Return whether all ranks are known to be on this host, as with a loopback address."""
    if info.world_size == 1 or info.nnodes == 1:
        return True
    return info.nnodes is None and is_loopback(info.master_addr or "")


def gloo_interface(info: RankInfo) -> str:
    """Return gloo's network interface; empty for the one of the host's name."""
    if is_one_host(info) or is_loopback(info.master_addr or ""):
        return "lo"
    # Without a known number of nodes, only the route to MASTER_ADDR shows an interface.
    return own_interface(info.master_addr, has_others=info.nnodes is not None)


def wrong_interface(info: RankInfo) -> str:
    """Return the fault of gloo's network interface, empty if there is none."""
    here = {name for _, name in socket.if_nameindex()}
    unknown = sorted({*filter(None, os.environ.get(_GLOO, "").split(","))} - here)
    if unknown:
        return (
            f"; {_GLOO} names {', '.join(unknown)}, and this host has {', '.join(sorted(here))}: "
            "correct or unset it"
        )
    if _GLOO not in os.environ and info.nnodes is not None and not gloo_interface(info):
        try:
            own_address(info.master_addr)  # only for its error
        except OSError as error:
            return f"; {error}"
    return ""


@contextlib.contextmanager
def listening_at(interface: str) -> Iterator[None]:
    """Set gloo's network interface within the block."""
    # Gloo only reads a variable; the user's own is kept.
    if not interface or _GLOO in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[_GLOO] = interface
    try:
        yield
    finally:
        os.environ.pop(_GLOO, None)


class Rendezvous:
    """Rendezvous of all ranks of a job, until its deadline."""

    def __init__(self, info: RankInfo, timeout: timedelta | None) -> None:
        limit_s = limit_of(_LIMIT_S if timeout is None else timeout.total_seconds())
        assert limit_s is not None
        self.info: RankInfo = info
        self.secret: bytes | None = None
        """Known only to ranks of this job; set once they have met in their user's private store."""
        private = info.private_store or os.environ.get(PRIVATE_STORE, "")
        self._private = private if is_one_host(info) else ""  # a file of this host
        self._limit_s = limit_s
        self._is_default_limit = timeout is None
        # Progress extends a default limit, but not beyond the block's deadline.
        self._last: float = end_of_block() or math.inf
        self._until = time.monotonic() + host_s(limit_s)
        self._warn_at: float = time.monotonic() + host_s(_WARN_AFTER_S)

    def left(self) -> timedelta:
        """Return the time left for torch's own part of set-up, never zero."""
        return timedelta(seconds=max(self._until - time.monotonic(), min(_LEAST_S, self._limit_s)))

    def set_address(self, url: str) -> bool:
        """Set the store's address from a URL; return False if torch must read it instead."""
        parts = urlsplit(url)
        if parts.scheme != "tcp" or parts.query:  # torch reads ranks from a query
            return False
        try:
            addr, port = parts.hostname, parts.port
        except ValueError:  # the port isn't a number in range
            addr, port = parts.hostname, None
        if addr is None or port is None:
            raise ArgumentError(f"init_method={url!r} should be tcp://HOST:PORT")
        there = {"master_addr": addr, "master_port": port, "source": "init_method"}
        self._private = ""  # the user's own address replaces the launcher's file
        self.info = replace(self.info, **there, store_is_hosted=False)  # type: ignore[arg-type]
        return True

    def store(self) -> Store:
        """Create or join the store, and wait there for all ranks. Collective over all ranks."""
        info = self.info
        if info.world_size == 1:
            return HashStore()
        if self._private:
            return self._in_thread(self._join_private_store)
        if info.master_addr is None or info.master_port is None:
            raise ContextError(
                f"{self._who()} has no rendezvous address: set MASTER_ADDR and "
                "MASTER_PORT, or pass init_method="
            )
        is_host = info.rank == 0 and not info.store_is_hosted
        addr, port = info.master_addr, info.master_port
        try:
            socket.getaddrinfo(addr, port)  # only for its error, without a wait until the deadline
        except OSError as error:
            raise ContextError(
                f"{self._where()}: the host doesn't resolve: {error}; correct {self._source()}"
            ) from error
        if is_one_host(info) and not info.store_is_hosted:
            addr = LOOPBACK
        if not is_host:
            self._wait_for_listener(addr, port)
        return self._in_thread(lambda: self._join_store(addr, port, is_host))

    def _in_thread(self, join: Callable[[], Store]) -> Store:
        """Run `join` in a thread, because torch waits forever for a listener that never answers."""
        outcome, thread = SafeFuture.in_thread(join, "unisono-rendezvous")
        try:
            # This wait is longer than that of `join`, whose own error says more. While ranks
            # arrive, `join` may extend `_until`.
            while not outcome.is_known and (left := self._until + _GRACE_S - time.monotonic()) > 0:
                thread.join(left)
        except BaseException:  # Ctrl-C: the thread gives up, and its store closes
            self._until, self._is_default_limit = time.monotonic(), False
            raise
        if outcome.is_known:
            try:
                return outcome.wait()
            except ContextError:  # it is a RuntimeError, too
                raise
            except RuntimeError as error:  # torch's
                hint = "" if self._private else "; rank 0 may have timed out or ended"
                why = str(error).partition("\n")[0].rstrip(".")
                raise ContextError(f"{self._where()}: {why}{hint}") from error
        limit = format_s(self._limit_s)
        if self._private:
            raise ContextError(f"{self._where()}: the file was locked for {limit}")
        raise ContextError(
            f"{self._where()}: the listener accepted the connection and did not answer for "
            f"{limit}: another program, or rank 0 is stopped{self._remedy('rank 0')}"
        )

    def _join_store(self, addr: str, port: int, is_host: bool) -> Store:
        size = self.info.world_size
        while True:
            limit = timedelta(seconds=math.ceil(self.left().total_seconds()))
            # In a list, from which it can be removed: an error refers to this frame, and a store
            # listens while it is referenced.
            stores: list[Store] = [
                self._host_store(addr, port, limit)
                if is_host
                else store_at(addr, port, size, False, timeout=limit, wait_for_workers=False)
            ]
            if not self._is_of_earlier_run(stores[0]):
                return self._await_all(stores.pop())
            stores.clear()
            self._wait_for_end_of_earlier_run(addr, port)

    def _is_of_earlier_run(self, store: Store) -> bool:
        """Return whether another process was this rank in the store, which node 0 closes soon."""
        # If each node makes its own calls, a node may begin the next run before node 0 has ended
        # the previous run, whose ranks met at the same port.
        info, token = self.info, _token(os.getpid())
        if info.source != "spawn" or not info.node_rank or not info.store_is_hosted:
            return False
        try:
            found = self._of_attempt(store).compare_set(f"process/{info.rank}", "", token)
        except RuntimeError:  # the store is closing; else the wait for its end reports the error
            return True
        return found.decode() != token

    def _wait_for_end_of_earlier_run(self, addr: str, port: int) -> None:
        now, rank = time.monotonic(), self.info.rank
        if now + _TRY_S > self._until:
            raise ContextError(
                f"{self._where()}: another process has been rank {rank} there, and that run hasn't "
                f"ended for {format_s(self._limit_s)}: see what node 0 still does in it, whether "
                f"two nodes have node_rank={self.info.node_rank}, or choose another master_port"
            )
        what = f"for the end of an earlier run, in which another process was rank {rank}"
        self._warn(now, what, "node 0's part of this run")
        time.sleep(_TRY_S)
        # Node 0 may have closed the earlier store now, and not yet opened that of this run.
        self._wait_for_listener(addr, port)

    def _join_private_store(self) -> Store:
        """Wait for all ranks in the launcher's file, and agree on a secret there."""
        info = self.info
        store = FileStore(_opened(self._private), -1)  # -1: for any number of ranks
        # Jobs that a rank starts inherit the variable, and use keys of their own.
        job = PrefixStore(f"{info.master_addr}:{info.master_port}/{info.world_size}", store)
        joined = self._await_all(job)
        token = job.compare_set("secret", "", secrets.token_hex(_SECRET_BYTES))
        self.secret = bytes.fromhex(token.decode())
        return joined

    def _await_all(self, store: Store) -> Store:
        """Wait for all ranks; return the part of the store for this context."""
        attempt = self._of_attempt(store)
        turn, missing = self._gather_ranks(attempt)
        if not missing:
            return PrefixStore(f"turn/{turn}", attempt)
        if isinstance(missing, str):  # the ranks disagree
            raise ContextError(missing)
        limit = f"within {format_s(self._limit_s)}"
        del store, attempt  # a referenced store listens, and the error refers to this frame
        if self.info.rank in missing:
            raise ContextError(
                f"{self._who()} reached {self._address()} too late: the other ranks had timed out "
                f"waiting for {named(missing)}; start all ranks {limit}, or pass a longer timeout"
            )
        raise ContextError(
            f"{named(missing)} of {self.info.world_size} did not reach {self._address()} {limit} "
            f"(rank {self.info.rank} did){self._remedy('them')}"
        )

    def _of_attempt(self, store: Store) -> PrefixStore:
        """Return the part of a store for this attempt of torchrun."""
        # Rank 0's own store is new in each attempt, in which the agents' counts may differ: an
        # agent counts only failures of its own ranks.
        is_kept = self._private or self.info.store_is_hosted
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
        return PrefixStore(f"unisono/{count}", store)

    def _who(self) -> str:
        return f"rank {self.info.rank} of {self.info.world_size}"

    def _where(self) -> str:
        return f"{self._who()} can't reach the rendezvous at {self._address()}"

    def _address(self) -> str:
        if self._private:
            return "the store of this job"
        return f"{self.info.master_addr}:{self.info.master_port}"

    def _source(self) -> str:
        source = self.info.source
        return _SOURCES.get(source, f"the variables of {source}")

    def _host_store(self, addr: str, port: int, limit: timedelta) -> Store:
        options = {"world_size": self.info.world_size, "timeout": limit}
        try:
            return host_store(addr, port, is_one_host=is_one_host(self.info), **options)
        except OSError as error:
            why = str(error) if error.errno is None else os.strerror(error.errno)
            raise ContextError(
                f"{self._who()} can't listen at {addr}:{port}: {why}; choose another port in "
                f"{self._source()}"
            ) from error

    def _wait_for_listener(self, addr: str, port: int) -> None:
        """Wait for a listener, because torch's own attempts take up to three times as long."""
        # Also after the deadline the time limit of an attempt must be positive.
        while reason := why_unreachable(addr, port, max(_TRY_S, self._until - time.monotonic())):
            now = time.monotonic()
            if now + _TRY_S > self._until:
                raise ContextError(
                    f"{self._where()}: no listener there within {format_s(self._limit_s)} "
                    f"({reason}){self._remedy('rank 0')}"
                ) from reason
            self._warn(now, f"for a listener ({reason})", "rank 0")
            time.sleep(_TRY_S)

    def _gather_ranks(self, store: PrefixStore) -> tuple[int, list[int] | str]:
        """Return the turn, and the ranks that are missing at the first rank's timeout, if any.

        If the ranks disagree about their number, an error text replaces the missing ranks.
        """
        # A store that outlives a context is used again: each turn has its own keys, and so has each
        # attempt of torchrun.
        rank, size = self.info.rank, self.info.world_size
        turn = store.add(f"arrived/{rank}", 1)
        end, begin = f"end/{turn}", time.monotonic()
        first = store.compare_set(f"size/{turn}", "", f"{rank} {size}").decode().split()
        if first[1] != str(size):
            text = (
                f"rank {rank} joined {self._address()} with world size {size}, and rank {first[0]} "
                f"with world size {first[1]}: give each node the same number of ranks "
                "(nproc_per_node)"
            )
            store.compare_set(end, "", json.dumps(text))
            time.sleep(_LINGER_S)  # the others read it, and this rank may host the store
            return turn, text
        n_ranks = store.add(f"ranks/{turn}", 1)
        if n_ranks == size:
            # The first verdict holds for all ranks, even if it is that of a rank that timed out.
            return turn, json.loads(store.compare_set(end, "", _ALL))
        while not store.check([end]):
            now = time.monotonic()
            if now >= self._until and self._is_default_limit:
                n_before, n_ranks = n_ranks, store.add(f"ranks/{turn}", 0)
                if n_ranks > n_before:  # a default timeout limits set-up without progress
                    self._until = min(now + host_s(self._limit_s), self._last)
            if now >= min(self._until, self._warn_at):
                missing = [at for at in range(size) if store.add(f"arrived/{at}", 0) < turn]
                if now >= self._until:
                    missing_json = store.compare_set(end, "", json.dumps(missing))
                    time.sleep(_LINGER_S)  # the others read it, and this rank may host the store
                    return turn, json.loads(missing_json)
                if store.compare_set(f"warned/{turn}", "", str(rank)) == str(rank).encode():
                    self._warn(now, f"for {named(missing)}", "them")
                self._warn_at = math.inf  # one rank warns for all
            time.sleep(min(max(_LOOK_S, (now - begin) / 20), _TRY_S))
        return turn, json.loads(store.get(end))

    def _remedy(self, missing: str) -> str:
        if self._private:
            return f": check the output of {missing}: the job has started every rank"
        source = self._source()
        return f". The address is from {source}: start {missing}, or correct or unset these"

    def _warn(self, now: float, what: str, missing: str) -> None:
        if now < self._warn_at:
            return
        self._warn_at = math.inf
        _log.warning(
            "%s has waited %g s at %s %s, and gives up after %.3g s%s",
            self._who(),
            _WARN_AFTER_S,
            self._address(),
            what,
            self._limit_s,
            self._remedy(missing),
        )


@functools.cache
def _token(process: int) -> str:
    """Return a random text for a process; a fork has its own, as another rank."""
    return f"{process} {secrets.token_hex(8)}"


@functools.cache
def _opened(path: str) -> str:
    """Return a path that stays valid when the process that created the file exits."""
    # The file is open until this process exits: torch opens the path for each operation, and
    # must never find another file there.
    if not path.startswith("/proc/"):
        return path
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ContextError(
            f"the file in which this job's ranks meet can't be opened: {error}; its path is in "
            f"{PRIVATE_STORE}. Has the process that launched the job ended, or this one changed "
            "its user or its process namespace? Initialize before that, or unset the variable"
        ) from error
    opened = f"/proc/self/fd/{file}"
    is_store = os.readlink(opened).startswith("/memfd:unisono-store")
    if not is_store or os.fstat(file).st_uid != os.geteuid():
        os.close(file)
        raise ContextError(f"{PRIVATE_STORE}={path} isn't the store of this user's job: unset it")
    return opened
