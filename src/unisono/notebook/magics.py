"""The magics ``%%ranks`` and ``%ranks`` of IPython and Jupyter."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from unisono.deadlines import format_s
from unisono.errors import ArgumentError, CollectiveTimeoutError, UnisonoError
from unisono.launchers.job.failure import Failure
from unisono.lifecycle import best_backend
from unisono.notebook.output import shown_once
from unisono.notebook.rank_set import INTERRUPT, TIMEOUT, CellRun, RankSet
from unisono.topology import named, ranks_by_value
from unisono.tracebacks import hides, is_full

__tracebackhide__ = hides

_NAME = "ranks"
_MISSING = re.compile(r"NameError: name '(\w+)' is not defined")
_RENDER = "_render_traceback_"  # IPython calls it to show an exception


def load_ipython_extension(shell: Any) -> None:
    """Add ``%%ranks`` and ``%ranks`` to a shell, for ``%load_ext unisono``."""
    magics = Magics(lambda: shell.execution_count, shell.user_ns)
    shell.register_magic_function(magics.cell, "cell", _NAME)
    shell.register_magic_function(magics.line, "line", _NAME)


def unload_ipython_extension(shell: Any) -> None:
    """End all ranks and remove the magics, for ``%unload_ext unisono``."""
    shell.magics_manager.magics["cell"].pop(_NAME, None)
    line = shell.magics_manager.magics["line"].pop(_NAME, None)
    if line is not None:
        line("stop")


@contextmanager
def _briefly() -> Iterator[None]:
    """Make a notebook show our errors as their texts alone, unless they have a rendering."""
    try:
        yield
    except UnisonoError as error:
        if not is_full() and not hasattr(error, _RENDER):
            lines = f"{type(error).__name__}: {error}".splitlines()
            setattr(error, _RENDER, lambda: lines)
        raise


class Magics:
    """The sets of ranks of one shell, and its magics."""

    def __init__(self, count: Callable[[], int], names: Container[str]) -> None:
        self._count = count
        self._names = names
        self._sets: dict[tuple[str, int], RankSet] = {}
        self._last: tuple[str, int] | None = None

    @_briefly()
    def cell(self, line: str, cell: str) -> None:
        """Run a cell in warm ranks: %%ranks [N] [--on BACKEND] [--timeout S] [--rank R[,R]].

        N and BACKEND default to those of the last cell. Lines that all ranks print are shown
        once, and so is the value of the last expression if it is equal. Each rank keeps its names
        from cell to cell; `idist`, `rank` and `size` are predefined. --timeout is in seconds;
        --rank names the ranks that run the cell.

        Args:
            line: what follows ``%%ranks``.
            cell: the lines below.
        """
        options = _parser().parse_args(shlex.split(line))
        source = f"# %%{_NAME} {line}\n{cell}"  # with the line numbers that the notebook shows
        filename = f"In[{self._count()}]"
        compile(source, filename, "exec")  # raises a SyntaxError here, and not in every rank
        rank_set = self._choose(options.size, options.on)
        ranks = range(rank_set.size) if options.rank is None else options.rank
        if not {*ranks} <= {*range(rank_set.size)}:
            texts = ",".join(map(str, ranks))
            raise ArgumentError(f"--rank {texts}: there are ranks 0 to {rank_set.size - 1}")
        run = rank_set.run(source, filename, ranks, options.timeout)
        _raise_failure(run, self._names)
        if run.remains:
            print(f"{run.remains}.")
        values = {rank: o.value for rank, o in run.outcomes.items() if o.value is not None}
        if values:
            print(shown_once(values, rank_set.size))

    @_briefly()
    def line(self, line: str) -> None:
        """Show the ranks, or end them: %ranks, %ranks stop.

        Args:
            line: what follows ``%ranks``.
        """
        if line.strip() not in ("", "stop"):
            raise ArgumentError(f"%ranks {line}: use %ranks, %ranks stop, or %%ranks for a cell")
        if not self._sets:
            print("no ranks: a cell that begins with %%ranks 4 starts four")
        if not line.strip():
            for each in self._sets.values():
                print(each.describe())
            return
        while self._sets:
            _, each = self._sets.popitem()
            print(f"{each}: {each.close()}")

    def _choose(self, size: int | None, backend: str | None) -> RankSet:
        """Return the set that a cell's options name, else the last cell's; create a missing one."""
        if size is None:
            matching = [key for key in self._sets if backend in (None, key[0])]
            if not matching:
                raise ArgumentError("%%ranks needs the number of ranks the first time: %%ranks 4")
            key = self._last if self._last in matching else matching[-1]
            assert key is not None
        elif backend is None and self._last is not None and self._last[1] == size:
            key = self._last  # even if another backend is the best one by now
        else:
            key = (backend or best_backend(), size)
        self._last = key
        if key not in self._sets:
            new = RankSet(*key)
            if self._sets:
                older = ", ".join(map(str, self._sets.values()))
                print(f"another set: {new}; it stays beside {older}. %ranks stop ends all")
            self._sets[key] = new
        return self._sets[key]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}. It is {self.format_usage().removeprefix('usage: ')}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=f"%%{_NAME}", add_help=False)
    parser.add_argument("size", nargs="?", type=int)
    parser.add_argument("--on", metavar="BACKEND")
    parser.add_argument("--timeout", type=float, metavar="S")
    parser.add_argument("--rank", type=_ranks, metavar="R[,R]")
    return parser


def _ranks(text: str) -> list[int]:
    """Parse the value of ``--rank``."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} should be ranks, such as 0 or 0,1")
    return sorted({int(word) for word in words})


