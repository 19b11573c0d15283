r"""How a rank of a script says that it failed: lines among those that it prints.

A report is JSON, in base64, in pieces: ``\x1e{token} {id} {piece} of {pieces} {text}\n``. Launchers
pass lines of this length on whole, whatever they put in front of them.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import asdict, dataclass

from unisono.errors import WorkerFailedError
from unisono.launchers.job.failure import SECONDARY, exit_code_of, signal_name
from unisono.tracebacks import after, fold_text, last_exception, newest

_HEAD = b"Traceback (most recent call last):"
_LONGEST_S = 10.0  # from a traceback to a silent program's end: torch's takes 1 s on a busy host
_MORE_S = 1.0  # from a traceback on, after which more lines show that the program goes on
_MOST_BYTES = 128 * 1024


class Held:
    """Lines from a traceback on, kept until it is known whether the program ends with them."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._is_ignored = False  # whether Python says next which exception it ignored
        self.begun_at: float = 0.0

    def take(self, line: bytes) -> bool:
        """Take one line in, unless no traceback has begun; tell whether it was taken."""
        is_ignored, self._is_ignored = self._is_ignored, line.startswith(b"Exception ignored ")
        if not self._lines and (is_ignored or not line.startswith(_HEAD)):
            return False
        if not self._lines:
            self.begun_at = time.monotonic()
        self._lines.append(line)
        self._size += len(line)
        return True

    def left_s(self) -> float | None:
        """Return the seconds until what is held isn't a program's end, None for nothing."""
        if not self._lines:
            return None
        if self._size > _MOST_BYTES:
            return 0.0
        return max(0.0, self.begun_at + _LONGEST_S - time.monotonic())

    def is_refuted(self) -> bool:
        """Return whether more that comes now shows that the program goes on."""
        return bool(self._lines) and time.monotonic() > self.begun_at + _MORE_S

    def give(self) -> bytes:
        """Return the lines, and hold them no longer."""
        lines, self._lines, self._size = self._lines, [], 0
        return b"".join(lines)


_PIECE = 600
_MARK = "\x1e"
_OF_TORCH = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # what torch puts before a traceback
_OF_PYTHON = 1  # exit code of a program that nobody caught an exception of
_MOST_AFTER = 10  # lines of a long message, and warnings of libraries at the program's exit
_OF_LOST, _OF_TERMINAL = 1, 2  # doubts
_WANTS_INPUT = re.compile(r"bdb\.BdbQuit|EOFError: EOF when reading a line")
_SECONDARY = re.compile(
    r"PeerFailedError|Connection (closed|reset) by peer|Broken pipe|DistNetworkError"
    r"|recvValue failed|Socket closed|application has failed|ncclRemoteError"
)


