r"""Failure reports of a script's rank, as lines among those that it prints.

A report is JSON, in base64, in pieces: ``\x1e{token} {id} {piece} of {pieces} {text}\n``. Launchers
pass on lines of this length whole, after any prefix.
"""

from __future__ import annotations

import base64
import json
import re
import socket
from dataclasses import asdict, dataclass
from typing import Any

from unisono.errors import WorkerFailedError
from unisono.launchers.job.failure import SECONDARY, exit_code_of, signal_name
from unisono.topology import RankInfo

_PIECE = 600  # characters: a launcher may split longer lines
_MARK = "\x1e"
_LOST, _WITH_TERMINAL = 1, 2  # in the order of causes, before SECONDARY
_WANTS_INPUT = re.compile(r"bdb\.BdbQuit|EOFError: EOF when reading a line")
_SECONDARY = re.compile(
    r"PeerFailedError|Connection (closed|reset) by peer|Broken pipe|DistNetworkError"
    r"|recvValue failed|Socket closed|application has failed|ncclRemoteError"
)


@dataclass(frozen=True, slots=True)
class Report:
    """The failure of one rank."""

    rank: int
    world_size: int
    host: str
    pid: int
    code: int
    attempt: int = 0
    raised: str = ""  # the uncaught exception, in one line
    place: str = ""  # the line of the user's code that raised it
    words: str = ""  # the last output to stderr: one line, or many that weren't printed
    local_rank: int | None = None
    node_rank: int | None = None
    has_terminal: bool = False
    is_lost: bool = False  # nothing is known of its failure: `words` are the reason why

    @classmethod
    def of(cls, info: RankInfo | None, pid: int, code: int, **facts: Any) -> Report:
        """Build the report of a rank of this host; `info` is None for one that isn't known."""
        if info is None:
            return cls(-1, -1, socket.gethostname(), pid, code, **facts)
        facts |= {"local_rank": info.local_rank, "node_rank": info.node_rank}
        return cls(info.rank, info.world_size, socket.gethostname(), pid, code, **facts)

    @property
    def exit_code(self) -> int:
        """The exit code of the rank, as a shell reports it."""
        return exit_code_of(self.code)

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the rank."""
        return None if self.code >= 0 else signal_name(-self.code)

    @property
    def _last(self) -> str:
        return self.raised or self.words.rstrip().rpartition("\n")[2]

    @property
    def is_secondary(self) -> bool:
        """Whether another rank's failure seems to have caused this one."""
        return self.has_terminal or _SECONDARY.search(self._last) is not None

    @property
    def cause_order(self) -> int:
        """Order of causes, as in `Fault`; a rank with the terminal shows its failure itself."""
        if self.is_secondary:
            return _WITH_TERMINAL if self.has_terminal else SECONDARY
        return _LOST if self.is_lost else 0

    def error(self, rank: int, world_size: int) -> WorkerFailedError:
        """Return the error of the job."""
        return WorkerFailedError(self.text(), self.rank, self.code, self.signal_name)

    @property
    def headline(self) -> str:
        """The rank at fault and the reason, in one line."""
        if self.raised:
            return WorkerFailedError.text(self._who, self.raised, "", "").partition("\n")[0]
        return f"{self._end}: {self._last}" if self._last else self._end

    def text(self) -> str:
        """Return the rank at fault, the reason and the place."""
        if self.raised:
            where = f"{self.place} ({self._where}, exit code {self.code})"
            text = WorkerFailedError.text(self._who, self.raised, where, self.words).rstrip()
            return text + self._hint()
        if self.has_terminal:
            return f"{self._end}; see its output above"
        if self.is_lost:
            return self.headline
        words = self.words.rstrip()
        return self._end + (
            f"; its last output:\n\n{words}" if words else "; it printed nothing to stderr"
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

    def _hint(self) -> str:
        """Return a remedy for a rank that wanted to read from the terminal."""
        if not _WANTS_INPUT.match(self.raised):
            return ""
        return (
            f"\n\nthe standard input of a rank is empty: unisono run --stdin {max(0, self.rank)} "
            f"gives rank {max(0, self.rank)} this terminal, for breakpoint() and input()"
        )


def encode(report: Report, token: str) -> bytes:
    """Encode a report as lines."""
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
    """A parser of reports among lines."""

    def __init__(self, token: str) -> None:
        self._mark = re.compile(
            re.escape(f"{_MARK}{token} ").encode() + rb"(\S+) (\d+) of (\d+) (\S+)\s*$"
        )
        self._pieces: dict[bytes, dict[int, bytes]] = {}

    def read(self, line: bytes) -> Report | bool:
        """Parse a line; return the report that it completes, or whether it is part of one."""
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
