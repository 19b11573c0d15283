"""Jobs as text, for ``unisono top`` and ``unisono where``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from unisono import __version__
from unisono.cli._tables import Column
from unisono.errors import ArgumentError
from unisono.observe.jobs import Meter, ObservedJob, look
from unisono.observe.remote import jobs_via
from unisono.observe.report import facts_of
from unisono.observe.stacks import Frame, Stack, equal, folded
from unisono.topology import named, ranks_by_value

Via = Annotated[
    list[str] | None,
    typer.Option(
        "--via",
        metavar="COMMAND",
        help="Look on other hosts, too: run unisono there with this command, such as 'ssh node2' "
        "or 'srun --jobid 12 --overlap'; may be given several times.",
    ),
]
NO_JOB = "no job of this user was found; a program is one once it uses unisono"
_COLUMNS = (
    Column("rank", is_number=True),
    Column("host"),
    Column("pid", is_number=True, drop_order=2),
    Column("cpu", is_number=True, drop_order=3),
    Column("memory", is_number=True, drop_order=4),
    Column("state"),
    Column("since", is_number=True),
    Column("in", drop_order=1),
    Column("at"),
)
_STYLES = {
    "dead": "bold red",
    "stopped": "bold red",
    "waits": "yellow",
    "in call": "green",
    "computes": "green",
}
_SOURCES = {
    "stack": "where its stack is now",
    "call": "where it made that call",
    "last call": "where it made its last call",
}
_NOW_S = 2.0  # a stack younger than this counts as the current one
_MIB = 1 << 20


def named_jobs(jobs: Sequence[ObservedJob], wanted: str | None) -> list[ObservedJob]:
    """Return the jobs that `wanted` names: by name, a rank's pid, program, or start of the name."""
    # The first way of naming that matches any job decides.
    ways: Sequence[Callable[[ObservedJob], bool]] = (
        lambda job: wanted in (None, job.name),
        lambda job: wanted in {str(rank.pid) for rank in job.ranks},
        lambda job: wanted in _programs(job),
        lambda job: bool(wanted) and job.name.startswith(str(wanted)),
    )
    found: list[ObservedJob] = []
    for way in ways:
        found = found or [job for job in jobs if way(job)]
    return found


def chosen(jobs: Sequence[ObservedJob], wanted: str | None) -> ObservedJob:
    """Return the one job that `wanted` names."""
    found = named_jobs(jobs, wanted)
    if len(found) == 1:
        return found[0]
    called = "" if wanted is None else f" called {wanted!r}"
    what = f"no job, program or rank's process is{called}; this user's jobs:"
    if found:
        what = f"several jobs{called} run, name one:"
    facts = [facts_of(job) for job in found or jobs]
    listed = [f"\n  {headline(each)}, in {each['cwd']}" for each in facts]
    raise ArgumentError(what + ("".join(listed) or " none"))


def _programs(job: ObservedJob) -> set[str]:
    """Return the ways to name a job's program: its command line, its file's path or name."""
    program = str(job.facts.get("program", ""))
    file = program.partition(" ")[0]
    # An empty name would match every job without a program.
    return {program, file, os.path.basename(file)} - {""}


def headline(job: Mapping[str, Any]) -> str:
    """Return a job in one line."""
    program = textwrap.shorten(str(job["program"]), 60, placeholder=" ...") or "-"
    parts = [program, f"{job['world_size']} rank{'s' * (job['world_size'] != 1)}"]
    parts += [job["backend"] or job["model"], f"up {_duration(job['up_s'])}"]
    return f"job {job['job']}: {', '.join(part for part in parts if part)}"


def verdict_lines(job: Mapping[str, Any]) -> list[str]:
    """Return the verdict as lines, with the culprits' positions and costs."""
    lines = [job["verdict"]["text"]]
    hosts = {each["rank"]: f"on {each['host']} " for each in job["ranks"] if _has_hosts(job)}
    lines += [_culprit(each, job["cwd"], hosts.get(each["rank"], "")) for each in job["culprits"]]
    return lines + missing_pages(job["elsewhere"])


def missing_pages(ranks: Sequence[int]) -> list[str]:
    """Return a note about ranks without a readable page."""
    if not ranks:
        return []
    why = 'on another host (name a command that leads there, as in --via "ssh node2"), or ended'
    return [f"{named(ranks)}: no page was found: {why}"]


def look_everywhere(meter: Meter, commands: Sequence[str] | None) -> tuple[list[ObservedJob], int]:
    """Return the jobs here and on the hosts of `--via`, and an exit code; print failures."""
    found, failed = jobs_via(commands or (), __version__)
    for line in failed:
        typer.echo(f"error: {line}", err=True)
    return look(meter, found), 1 if failed else 0


def _has_hosts(job: Mapping[str, Any]) -> bool:
    return len({each["host"] for each in job["ranks"]}) > 1


