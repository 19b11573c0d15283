"""Check of the installed Horovod and barrier before ``hvd.init()``; neither imports Horovod."""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import json
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from unisono.errors import CollectiveTimeoutError, ContextError

_EXTENSION = f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}"
_AGAIN = "install it again beside this torch and Python, with HOROVOD_WITH_PYTORCH=1"


def why_unusable() -> str | None:
    """Return why the installed Horovod can't be used, None if no fault is found."""
    # Only files are read. Faults that only the loader detects are errors of the import.
    spec = importlib.util.find_spec("horovod")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        return None  # not installed, which the registry reports
    built = [folder for folder in folders if (folder / "torch" / _EXTENSION).exists()]
    if not built:
        return (
            f"horovod in {folders[0]} was installed without its C++ part for torch and this "
            f"Python (torch/{_EXTENSION}): {_AGAIN}, so that the build reports the missing part"
        )
    built_for = _torch_of(built[0])
    if built_for and built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        return (
            f"horovod in {built[0]} was built for torch {built_for}, but this is torch "
            f"{torch.__version__}: {_AGAIN}"
        )
    return None


def _torch_of(folder: Path) -> str:
    """Return the torch version recorded by Horovod's build, empty if it recorded none."""
    try:
        return str(json.loads((folder / "metadata.json").read_text()).get("pytorch") or "")
    except (OSError, ValueError, AttributeError):
        return ""


# A barrier on horovodrun's key-value server clears stale addresses. Horovod 0.28.1 doesn't clear
# those of an earlier context: when one scope is done, its server (`RendezvousHandler.do_DELETE`)
# drops the count of every other scope too. A rank that then creates a context again may find an
# address without a listener, and Horovod aborts its process. It also aborts if a rank doesn't
# arrive within 30 seconds.
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_NEEDED = (_ADDRESS, _PORT, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_HOSTNAME")
_REQUEST_S = 30.0
_TRIES = 3
_POLL_S, _SLOWEST_POLL_S = 0.002, 0.1
_POLL_PER_RANK_S = 0.005  # the server answers about a thousand times a second
_VERDICT = "verdict"
_GONE = "gone"
_scopes = itertools.count(1)


def wait_for_all(environ: Mapping[str, str], timeout_s: float) -> None:
    """Wait until every rank is about to create a context; clear addresses of earlier contexts."""
    # Collective over all ranks. Returns at once without a server of horovodrun: under mpirun, for a
    # single rank, and in an elastic job, whose ranks change.
    if any(name not in environ for name in _NEEDED) or environ.get("HOROVOD_ELASTIC") == "1":
        return
    rank, size = int(environ["HOROVOD_RANK"]), int(environ["HOROVOD_SIZE"])
    if size == 1:
        return
    store = Store(environ[_ADDRESS], int(environ[_PORT]), f"unisono_{next(_scopes)}")
    own_place = json.dumps([environ["HOROVOD_HOSTNAME"], int(environ.get("HOROVOD_LOCAL_RANK", 0))])
    until = time.monotonic() + timeout_s
    try:
        store.ask("PUT", str(rank), own_place)
        why = _meet(store, rank, size, until)
        if why:  # so that rank 0, if it is the late one, doesn't count this rank as arrived
            store.ask("PUT", str(rank), _GONE)
    except (OSError, http.client.HTTPException) as error:
        raise ContextError(
            f"rank {rank} of {size}: horovodrun's server at {environ[_ADDRESS]}:{environ[_PORT]} "
            f"does not answer: {type(error).__name__}: {error}; is horovodrun still running?"
        ) from error
    if why:
        raise CollectiveTimeoutError(
            f"rank {rank} of {size}: initialize: {why}: every rank of the job has to initialize; "
            "check the output of these ranks"
        )


def _meet(store: Store, rank: int, size: int, until: float) -> str:
    """Return why ranks are missing, else an empty text; rank 0 clears the server and decides."""
    if rank > 0:
        verdict = store.wait(_VERDICT, until, size)
        return store.missing(size) if verdict is None else verdict
    places: list[str | None] = []
    # In the order of ranks, up to the first one that is late or has given up.
    while len(places) < size and not {None, _GONE} & {*places}:
        places.append(store.wait(str(len(places)), until, size))
    arrived = [json.loads(place) for place in places if place not in (None, _GONE)]
    why = ""
    if len(arrived) == size:
        # Horovod has a scope for the ranks of each host, and one for the ranks of each local rank.
        scopes = {f"local_{host}" for host, _ in arrived} | {
            f"cross_{index}" for _, index in arrived
        }
        for scope in ("global", *scopes):
            _clear(store, scope, size)
    elif _GONE in places:
        why = f"rank {places.index(_GONE)} had timed out"
    else:
        why = store.missing(size)
    store.ask("PUT", _VERDICT, why)  # also after a failure, because the others wait for it
    return why


def _clear(store: Store, scope: str, size: int) -> None:
    for _ in range(size):
        if store.ask("GET", "0", scope=scope) is None:  # no address of an earlier context is left
            return
        # The server counts these requests, and clears the scope at the last one of its size.
        store.ask("DELETE", "0", scope=scope)


class Store:
    """HTTP client of horovodrun's server, for keys of the barrier and of Horovod itself."""

    def __init__(self, address: str, port: int, scope: str) -> None:
        self._where = (address, port)
        self._scope = scope

    def missing(self, size: int) -> str:
        """Return the ranks without a key, as a text."""
        ranks = [rank for rank in range(size) if self.ask("GET", str(rank)) is None]
        return f"timed out: ranks {ranks} did not arrive"

    def wait(self, key: str, until: float, size: int) -> str | None:
        """Wait for a key of the barrier; None after the deadline."""
        pause_s, slowest_s = _POLL_S, max(_SLOWEST_POLL_S, _POLL_PER_RANK_S * size)
        while (value := self.ask("GET", key)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, slowest_s)
        return value.decode()

    def ask(self, verb: str, key: str, value: str = "", scope: str = "") -> bytes | None:
        """Send a request; return the value of a key, or None."""
        path = f"/{scope or self._scope}/{key}"
        for _ in range(_TRIES - 1):  # the server's listen queue is short
            with suppress(OSError, http.client.HTTPException):
                return self._ask_once(verb, path, value)
            time.sleep(_SLOWEST_POLL_S)
        return self._ask_once(verb, path, value)  # the last error is raised

    def _ask_once(self, verb: str, path: str, value: str) -> bytes | None:
        with closing(http.client.HTTPConnection(*self._where, timeout=_REQUEST_S)) as connection:
            connection.request(verb, path, value.encode())
            response = connection.getresponse()
            content = response.read()
        return content if response.status == http.client.OK else None
