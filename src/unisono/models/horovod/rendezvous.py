"""A barrier on horovodrun's key-value server before ``hvd.init()``, which clears stale addresses.

Horovod 0.28.1 forgets to clear the addresses of an earlier context: when one scope is done, its
server (``RendezvousHandler.do_DELETE``) drops the count of every other scope too. A rank that then
makes a context again may find an address that nobody listens at, and Horovod aborts its process. It
aborts it, too, where a rank doesn't come in 30 seconds.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Mapping
from contextlib import closing, suppress

from unisono.errors import CollectiveTimeoutError, ContextError

_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_NEEDED = (_ADDRESS, _PORT, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_HOSTNAME")
_REQUEST_S = 30.0
_TRIES = 3
_POLL_S, _SLOWEST_POLL_S = 0.002, 0.1
_POLL_PER_RANK_S = 0.005  # the server answers about a thousand times a second
_VERDICT = "word"
_GONE = "gone"
_scopes = itertools.count(1)


def wait_for_all(environ: Mapping[str, str], timeout_s: float) -> None:
    """Wait until every rank is about to make a context, and clear what earlier ones left."""
    # Collective over all ranks. Does nothing where no server of horovodrun is: under mpirun, for a
    # rank on its own, and in an elastic job, whose ranks come and go.
    if any(name not in environ for name in _NEEDED) or environ.get("HOROVOD_ELASTIC") == "1":
        return
    rank, size = int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])
    if size == 1:
        return
    store = Store(environ[_ADDRESS], int(environ[_PORT]), f"unisono_{next(_scopes)}")
    own_seat = json.dumps([environ["HOROVOD_HOSTNAME"], int(environ.get("HOROVOD_LOCAL_RANK", 0))])
    until = time.monotonic() + timeout_s
    try:
        store.put(str(rank), own_seat)
        why = _meet(store, rank, size, until)
        if why:
            store.put(str(rank), _GONE)
    except (OSError, http.client.HTTPException) as error:
        raise ContextError(
            f"rank {rank} of {size}: horovodrun's server at {environ[_ADDRESS]}:{environ[_PORT]} "
            f"doesn't answer: {type(error).__name__}: {error}; is horovodrun still running?"
        ) from error
    if why:
        raise CollectiveTimeoutError(
            f"rank {rank} of {size}: initialize: {why}: every rank of the job has to initialize; "
            "see what these ranks did instead"
        )


def _meet(store: Store, rank: int, size: int, until: float) -> str:
    """Return why not all have come; if they have, rank 0 clears, and tells the others."""
    if rank > 0:
        verdict = store.wait(_VERDICT, until, size)
        return store.missing(size) if verdict is None else verdict
    seats: list[str | None] = []
    while len(seats) < size and not {None, _GONE} & {*seats}:
        seats.append(store.wait(str(len(seats)), until, size))
    came = [json.loads(seat) for seat in seats if seat not in (None, _GONE)]
    why = ""
    if len(came) == size:
        scopes = {f"local_{host}" for host, _ in came} | {f"cross_{index}" for _, index in came}
        for scope in ("global", *scopes):
            _clear(store, scope, size)
    elif _GONE in seats:
        why = f"rank {seats.index(_GONE)} had given up waiting"
    else:
        why = store.missing(size)
    store.put(_VERDICT, why)
    return why


def _clear(store: Store, scope: str, size: int) -> None:
    for _ in range(size):
        if store.ask("GET", "0", scope) is None:
            return
        store.ask("DELETE", "0", scope)  # counted: the scope is cleared with the last of its size


class Store:
    """The server's HTTP: keys of the barrier's scope, and of Horovod's own."""

    def __init__(self, address: str, port: int, scope: str) -> None:
        self._where = (address, port)
        self._scope = scope

    def put(self, key: str, value: str) -> None:
        """Set a key of the barrier."""
        self.ask("PUT", key, value=value)

    def missing(self, size: int) -> str:
        """Name the ranks that have put no key of theirs."""
        ranks = [rank for rank in range(size) if self.ask("GET", str(rank)) is None]
        return f"timed out: ranks {ranks} didn't come"

    def wait(self, key: str, until: float, size: int) -> str | None:
        """Wait for a key of the barrier; None if it doesn't come."""
        pause_s, slowest_s = _POLL_S, max(_SLOWEST_POLL_S, _POLL_PER_RANK_S * size)
        while (value := self.ask("GET", key)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, slowest_s)
        return value.decode()

    def ask(self, verb: str, key: str, scope: str = "", value: str = "") -> bytes | None:
        """Send a request; return the value of a key, or None."""
        for _ in range(_TRIES - 1):  # it listens with a short queue
            with suppress(OSError, http.client.HTTPException):
                return self._ask_once(verb, f"/{scope or self._scope}/{key}", value)
            time.sleep(_SLOWEST_POLL_S)
        return self._ask_once(verb, f"/{scope or self._scope}/{key}", value)

    def _ask_once(self, verb: str, path: str, value: str) -> bytes | None:
        with closing(http.client.HTTPConnection(*self._where, timeout=_REQUEST_S)) as connection:
            connection.request(verb, path, value.encode())
            response = connection.getresponse()
            content = response.read()
        return content if response.status == http.client.OK else None