def _culprit(culprit: Mapping[str, Any], cwd: str, host: str) -> str:
    """Return a line about one culprit, with paths relative to the job's folder."""
    line = f"culprit: rank {culprit['rank']} {host}{culprit['why']}"
    if culprit["file"]:
        inside = f" in {culprit['function']}" if culprit["function"] else ""
        file = culprit["file"].removeprefix(f"{cwd}{os.sep}") if cwd else culprit["file"]
        source = _SOURCES[culprit["from"]]
        if culprit["from"] == "stack" and culprit["told_s"] > _NOW_S:
            source = f"where its stack was {_duration(culprit['told_s'])} ago"
        line += f", at {file}:{culprit['line']}{inside} ({source})"
    if culprit["waiters"]:
        waiters = culprit["waiters"]
        has = "has" if len(waiters) == 1 else "have"
        line += f"; {named(waiters)} {has} waited {_duration(culprit['waited_s'])}"
    if culprit["lost_s"] >= 0.1:  # the last digit that `_duration` shows
        line += f"; lost so far: {_duration(culprit['lost_s'])} of others"
    if culprit["came_last"]:
        line += (
            f"; it arrived last in {culprit['came_last']} of {culprit['n_calls']} calls, in the "
            f"median {_duration(culprit['median_late_s'])} late"
        )
    return line


def columns_and_rows(job: Mapping[str, Any]) -> tuple[list[Column], list[list[Text]]]:
    """Return columns and a row for each rank, culprits first; hosts only if there are several."""
    culprits = {each["rank"]: each for each in job["culprits"]}
    order = sorted(job["ranks"], key=lambda each: (each["rank"] not in culprits, each["rank"]))
    rows = [_row(each, culprits.get(each["rank"])) for each in order]
    if _has_hosts(job):
        return [*_COLUMNS], rows
    return [_COLUMNS[0], *_COLUMNS[2:]], [[row[0], *row[2:]] for row in rows]


def _row(rank: Mapping[str, Any], culprit: Mapping[str, Any] | None) -> list[Text]:
    """Return the cells of one rank's row."""
    state, call = rank["state"], rank["call"]
    words = f"waits for {named(rank['waits_for'])}" if rank["waits_for"] else state
    if state == "computes" and rank["is_idle"]:
        words = "idle"
    name = "-"
    if call is not None:
        name = call["name"] + (f" {_size(call['size_bytes'])}" if call["size_bytes"] else "")
        name = name if rank["is_in_call"] else f"last: {name}"
    line = f"{os.path.basename(call['file'])}:{call['line']}" if call and call["file"] else "-"
    if culprit is not None and culprit["file"]:
        inside = f" {culprit['function']}" if culprit["function"] else ""
        # The line of a culprit's stack, if there is one, is more exact than that of its call.
        line = f"{os.path.basename(culprit['file'])}:{culprit['line']}{inside}"
    percent, memory = rank["cpu_percent"], rank["memory_bytes"]
    style = _STYLES.get(state, "") if culprit is None else "bold red"
    return [
        Text(str(rank["rank"]), style),
        Text(rank["host"]),
        Text(str(rank["pid"])),
        Text("-" if percent is None else f"{percent:.0f}%"),
        Text("-" if memory is None else _size(memory)),
        Text(words, style),
        Text(_duration(rank["since_s"])),
        Text(name),
        Text(line, style if culprit is not None else ""),
    ]


def _size(size_bytes: int) -> str:
    if size_bytes < 1024:
        return f"{size_bytes} B"
    if size_bytes < _MIB:
        return f"{size_bytes / 1024:.0f} KiB"
    return f"{size_bytes / _MIB:.0f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def grouped(
    found: Mapping[int, list[Stack] | str], calls: Mapping[int, str], *, all_threads: bool
) -> list[str]:
    """Return the stacks of ranks as lines: equal stacks once, the innermost call last."""
    stacks: dict[int, tuple[Frame, ...]] = {}  # of the ranks' own threads
    reasons: dict[int, str] = {}  # of ranks without a stack
    others: list[str] = []  # lines of the other threads
    for rank, each in sorted(found.items()):
        if isinstance(each, str):
            reasons[rank] = each
        else:  # a call's name replaces the frames within it, which differ from rank to rank
            call = [Frame("", 0, calls[rank])] if rank in calls else []
            stacks[rank] = (*call, *folded(each[0].frames))
            for stack in each[1:] if all_threads else ():
                others += _lines(f"rank {rank}, thread {stack.thread_id}", stack.frames)
    lines = [line for frames, ranks in equal(stacks) for line in _lines(named(ranks), frames)]
    lines += [f"{named(ranks)}: {why}" for why, ranks in ranks_by_value(reasons).items()]
    return lines + others


def _lines(head: str, frames: Sequence[Frame]) -> list[str]:
    # A frame without a file stands for a call of unisono: see `grouped`.
    lines = [
        f"  {each.file}:{each.line} in {each.function}" if each.file else f"  in {each.function}"
        for each in reversed(frames)
    ]
    return [f"{head}:", *(lines or ["  (no Python code)"])]
