"""The full-screen view of ``unisono top``."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from unisono.cli._jobs import NO_JOB, chosen, columns_and_rows, grouped, headline, verdict_lines
from unisono.cli._tables import table_of
from unisono.observe.jobs import Meter, ObservedJob, look, send, stacks_of
from unisono.observe.report import StackCache, calls_of, report_of
from unisono.observe.verdict import Rank

_KEYS = "s stacks of a rank   a stacks of all   n next job   k end the job   q quit"
_BACK = "arrows scroll   any other key goes back"
_ANSWER_S = 1.0  # for a rank to write its stacks
_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_KEY_BYTES = 16  # a key such as an arrow is a sequence of several bytes
_ESCAPE = "\x1b"
_SCROLLS = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -10, "\x1b[6~": 10}
_LINES_AROUND = 2  # of the screen, used for the title and the keys


class LiveView:
    """The state of the view, and its keys."""

    def __init__(self, wanted: str | None, every_s: float) -> None:
        self.wanted, self.every_s = wanted, every_s
        self.name: str | None = None  # of the wanted job, kept in case the job ends
        self.console = Console()
        self.meter = Meter()
        self.stacks = StackCache()
        self.jobs: list[ObservedJob] = []
        self.report: Mapping[str, Any] | None = None
        self.index = 0  # of the job that is shown
        self.prompt = ""  # the question at the bottom, followed by the text typed
        self.typed = ""
        self.answer: Callable[[str], None] | None = None  # None while no question is open
        self.page: list[str] | None = None  # stacks, in place of the table
        self.scrolled = 0
        self.ending: list[tuple[ObservedJob, float]] = []  # jobs, and when they are sent SIGKILL
        self.is_over = False

    def run(self) -> int:
        """Run the view until the user quits."""
        with (
            _keys(sys.stdin.fileno()) as fd,
            Live(console=self.console, screen=True, auto_refresh=False) as live,
        ):
            while not self.is_over:
                self.look()
                # A key redraws the screen at once, without another look at the jobs.
                until = time.monotonic() + self.every_s
                while not self.is_over and (left_s := self._look_at(until) - time.monotonic()) > 0:
                    live.update(self.screen(), refresh=True)
                    for key in _pressed(fd, left_s):
                        self.press(key)
        return 0

    def _look_at(self, until: float) -> float:
        """Return the time of the next look: `until`, or earlier if a job must be killed."""
        return min([until, *(kills_at for _, kills_at in self.ending)])

    def look(self) -> None:
        """Update the jobs and the report; kill jobs that had enough time to end."""
        name = self.jobs[self.index].name if self.jobs else None
        self.jobs = look(self.meter)
        if self.wanted is not None:
            # The job is chosen only once, so that no other one is shown after it has ended.
            if self.name is None and self.jobs:
                self.name = chosen(self.jobs, self.wanted).name
            self.jobs = [job for job in self.jobs if job.name == self.name]
        names = [job.name for job in self.jobs]
        # Other jobs may begin or end, so this job's position may change.
        last = max(len(names) - 1, 0)
        self.index = names.index(name) if name in names else min(self.index, last)
        self.report = report_of(self.jobs[self.index], self.stacks) if self.jobs else None
        now = time.monotonic()
        for job in [job for job, kills_at in self.ending if kills_at <= now]:
            send(job, signal.SIGKILL)  # only to processes that haven't ended: see `send`
        self.ending = [each for each in self.ending if each[1] > now]

    def press(self, key: str) -> None:
        """Process a key."""
        if self.answer is not None:
            self._type(key)  # keys are text while a question is open
        elif self.page is not None:
            self._scroll(key)
        elif key == "q":
            self.is_over = True
        elif key == "n" and self.jobs:
            self.index = (self.index + 1) % len(self.jobs)
            self.report = report_of(self.jobs[self.index], self.stacks)
        elif self.report is not None:
            keys = {"s": self._ask_rank, "a": self._show_all, "k": self._ask_end}
            keys.get(key, lambda: None)()

    def _type(self, key: str) -> None:
        """Edit or end the answer to the open question."""
        if key == _ESCAPE:
            self.answer = None
        elif key in ("\r", "\n"):
            answer, self.answer = self.answer, None
            if answer is not None:
                answer(self.typed)
        elif key in ("\x7f", "\b"):
            self.typed = self.typed[:-1]
        elif key.isprintable():
            self.typed += key

    def _scroll(self, key: str) -> None:
        if key in _SCROLLS and self.page is not None:
            self.scrolled = max(0, min(self.scrolled + _SCROLLS[key], len(self.page) - 1))
        else:
            self.page = None

    def _ask(self, prompt: str, answer: Callable[[str], None]) -> None:
        """Open a question; `answer` gets the text typed."""
        self.prompt, self.typed, self.answer = prompt, "", answer

    def _ask_rank(self) -> None:
        """Ask for a rank, and show its stacks."""
        # `press` calls this only with a report, which has at least one rank.
        name, report = self.jobs[self.index].name, self.report or {}
        # The first culprit, or without one the first rank.
        suspect = int([*report["culprits"], *report["ranks"]][0]["rank"])

        def answer(typed: str) -> None:
            job = self.jobs[self.index] if self.jobs else None
            # The jobs are updated while the user types, so this one may have ended.
            if job is None or job.name != name:
                self._show([f"job {name} has ended"])
                return
            # Later reports ask all ranks again: a user who wants stacks accepts interrupted waits.
            self.stacks = StackCache()
            rank = int(typed) if typed.isdecimal() else suspect
            wanted = [each for each in job.ranks if each.rank == rank]
            lines = _stack_lines(job, wanted, all_threads=True)
            self._show(lines or [f"there isn't a rank {rank} here"])

        self._ask(f"stacks of which rank? [{suspect}] ", answer)

    def _show_all(self) -> None:
        job = self.jobs[self.index]
        self._show(_stack_lines(job, job.ranks, all_threads=False))

    def _show(self, lines: Sequence[str]) -> None:
        self.page, self.scrolled = list(lines), 0

    def _ask_end(self) -> None:
        """Ask whether to end the job, and send it SIGTERM; `look` sends SIGKILL later."""
        job = self.jobs[self.index]

        def answer(typed: str) -> None:
            # This is the job of the question, even if another one is shown by now.
            if typed.strip().lower() in ("y", "yes"):
                send(job, signal.SIGTERM)
                self.ending.append((job, time.monotonic() + _GRACE_S))

        self._ask(f"end the {len(job.ranks)} ranks of job {job.name} on this host? y/[n] ", answer)

    def screen(self) -> RenderableType:
        """Return the contents of the screen."""
        if self.page is not None:
            room = max(self.console.height - _LINES_AROUND, 1)
            lines = self.page[self.scrolled : self.scrolled + room]
            return Group(*(Text(line, no_wrap=True) for line in lines), Text(_BACK, "reverse"))
        bottom = Text(_KEYS, "reverse")
        if self.answer is not None:
            bottom = Text(f"{self.prompt}{self.typed}", "bold")
        if self.report is None:
            return Group(Text(NO_JOB), bottom)
        return Group(*self._job(self.report), bottom)

    def _job(self, report: Mapping[str, Any]) -> Iterator[RenderableType]:
        """Yield the parts of the screen about the job that is shown."""
        count = f"  ({self.index + 1} of {len(self.jobs)} jobs)" if len(self.jobs) > 1 else ""
        yield Text(headline(report) + count, "bold")
        style = "bold red" if report["culprits"] else "green"
        for line in verdict_lines(report):
            yield Text(line, style)
            style = ""  # the first line is the verdict, and only that is coloured
        yield table_of(*columns_and_rows(report))
        if report["job"] in [job.name for job, _ in self.ending]:
            yield Text("ending the job: SIGTERM was sent, SIGKILL follows", "bold red")


def _stack_lines(job: ObservedJob, ranks: Sequence[Rank], *, all_threads: bool) -> list[str]:
    found = stacks_of(ranks, _ANSWER_S, all_threads=all_threads)
    return grouped(found, calls_of(job), all_threads=all_threads)


@contextmanager
def _keys(fd: int) -> Iterator[int]:
    """Set the terminal to deliver each key at once, without echo."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int, timeout_s: float) -> list[str]:
    """Wait for keys and return them; an escape sequence, such as an arrow's, is one key."""
    ready, _, _ = select.select([fd], [], [], timeout_s)
    if not ready:
        return []
    text = os.read(fd, _KEY_BYTES).decode("utf-8", "replace")
    if not text:  # the terminal is gone
        return ["q"]
    return [text] if text.startswith(_ESCAPE) else list(text)
