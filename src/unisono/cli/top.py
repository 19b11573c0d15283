"""``unisono top``: ranks that hang, their lines, and the ranks that wait for them."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from unisono import __version__
from unisono.cli._jobs import (
    NO_JOB,
    Via,
    chosen,
    columns_and_rows,
    headline,
    look_everywhere,
    named_jobs,
    verdict_lines,
)
from unisono.cli._tables import show, wrapped
from unisono.errors import ArgumentError
from unisono.observe.jobs import Meter, read
from unisono.observe.remote import packed
from unisono.observe.report import reports

_SAMPLE_S = 0.2  # between the two looks that measure a process's CPU use


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON once, for programs.")] = False,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Show only this job: its program, its name or the start of its name, or a rank's "
            "pid.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Time between two looks.")
    ] = 1.0,
    via: Via = None,
    is_check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Print the jobs in which a rank has waited in one call for longer than --waited, "
            "and exit with code 1 if there are any: for a health probe.",
        ),
    ] = False,
    waited: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Longest wait that --check accepts.")
    ] = 60.0,
    is_packed: Annotated[bool, typer.Option("--packed", hidden=True)] = False,
) -> int:
    """Show this user's jobs: the state of each rank, and the ranks that make others wait.

    Shows the ranks that run on this host, and on the hosts of --via. With --via, and without a
    terminal, prints once.

    Returns:
        The exit code: 1 if a command of --via has failed, or --check has found a long wait.
    """
    if is_packed:
        # Ranks that have ended are included, because the caller merges the jobs with its own.
        typer.echo("\n".join(packed(read(_measured()), __version__)))
        return 0
    if is_check and as_json:
        raise ArgumentError("--check prints no JSON: use --json alone")
    if is_check:
        return _check(job, via, waited)
    if once or as_json or via or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _once(job, via, as_json=as_json)
    from unisono.cli._live import LiveView

    return LiveView(job, every).run()


def _measured() -> Meter:
    """Return a meter after its first look; the next look measures the CPU use since then."""
    meter = Meter()
    if read(meter):
        time.sleep(_SAMPLE_S)
    return meter


def _once(wanted: str | None, via: list[str] | None, *, as_json: bool) -> int:
    jobs, code = look_everywhere(_measured(), via)
    report = reports(jobs if wanted is None else [chosen(jobs, wanted)])
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return code
    for each in report["jobs"]:
        _show(each)
    if not report["jobs"]:
        typer.echo(NO_JOB)
    return code


def _check(wanted: str | None, via: list[str] | None, waited_s: float) -> int:
    """Show the jobs with a rank that has waited longer; return 1 if there are any."""
    jobs, code = look_everywhere(_measured(), via)
    # A job that hasn't begun, or is over, doesn't hang.
    found = reports(named_jobs(jobs, wanted))["jobs"]
    late = [job for job in found if any(_waits(each, waited_s) for each in job["ranks"])]
    for each in late:
        _show(each)
    if code != 0:  # a command of --via has printed its error
        return code
    if not found:
        typer.echo(NO_JOB if wanted is None else f"no job called {wanted!r} was found")
    elif not late:
        typer.echo(f"no rank has waited longer than {waited_s:g} s")
    return 1 if late else code


def _waits(rank: dict[str, Any], waited_s: float) -> bool:
    # A dead rank, whose page stays until its job is over, waits for nothing; nor does a stopped
    # one: the ranks that wait for it do.
    is_in_call = rank["state"] in ("waits", "in call")
    return is_in_call and rank["since_s"] > waited_s


def _show(job: dict[str, Any]) -> None:
    show(headline(job), *columns_and_rows(job))
    typer.echo("\n".join(wrapped(line) for line in verdict_lines(job)) + "\n")
