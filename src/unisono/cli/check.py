"""``unisono check``: every law of a contract, on a backend, a launcher or an environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import unisono
from unisono.cli._tables import Column, folded, show
from unisono.errors import ArgumentError

if TYPE_CHECKING:
    from unisono.testing import Outcome, Status

_COLOURS: dict[Status, str] = {
    "passed": "green",
    "derived": "cyan",
    "unsupported": "yellow",
    "failed": "red",
}
_STATUS_WIDTH = max(map(len, _COLOURS))
_MEANS = {
    "derived": "it holds; the model leaves members to the contract, which derives them from its "
    "all_gather: right, and slower than an override",
    "unsupported": "the model doesn't declare what the law needs, and refuses it by name; or it "
    "can't be checked here",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Check every law of the contract on one backend, launcher or environment.

    It starts replicas (1, 2 and 3, as the kit for pytest does, or as many as each -n says)
    and says of each law whether it passed, passed by members that the contract derives from others,
    isn't supported (declared), or failed, and how. A law that hangs has failed, and the stacks of
    all replicas are shown.

    Returns:
        The exit code: 0 if no law failed, 1 if one did.
    """
    subject = _subject(backend, launcher, environment)
    names = [name for name in subject.laws if law.strip().replace(" ", "_") in name]
    if not names:
        raise typer.BadParameter(f"none of the {len(subject.laws)} laws has {law!r} in its name")
    limit = {} if timeout is None else {"timeout_s": timeout}
    outcomes: list[Outcome] = []
    for size in nproc_per_node or subject.sizes:
        try:
            outcomes_here = subject.check(size, laws=names, **limit)
        except ArgumentError as error:
            if nproc_per_node or not outcomes:
                raise
            typer.echo(f"not checked with {size} replicas: {error}", err=True)
            break
        if not as_json:
            _show(subject.name, size, outcomes_here)
        outcomes += outcomes_here
    text = json.dumps(_facts(subject, outcomes), indent=1)
    if save is not None:
        save.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
    else:
        _sum_up(outcomes)
    return int(any(outcome.status == "failed" for outcome in outcomes))


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is checked: a backend, a launcher or an environment."""

    name: str
    facts: Mapping[str, Any]  # of it, in the JSON
    laws: Mapping[str, str]  # and the group of each
    sizes: Sequence[int]  # numbers of replicas, where none is given
    check: Callable[..., list[Outcome]]


def _subject(backend: str | None, launcher: str | None, environment: str | None) -> _Subject:
    from unisono import testing
    from unisono.registry import find_environment, find_launcher

    if launcher is not None and environment is None:
        find_launcher(launcher)
        used = backend or "gloo"
        facts = {"launcher": launcher, "backend": used}
        laws = dict.fromkeys(testing.LAUNCHER_LAWS, "launchers")
        each = partial(testing.check_launcher, launcher, backend=used)
        sizes = testing.LauncherConformance.sizes
        return _Subject(f"launcher {launcher} with {used}", facts, laws, sizes, each)
    if environment is not None and launcher is None and backend is None:
        find_environment(environment)
        laws = dict.fromkeys(testing.ENVIRONMENT_LAWS, "environments")

        def without_replicas(_: int, *, laws: Sequence[str], **__: Any) -> list[Outcome]:
            return testing.check_environment(environment, laws=laws)

        facts = {"environment": environment}
        return _Subject(f"environment {environment}", facts, laws, (0,), without_replicas)
    if backend is None or environment is not None:
        raise typer.BadParameter("name one thing: a backend, --launcher NAME or --environment NAME")
    return _of_backend(backend)


def _of_backend(backend: str) -> _Subject:
    from unisono import testing
    from unisono.registry import find_model

    model = find_model(backend)
    facts = {
        "backend": backend,
        "model": model.name,
        "capabilities": sorted(model.capabilities),
    }
    laws = {name: law.check.__module__.rpartition(".")[2] for name, law in testing.LAWS.items()}
    each = partial(testing.check, backend)
    return _Subject(backend, facts, laws, testing.Conformance.sizes, each)


def _facts(subject: _Subject, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    import torch

    return {
        **subject.facts,
        "torch": torch.__version__,
        "unisono": unisono.__version__,
        "laws": [
            {
                "law": outcome.law,
                "group": subject.laws[outcome.law],
                "nproc": outcome.nproc,
                "status": outcome.status,
                "reason": outcome.reason,
                "seconds": round(outcome.seconds, 4),
            }
            for outcome in outcomes
        ],
    }


def _show(name: str, size: int, outcomes: Sequence[Outcome]) -> None:
    who = "1 replica" if size == 1 else f"{size} replicas"
    title = f"{name}, {who}" if size else name
    console = Console(highlight=False)
    if console.is_terminal:
        _show_lines(console, title, outcomes)
    else:
        columns = [Column(name) for name in ("law", "outcome", "ms", "why")]
        show(title, columns, [(o.law, o.status, _ms(o), _brief(o)) for o in outcomes])
    for outcome in outcomes:
        if "\n" in outcome.reason:
            typer.echo(f"{outcome.law}, {title}: {outcome.reason}\n")
    typer.echo(_counts(outcomes))


def _show_lines(console: Console, title: str, outcomes: Sequence[Outcome]) -> None:
    """Print a line for each law, whose name is never cut or folded, so that it can be copied."""
    console.print(Text(title, "italic"))
    for outcome in outcomes:
        status = Text(outcome.status.ljust(_STATUS_WIDTH), _COLOURS[outcome.status])
        console.print(status, f"{_ms(outcome):>7} ms ", outcome.law, soft_wrap=True)
        if _brief(outcome):
            typer.echo(folded(_brief(outcome), _STATUS_WIDTH + 1))


def _ms(outcome: Outcome) -> str:
    return f"{outcome.seconds * 1000:.1f}" if outcome.seconds else "-"


def _brief(outcome: Outcome) -> str:
    return outcome.reason.partition("\n")[0]


def _counts(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in _COLOURS if counts[status])


def _sum_up(outcomes: Sequence[Outcome]) -> None:
    """Say what the words mean that came, and how to check one law alone."""
    statuses = {outcome.status for outcome in outcomes}
    for status, meaning in _MEANS.items():
        if status in statuses:
            typer.echo(folded(f"{status}: {meaning}"))
    failed = sorted({outcome.law for outcome in outcomes if outcome.status == "failed"})
    if failed:
        typer.echo(folded(f"to check one law again: --law {failed[0]}"))
