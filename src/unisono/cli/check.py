"""``unisono check``: every law of the contract on one backend, law by law."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import unisono
from unisono.cli._tables import Column, folded, show
from unisono.errors import ArgumentError

if TYPE_CHECKING:
    from unisono.testing import Outcome, Status

__all__ = ("check",)

_COLOURS: dict[Status, str] = {
    "passed": "green",
    "derived": "cyan",
    "unsupported": "yellow",
    "failed": "red",
}
_MEANS = {
    "derived": "it holds; the model leaves members to the contract, which derives them from its "
    "all_gather: right, and slower than an override",
    "unsupported": "the model doesn't declare what the law needs, and refuses it by name",
}


def check(
    backend: Annotated[str, typer.Argument(help="Such as gloo, threads, mpi4py, or a plug-in's.")],
    *,
    nproc_per_node: Annotated[
        list[int] | None,
        typer.Option(
            "-n",
            "--nproc-per-node",
            min=1,
            metavar="N",
            help="Replicas; may be repeated. By default what the kit takes: 1, 2 and 3.",
        ),
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

    Local. It starts replicas (1, 2 and 3, as the kit for pytest does, or as many as each -n says)
    and says of each law whether it passed, passed by members that the contract derives from others,
    isn't supported (declared), or failed, and how. A law that hangs has failed, and the stacks of
    all replicas are shown.

    Returns:
        The exit code: 0 if no law failed, 1 if one did.
    """
    from unisono.testing import LAWS, Conformance, law_names
    from unisono.testing import check as keep

    names = law_names(law.strip().replace(" ", "_"))
    if not names:
        raise typer.BadParameter(f"none of the {len(LAWS)} laws has {law!r} in its name")
    outcomes: list[Outcome] = []
    for size in nproc_per_node or Conformance.sizes:
        try:
            found = keep(backend, size, laws=names, timeout_s=timeout)
        except ArgumentError as error:
            if nproc_per_node or not outcomes:
                raise
            typer.echo(f"not checked with {size} replicas: {error}", err=True)
            break
        if not as_json:
            _show(backend, size, found)
        outcomes += found
    text = json.dumps(_facts(backend, outcomes), indent=1)
    if save is not None:
        save.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
    else:
        _sum_up(outcomes)
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _facts(backend: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    import torch

    from unisono.registry import find_model
    from unisono.testing import LAWS

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


def _show(backend: str, size: int, outcomes: Sequence[Outcome]) -> None:
    who = "1 replica" if size == 1 else f"{size} replicas"
    columns = (
        Column("law", folds=True),
        Column("outcome"),
        Column("ms", is_number=True, rank=2),
        Column("why", rank=1, folds=True),
    )
    rows: list[list[str | Text]] = [
        [
            outcome.law,
            Text(outcome.status, _COLOURS[outcome.status]),
            f"{outcome.seconds * 1000:.1f}" if outcome.seconds else "",
            outcome.reason.partition("\n")[0],
        ]
        for outcome in outcomes
    ]
    show(f"{backend}, {who}", columns, rows)
    for outcome in outcomes:
        if "\n" in outcome.reason:
            typer.echo(f"{outcome.law}, {who}: {outcome.reason}\n")
    typer.echo(_counts(outcomes))


def _counts(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in _COLOURS if counts[status])


def _sum_up(outcomes: Sequence[Outcome]) -> None:
    """Say what the words mean that came, and how to check one law alone. Local."""
    statuses = {outcome.status for outcome in outcomes}
    for status, meaning in _MEANS.items():
        if status in statuses:
            typer.echo(folded(f"{status}: {meaning}"))
    failed = sorted({outcome.law for outcome in outcomes if outcome.status == "failed"})
    if failed:
        typer.echo(folded(f"to check one law again: --law {failed[0]}"))