def _raise_failure(run: CellRun, names: Container[str]) -> None:
    """Raise the error of a cell that failed or was ended early."""
    # A notebook shows the ranks' tracebacks in place of this process's. Ranks in `run.stacks` only
    # failed because this process interrupted them.
    failures = {
        rank: each.failure
        for rank, each in run.outcomes.items()
        if each.failure is not None and rank not in run.stacks
    }
    if run.cut_by == INTERRUPT:
        text = f"the cell was interrupted\n\n{_tracebacks(run, failures)}"
        _raise(KeyboardInterrupt(), text, run.remains)
    if run.cut_by == TIMEOUT:
        limit = format_s(run.timeout_s or 0.0)
        text = f"{named(run.stacks)} of {run.size} weren't done after {limit}"
        error = CollectiveTimeoutError(text)
        _raise(error, f"{text}\n\n{_tracebacks(run, failures)}", run.remains)
    # A cell that was cut by a FAILURE is reported from here on, by that failure.
    first = min(failures, key=lambda rank: failures[rank].cause_order, default=None)
    # If a rank has died, a rank that only reports another one's failure isn't the cause.
    if run.error is not None and (first is None or failures[first].cause_order):
        _raise(run.error, str(run.error), run.remains)
    if first is not None:
        failure = failures[first]
        alike = [rank for rank in failures if failures[rank].traceback == failure.traceback]
        is_all = len(alike) == run.size > 1
        who = f"all {run.size} ranks" if is_all else f"{named(alike)} of {run.size}"
        text = f"{who} raised {failure.summary}\n"
        text += f"  at {failure.line}\n" if failure.line else ""
        text += f"\n{failure.traceback}"
        others = _tracebacks(run, {r: each for r, each in failures.items() if r not in alike})
        text += f"\nThe others:\n{others}" if others else ""
        missing = _MISSING.match(failure.summary)
        if missing is not None and missing[1] in names:
            name = missing[1]
            text += f"\nthe notebook has {name}, its ranks don't: define it in a cell of %%ranks"
        substitute = failure.error(first, run.size)
        raised = substitute.__cause__  # the rank's exception; None if its class doesn't exist here
        _raise(substitute if raised is None else raised, text, run.remains)


def _tracebacks(run: CellRun, failures: Mapping[int, Failure]) -> str:
    """Return the text of each rank's failure or stack, equal texts once."""
    texts = {rank: failure.traceback for rank, failure in failures.items()}
    texts |= {rank: stack or "it doesn't answer\n" for rank, stack in run.stacks.items()}
    return "\n".join(
        f"{named(ranks)} of {run.size}:\n{text}" for text, ranks in ranks_by_value(texts).items()
    )


def _raise(error: BaseException, text: str, remains: str) -> NoReturn:
    """Raise an error that a notebook shows as text."""
    lines = [*text.rstrip().splitlines(), *(["", f"{remains}."] if remains else [])]
    with suppress(AttributeError):  # an exception may have slots
        setattr(error, _RENDER, lambda: lines)
    raise error
