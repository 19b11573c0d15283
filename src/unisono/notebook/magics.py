"""The magics ``%%ranks`` and ``%ranks`` of IPython and Jupyter."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

from unisono.errors import ArgumentError
from unisono.lifecycle import best_backend
from unisono.notebook.output import shown_once
from unisono.notebook.rank_set import RankSet
from unisono.notebook.reports import briefly, raise_failure

_NAME = "ranks"


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


class Magics:
    """The sets of ranks of one shell, and its magics."""

    def __init__(self, count: Callable[[], int], names: Container[str]) -> None:
        self._count = count
        self._names = names
        self._sets: dict[tuple[str, int], RankSet] = {}
        self._last: tuple[str, int] | None = None

    @briefly()
    def cell(self, line: str, cell: str) -> None:
        """Run a cell in warm ranks: %%ranks [N] [--on BACKEND] [--timeout S] [--rank R[,R]].

        N and BACKEND are those of the cell before where they are left out. What all ranks
        print is shown once, and so is the value of the last expression. Each rank keeps its names
        from cell to cell; `idist`, `rank` and `size` are there. --timeout takes seconds, --rank
        the ranks that run the cell.

        Args:
            line: what follows ``%%ranks``.
            cell: the lines below.
        """
        options = _parser().parse_args(shlex.split(line))
        source = f"# %%{_NAME} {line}\n{cell}"  # so that lines have the numbers that one sees
        filename = f"In[{self._count()}]"
        compile(source, filename, "exec")  # a SyntaxError is this process's own
        rank_set = self._choose(options.size, options.on)
        ranks = _checked(options.rank, rank_set.size)
        result = rank_set.run(source, filename, ranks, options.timeout)
        raise_failure(result, options.timeout, self._names)
        if result.stays:
            print(f"{result.stays}.")
        values = {rank: o.value for rank, o in result.outcomes.items() if o.value is not None}
        if values:
            print(shown_once(values, rank_set.size))

    @briefly()
    def line(self, line: str) -> None:
        """Show the ranks, or end them: %ranks, %ranks stop.

        Args:
            line: what follows ``%ranks``.
        """
        if line.strip() not in ("", "stop"):
            raise ArgumentError(f"%ranks {line}: it is %ranks, %ranks stop, or %%ranks for a cell")
        if not self._sets:
            print("no ranks: a cell that begins with %%ranks 4 makes four")
        if not line.strip():
            print(*(f"{each.describe()}\n" for each in self._sets.values()), sep="", end="")
            return
        while self._sets:
            _, each = self._sets.popitem()
            print(f"{each}: {each.close()}")

    def _choose(self, size: int | None, backend: str | None) -> RankSet:
        if size is None:
            same = [key for key in self._sets if backend in (None, key[0])]
            if not same:
                raise ArgumentError("%%ranks needs the number of ranks the first time: %%ranks 4")
            key = self._last if self._last in same else same[-1]
            assert key is not None
        else:
            is_default = backend is None and self._last is not None and self._last[1] == size
            known = self._last if is_default else None
            key = known or (backend or best_backend(), size)
        self._last = key
        if key not in self._sets:
            made = RankSet(*key)
            if self._sets:
                older = ", ".join(map(str, self._sets.values()))
                print(f"another set: {made}; it stays beside {older}. %ranks stop ends all")
            self._sets[key] = made
        return self._sets[key]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}. It is {self.format_usage().removeprefix('usage: ')}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=f"%%{_NAME}", add_help=False)
    parser.add_argument("size", nargs="?", type=int)
    parser.add_argument("--on", metavar="BACKEND")
    parser.add_argument("--timeout", type=float, metavar="S")
    parser.add_argument("--rank", type=_numbers, metavar="R[,R]")
    return parser


def _numbers(text: str) -> list[int]:
    return sorted({int(each) for each in text.split(",")})


def _checked(ranks: Sequence[int] | None, size: int) -> Sequence[int]:
    if ranks is None:
        return range(size)
    if not set(ranks) <= set(range(size)):
        raise ArgumentError(f"--rank {','.join(map(str, ranks))}: there are ranks 0 to {size - 1}")
    return ranks
