"""What ranks of other hosts are in: asked of one rank of this host, which asks one of each other.

Their clocks aren't this host's. Each answer says when it was asked for and when it was sent, by the
clock of its host, and the rank that asked says the same by this one's. The middles of both are
taken for the same moment; it is off by less than half a round between the hosts.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.control.addresses import peer
from unisono.host import stack_signal
from unisono.host.page_copies import PageCopy, from_plain, unpacked
from unisono.host.status_socket import connected, sockets_of
from unisono.observe import stacks
from unisono.observe.jobs import Job, Meter, Seen, Silent, job_of, newness, seen_in
from unisono.observe.stacks import Stack
from unisono.observe.verdict import named

_GREETING_S = 0.3  # a rank that keeps Python's lock says nothing; others are asked then
_LIMIT_S = 1.0
_NAMELESS = "?"
_HOW = {"dead": "is dead", "stopped": "is stopped by a signal"}
_MORE_S = 1.0  # for the answer to come here, once the time of the hosts is over
_CANNOT = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one host has answered."""

    host: str
    shift_ns: int
    parts: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What came of asking."""

    answers: list[_Answer]
    silent: list[tuple[str, tuple[int, ...]]]
    pid: int | None


def gather(job: Job, meter: Meter) -> Job:
    """Add the ranks of other hosts to a job."""
    # It waits for a second where a host doesn't answer.
    paths = _sockets(job)
    dead = {each.rank.rank for each in job.ranks if each.rank.condition == "dead"}
    if not paths or not (job.elsewhere or dead):
        return job
    asked = _ask(paths, {"ranks": [], "limit_s": _LIMIT_S})
    if asked is None:
        why = "no rank of this host answers: each is stopped, or keeps Python's lock"
        silent = Silent("", tuple(sorted(dead.union(job.elsewhere))), why)
        return replace(job, silent=(silent,), is_asked=True)
    # A page of a rank that another host has is an earlier run's, even if that host is silent.
    old = dead.intersection(rank for _, ranks in asked.silent for rank in ranks)
    known = {each.rank.rank: each for each in job.ranks if each.rank.rank not in old}
    for answer in asked.answers:
        for seen in seen_in(_pages(answer), meter, answer.host or _NAMELESS):
            rank = seen.rank.rank
            known[rank] = max(known.get(rank, seen), seen, key=newness)
    gathered = job_of(job.name, known.values())
    return replace(gathered, silent=_explained(asked, gathered), is_asked=True)


def _pages(answer: _Answer) -> Iterable[PageCopy]:
    for part in answer.parts:
        with suppress(*_CANNOT):
            yield from_plain(part, answer.shift_ns)


def stacks_elsewhere(
    job: Job, ranks: Collection[int], timeout_s: float, *, all_threads: bool = False
) -> dict[int, list[Stack] | str]:
    """Have ranks of other hosts asked for their stacks."""
    by_rank = {each.rank.rank: each for each in job.ranks}
    found: dict[int, list[Stack] | str] = dict.fromkeys(ranks, "its host doesn't answer")
    timeout_s = min(timeout_s, stack_signal.LONGEST_S)
    request = {
        "ranks": sorted(ranks),
        # Each of two ranks of a host has half of it: both would ask the same processes.
        "limit_s": 2 * timeout_s + _LIMIT_S,
        "timeout_s": timeout_s,
        "all_threads": all_threads,
    }
    asked = _ask(_sockets(job), request) if ranks else None
    for answer in [] if asked is None else asked.answers:
        for part in answer.parts:
            with suppress(*_CANNOT):
                if part["rank"] in found:
                    found[part["rank"]] = _told(by_rank[part["rank"]], part["stacks"], timeout_s)
    return found


def _told(seen: Seen, texts: Sequence[Sequence[Any]] | None, timeout_s: float) -> list[Stack] | str:
    if texts is None:
        is_stopped = seen.rank.condition == "stopped"
        return stacks.STOPPED if is_stopped else stacks.silent(timeout_s, seen.facts)
    return stacks.told({int(thread): str(text) for thread, text in texts})


def _sockets(job: Job) -> list[Path]:
    """List where ranks of this host can be asked, those that can't answer left out."""
    able = [
        (each.facts["pid"], each.facts["start_ticks"])
        for each in job.ranks
        if each.is_here and each.rank.condition not in ("dead", "stopped")
    ]
    found = sockets_of(able)
    return [found[process] for process in dict.fromkeys(able) if process in found]


def _ask(paths: Sequence[Path], request: Mapping[str, Any]) -> _Asked | None:
    """Ask one rank of this host about others; None where none answers."""
    with ExitStack() as stack:
        sock = _greeted(paths[:1], stack) or _greeted(paths, stack)
        if sock is None:
            return None
        limit_s = float(request["limit_s"])
        answers: list[_Answer] = []
        with suppress(OSError, *_CANNOT):
            sock.settimeout(limit_s + _MORE_S)
            sock.sendall(json.dumps(request).encode() + b"\n")
            for line in stack.enter_context(sock.makefile("rb")):
                plain = json.loads(line)
                if "silent" in plain:
                    silent = [(str(each["host"]), tuple(each["ranks"])) for each in plain["silent"]]
                    return _Asked(answers, silent, peer(sock).pid)
                with suppress(*_CANNOT):
                    answers.append(_answer(plain))
    return None


def _greeted(paths: Sequence[Path], stack: ExitStack) -> socket.socket | None:
    """Connect to ranks, and choose the first one whose thread says a word."""
    socks = [sock for path in paths if (sock := connected(path, _GREETING_S)) is not None]
    readable = select.poll()
    for sock in socks:
        stack.callback(sock.close)
        if peer(sock).is_own_user:
            readable.register(sock, select.POLLIN)
    by_fd = {sock.fileno(): sock for sock in socks}
    until = time.monotonic() + _GREETING_S
    while by_fd and (left_s := until - time.monotonic()) > 0:
        for fd, _ in readable.poll(left_s * 1000):
            if _has_greeted(by_fd[fd]):
                return by_fd[fd]
            readable.unregister(fd)
    return None


def _has_greeted(sock: socket.socket) -> bool:
    """Read one line, byte by byte: what follows is another reader's."""
    with suppress(OSError):
        while byte := sock.recv(1):
            if byte == b"\n":
                return True
    return False


def _answer(plain: Mapping[str, Any]) -> _Answer:
    head, *parts = map(unpacked, plain["parts"])
    here_ns = (int(plain["asked_ns"]) + int(plain["came_ns"])) // 2
    there_ns = (int(head["got_ns"]) + int(head["sent_ns"])) // 2
    return _Answer(str(head["host"]), here_ns - there_ns, parts)


def _explained(asked: _Asked, job: Job) -> tuple[Silent, ...]:
    """Say why hosts may not have answered: all ways from a host lead through its first rank."""
    first = next((each.rank for each in job.ranks if each.is_here), None)
    here = ""
    if first is not None and first.pid != asked.pid:
        how = _HOW.get(first.condition, "doesn't answer, as one that keeps Python's lock")
        here = f"rank {first.rank}, through which this host asks, {how}"
    found = []
    for host, ranks in asked.silent:
        there = f"it can't be reached, or {named(ranks[:1])}, through which it is asked, is stopped"
        why = here or f"{there} or keeps Python's lock"
        found.append(Silent(host, ranks, f"no answer within {_LIMIT_S:g} s: {why}"))
    return tuple(found)
