"""What one rank of a group knows of ranks that are gone or late, and how all others learn it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import NoReturn

from unisono.control import calls
from unisono.control.absence import Absent, Missing, has_ended, is_stopped, report, watch
from unisono.control.aside import Aside, place_in, stack_of
from unisono.control.neighbours import Neighbours
from unisono.control.wire import FAIL, NOTICE, Line, LineClosed, read_entries, read_failure
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

__all__ = ("Alarm",)

_log = logging.getLogger(__name__)
_LAST_WORD_S = 0.1
_LATE_S = 1.0  # for the root to ask everybody, and to tell


class Alarm:
    """What one rank knows of the absence of others.

    Args:
        ranks: global ranks of the group, in order of places.
        place: this rank's place.
        neighbours: whom it can see.
    """

    def __init__(self, ranks: tuple[int, ...] | range, place: int, neighbours: Neighbours) -> None:
        self._ranks = ranks
        self._place = place
        self._links = neighbours.links
        self._lines = neighbours.lines
        self._pids = neighbours.pids
        self._aside = Aside(neighbours.asides)
        self.pidfds: Mapping[int, int] = watch(neighbours.pids)
        """For each place of this host, what becomes readable when its process ends."""
        self.failure: CollectiveError | None = None
        self.gone: Absent | None = None
        self._seq, self._blob = 0, b""
        self._is_told = False
        self._close = weakref.finalize(
            self, _close, self._aside, list(self._lines.values()), list(self.pidfds.values())
        )
        self._close.atexit = False

    def close(self) -> None:
        """Close all lines. Local; harmless the second time."""
        self._close()

    def enter(self, seq: int, blob: bytes) -> None:
        """Take note of the round that this thread begins, and of what it gives. Local.

        Raises:
            CollectiveError: the group has failed before.
        """
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        self._seq, self._blob = seq, blob
        self._aside.thread_id = threading.get_ident()
        self._is_told = False

    def look_around(self) -> None:
        """Notice who is gone, and leave what neighbours say of rounds.

        Local. What others say comes first: some may have left because of the one that is gone.

        Raises:
            CollectiveError: a rank is gone.
        """
        ended = [place for place, fd in self.pidfds.items() if has_ended(fd)]
        said = self._aside.failure(_LAST_WORD_S if len(ended) > 1 else 0.0)
        if said is not None:
            self.fail(read_failure(said))
        if ended:
            self.lose(ended[0])
        for place, line in self._lines.items():
            if line.is_closed():
                self.lose(place, "it closed the connection")

    def late(self) -> str:
        """Say which neighbours aren't where this rank is, when the data plane's time is over.

        Local; waits a second at most. The root finds out, and tells those that it serves.
        """
        if self._links.up is not None:
            said = self._aside.failure(_LATE_S)
            return "" if said is None else str(read_failure(said)["text"])
        here = place_in(stack_of(threading.get_ident()))
        stacks = self._ask(self._links.downs)
        absent = [p for p in self._links.downs if here not in stacks.get(p, "")]
        text = "\n".join(str(self._missing(place, stacks)) for place in absent)
        self._aside.tell(json.dumps({"kind": "timeout", "text": text}).encode())
        return text

    def hand_on(self, body: bytes, source: int) -> None:
        """Log what a neighbour says of a long wait, and hand it down. Local."""
        self._is_told = True
        _log.warning("%s", body.decode("utf-8", "replace"))
        self._notify([place for place in self._links.downs if place != source], body)

    def warn(self, places: tuple[int, ...], got: Mapping[int, bytes]) -> None:
        """Say who of `places` is missing, unless a neighbour has said so. Local; once a round."""
        if self._is_told:
            return
        call = calls.describe(self._blob)
        text = f"{self._me()} is still waiting in {call}\n{self._report(places, got)}"
        _log.warning("%s", text)
        self._notify(list(got), text.encode())

    def _notify(self, places: list[int], body: bytes) -> None:
        for place in places:
            with contextlib.suppress(LineClosed, TimeoutError):
                self._lines[place].send(NOTICE, self._seq, body, time.monotonic() + 1)

    def interrupt(self, error: BaseException) -> None:
        """Take note that a round was left half-way: nobody knows what the others have. Local."""
        self.failure = CollectiveError(
            f"{self._me()}: {type(error).__name__} interrupted {calls.describe(self._blob)}, so "
            "the ranks are out of step: end the job, or finalize() and initialize anew"
        )

    def lose(self, place: int, how: str = "") -> NoReturn:
        """Fail because of a rank that is gone. Local."""
        rank, pid = self._ranks[place], self._pids.get(place)
        who = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid} on this host)"
        ended = pid is not None and place in self.pidfds and has_ended(self.pidfds[place])
        text = f"{who} has ended" if ended else f"{who} is gone: {how}"
        self.fail({"kind": "peer", "rank": rank, "text": text})

    def time_out(self, places: tuple[int, ...], got: Mapping[int, bytes]) -> NoReturn:
        """Fail because some of `places` didn't come. Local; asks them where they are."""
        text = self._report(places, got)
        self.fail({"kind": "timeout", "text": f"the deadline is over.\n{text}"})

    def jam(self, place: int) -> NoReturn:
        """Fail because a neighbour doesn't read what it is sent. Local."""
        late = Missing(self._ranks[place], pid=self._pids.get(place))
        text = f"the deadline is over, and what came isn't read:\n{late}"
        self.fail({"kind": "timeout", "text": text})

    def fail(self, said: dict[str, object], source: int | None = None) -> NoReturn:
        """Tell all neighbours but the one that said so, then raise. Local."""
        body = json.dumps(said).encode()
        self._aside.tell(body)
        for place, line in self._lines.items():
            if place != source:
                with contextlib.suppress(LineClosed, TimeoutError):
                    line.send(FAIL, self._seq, body, time.monotonic() + 1)
        text = f"{self._me()}, in {calls.describe(self._blob)}: {said['text']}"
        if said["kind"] == "peer":
            self.gone = Absent(int(str(said["rank"])), str(said["text"]))
            self.failure = PeerFailedError(text, self.gone.rank)
        else:
            self.failure = CollectiveTimeoutError(text)
        raise self.failure

    def _me(self) -> str:
        return f"rank {self._ranks[self._place]} of {len(self._ranks)}"

    def _ask(self, places: Iterable[int]) -> dict[int, str]:
        """Ask where the threads of neighbours are, but for those that can't answer."""
        return self._aside.ask([p for p in places if not is_stopped(self._pids.get(p))])

    def _missing(self, place: int, stacks: Mapping[int, str]) -> Missing:
        behind = [self._ranks[other] for other in self._links.below.get(place, ())[1:]]
        return Missing(self._ranks[place], behind, self._pids.get(place), stacks.get(place, ""))

    def _report(self, places: tuple[int, ...], got: Mapping[int, bytes]) -> str:
        """Say who has come with which call, who has not, and where those are."""
        absent = [place for place in places if place not in got]
        stacks = self._ask(absent)
        came = {self._place: self._blob}
        for bundle in got.values():
            with contextlib.suppress(LineClosed):
                came |= read_entries(bundle)
        missing = [self._missing(place, stacks) for place in absent]
        by_rank = {self._ranks[place]: blob for place, blob in came.items()}
        return report(f"round {self._seq} of the group of {len(self._ranks)}", by_rank, missing)


def _close(aside: Aside, lines: list[Line], pidfds: list[int]) -> None:
    aside.close()
    for line in lines:
        line.close()
    for fd in pidfds:
        os.close(fd)
