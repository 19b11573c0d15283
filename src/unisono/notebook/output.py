"""Output of ranks in the notebook: read from their files, equal lines shown once."""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from unisono.topology import named, ranks_by_value

_HOLD_S = 0.3  # that a line waits for the same line of the other ranks
_LOOK_AHEAD = 200  # lines of each rank that are compared
_CONTROL = re.compile(r"(\n|\r|\x1b\[A|\x1b\[K)")


class _RankOutput:
    """The output of one rank in lines, as on a terminal, where bars overwrite their own line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")  # made here, before the rank appends to it
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rows = [""]
        self._row = 0
        self._is_at_start = self._goes_up = False
        self.lines: list[str] = []  # final ones that haven't been shown yet

    @property
    def unfinished(self) -> str:
        """The row that is being written."""
        return self._rows[self._row]

    def read(self, is_over: bool) -> None:
        """Read new output, and apply its control characters to the rows, as a terminal does."""
        for token in _CONTROL.split(self._decode(self._file.read())):
            if token == "\n":
                self._row += 1
                self._is_at_start = False
                if self._row == len(self._rows):
                    self._rows.append("")
            elif token == "\r":
                self._is_at_start = True
            elif token == "\x1b[A":
                self._row = max(0, self._row - 1)
                self._goes_up = True
            elif token and token != "\x1b[K":  # nothing is erased: a row is rewritten as a whole
                kept = "" if self._is_at_start else self._rows[self._row]
                self._rows[self._row] = kept + token
                self._is_at_start = False
        if is_over:
            self.lines += self._rows[: len(self._rows) if self._rows[-1].strip() else -1]
            self._rows, self._row = [""], 0
        elif not self._goes_up:  # else any row may change, as with nested bars
            self.lines += self._rows[:-1]
            self._rows, self._row = self._rows[-1:], 0

    def close(self) -> None:
        self._file.close()


class Transcript:
    """Output of the ranks during one cell, written to stdout as it arrives."""

    def __init__(self, paths: Mapping[int, Path], size: int) -> None:
        self._outputs = {rank: _RankOutput(path) for rank, path in paths.items()}
        self._is_marked = size > 1
        self._has_all_ranks = len(paths) == size
        self._held_since: float | None = None  # when the oldest line that isn't shown arrived
        self._bar = ""  # the unfinished line that was shown last

    def show(self, is_over: bool = False) -> None:
        """Write the output that has arrived."""
        for output in self._outputs.values():
            output.read(is_over)
        lines = list(self._lines(is_over))
        # The bar of one rank is shown, because there is only one last line.
        bar = "" if is_over else next(iter(self._outputs.values())).unfinished
        if not lines and bar == self._bar:
            return
        clear = "\r" + " " * len(self._bar) + "\r" if self._bar else ""
        sys.stdout.write(clear + "".join(f"{line}\n" for line in lines) + bar)
        sys.stdout.flush()
        self._bar = bar

    def close(self) -> None:
        """Close the files."""
        for output in self._outputs.values():
            output.close()

    def _lines(self, is_over: bool) -> Iterator[str]:
        """Yield the lines that can be shown now; a line that all ranks have printed comes once."""
        pending = {rank: output.lines for rank, output in self._outputs.items()}
        if self._has_all_ranks and len(pending) > 1:
            yield from self._shared(pending)
        if not any(pending.values()):
            self._held_since = None
            return
        # The lines that are left wait a little for the same lines of the other ranks.
        if self._held_since is None:
            self._held_since = time.monotonic()
        is_alone = len(pending) == 1
        if is_over or is_alone or time.monotonic() - self._held_since > _HOLD_S:
            for rank, lines in pending.items():
                yield from (self._marked(rank, line) for line in lines)
                lines.clear()
            self._held_since = None

    def _shared(self, pending: Mapping[int, list[str]]) -> Iterator[str]:
        """Yield each line that all ranks have printed once, after the lines that precede it."""
        first, *others = pending.values()
        while all(pending.values()):
            ahead = [set(lines[:_LOOK_AHEAD]) for lines in others]
            shared = [line for line in first[:_LOOK_AHEAD] if all(line in each for each in ahead)]
            if not shared:
                return
            for rank, lines in pending.items():
                index = lines.index(shared[0])
                yield from (self._marked(rank, line) for line in lines[:index])
                del lines[: index + 1]
            yield shared[0]

    def _marked(self, rank: int, line: str) -> str:
        mark = f"[rank {rank}] " if self._is_marked else ""
        return line if line.startswith(mark) else mark + line  # `idist.print` has marked its lines


def shown_once(values: Mapping[int, str], size: int) -> str:
    """Join the texts of ranks: equal ones once, and without a mark if all ranks have it."""
    parts = []
    for value, ranks in ranks_by_value(values).items():
        if len(ranks) == size:
            return value
        # A text of several lines begins below the mark, so that its columns stay aligned.
        parts.append(f"[{named(ranks)}] " + ("\n" * ("\n" in value)) + value)
    return "\n".join(parts)
