"""``unisono top``: which rank hangs where, and who waits for it."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from unisono.cli._jobs import NO_JOB, chosen, columns, headline, rows, verdict_lines
from unisono.cli._tables import folded, show
from unisono.observe.hosts import gather
from unisono.observe.jobs import Meter, look
from unisono.observe.report import reports

_SAMPLE_S = 0.2  # between the two looks that tell how busy a process is


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON once, for programs.")] = False,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Show this one alone: its program, its name or how that begins, or a rank's pid.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Look again after so long.")
    ] = 1.0,
) -> int:
    """Show this user's jobs: what each rank does, and who makes the others wait.

    It shows jobs that run on this host, with their ranks on others where the job's own
    connections lead there. Without a terminal it prints once.

    Returns:
        The exit code.
    """
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _once(job, as_json=as_json)
    from unisono.cli._live import LiveView

    return LiveView(job, every).run()


def _once(wanted: str | None, *, as_json: bool) -> int:
    meter = Meter()
    jobs = look(meter)
    name = None if wanted is None else chosen(jobs, wanted).name
    for each in jobs:
        if name in (None, each.name):
            gather(each, meter)
    if jobs:
        time.sleep(_SAMPLE_S)
    report = reports(meter, name)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return 0
    for each in report["jobs"]:
        show(headline(each), columns(each), rows(each))
        typer.echo("\n".join(folded(line) for line in verdict_lines(each)) + "\n")
    if not report["jobs"]:
        typer.echo(NO_JOB)
    return 0
