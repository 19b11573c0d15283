"""The jobs of this user on this host: status pages by job and rank, with what the kernel says."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from unisono.host.status_page import IN_FLIGHT, PageReader, is_running, pages, ranks_of
from unisono.observe.verdict import Call, Rank
from unisono.topology import EVERYBODY, members_of_pair

__all__ = ("Job", "Meter", "Seen", "look", "send")

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CONDITIONS = {
    "R": "running",
    "D": "disk",
    "T": "stopped",
    "t": "stopped",
    "Z": "dead",
    "X": "dead",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank whose page is here.

    Args:
        rank: what is known of it.
        facts: those of its newest page.
    """

    rank: Rank
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A job, as far as it runs on this host.

    Args:
        name: what its pages call it.
        ranks: those whose pages are here, ascending.
        world_size: number of ranks of the job.
        elsewhere: ranks without a page here, on another host or ended.
    """

    name: str
    ranks: tuple[Seen, ...]
    world_size: int
    elsewhere: tuple[int, ...]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the first rank's page says."""
        return self.ranks[0].facts


class Meter:
    """How busy processes and threads are, between one look and the next."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[float, float]] = {}

    def percent(self, pid: int, thread_id: int, used_s: float) -> float | None:
        """Give the share of a core since the last look, None at the first one.

        Local.

        Args:
            pid: the process.
            thread_id: the thread; 0 for all of the process.
            used_s: seconds of a core that it has used up to now.
        """
        now = time.monotonic()
        before = self._before.get((pid, thread_id))
        self._before[pid, thread_id] = (now, used_s)
        if before is None or now <= before[0]:
            return None
        return 100.0 * max(used_s - before[1], 0.0) / (now - before[0])


def look(meter: Meter) -> list[Job]:
    """Read all pages of this user, and group them by job.

    Local. A job whose processes have all ended is left out.

    Args:
        meter: what the last look was made with.
    """
    by_job: dict[str, list[PageReader]] = {}
    for page in pages():
        by_job.setdefault(str(page.facts.get("job", "")), []).append(page)
    jobs: list[Job] = []
    for name, found in sorted(by_job.items()):
        newest = _by_rank(found)
        if any(page.is_alive() for each in newest.values() for page in each):
            jobs += _job(name, newest, meter)
    return jobs


def _by_rank(found: Iterable[PageReader]) -> dict[int, list[PageReader]]:
    """Take each rank's pages, the newest last: those of its newest process that lives.

    A job that was started again with fewer ranks has left pages of the dead that it has no more.
    """
    by_process: dict[int, dict[tuple[int, int], list[PageReader]]] = {}
    for page in sorted(found, key=lambda page: page.facts.get("made_ns", 0)):
        process = page.facts["pid"], page.facts["start_ticks"]
        by_process.setdefault(page.facts["rank"], {}).setdefault(process, []).append(page)
    newest = {
        rank: max(each.values(), key=lambda of: (of[-1].is_alive(), of[-1].facts["made_ns"]))
        for rank, each in by_process.items()
    }
    living = [each[-1] for each in newest.values() if each[-1].is_alive()]
    now = max(living, key=lambda page: page.facts["made_ns"], default=None)
    size = math.inf if now is None else now.facts["world_size"]
    return {rank: each for rank, each in newest.items() if rank < size or each[-1].is_alive()}


def _job(name: str, by_rank: Mapping[int, list[PageReader]], meter: Meter) -> Iterator[Job]:
    sharing: dict[int, int] = {}
    for found in by_rank.values():
        pid = found[-1].facts["pid"]
        sharing[pid] = sharing.get(pid, 0) + 1
    seen = {
        rank: _seen(rank, found, meter, is_alone=sharing[found[-1].facts["pid"]] == 1)
        for rank, found in sorted(by_rank.items())
    }
    here = {
        rank: each
        for rank, each in seen.items()
        # Who ends in good order takes the page away, which may be just now.
        if each.rank.condition != "dead" or by_rank[rank][-1].path.exists()
    }
    if any(each.rank.condition != "dead" for each in here.values()):
        world_size = max(each.facts["world_size"] for each in here.values())
        elsewhere = tuple(rank for rank in range(world_size) if rank not in here)
        yield Job(name, tuple(here.values()), world_size, elsewhere)


def _seen(rank: int, found: Sequence[PageReader], meter: Meter, *, is_alone: bool) -> Seen:
    calls: list[Call] = []
    for page in found:
        model = f"{page.facts.get('model', '')} {page.facts.get('backend', '')}"
        calls += _calls(page, model)
    facts = found[-1].facts
    calls.sort(key=lambda call: call.begin_ns)
    known = Rank(rank, facts["pid"], "dead", tuple(calls), made_ns=facts["made_ns"])
    if found[-1].is_alive():
        known = _measured(known, facts.get("thread_id", 0), meter, is_alone=is_alone)
    return Seen(known, facts)


def _calls(page: PageReader, context: str) -> Iterable[Call]:
    groups = {name: ranks_of(each) for name, each in page.facts.get("groups", {}).items()}
    groups[EVERYBODY] = tuple(range(page.facts["world_size"]))
    for each in page.records():
        yield Call(
            name=each.name,
            context=context,
            group=each.group,
            ranks=groups.get(each.group) or members_of_pair(each.group),
            number=each.number,
            file=each.file,
            line=each.line,
            begin_ns=each.begin_ns,
            end_ns=each.end_ns,
            size_bytes=each.size_bytes,
            lane=each.thread_id,  # pages of one process number their lanes alike
            is_blocking=each.state != IN_FLIGHT,
        )


def _measured(rank: Rank, thread_id: int, meter: Meter, *, is_alone: bool) -> Rank:
    """Ask the kernel for the state of a rank's thread, its work and its memory."""
    pid = rank.pid
    if not Path(f"/proc/{pid}/task/{thread_id}").exists():  # it has ended, and others go on
        thread_id = pid
    try:
        status = Path(f"/proc/{pid}/task/{thread_id}/stat").read_bytes()
        words = status.rpartition(b")")[2].split()
        process = psutil.Process(pid)
        times = process.cpu_times()
        memory = process.memory_info().rss
    except (OSError, psutil.Error):  # it has just ended
        return rank
    own = meter.percent(pid, thread_id, (int(words[11]) + int(words[12])) / _TICKS_PER_S)
    whole = meter.percent(pid, 0, times.user + times.system) if is_alone else own
    return replace(
        rank,
        condition=_CONDITIONS.get(words[0].decode(), "sleeping"),
        cpu_percent=whole,
        thread_percent=own,
        memory_bytes=memory,
    )


def send(job: Job, number: int) -> None:
    """Send a signal to all ranks of a job that still run; a stopped one goes on, to get it.

    Local.

    Args:
        job: the job.
        number: the signal.
    """
    for each in job.ranks:
        if is_running(each.facts["pid"], each.facts["start_ticks"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.facts["pid"], number)
                os.kill(each.facts["pid"], signal.SIGCONT)
