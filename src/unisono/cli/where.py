"""``unisono where``: the stacks of all ranks of a job, equal ones once."""

from __future__ import annotations

from typing import Annotated

import typer

from unisono.cli._jobs import NO_JOB, chosen, grouped, host_of
from unisono.observe.hosts import gather
from unisono.observe.jobs import Meter, look
from unisono.observe.report import calls_of, stacks_of


def where(
    job: Annotated[
        str | None,
        typer.Argument(
            help="The job: its program, its name or how that begins, or the pid of a rank; "
            "needless if there is one job alone.",
        ),
    ] = None,
    *,
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Show every thread of each rank.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for each rank.")
    ] = 1.0,
) -> int:
    """Print the stacks of all ranks of a job that runs on this host, equal ones once.

    Ranks needn't be prepared, nor answer: they may be in a lock, in C or in a busy loop.
    Those of other hosts are told where the job's own connections lead there.

    Returns:
        The exit code.

    Raises:
        ArgumentError: there isn't such a job, or there are several.
    """
    jobs = look(Meter())
    if job is None and not jobs:
        typer.echo(NO_JOB)
        return 0
    found = gather(chosen(jobs, job), Meter())
    asked = stacks_of(found, timeout, all_threads=all_threads)
    lines = grouped(asked, calls_of(found), all_threads=all_threads)
    lines += [f"{host_of(each.host, each.ranks)}: {each.why}" for each in found.silent]
    typer.echo("\n".join(lines))
    return 0
