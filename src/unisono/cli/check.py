"""``unisono check``: every law of the contract on one backend, law by law."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import unisono
from unisono.registry import find_model
from unisono.testing import LAWS, Outcome, Status, law_names
from unisono.testing import check as keep

__all__ = ("check",)

_COLOURS: dict[Status, str] = {
    "passed": "green",
    "derived": "cyan",
    "unsupported": "yellow",
    "failed": "red",
}


def check(
    backend: Annotated[str, typer.Argument(help="Such as gloo, threads, mpi4py, or a plug-in's.")],
    *,
    nproc: Annotated[
        list[int] | None,
        typer.Option("-n", "--nproc", min=1, metavar="N", help="Replicas; may be repeated."),
    ] = None,
    law: Annotated[str, typer.Option(metavar="PART", help="Only laws with this in the name.")] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Seconds that one law may take.")
    ] = 60.0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON to a file as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Check every law of the contract on one backend.

    Local. It starts replicas (2, or as many as each -n says) and says of each law whether it
    passed, passed by members that the contract derives from others, isn't supported (declared), or
    failed, and how. A law that hangs has failed, and the stacks of all replicas are shown.

    Returns:
        The exit code: 0 if no law failed, 1 if one did.
    """
    names = law_names(law)
    if not names:
        raise typer.BadParameter(f"none of the {len(LAWS)} laws has {law!r} in its name")
    outcomes: list[Outcome] = []
    for size in nproc or [2]:
        found = keep(backend, size, laws=names, timeout_s=timeout)
        if not as_json:
            _show(Console(highlight=False), backend, size, found)
        outcomes += found
    text = json.dumps(_facts(backend, outcomes), indent=1)
    if save is not None:
        save.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _facts(backend: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    model = find_model(backend)
    return {
        "backend": backend,
        "model": model.name,
        "torch": torch.__version__,
        "unisono": unisono.__version__,
        "capabilities": sorted(model.capabilities),
        "laws": [
            {
                "law": outcome.law,
                "group": LAWS[outcome.law].check.__module__.rpartition(".")[2],
                "nproc": outcome.nproc,
                "status": outcome.status,
                "reason": outcome.reason,
                "seconds": round(outcome.seconds, 4),
            }
            for outcome in outcomes
        ],
    }


def _show(console: Console, backend: str, size: int, outcomes: Sequence[Outcome]) -> None:
    who = "1 replica" if size == 1 else f"{size} replicas"
    table = Table(title=f"{backend}, {who}", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("law", overflow="fold")
    table.add_column("outcome")
    table.add_column("ms", justify="right")
    table.add_column("why", overflow="fold", max_width=60)
    for outcome in outcomes:
        colour = _COLOURS[outcome.status]
        first = outcome.reason.partition("\n")[0]
        millis = f"{outcome.seconds * 1000:.1f}" if outcome.seconds else ""
        law = outcome.law.replace("_", " ")
        table.add_row(law, f"[{colour}]{outcome.status}[/]", millis, first)
    console.print(table)
    for outcome in outcomes:
        if "\n" in outcome.reason:
            console.print(f"{outcome.law} at {who}: {outcome.reason}\n", markup=False)
    counts = Counter(outcome.status for outcome in outcomes)
    console.print(", ".join(f"{counts[status]} {status}" for status in _COLOURS if counts[status]))
