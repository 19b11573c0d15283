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

import psutil

from unisono.observe.stacks import Frame, Stack
from unisono.observe.verdict import Rank
from unisono.recording import stack_signal
from unisono.recording.status_page import PageReader, is_running, pages

_S = 1e9
_N_AT_ONCE = 16  # ranks that are asked for their stacks at the same time
STOPPED = "is stopped by a signal, so its stack cannot be read"
_CONDITIONS = {
    psutil.STATUS_RUNNING: "running",
    psutil.STATUS_DISK_SLEEP: "disk",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_ZOMBIE: "dead",
    psutil.STATUS_DEAD: "dead",
}


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A job as its status pages show it; the first page was read at `at_ns`."""

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

    def percent(self, pid: int, thread_id: int, used_s: float) -> float | None:
        """Return the share of a core since the last look, None at the first one."""
        now_ns = time.monotonic_ns()
        before_ns, before_s = self._before.get((pid, thread_id), (now_ns, 0.0))
        self._before[pid, thread_id] = (now_ns, used_s)
        if now_ns == before_ns:  # as at the first look, which is compared with itself
            return None
        # A new process with the pid of an ended one may have used less time.
        return 100.0 * max(used_s - before_s, 0.0) / (now_ns - before_ns) * _S


def look(meter: Meter, remote_jobs: Iterable[ObservedJob] = ()) -> list[ObservedJob]:
    """Return the running jobs of this user here, joined with those of other hosts."""
    found: list[list[ObservedJob]] = []  # for each job its parts, one for each host
    for part in sorted((*read(meter), *remote_jobs), key=lambda part: part.name):
        parts = next((parts for parts in found if _is_part(part, parts)), None)
        if parts is None:
            found.append([part])
        else:
            parts.append(part)
    jobs = []
    for parts in found:
        ranks = [rank for part in parts for rank in part.ranks]
        # Hosts are read at different times: a rank is late only if it was so at the first time.
        jobs.append(job_of(parts[0].name, ranks, min(part.at_ns for part in parts)))
    return [job for job in jobs if any(rank.is_alive for rank in job.ranks)]


def _is_part(part: ObservedJob, others: Sequence[ObservedJob]) -> bool:
    """Return whether a part is of others' job: the same name, and no rank alive on two hosts."""
    living = {
        (rank.rank, rank.facts["pid_namespace"])  # which identifies the host or container
        for job in (part, *others)
        for rank in job.ranks
        if rank.is_alive
    }
    # A rank that is alive on two hosts has two pairs, of which the dict keeps one.
    return part.name == others[0].name and len(dict(living)) == len(living)


def job_of(name: str, found: Collection[Rank], at_ns: int) -> ObservedJob:
    """Build a job from its ranks, each of which may have been read from several processes."""
    # A job that was started again with fewer ranks has left pages of ranks that it no longer has.
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
    """Return a sort key: a rank's live, this host's and newer processes are larger."""
    # A command of --via may lead back to this host; the times that it returns are less exact.
    return rank.is_alive, rank.is_alive and rank.stacks is None, rank.made_ns


def read(meter: Meter) -> list[ObservedJob]:
    """Return the jobs of all pages of this user, including those that have ended."""
    at_ns = time.monotonic_ns()
    found: dict[tuple[str, int, tuple[int, int]], list[PageReader]] = {}
    for page in pages():
        process = page.facts["pid"], page.facts["start_ticks"]  # a pid alone may be reused
        key = str(page.facts.get("job", "")), page.facts["rank"], process
        found.setdefault(key, []).append(page)
    # Ranks that are threads share a process.
    n_ranks = Counter((job, process) for job, _, process in found)
    jobs: dict[str, list[Rank]] = {}
    for (job, _, process), readers in found.items():
        rank = _rank(readers, meter, is_alone=n_ranks[job, process] == 1)
        # A rank that exits normally first removes its page, so one without a page isn't dead.
        if rank.is_alive or any(page.path.exists() for page in readers):
            jobs.setdefault(job, []).append(rank)
    return [job_of(name, ranks, at_ns) for name, ranks in jobs.items()]


def _rank(readers: Sequence[PageReader], meter: Meter, *, is_alone: bool) -> Rank:
    """Return a rank from the pages of its process, one for each context."""
    readers = sorted(readers, key=lambda page: int(page.facts.get("made_ns", 0)))
    newest = readers[-1]  # of the context that the process has now
    facts = newest.facts
    rank = Rank(facts["rank"], facts["pid"], "dead", made_ns=facts["made_ns"], facts=facts)
    if newest.is_alive():
        rank = _with_process_state(rank, meter, is_alone=is_alone)
    calls = sorted((c for page in readers for c in page.calls()), key=lambda call: call.begin_ns)
    return replace(rank, calls=tuple(calls))


def _with_process_state(rank: Rank, meter: Meter, *, is_alone: bool) -> Rank:
    """Return a rank with the kernel's facts on its process; without them it stays dead."""
    thread_id = _thread_of(rank)
    try:
        condition = _CONDITIONS.get(psutil.Process(thread_id).status(), "sleeping")
        process = psutil.Process(rank.pid)
        threads, whole = process.threads(), process.cpu_times()
        memory_bytes = process.memory_info().rss
    except psutil.Error:  # there is no such process any more
        return rank
    own_s = sum(each.user_time + each.system_time for each in threads if each.id == thread_id)
    thread_percent = meter.percent(rank.pid, thread_id, own_s)
    # Ranks that share a process count the time of their own threads alone.
    used_s = whole.user + whole.system
    percent = meter.percent(rank.pid, 0, used_s) if is_alone else thread_percent
    return replace(
        rank,
        condition=condition,
        cpu_percent=percent,
        memory_bytes=memory_bytes,
        thread_percent=thread_percent,
    )


def _thread_of(rank: Rank) -> int:
    """Return the id of a rank's own thread, or of the main one if it has ended."""
    thread_id = int(rank.facts.get("thread_id", 0))
    return thread_id if Path(f"/proc/{rank.pid}/task/{thread_id}").exists() else rank.pid


def send(job: ObservedJob, number: int) -> None:
    """Send a signal to all processes of a job on this host, and continue stopped ones."""
    processes = [(rank.facts["pid"], rank.facts["start_ticks"]) for rank in job.ranks]
    for pid, ticks in dict.fromkeys(processes):  # once, even if it has several ranks
        if is_running(pid, ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # else a stopped process would not handle the signal


def stacks_of(
    ranks: Sequence[Rank], timeout_s: float, *, all_threads: bool = False
) -> dict[int, list[Stack] | str]:
    """Return each rank's stacks, that of its own thread first, or why there are none."""

    def stacks(rank: Rank) -> list[Stack] | str:
        if not rank.is_alive:
            return "is dead"
        if rank.stacks is not None:  # they were read on the rank's own host
            return rank.stacks
        if rank.condition == "stopped":
            return STOPPED
        if "signal" not in rank.facts:
            return "can't be asked for its stack: that takes Python 3.11 or later, and Linux"
        thread_id = _thread_of(rank)
        texts = stack_signal.texts(rank.pid, rank.facts, thread_id, timeout_s, all_threads)
        if texts is None:
            return f"doesn't answer within {timeout_s:g} s"
        stacks = {thread: stack_signal.parse(text) for thread, text in texts.items()}
        return [Stack(each, tuple(Frame(*line) for line in of)) for each, of in stacks.items()]

    with ThreadPoolExecutor(_N_AT_ONCE) as executor:
        found = executor.map(stacks, ranks)
        return {rank.rank: each for rank, each in zip(ranks, found, strict=True)}