@dataclass(frozen=True, slots=True)
class Report:
    """How one rank ended."""

    rank: int
    world_size: int
    host: str
    pid: int
    code: int
    attempt: int = 0
    output: str = ""
    local_rank: int | None = None
    node_rank: int | None = None
    is_shown: bool = False
    has_terminal: bool = False
    was_told: bool = False
    is_lost: bool = False

    @property
    def exit_code(self) -> int:
        """What a shell would call its exit code."""
        return exit_code_of(self.code)

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it."""
        return None if self.code >= 0 else signal_name(-self.code)

    @property
    def traceback(self) -> str:
        """The traceback that ends its words, with those that it names as causes; else empty."""
        last = newest(_OF_TORCH.sub("", self.output))
        most = _MOST_AFTER if self.code == _OF_PYTHON else 0
        return last if len(after(last)) <= most else ""

    @property
    def _told(self) -> tuple[str, str]:
        """What it raised and where; a signal isn't raised."""
        return ("", "") if self.code < 0 else last_exception(self.traceback)

    @property
    def shown(self) -> str:
        """The traceback that `text` gives."""
        return self.traceback if self._told[0] else ""

    @property
    def is_secondary(self) -> bool:
        """Whether it seems to have failed because another rank had, or may have."""
        if self.has_terminal or self.was_told:
            return True
        text = (self.traceback or self.output).rstrip()
        last = last_exception(self.traceback)[0] or text.rpartition("\n")[2]
        return _SECONDARY.search(last) is not None

    @property
    def doubt(self) -> int:
        """How likely another rank caused its end; a rank with the terminal tells that itself."""
        if self.is_secondary:
            return _OF_TERMINAL if self.has_terminal else SECONDARY
        return _OF_LOST if self.is_lost else 0

    def error(self, rank: int, world_size: int) -> WorkerFailedError:
        """Make the error of a function that the rank ran."""
        del rank, world_size
        code = None if self.signal_name or self.traceback else self.code
        text = self.text(is_whole=True)
        return WorkerFailedError(text, self.rank, code, self.signal_name, self.traceback)

    @property
    def headline(self) -> str:
        """Who is at fault and why, in one line."""
        raised = self._told[0]
        if raised:
            return WorkerFailedError.text(self._who, raised, "", "").partition("\n")[0]
        last = self.output.rstrip().rpartition("\n")[2]
        return f"{self._end}: {last}" if last else self._end

    @property
    def cause(self) -> tuple[int, str]:
        """What is the same for ranks that failed the same way, whatever their numbers are."""
        traceback = newest(_OF_TORCH.sub("", self.output)) if self.was_told else self.traceback
        last = last_exception(traceback)[0] or self.output.rstrip().rpartition("\n")[2]
        return 0 if self.was_told else self.code, re.sub(rf"\b{self.rank}\b", "R", last)

    def text(self, is_whole: bool = False) -> str:
        """Say who is at fault and why, and last of all its traceback."""
        raised, line = self._told
        if raised:
            where = f"{line} ({self._where}, exit code {self.code})"
            text = fold_text(self.traceback).rstrip()
            if self.is_shown and not is_whole:
                text = "its traceback is above"
            return WorkerFailedError.text(self._who, raised, where, text) + self._hint(raised)
        if self.has_terminal:
            return f"{self._end}; what it said is above"
        last_lines = "\n".join(self.output.splitlines()[-20:]).rstrip()
        return self._end + (
            f"; it said:\n\n{last_lines}" if last_lines else "; it printed nothing to stderr"
        )

    @property
    def _who(self) -> str:
        return "a rank" if self.rank < 0 else f"rank {self.rank} of {self.world_size}"

    @property
    def _where(self) -> str:
        local = "" if self.local_rank is None else f"local rank {self.local_rank}, "
        return f"{local}host {self.host}, process {self.pid}"

    @property
    def _end(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.signal_name is not None:
            how = f"was ended by {self.signal_name}"
        return f"{self._who} ({self._where}) {how}"

    def _hint(self, raised: str) -> str:
        """Say what to do instead, where a rank wanted to read from the terminal."""
        if not _WANTS_INPUT.match(raised):
            return ""
        return (
            f"\n\nthe standard input of a rank is empty: unisono run --stdin {max(0, self.rank)} "
            f"gives rank {max(0, self.rank)} this terminal, for breakpoint() and input()"
        )


def is_of_the_end(text: str) -> bool:
    """Return whether a traceback of a rank that was told to end says only that."""
    raised = last_exception(text)[0] or text
    return "KeyboardInterrupt" in raised or _SECONDARY.search(raised) is not None


def encode(report: Report, token: str) -> bytes:
    """Write a report as lines."""
    data = json.dumps(asdict(report)).encode()
    text = base64.b64encode(data).decode()
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    name = f"{report.host}/{report.pid}/{report.attempt}"
    lines = [
        f"{_MARK}{token} {name} {index} of {len(pieces)} {piece}\n"
        for index, piece in enumerate(pieces)
    ]
    return "".join(lines).encode()


class Reader:
    """Finds reports among lines."""

    def __init__(self, token: str) -> None:
        self._mark = re.compile(
            re.escape(f"{_MARK}{token} ").encode() + rb"(\S+) (\d+) of (\d+) (\S+)\s*$"
        )
        self._pieces: dict[bytes, dict[int, bytes]] = {}

    def read(self, line: bytes) -> Report | bool:
        """Take one line in."""
        piece_of = self._mark.search(line)
        if piece_of is None:
            return False
        name, index, count, piece = piece_of.groups()
        pieces = self._pieces.setdefault(name, {})
        pieces[int(index)] = piece
        if len(pieces) < int(count):
            return True
        text = b"".join(pieces[i] for i in sorted(pieces))
        return Report(**json.loads(base64.b64decode(text)))
