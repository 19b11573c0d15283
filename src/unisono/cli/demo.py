"""``unisono demo``: train on real data, and show that the number of workers changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import ControlType
from rich.table import Table

import unisono as idist
from unisono.cli import _digits
from unisono.cli._digits import Digits, Outcome, Settings

_GOAL = 0.95
_TOLERANCE = 1e-5
_COMPARED = (1, 2, 3)
_FOR_SEVERAL = {"serial": "threads"}  # with several replicas, serial is compared with threads


def demo(
    *,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Such as gloo, nccl, threads, serial.")
    ] = "gloo",
    nproc_per_node: Annotated[
        int, typer.Option("-n", "--nproc-per-node", min=1, metavar="N", help="Workers to start.")
    ] = 2,
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Times to go through the images.")
    ] = 20,
    batch_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Images in a batch, of all workers together."),
    ] = 64,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**32 - 1, metavar="S", help="Decides first weights and order of images."
        ),
    ] = 0,
    compare: Annotated[
        bool, typer.Option(help="Train with 1, 2 and 3 workers and compare what they learnt.")
    ] = True,
) -> int:
    """Train a small net on real handwritten digits with several workers.

    It shows who ran where, how well the net reads images that it hasn't seen, and that 1,
    2 and 3 workers reach the same parameters.

    Returns:
        The exit code: 0 if the goals were reached, 1 if not, 2 without scikit-learn.
    """
    console = Console(highlight=False)
    try:
        digits = _digits.load()
    except ImportError as error:
        typer.echo(
            "error: the demo needs scikit-learn, whose digits it learns from "
            f'({error}): python -m pip install "unisono[demo]"',
            err=True,
        )
        return 2
    settings = Settings(epochs, batch_size, seed)
    runs = {nproc_per_node: _run(backend, nproc_per_node, digits, settings)}
    first = runs[nproc_per_node][0]
    _show_who(console, first, digits)
    if compare:
        for workers in _COMPARED:
            if workers not in runs:
                runs[workers] = _run(_capable(backend, workers), workers, digits, settings)
        _show_runs(console, runs, digits, backend)
    return _judge(console, runs, digits, nproc_per_node)


def _capable(backend: str, workers: int) -> str:
    """Name the backend, or the one that stands in where it can't have so many workers."""
    return backend if workers == 1 else _FOR_SEVERAL.get(backend.lower(), backend)


def _run(backend: str, workers: int, digits: Digits, settings: Settings) -> list[Outcome]:
    """Train with so many workers and give each one's outcome."""
    title = f"{_count(workers)}, {backend}"
    try:
        outcomes: list[Outcome] = idist.spawn(
            backend,
            _digits.train,
            args=(digits, settings, partial(_bar, title)),
            nproc_per_node=workers,
        )
    except BaseException:  # the worker that drew the bar may have been ended in the middle
        _clear_bar(Console(stderr=True))
        raise
    return outcomes


@contextmanager
def _bar(title: str, epochs: int) -> Iterator[_digits.Report]:
    """Show a progress bar in a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("epochs, loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
        expand=True,
    ) as progress:
        task = progress.add_task(title, total=epochs, loss=0.0)

        def report(metrics: dict[str, float]) -> None:
            progress.update(task, advance=1, loss=metrics["loss"], refresh=True)

        yield report


def _clear_bar(console: Console) -> None:
    """Erase half a bar and bring back the cursor that it hid."""
    console.show_cursor()
    console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )


def _show_who(console: Console, outcome: Outcome, digits: Digits) -> None:
    table = _table("Who ran where")
    numbers = ("rank", "local rank", "node", "pid")
    for name in outcome.workers[0]:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in outcome.workers:
        table.add_row(*(str(value) for value in row.values()))
    console.print()
    console.print(table)
    console.print(
        f"\n{_count(len(outcome.workers))} learnt {len(digits.labels):,} handwritten digits: "
        f"loss {outcome.metrics['loss']:.4f}, accuracy {outcome.metrics['correct']:.4f}.\n"
    )


def _show_runs(
    console: Console, runs: dict[int, list[Outcome]], digits: Digits, backend: str
) -> None:
    table = _table("The same batches, shared by 1, 2 and 3 workers")
    for name in ("workers", "backend", "accuracy", "seconds", "largest difference to 1 worker"):
        table.add_column(name, justify="left" if name == "backend" else "right")
    for workers, outcomes in sorted(runs.items()):
        table.add_row(
            str(workers),
            _capable(backend, workers),
            f"{_accuracy(outcomes[0], digits):.4f}",
            f"{outcomes[0].seconds:.1f}",
            f"{_difference(outcomes, runs[1]):.1e}",
        )
    console.print(table)
    console.print("\nSteps of so small a net are short: the workers mostly wait for each other.")


def _accuracy(outcome: Outcome, digits: Digits) -> float:
    return (outcome.predictions == digits.held_out_labels).double().mean().item()


def _difference(outcomes: list[Outcome], alone: list[Outcome]) -> float:
    """Give the largest difference of any worker's parameter to that of the one alone."""
    apart = [(outcome.parameters - alone[0].parameters).abs().max() for outcome in outcomes]
    return max(float(difference) for difference in apart)


def _judge(
    console: Console, runs: dict[int, list[Outcome]], digits: Digits, nproc_per_node: int
) -> int:
    """Say whether the goals were reached, and give the exit code."""
    is_reached = True
    if 1 in runs and len(runs) > 1:
        worst = max(_difference(outcomes, runs[1]) for outcomes in runs.values())
        is_reached = worst <= _TOLERANCE
        verdict = "the same parameters" if is_reached else "DIFFERENT parameters"
        console.print(
            f"All reached {verdict}: at most {worst:.1e} apart, {_TOLERANCE:.0e} is allowed."
        )
    outcome = runs[nproc_per_node][0]
    accuracy = _accuracy(outcome, digits)
    right, count = round(accuracy * len(digits.held_out_labels)), len(digits.held_out_labels)
    console.print(f"Held-out accuracy: {accuracy:.4f} ({right} of {count} digits read right).")
    if accuracy < _GOAL:
        console.print(f"That is below the goal of {_GOAL}: try more --epochs.")
    return 0 if is_reached and accuracy >= _GOAL else 1
