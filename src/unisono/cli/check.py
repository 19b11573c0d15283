"""``unisono check``: every law of a contract, on a backend, a launcher or an environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.text import Text

import unisono
from unisono import registry, testing
from unisono.cli._tables import wrapped
from unisono.errors import ArgumentError
from unisono.testing import Outcome, Status

_COLOURS: dict[Status, str] = {
    "passed": "green",
    "derived": "cyan",
    "unsupported": "yellow",
    "failed": "red",
}
_STATUS_WIDTH = max(map(len, _COLOURS))
_MEANS = {
    "derived": "the law holds; the model lacks some members, so the contract derives them from "
    "its all_gather: right, but slower than an override",
    "unsupported": "the model does not declare a capability that the law needs, and raises an "
    "error that names it; or the law cannot be checked here",
}


def check(
    backend: Annotated[
        str | None,
        typer.Argument(
            help="Such as gloo, threads, mpi4py, or a plug-in's; with --launcher what its ranks "
            "use, gloo by default."
        ),
    ] = None,
    *,
    launcher: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Check a launcher: processes, mpi, a plug-in's, ..."),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Check an environment: slurm, a plug-in's, ..."),
    ] = None,
    nproc_per_node: Annotated[
        list[int] | None,
        typer.Option(
            "-n",
            "--nproc-per-node",
            min=1,
            metavar="N",
            help="Replicas; may be repeated. By default what the kit takes: 1, 2 and 3; for a "
            "launcher 2.",
        ),
    ] = None,
    law: Annotated[str, typer.Option(metavar="PART", help="Only laws with this in the name.")] = "",
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="S", help="Seconds that one law may take: 60; for a launcher 120."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON to a file as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> int:
    """Check every law of the contract on one backend, launcher or environment.

    Starts replicas (1, 2 and 3 by default, else as many as each -n says), and reports of each law
    whether it passed, passed by members that the contract derives from others, isn't supported
    because the model lacks a capability, or failed, and how. A law that hangs has failed; the
    stacks of all replicas are shown.

    Returns:
        The exit code: 0 if no law failed, 1 if one did.
    """
    subject = _subject(backend, launcher, environment)
    names = [name for name in subject.groups if law.strip().replace(" ", "_") in name]
    if not names:
        raise typer.BadParameter(f"none of the {len(subject.groups)} laws has {law!r} in its name")
    limit = {} if timeout is None else {"timeout_s": timeout}
    outcomes: list[Outcome] = []
    for size in nproc_per_node or subject.sizes:
        try:
            outcomes_here = subject.check(size, laws=names, **limit)
        except ArgumentError as error:
            # A backend may refuse some of the default sizes, as serial refuses two replicas.
            if nproc_per_node or not outcomes:
                raise
            typer.echo(f"not checked with {size} replicas: {error}", err=True)
            break
        if not as_json:
            _show(subject.name, size, outcomes_here)
        outcomes += outcomes_here
    text = json.dumps(_facts(subject, outcomes), indent=1)
    if save is not None:
        try:
            save.write_text(f"{text}\n")
        except OSError as error:
            raise ArgumentError(f"--save {save}: it can't be written: {error}") from error
    if as_json:
        typer.echo(text)
    else:
        _sum_up(outcomes)
    return int(any(outcome.status == "failed" for outcome in outcomes))


class _Subject(NamedTuple):
    """A backend, a launcher or an environment that is checked."""

    name: str
    facts: Mapping[str, Any]  # about it, for the JSON
    groups: Mapping[str, str]  # the group of each law
    sizes: Sequence[int]  # default numbers of replicas
    check: Callable[..., list[Outcome]]


def _subject(backend: str | None, launcher: str | None, environment: str | None) -> _Subject:
    """Return the subject that the arguments name; raise unless they name one."""
    # With --launcher, the backend isn't the subject: the launcher's ranks use it.
    subjects = (launcher, environment, None if launcher else backend)
    if sum(each is not None for each in subjects) != 1:
        raise typer.BadParameter("name one thing: a backend, --launcher NAME or --environment NAME")
    if launcher is not None:
        used = backend or "gloo"
        return _Subject(
            f"launcher {launcher} with {used}",
            {"launcher": launcher, "backend": used},
            dict.fromkeys(testing.LAUNCHER_LAWS, "launchers"),
            testing.LauncherConformance.sizes,
            partial(testing.check_launcher, launcher, backend=used),
        )
    if environment is not None:
        return _Subject(
            f"environment {environment}",
            {"environment": environment},
            dict.fromkeys(testing.ENVIRONMENT_LAWS, "environments"),
            (0,),  # it is only read, by no replica
            lambda _, laws, **__: testing.check_environment(environment, laws=laws),
        )
    name = str(backend)
    model = registry.find_model(name)
    capabilities = sorted(model.capabilities)
    return _Subject(
        name,
        {"backend": name, "model": model.name, "capabilities": capabilities},
        {each: law.check.__module__.rpartition(".")[2] for each, law in testing.LAWS.items()},
        testing.Conformance.sizes,
        partial(testing.check, name),
    )


def _facts(subject: _Subject, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    laws = [
        {"law": each.law, "group": subject.groups[each.law], "nproc": each.nproc}
        | {"status": each.status, "reason": each.reason, "seconds": round(each.seconds, 4)}
        for each in outcomes
    ]
    versions = {"torch": torch.__version__, "unisono": unisono.__version__}
    return {**subject.facts, **versions, "laws": laws}


def _show(name: str, size: int, outcomes: Sequence[Outcome]) -> None:
    """Print a line for each law, whose name is never cut or wrapped, so that it can be copied."""
    title = name
    if size > 0:  # an environment has no replicas
        title += f", {size} replica{'s' * (size > 1)}"
    console = Console(highlight=False)
    console.print(Text(title, "italic"))
    for outcome in outcomes:
        ms = f"{outcome.seconds * 1000:.1f}" if outcome.seconds else "-"
        status = Text(outcome.status.ljust(_STATUS_WIDTH), _COLOURS[outcome.status])
        console.print(status, f"{ms:>7} ms ", outcome.law, soft_wrap=True)
        first, _, more = outcome.reason.partition("\n")
        if first:
            typer.echo(wrapped(first, _STATUS_WIDTH + 1))
        if more:
            typer.echo(f"{more}\n")
    counts = Counter(outcome.status for outcome in outcomes)
    typer.echo(", ".join(f"{counts[status]} {status}" for status in _COLOURS if counts[status]))


def _sum_up(outcomes: Sequence[Outcome]) -> None:
    """Explain the statuses that occurred, and how to check one law alone."""
    statuses = {outcome.status for outcome in outcomes}
    for status, meaning in _MEANS.items():
        if status in statuses:
            typer.echo(wrapped(f"{status}: {meaning}"))
    failed = sorted({outcome.law for outcome in outcomes if outcome.status == "failed"})
    if failed:
        typer.echo(wrapped(f"to check one law again: --law {failed[0]}"))
