"""The jobs of this user on this host, from status pages and the kernel's process states."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.host.status_page import (
    IN_FLIGHT,
    PageReader,
    PageRecord,
    is_running,
    pages,
    ranks_of,
)
from unisono.observe import stacks
from unisono.observe.stacks import Stack
from unisono.observe.verdict import ObservedCall, Rank
from unisono.topology import EVERYBODY, members_of_pair

_S = 1e9
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CONDITIONS = {
    b"R": "running",
    b"D": "disk",
    b"T": "stopped",
    b"t": "stopped",
    b"Z": "dead",
    b"X": "dead",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank whose page was read; on another host with its stacks, or the reason for none."""

    rank: Rank
    facts: Mapping[str, Any]
    told: list[Stack] | str | None = None


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A job, from the pages read of it, the first ones at `at_ns`."""

    name: str
    ranks: tuple[Seen, ...]
    world_size: int
    elsewhere: tuple[int, ...]
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
    jobs = [_joined(parts[0].name, parts) for parts in found]
    return [job for job in jobs if any(each.rank.condition != "dead" for each in job.ranks)]


def _is_one(part: ObservedJob, others: Sequence[ObservedJob]) -> bool:
    """Return whether parts are of one job: the same name, and no rank alive on two hosts."""
    living = {
        (each.rank.rank, each.facts["pids"])
        for job in (part, *others)
        for each in job.ranks
        if each.rank.condition != "dead"
    }
    return part.name == others[0].name and len(dict(living)) == len(living)


def _joined(name: str, parts: Sequence[ObservedJob]) -> ObservedJob:
    """Merge the parts of a job on several hosts."""
    # Their looks weren't at one moment: a rank is late only if it was at the first of them.
    known: dict[int, Seen] = {}
    for each in (each for part in parts for each in part.ranks):
        rank = each.rank.rank
        known[rank] = max(known.get(rank, each), each, key=_nearness)
    return job_of(name, known.values(), min(part.at_ns for part in parts))


def read(meter: Meter) -> list[ObservedJob]:
    """Return the jobs of all pages of this user, ended ones too."""
    at_ns = time.monotonic_ns()
    by_job: dict[str, list[_Page]] = {}
    for page in _copied(pages()):
        by_job.setdefault(str(page.facts.get("job", "")), []).append(page)
    return [job_of(name, _seen_in(found, meter), at_ns) for name, found in by_job.items()]


def _copied(found: Iterable[PageReader]) -> list[_Page]:
    """Copy pages, except of ranks that have just exited normally."""
    copies = []
    for page in found:
        vitals = _vitals(page) if page.is_alive() else None
        # A rank that exits normally removes its page first.
        if vitals is not None or page.path.exists():
            copies.append(_Page(page.facts, page.records(), vitals))
    return copies


def _vitals(page: PageReader) -> _Vitals | None:
    pid = int(page.facts["pid"])
    thread_id = int(page.facts.get("thread_id", 0))
    if not Path(f"/proc/{pid}/task/{thread_id}").exists():  # it has ended, and others go on
        thread_id = pid
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
    """Read the fields after the name, the state first."""
    return Path(path).read_bytes().rpartition(b")")[2].split()


def _used_s(words: list[bytes]) -> float:
    return (int(words[11]) + int(words[12])) / _TICKS_PER_S


def job_of(name: str, found: Collection[Seen], at_ns: int) -> ObservedJob:
    """Build a job from its ranks, with the world size of the newest live one."""
    # A job restarted with fewer ranks has left pages of dead ranks that it no longer has.
    world_size = int(max(found, key=_newness).facts["world_size"])
    by_rank = {
        each.rank.rank: each
        for each in found
        if each.rank.rank < world_size or each.rank.condition != "dead"
    }
    elsewhere = tuple(rank for rank in range(world_size) if rank not in by_rank)
    ranks = tuple(by_rank[rank] for rank in sorted(by_rank))
    return ObservedJob(name, ranks, world_size, elsewhere, at_ns)


def _newness(seen: Seen) -> tuple[bool, int]:
    """Return the sort key of a rank's processes: a live one, then the newest, is largest."""
    return seen.rank.condition != "dead", seen.rank.made_ns


