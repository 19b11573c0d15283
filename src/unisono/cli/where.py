"""``unisono where``: the stacks of all ranks of a job, and equal stacks only once."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.cli._jobs import NO_JOB, Via, chosen, grouped, look_everywhere, missing_pages
from unisono.observe.jobs import Meter, stacks_of
from unisono.observe.report import calls_of


def where(
    job: Annotated[
        str | None,
        typer.Argument(
            help="The job: its program, its name or the start of its name, or the pid of a rank; "
            "not needed if there is only one job."
        ),
    ] = None,
    *,
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Show every thread of each rank.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for each rank.")
    ] = 1.0,
    via: Via = None,
) -> int:
    """Print the stacks of all ranks of a job on this host, and equal stacks only once.

    Ranks needn't be prepared or responsive: they may wait for a lock, or be in C or a busy loop.
    For a rank on the hosts of --via, only the stack of its own thread is printed.

    Returns:
        The exit code: 1 if a command of --via has failed.

    Raises:
        ArgumentError: there is no such job, or more than one.
    """
    jobs, code = look_everywhere(Meter(), via)
    if job is None and not jobs:  # with a name, `chosen` raises
        typer.echo(NO_JOB)
        return code
    found = chosen(jobs, job)
    stacks = stacks_of(found.ranks, timeout, all_threads=all_threads)
    lines = grouped(stacks, calls_of(found), all_threads=all_threads)
    typer.echo("\n".join([*lines, *missing_pages(found.elsewhere)]))
    return code
