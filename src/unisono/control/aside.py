"""A second line to each neighbour, served by a thread: where are you, and who has failed?"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from unisono.control.wire import ANSWER, ASK, FAIL, Line, LineClosed, read_failure

__all__ = ("Aside", "place_in", "stack_of")

_ANSWER_WITHIN_S = 1.0
_ASK_S = 0.4  # who is stuck in C never answers, and who asks has waited for its deadline already
_FRAMES = 6
_PACKAGE = str(Path(__file__).parents[1])


def stack_of(thread_id: int) -> str:
    """Give the innermost frames of one thread of this process that aren't ours. Local."""
    frame = sys._current_frames().get(thread_id)
    stack = [
        entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(_PACKAGE)
    ]
    return "".join(traceback.format_list(stack[-_FRAMES:])).rstrip()


def place_in(stack: str) -> str:
    """Give the innermost file and line of what `stack_of` gave, without its text. Local."""
    lines = [line for line in stack.splitlines() if line.startswith("  File ")]
    return lines[-1] if lines else ""


class Aside:
    """The side lines of one rank, and the thread that answers on them.

    Args:
        lines: one line for each neighbour, by its place.
    """

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self.thread_id: int = threading.get_ident()
        """The thread whose stack the neighbours get."""
        self._lines = dict(lines)
        self._answers: dict[int, str] = {}
        self._failure: bytes | None = None
        self._heard = threading.Condition()
        self._end, wake = os.pipe()
        self._is_open = True
        threading.Thread(
            target=self._serve, args=(wake,), name="unisono-aside", daemon=True
        ).start()

    def ask(self, places: Iterable[int]) -> dict[int, str]:
        """Ask neighbours for the stack of their thread; wait 0.4 s at most.

        Local.

        Returns:
            The answers that came, by place.
        """
        asked = [place for place in places if place in self._lines]
        until = time.monotonic() + _ANSWER_WITHIN_S
        with self._heard:
            for place in asked:
                self._answers.pop(place, None)
                with contextlib.suppress(LineClosed, TimeoutError):
                    self._lines[place].send(ASK, 0, b"", until)
            self._heard.wait_for(lambda: all(place in self._answers for place in asked), _ASK_S)
            return {place: self._answers[place] for place in asked if place in self._answers}

    def tell(self, failure: bytes, source: int | None = None) -> None:
        """Let all ranks know of a failure, also those whose own thread is in a collective.

        Local.

        Args:
            failure: what to say; only the first one counts.
            source: the place that said so, None for this rank itself.
        """
        with self._heard:
            if self._failure is not None:
                return
            self._failure = failure
            self._heard.notify_all()
        for place, line in self._lines.items():
            if place != source:
                with contextlib.suppress(LineClosed, TimeoutError):
                    line.send(FAIL, 0, failure, time.monotonic() + _ANSWER_WITHIN_S)

    def failure(self, wait_s: float = 0.0) -> bytes | None:
        """Give what the first rank that failed was told to say, None if nobody has. Local."""
        with self._heard:
            self._heard.wait_for(lambda: self._failure is not None, wait_s)
            return self._failure

    def close(self) -> None:
        """End the thread, which closes the lines. Local; harmless the second time."""
        if self._is_open:
            self._is_open = False
            os.close(self._end)

    def _serve(self, wake: int) -> None:
        places = {line.fd: place for place, line in self._lines.items()}
        readable = select.poll()
        for fd in (wake, *places):
            readable.register(fd, select.POLLIN)
        is_over = False
        while not is_over:
            for fd, _ in readable.poll():
                if fd == wake:
                    is_over = True
                    continue
                try:
                    self._answer(places[fd])
                except (LineClosed, TimeoutError):
                    readable.unregister(fd)
        os.close(wake)
        for line in self._lines.values():
            line.close()

    def _answer(self, place: int) -> None:
        line = self._lines[place]
        while (frame := line.take()) is not None:
            kind, _, body = frame
            if kind == ASK:
                text = stack_of(self.thread_id).encode("utf-8", "replace")
                line.send(ANSWER, 0, text, time.monotonic() + _ANSWER_WITHIN_S)
            elif kind == FAIL:
                read_failure(body)
                self.tell(body, place)
            elif kind == ANSWER:
                with self._heard:
                    self._answers[place] = body.decode("utf-8", "replace")
                    self._heard.notify_all()
