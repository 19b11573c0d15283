"""The jobs of this user on this host: status pages by job and rank, with what the kernel says."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.host.page_copies import PageCopy, copied
from unisono.host.status_page import IN_FLIGHT, is_running, pages, ranks_of
from unisono.observe.verdict import Call, Rank
from unisono.topology import EVERYBODY, members_of_pair

_S = 1e9


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank whose page has been read."""

    rank: Rank
    facts: Mapping[str, Any]
    is_here: bool = True


@dataclass(frozen=True, slots=True)
class Silent:
    """Ranks of another host that couldn't be asked."""

    host: str
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job, as far as it runs on this host, or on others that have been asked."""

    name: str
    ranks: tuple[Seen, ...]
    world_size: int
    elsewhere: tuple[int, ...]
    silent: tuple[Silent, ...] = ()
    is_asked: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the first rank's page says."""
        return self.ranks[0].facts


class Meter:
    """How busy processes and threads are, between one look and the next."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int, int], tuple[int, float]] = {}

    def percent(
        self, host: str, pid: int, thread_id: int, at_ns: int, used_s: float
    ) -> float | None:
        """Return the share of a core since the last look, None at the first one."""
        before = self._before.get((host, pid, thread_id))
        self._before[host, pid, thread_id] = (at_ns, used_s)
        if before is None or at_ns <= before[0]:
            return None
        return 100.0 * max(used_s - before[1], 0.0) / (at_ns - before[0]) * _S


def look(meter: Meter) -> list[Job]:
    """Read all pages of this user, and group them by job."""
    # A job whose processes have all ended is left out.
    by_job: dict[str, list[PageCopy]] = {}
    for page in copied(pages()):
        by_job.setdefault(str(page.facts.get("job", "")), []).append(page)
    jobs: list[Job] = []
    for name, found in sorted(by_job.items()):
        here = seen_in(found, meter)
        if any(each.rank.condition != "dead" for each in here):
            jobs.append(job_of(name, here))
    return jobs


def job_of(name: str, found: Collection[Seen]) -> Job:
    """Make a job of its ranks: as many as the newest one that lives says."""
    world_size = int(max(found, key=newness).facts["world_size"])
    by_rank = {
        each.rank.rank: each
        for each in found
        if each.rank.rank < world_size or each.rank.condition != "dead"
    }
    elsewhere = tuple(rank for rank in range(world_size) if rank not in by_rank)
    return Job(name, tuple(by_rank[rank] for rank in sorted(by_rank)), world_size, elsewhere)


def newness(seen: Seen) -> tuple[bool, int]:
    """Order what is known of one rank: one that lives, then the one that began last."""
    return seen.rank.condition != "dead", seen.rank.made_ns


def seen_in(found: Iterable[PageCopy], meter: Meter, host: str = "") -> list[Seen]:
    """Tell what is known of the ranks of one job on one host."""
    # Local, and pure but for the meter.
    by_rank = _by_rank(found)
    sharing: dict[int, int] = {}
    for each in by_rank.values():
        pid = each[-1].facts["pid"]
        sharing[pid] = sharing.get(pid, 0) + 1
    return [
        _seen(rank, each, meter, host, is_alone=sharing[each[-1].facts["pid"]] == 1)
        for rank, each in sorted(by_rank.items())
    ]


def _by_rank(found: Iterable[PageCopy]) -> dict[int, list[PageCopy]]:
    """Take each rank's pages, the newest last: those of its newest process that lives."""
    # A job that was started again with fewer ranks has left pages of the dead that it has no more.
    by_process: dict[int, dict[tuple[int, int], list[PageCopy]]] = {}
    for page in sorted(found, key=lambda page: int(page.facts.get("made_ns", 0))):
        process = page.facts["pid"], page.facts["start_ticks"]
        by_process.setdefault(page.facts["rank"], {}).setdefault(process, []).append(page)
    newest = {
        rank: max(each.values(), key=lambda of: (_is_alive(of), of[-1].facts["made_ns"]))
        for rank, each in by_process.items()
    }
    living = [each[-1] for each in newest.values() if _is_alive(each)]
    now = max(living, key=lambda page: int(page.facts["made_ns"]), default=None)
    size = math.inf if now is None else now.facts["world_size"]
    return {rank: each for rank, each in newest.items() if rank < size or _is_alive(each)}


def _is_alive(found: Sequence[PageCopy]) -> bool:
    return found[-1].vitals is not None


def _seen(rank: int, found: Sequence[PageCopy], meter: Meter, host: str, *, is_alone: bool) -> Seen:
    calls: list[Call] = []
    for page in found:
        model = f"{page.facts.get('model', '')} {page.facts.get('backend', '')}"
        calls += _calls(page, model)
    facts, vitals = found[-1].facts, found[-1].vitals
    calls.sort(key=lambda call: call.begin_ns)
    pid, made_ns = facts["pid"], facts["made_ns"]
    if vitals is None:
        return Seen(Rank(rank, pid, "dead", tuple(calls), made_ns=made_ns), facts, not host)
    at_ns = vitals.at_ns
    own = meter.percent(host, pid, vitals.thread_id, at_ns, vitals.thread_s)
    whole = meter.percent(host, pid, 0, at_ns, vitals.process_s) if is_alone else own
    known = Rank(
        rank,
        pid,
        vitals.condition,
        tuple(calls),
        cpu_percent=whole,
        memory_bytes=vitals.memory_bytes,
        made_ns=made_ns,
        thread_percent=own,
    )
    return Seen(known, facts, not host)


def _calls(page: PageCopy, context: str) -> Iterable[Call]:
    groups = {name: ranks_of(each) for name, each in page.facts.get("groups", {}).items()}
    groups[EVERYBODY] = tuple(range(page.facts["world_size"]))
    for each in page.records:
        yield Call(
            name=each.name,
            context=context,
            group=each.group,
            ranks=groups.get(each.group) or members_of_pair(each.group),
            number=each.number if each.group else 0,  # else those of several groups would be one
            file=each.file,
            line=each.line,
            begin_ns=each.begin_ns,
            end_ns=each.end_ns,
            size_bytes=each.size_bytes,
            lane=each.thread_id,  # pages of one process number their lanes alike
            is_blocking=each.state != IN_FLIGHT,
        )


def send(job: Job, number: int) -> None:
    """Send a signal to all processes of a job on this host; a stopped one goes on, to get it."""
    here = [(each.facts["pid"], each.facts["start_ticks"]) for each in job.ranks if each.is_here]
    for pid, ticks in dict.fromkeys(here):  # once, where it has several ranks
        if is_running(pid, ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
