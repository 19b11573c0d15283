"""``unisono trace``: a merged file of the traces of all ranks, and a summary of their waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli._tables import Column, show
from unisono.errors import ArgumentError
from unisono.topology import named

if TYPE_CHECKING:
    from unisono.observe.perfetto import JobTrace
    from unisono.observe.waits import LineCost, Watch

_RANKS = (
    Column("rank", is_number=True),
    Column("others waited for it", is_number=True),
    Column("arrived last", is_number=True),
    Column("it waited", is_number=True),
    Column("moving", is_number=True),
    Column("in calls", is_number=True, drop_order=1),
)
_LINES: Sequence[tuple[Column, Callable[[LineCost], str]]] = (
    (Column("call"), lambda line: line.name),
    (Column("line"), lambda line: Path(line.site).name),
    (Column("calls", is_number=True), lambda line: str(line.calls)),
    (Column("MB", is_number=True, drop_order=2), lambda line: f"{line.size_bytes / 1e6:.3f}"),
    (Column("seconds", is_number=True), lambda line: f"{line.total_s:.3f}"),
    (Column("waiting", is_number=True), lambda line: f"{line.waiting_s:.3f}"),
    (Column("moving", is_number=True, drop_order=1), lambda line: f"{line.moving_s:.3f}"),
    (
        Column("for rank", is_number=True),
        lambda line: "" if line.slowest is None else str(line.slowest),
    ),
)
_FAILED = (Column("call"), Column("line"), Column("on"), Column("error"))
_MOST_LINES = 20


def trace(
    folder: Annotated[Path, typer.Argument(help="As in UNISONO_TRACE or --trace.")],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one file for Perfetto or Chrome.")
    ] = None,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary", help="Print how long ranks waited for each other; the default output."
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the waits to a .png, .svg or .pdf file; needs matplotlib."
        ),
    ] = None,
) -> int:
    """Join the traces of all ranks: one file for Perfetto, or a summary of the waits.

    ``UNISONO_TRACE=DIR``, ``unisono run --trace DIR`` or ``idist.trace(DIR)`` in the program
    write the traces. Open the file at https://ui.perfetto.dev or in chrome://tracing.

    Returns:
        The exit code.
    """
    from unisono.observe.perfetto import jobs
    from unisono.recording.trace_file import read

    found = jobs(read(folder))
    if out is not None:
        _write(found, out)
    is_shown = summary or (out is None and picture is None)
    waits = [job.waits() for job in found] if is_shown or picture is not None else []
    if picture is not None:
        _draw(found, waits, picture)
    if is_shown:
        for job, job_waits in zip(found, waits, strict=True):
            _show(job, job_waits)
    return 0


def _write(found: Sequence[JobTrace], out: Path) -> None:
    from unisono.observe.perfetto import chrome_trace

    merged = chrome_trace(found)
    try:
        out.write_text(json.dumps(merged, separators=(",", ":")) + "\n")
    except OSError as error:
        raise ArgumentError(f"--out {out}: it can't be written: {error}") from error
    calls = sum(event.get("cat") == "call" for event in merged["traceEvents"])
    ranks = _count(sum(len(job.records) for job in found))
    typer.echo(f"{out}: {calls} calls of {ranks}{f' in {len(found)} jobs' if found[1:] else ''}")


def _draw(found: Sequence[JobTrace], waits: Sequence[Watch], picture: Path) -> None:
    from unisono.observe.waits import draw

    named = {
        f"job {job.name} of {_count(job.world_size)}": job_waits
        for job, job_waits in zip(found, waits, strict=True)
    }
    # A single job needs no name in the title.
    draw("--picture", named if len(named) > 1 else {"": waits[0]}, picture)
    typer.echo(f"{picture}: waiting times by rank")


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _show(job: JobTrace, waits: Watch) -> None:
    rows = []
    for rank, in_calls_s in enumerate(waits.in_calls_s):
        moving_s = in_calls_s - waits.waited_s[rank]  # not negative: ranks wait only in calls
        seconds = (waits.waited_s[rank], moving_s, in_calls_s)
        first = [str(rank), f"{waits.lost_s[rank]:.3f} s", str(waits.last[rank])]
        rows.append(first + [f"{each:.3f} s" for each in seconds])
    show(f"job {job.name}: {waits.headline}", _RANKS, rows)
    missing = sorted(set(range(job.world_size)) - set(job.records))
    if missing:
        typer.echo(f"no trace of {named(missing)}")
    lines = [[cell(line) for _, cell in _LINES] for line in waits.lines[:_MOST_LINES]]
    if lines:
        typer.echo()
        show("by call and line, over all ranks", [column for column, _ in _LINES], lines)
    _show_failed(job)


def _show_failed(job: JobTrace) -> None:
    failed: dict[tuple[str, str, str], list[int]] = {}
    for rank, records in job.records.items():
        for each in filter(lambda record: record.error, records):
            site = f"{Path(each.file).name}:{each.line}"
            failed.setdefault((each.name, site, each.error), []).append(rank)
    rows = [[name, site, named(ranks), why] for (name, site, why), ranks in failed.items()]
    if rows:
        typer.echo()
        show("calls that failed", _FAILED, rows[:_MOST_LINES])
