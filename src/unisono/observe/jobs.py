"""The jobs of this user on this host, from status pages and the kernel's process states."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.observe.stacks import Stack, own_thread, read_stacks
from unisono.observe.verdict import ObservedCall, Rank
from unisono.recording.status_page import (
    IN_FLIGHT,
    PageReader,
    PageRecord,
    decode_ranks,
    is_running,
    pages,
)
from unisono.topology import EVERYBODY, members_of_pair

_S = 1e9
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_N_AT_ONCE = 16  # ranks that are asked for their stacks
_CONDITIONS = {
    b"R": "running",
    b"D": "disk",
    b"T": "stopped",
    b"t": "stopped",
    b"Z": "dead",
    b"X": "dead",
}


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A job, from the pages read of it, the first ones at `at_ns`."""

    name: str
    ranks: tuple[Rank, ...]
    world_size: int
    elsewhere: tuple[int, ...]  # ranks without a page
    at_ns: int

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the first rank's page."""
        return self.ranks[0].facts


class Meter:
    """The CPU use of processes and threads between two looks."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, float]] = {}

    def percent(self, pid: int, thread_id: int, at_ns: int, used_s: float) -> float | None:
        """Return the share of a core since the last look, None at the first one."""
        before = self._before.get((pid, thread_id))
        self._before[pid, thread_id] = (at_ns, used_s)
        if before is None or at_ns <= before[0]:
            return None
        return 100.0 * max(used_s - before[1], 0.0) / (at_ns - before[0]) * _S


@dataclass(frozen=True, slots=True)
class _Vitals:
    """State of a running process, from the kernel."""

    condition: str
    thread_id: int
    thread_s: float
    process_s: float
    memory_bytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class _Page:
    """Contents of a page at the time of reading."""

    facts: Mapping[str, Any]
    records: Sequence[PageRecord]
    vitals: _Vitals | None


def look(meter: Meter, elsewhere: Iterable[ObservedJob] = ()) -> list[ObservedJob]:
    """Return the running jobs of this user here, joined with those of other hosts."""
    found: list[list[ObservedJob]] = []
    for part in sorted((*read(meter), *elsewhere), key=lambda part: part.name):
        other = next((each for each in found if _is_one(part, each)), None)
        if other is None:
            found.append([part])
        else:
            other.append(part)
    jobs = []
    for parts in found:
        ranks = [rank for part in parts for rank in part.ranks]
        # Their looks weren't at one moment: a rank is late only if it was at the first of them.
        jobs.append(job_of(parts[0].name, ranks, min(part.at_ns for part in parts)))
    return [job for job in jobs if any(rank.is_alive for rank in job.ranks)]


def _is_one(part: ObservedJob, others: Sequence[ObservedJob]) -> bool:
    """Return whether parts are of one job: the same name, and no rank alive on two hosts."""
    living = {
        (rank.rank, rank.facts["pids"])
        for job in (part, *others)
        for rank in job.ranks
        if rank.is_alive
    }
    # The dict keeps only one pair of a rank that is alive on two hosts.
    return part.name == others[0].name and len(dict(living)) == len(living)


def job_of(name: str, found: Collection[Rank], at_ns: int) -> ObservedJob:
    """Build a job from what was read of its ranks, perhaps of several processes or hosts each."""
    # A job restarted with fewer ranks has left pages of dead ranks that it no longer has.
    newest = max(found, key=lambda rank: (rank.is_alive, rank.made_ns))
    world_size = int(newest.facts["world_size"])
    known: dict[int, Rank] = {}
    for each in found:
        if each.rank < world_size or each.is_alive:
            known[each.rank] = max(known.get(each.rank, each), each, key=_preference)
    elsewhere = tuple(rank for rank in range(world_size) if rank not in known)
    return ObservedJob(
        name, tuple(known[rank] for rank in sorted(known)), world_size, elsewhere, at_ns
    )


def _preference(rank: Rank) -> tuple[bool, bool, int]:
    """Return the sort key of a rank's processes: live ones, this host's, newer ones are larger."""
    # A command of --via may lead back to this host, and its clock be a little off.
    return rank.is_alive, rank.is_alive and rank.stacks is None, rank.made_ns


def read(meter: Meter) -> list[ObservedJob]:
    """Return the jobs of all pages of this user, ended ones too."""
    at_ns = time.monotonic_ns()
    by_job: dict[str, dict[tuple[int, int, int], list[_Page]]] = {}
    for page in pages():
        facts = page.facts
        vitals = _vitals(page) if page.is_alive() else None
        # A rank that exits normally removes its page first: one without a page isn't dead.
        if vitals is not None or page.path.exists():
            # The start is part of the key, as a pid may be reused.
            process = facts["rank"], facts["pid"], facts["start_ticks"]
            processes = by_job.setdefault(str(facts.get("job", "")), {})
            processes.setdefault(process, []).append(_Page(facts, page.records(), vitals))
    jobs = []
    for name, processes in by_job.items():
        # Ranks that are threads share a process.
        n_ranks = Counter(process[1:] for process in processes)
        ranks = [
            _rank(found, meter, is_alone=n_ranks[process[1:]] == 1)
            for process, found in processes.items()
        ]
        jobs.append(job_of(name, ranks, at_ns))
    return jobs


def _vitals(page: PageReader) -> _Vitals | None:
    pid, thread_id = int(page.facts["pid"]), own_thread(page.facts)
    try:
        own = _status(f"/proc/{pid}/task/{thread_id}/stat")
        whole = _status(f"/proc/{pid}/stat")
        n_pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):  # it has just ended
        return None
    condition = _CONDITIONS.get(own[0], "sleeping")
    memory_bytes, now = n_pages * _PAGE_BYTES, time.monotonic_ns()
    return _Vitals(condition, thread_id, _used_s(own), _used_s(whole), memory_bytes, now)


def _status(path: str) -> list[bytes]:
    """Read the fields after the name, which may contain anything: the state first."""
    return Path(path).read_bytes().rpartition(b")")[2].split()


def _used_s(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime, see proc(5)


def _rank(found: Sequence[_Page], meter: Meter, *, is_alone: bool) -> Rank:
    """Return a rank from the pages of its process, of which each context has one."""
    found = sorted(found, key=lambda page: int(page.facts.get("made_ns", 0)))
    calls = sorted((c for page in found for c in _calls(page)), key=lambda call: call.begin_ns)
    facts, vitals = found[-1].facts, found[-1].vitals
    known = Rank(facts["rank"], facts["pid"], "dead", tuple(calls), facts["made_ns"], facts)
    if vitals is None:
        return known
    own = meter.percent(known.pid, vitals.thread_id, vitals.at_ns, vitals.thread_s)
    # Ranks that share a process count the time of their own threads alone.
    whole = meter.percent(known.pid, 0, vitals.at_ns, vitals.process_s) if is_alone else own
    return replace(
        known,
        condition=vitals.condition,
        cpu_percent=whole,
        memory_bytes=vitals.memory_bytes,
        thread_percent=own,
    )


def _calls(page: _Page) -> Iterable[ObservedCall]:
    context = f"{page.facts.get('model', '')} {page.facts.get('backend', '')}"
    groups = {name: decode_ranks(each) for name, each in page.facts.get("groups", {}).items()}
    groups[EVERYBODY] = tuple(range(page.facts["world_size"]))
    for each in page.records:
        yield ObservedCall(
            name=each.name,
            context=context,
            group=each.group,
            ranks=groups.get(each.group) or members_of_pair(each.group),  # send and recv
            number=each.number,
            file=each.file,
            line=each.line,
            begin_ns=each.begin_ns,
            end_ns=each.end_ns,
            size_bytes=each.size_bytes,
            lane=each.thread_id,  # pages of one process number their lanes alike
            is_blocking=each.state != IN_FLIGHT,
        )


def send(job: ObservedJob, number: int) -> None:
    """Send a signal to all processes of a job on this host, and continue stopped ones."""
    processes = [(rank.facts["pid"], rank.facts["start_ticks"]) for rank in job.ranks]
    for pid, ticks in dict.fromkeys(processes):  # once, where it has several ranks
        if is_running(pid, ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # else a stopped process would not handle it


def stacks_of(
    ranks: Sequence[Rank], timeout_s: float, *, all_threads: bool = False
) -> dict[int, list[Stack] | str]:
    """Return the stacks of ranks, or why there are none; only live ones of this host are asked."""

    def stacks(rank: Rank) -> list[Stack] | str:
        if not rank.is_alive:
            return "is dead"
        if rank.stacks is not None:  # they were read on the rank's own host
            return rank.stacks
        is_stopped = rank.condition == "stopped"
        return read_stacks(rank.facts, timeout_s, is_stopped=is_stopped, all_threads=all_threads)

    with ThreadPoolExecutor(_N_AT_ONCE) as executor:
        found = executor.map(stacks, ranks)
        return {rank.rank: each for rank, each in zip(ranks, found, strict=True)}