def _nearness(seen: Seen) -> tuple[bool, bool, int]:
    """Return the sort key of a rank on several hosts: a live one, then this host's, is largest."""
    lives, made_ns = _newness(seen)
    return lives, lives and seen.told is None, made_ns


def _seen_in(found: Iterable[_Page], meter: Meter) -> list[Seen]:
    """Return the ranks of one job, from its pages."""
    by_rank = _by_rank(found)
    sharing: dict[int, int] = {}
    for each in by_rank.values():
        pid = each[-1].facts["pid"]
        sharing[pid] = sharing.get(pid, 0) + 1
    return [
        _seen(rank, each, meter, is_alone=sharing[each[-1].facts["pid"]] == 1)
        for rank, each in sorted(by_rank.items())
    ]


def _by_rank(found: Iterable[_Page]) -> dict[int, list[_Page]]:
    """Return each rank's pages, the newest last, of its newest live process."""
    by_process: dict[int, dict[tuple[int, int], list[_Page]]] = {}
    for page in sorted(found, key=lambda page: int(page.facts.get("made_ns", 0))):
        process = page.facts["pid"], page.facts["start_ticks"]
        by_process.setdefault(page.facts["rank"], {}).setdefault(process, []).append(page)
    return {
        rank: max(each.values(), key=lambda of: (_is_alive(of), of[-1].facts["made_ns"]))
        for rank, each in by_process.items()
    }


def _is_alive(found: Sequence[_Page]) -> bool:
    return found[-1].vitals is not None


def _seen(rank: int, found: Sequence[_Page], meter: Meter, *, is_alone: bool) -> Seen:
    calls: list[ObservedCall] = []
    for page in found:
        model = f"{page.facts.get('model', '')} {page.facts.get('backend', '')}"
        calls += _calls(page, model)
    facts, vitals = found[-1].facts, found[-1].vitals
    calls.sort(key=lambda call: call.begin_ns)
    pid, made_ns = facts["pid"], facts["made_ns"]
    if vitals is None:
        return Seen(Rank(rank, pid, "dead", tuple(calls), made_ns=made_ns), facts)
    at_ns = vitals.at_ns
    own = meter.percent(pid, vitals.thread_id, at_ns, vitals.thread_s)
    whole = meter.percent(pid, 0, at_ns, vitals.process_s) if is_alone else own
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
    return Seen(known, facts)


def _calls(page: _Page, context: str) -> Iterable[ObservedCall]:
    groups = {name: ranks_of(each) for name, each in page.facts.get("groups", {}).items()}
    groups[EVERYBODY] = tuple(range(page.facts["world_size"]))
    for each in page.records:
        yield ObservedCall(
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


def send(job: ObservedJob, number: int) -> None:
    """Send a signal to all processes of a job on this host, and continue stopped ones."""
    processes = [(each.facts["pid"], each.facts["start_ticks"]) for each in job.ranks]
    for pid, ticks in dict.fromkeys(processes):  # once, where it has several ranks
        if is_running(pid, ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)


def stacks_of(
    ranks: Sequence[Seen], timeout_s: float, *, all_threads: bool = False
) -> dict[int, list[Stack] | str]:
    """Return the stacks of ranks, or why there are none; only live ones of this host are asked."""
    known = {
        each.rank.rank: "is dead" if each.rank.condition == "dead" else each.told for each in ranks
    }
    here = {
        each.rank.rank: (each.facts, each.rank.condition == "stopped")
        for each in ranks
        if known[each.rank.rank] is None
    }
    found = stacks.of_ranks(here, timeout_s, all_threads=all_threads)
    return {**found, **{rank: told for rank, told in known.items() if told is not None}}
