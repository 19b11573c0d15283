"""What the last words of a process say about the replicas that were its threads."""

from __future__ import annotations

import re
from collections.abc import Mapping

# As faulthandler prints a thread, before its frames, the innermost first.
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)[^\n]*$", re.MULTILINE)
_FRAME = re.compile(r'\s*File "(?P<file>[^\n]*)", line (?P<line>\d+) in (?P<name>[^\n]*)')
# As XLA's CPU client says that it gives up on a graph (torch_xla 2.9).
_ALONE = re.compile(r"Expected (\d+) threads to join the rendezvous, but only (\d+)")


def explain(printed: str, ranks: Mapping[int, int]) -> str:
    """Say in one line why XLA ended the process, and where each replica was."""
    places = {
        ranks[int(head[1], 16)]: f"{frame['name']}, {frame['file']}:{frame['line']}"
        for head in _THREAD.finditer(printed)
        if int(head[1], 16) in ranks and (frame := _FRAME.match(printed, head.end()))
    }
    where = "; ".join(f"rank {rank} was in {places[rank]}" for rank in sorted(places))
    alone = _ALONE.search(printed)
    if alone is None:
        return where
    return (
        f"XLA gave up on a graph with a collective that only {alone[2]} of {alone[1]} replicas "
        f"launched within 10 s: every rank must run the same graphs. {where}"
    )


def with_ranks(printed: str, ranks: Mapping[int, int]) -> str:
    """Add to each printed thread which rank it was."""

    def name(head: re.Match[str]) -> str:
        rank = ranks.get(int(head[1], 16))
        return head[0] if rank is None else f"rank {rank}: {head[0]}"

    return _THREAD.sub(name, printed)
