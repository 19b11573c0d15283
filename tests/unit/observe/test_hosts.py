"""What other hosts answer to a rank of this one, and what is made of that.

This process is the rank that is asked. What its frames meet on their way is played here: the pages
and stacks of other hosts. Whole jobs are in tests/process/observe.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.processes import in_fork, python
from tests.unit.observe.test_jobs import leave_page, page as page_of
from unisono.cli._live import LiveView
from unisono.control import inquiry
from unisono.control.connection import LOOK, SEEN
from unisono.control.inquiry import Inquiries
from unisono.control.tree import Seat
from unisono.host import stack_signal
from unisono.host.page_copies import PageCopy, Vitals, copied, packed, to_plain
from unisono.host.stack_signal import LONGEST_S
from unisono.host.status_page import pages
from unisono.observe.hosts import gather, stacks_elsewhere
from unisono.observe.jobs import Job, Meter, look

SEATS = (Seat("a", (0,)), Seat("b", (1,)), Seat("c", (2, 3)))
page = partial(page_of, model="native")
pytestmark = [
    pytest.mark.usefixtures("own_pages"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def copy_of(rank: int, **more: Any) -> dict[str, Any]:
    """Have a page of a rank as another host reads it."""
    with page(rank, **more) as made:
        (copy,) = copied(each for each in pages() if each.path == made.path)
        return to_plain(copy)


class Others:
    """The other hosts, and the inquiries of this one.

    Args:
        bodies: what each place answers, as it is packed; one that isn't there is silent.
    """

    def __init__(self, bodies: Mapping[int, Sequence[str]]) -> None:
        self.bodies = bodies
        self.looks: list[Mapping[str, Any]] = []
        self.looked_s: list[float] = []
        self.inquiries = Inquiries(0, SEATS, self.offer)
        self.over, self.end = os.pipe()

    def offer(self, kind: int, message: Mapping[str, Any], place: int, _: float) -> bool:
        assert kind == LOOK
        self.looks.append(message)
        self.looked_s.append(time.monotonic())
        now = time.monotonic_ns()
        head = packed({"host": f"host of {place}", "got_ns": now, "sent_ns": now})
        if place in self.bodies:
            stacks = [packed({"rank": rank, "stacks": None}) for rank in message["ranks"]]
            parts = [head, *(stacks or self.bodies[place])]
            facts = {"to": 0, "of": place, "id": message["id"], "parts": len(parts)}
            for part, body in enumerate(parts):
                self.inquiries.handle(SEEN, {**facts, "part": part, "body": body})
        return True

    def serve(self) -> None:
        fd = self.inquiries.fd
        assert fd is not None
        while self.over not in (ready := select.select([fd, self.over], [], [])[0]):
            assert ready == [fd]
            self.inquiries.accept()


@contextmanager
def others(bodies: Mapping[int, Sequence[str]]) -> Iterator[Others]:
    made = Others(bodies)
    thread = threading.Thread(target=made.serve)
    thread.start()
    with ExitStack() as stack:
        for fd in (made.over, made.end):
            stack.callback(os.close, fd)
        stack.callback(made.inquiries.close)
        stack.callback(thread.join)
        stack.callback(os.write, made.end, b"!")
        yield made


def gathered() -> Job:
    (job,) = look(Meter())
    return gather(job, Meter())


def known() -> dict[int, list[str]]:
    """Return what the other hosts answer of the ranks there."""
    return {rank: [packed(copy_of(rank))] for rank in (1, 2)}


def conditions(job: Job) -> dict[int, tuple[bool, bool]]:
    """Tell by rank whether it lives, and whether it is here."""
    return {each.rank.rank: (each.rank.condition != "dead", each.is_here) for each in job.ranks}


def test_pages_of_an_earlier_run_hide_no_rank_of_another_host() -> None:
    """Even where they leave no rank without a page."""
    with page(0), others(known()):
        leave_page(rank=1)
        leave_page(rank=2)
        job = gathered()
    assert conditions(job) == {0: (True, True), 1: (True, False), 2: (True, False)}
    assert (job.elsewhere, job.silent, job.is_asked) == ((), (), True)


def test_a_rank_of_a_silent_host_is_not_dead_by_an_old_page_of_this_one() -> None:
    bodies = {2: [packed(copy_of(2))]}
    with page(0), others(bodies):
        leave_page(rank=1)
        leave_page(rank=2)
        job = gathered()
    assert conditions(job) == {0: (True, True), 2: (True, False)}
    assert job.elsewhere == (1,)
    assert [(each.host, each.ranks) for each in job.silent] == [("b", (1,))]


def test_of_two_pages_of_a_dead_rank_the_newer_counts() -> None:
    older, newer = ({**copy_of(1, program=name), "vitals": None} for name in ("old", "new"))
    for first, second in ((older, newer), (newer, older)):
        with page(0), others({1: [packed(first)], 2: [packed(second)]}):
            job = gathered()
        assert job.ranks[1].facts["program"] == "new"


def test_a_job_that_was_started_again_has_the_size_of_its_newest_rank() -> None:
    with page(0), others(known()):
        leave_page(rank=2, world_size=5)
        job = gathered()
    assert (job.world_size, job.elsewhere) == (3, ())
    assert [each.rank.rank for each in job.ranks] == [0, 1, 2]


def test_an_answer_that_cannot_be_read_costs_its_own_host_alone() -> None:
    with page(0), others({1: ["?"], 2: [packed(copy_of(2))]}):
        job = gathered()
    assert conditions(job) == {0: (True, True), 2: (True, False)}
    assert (job.elsewhere, job.silent) == ((1,), ())


def test_a_second_rank_is_asked_for_stacks_once_the_first_has_had_its_time() -> None:
    """Both ask the same processes."""
    with page(0), others(known()) as those:
        job = gathered()
        those.bodies = {3: ()}
        those.looks.clear()
        those.looked_s.clear()
        assert stacks_elsewhere(job, [2], 1.2) == {2: "doesn't answer within 1.2 s"}
    assert [each["to"] for each in those.looks] == [2, 3]
    assert those.looked_s[1] - those.looked_s[0] > 1.2


def test_who_asks_another_host_waits_no_longer_than_it_lets_its_ranks_take() -> None:
    with page(0), others(known()) as those:
        told = stacks_elsewhere(gathered(), [2], 1e6)
    assert told == {2: f"doesn't answer within {LONGEST_S:g} s"}
    assert those.looks[-1]["timeout_s"] == LONGEST_S


def test_the_key_for_the_stacks_of_a_rank_asks_that_one_alone() -> None:
    with page(0), others(known()) as those:
        view = LiveView("job a", 1.0)
        view.look()
        for key in "s1\r":
            view.press(key)
    looks = [each for each in those.looks if each.get("all_threads")]
    assert [(each["to"], each["ranks"]) for each in looks] == [(1, [1])]
    assert view.page is not None
    assert "rank 1" in view.page[0]


LEAVES = """
import signal, threading, time
from unisono.control.connection import LOOK
from unisono.control.inquiry import Inquiries
from unisono.control.tree import Seat
from unisono.host import stack_signal
from unisono.host.status_page import StatusPage
known = stack_signal.install()
facts = {"rank": 0, "job": "a", "world_size": 2, "groups": {}}
page = StatusPage.make({**facts, "thread_id": threading.get_native_id(), **known})
told = threading.Event()
inquiries = Inquiries(0, [Seat("a", (0,)), Seat("b", (1,))], lambda *_: told.set() or True)
signal.pthread_sigmask(signal.SIG_BLOCK, [known["signal"]])
request = {"ranks": [0], "timeout_s": 1e6, "all_threads": False, "of": 1, "id": 1}
longest_s, stack_signal.LONGEST_S = stack_signal.LONGEST_S, 0.1
inquiries.handle(LOOK, request)
assert told.wait(20)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [known["signal"]])
signal.pthread_sigmask(signal.SIG_BLOCK, [known["signal"]])
stack_signal.LONGEST_S = longest_s
inquiries.handle(LOOK, request)
while known["signal"] not in signal.sigpending():
    pass
print(time.monotonic())
"""


def test_who_asks_for_stacks_keeps_a_rank_no_longer_than_allowed_nor_from_its_end() -> None:
    done = python("-c", LEAVES)
    end_s = time.monotonic()
    assert (done.returncode, done.stderr) == (0, "")
    assert end_s - float(done.stdout) < LONGEST_S / 2


def test_a_rank_that_answers_for_others_rests_when_it_asks_its_own_process() -> None:
    """As on Python 3.10. Somebody else asks rank 1, so it is looked at again and again."""

    def ask() -> None:
        read, write = os.pipe()
        if not (other := os.fork()):
            os.write(write, json.dumps(stack_signal.install()).encode())
            signal.pause()
        others = {**json.loads(os.read(read, 4096)), "pid": other}
        own = threading.Thread(target=threading.Event().wait, daemon=True)
        own.start()

        def copy(rank: int, facts: Mapping[str, Any], thread: int | None) -> PageCopy:
            known = {**facts, "rank": rank, "made_ns": 1, "at_rest": 1}
            return PageCopy(known, (), Vitals("sleeping", thread or 0, 0.0, 0.0, 0, 0))

        mine = copy(0, {**stack_signal.install(), "pid": os.getpid()}, own.native_id)
        with open(f"/proc/{other}/fd/{others['stacks_fd']}") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            asked = {"ranks": [0, 1], "timeout_s": 0.5, "all_threads": False}
            told = inquiry._stacks([mine, copy(1, others, other)], asked)
        os.kill(other, signal.SIGKILL)
        assert [each["rank"] for each in told if each["stacks"]] == [0]

    assert in_fork(ask) == 0
