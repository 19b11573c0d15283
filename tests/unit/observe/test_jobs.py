"""Pages of one host as jobs: by job and rank, the newest ones, with what the kernel says."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import Any

import pytest

from tests.support.processes import in_fork
from tests.support.records import begin_in
from tests.support.screens import Ended, run
from unisono.cli import _live
from unisono.cli._jobs import NO_JOB, chosen
from unisono.cli._live import LiveView
from unisono.errors import ArgumentError
from unisono.observe import jobs
from unisono.observe.jobs import Meter, ObservedJob, look
from unisono.observe.report import reports
from unisono.observe.verdict import innermost
from unisono.recording.records import CallLog
from unisono.recording.status_page import (
    CALLED,
    IN_FLIGHT,
    ObservedCall,
    StatusPage,
    encode_call,
    pages,
)
from unisono.topology import Group, pair

pytestmark = [
    pytest.mark.usefixtures("own_pages"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@contextmanager
def page(rank: int, job: str = "job a", **more: Any) -> Iterator[StatusPage]:
    """Have a page of this process."""
    facts = {"rank": rank, "world_size": 3, "job": job, "groups": {}, "model": "threads"}
    made = StatusPage.make({**facts, "thread_id": threading.get_native_id(), **more})
    assert made is not None
    try:
        yield made
    finally:
        made.close()


def begin(of: StatusPage, name: str, number: int, begin_ns: int, state: int = CALLED) -> None:
    lane, file = of.lane(), "" if name == "initialize" else "train.py"
    assert lane is not None
    begin_in(lane, encode_call(name, "all ranks", file, 7), number, 64, begin_ns, state)


def leave_page(**facts: Any) -> None:
    """Have a process make a page and die."""
    known = {"world_size": 3, "job": "job a", "groups": {}, "model": "threads", "thread_id": 1}

    def make() -> None:
        made = StatusPage.make({**known, **facts})
        assert made is not None
        begin(made, "barrier", 1, 5)

    assert in_fork(make) == 0


def test_pages_are_grouped_by_job_and_rank() -> None:
    with page(1) as own, page(0), page(0, "job b", world_size=1):
        begin(own, "all_reduce", 4, 10)
        begin(own, "barrier", 5, 20, IN_FLIGHT)
        first, second = look(Meter())
    assert (first.name, first.world_size, first.elsewhere) == ("job a", 3, (2,))
    assert [each.rank for each in first.ranks] == [0, 1]
    assert (second.name, second.elsewhere) == ("job b", ())
    call, started = first.ranks[1].calls
    assert (call.name, call.number, call.ranks, call.size_bytes) == ("all_reduce", 4, (0, 1, 2), 64)
    assert (call.file, call.line) == ("train.py", 7)
    assert (call.is_blocking, started.is_blocking) == (True, False)


def test_a_dead_rank_of_a_job_that_lives_is_there() -> None:
    with page(0, thread_id=0):  # whose thread has ended, and others go on
        leave_page(rank=1)
        ((alive, dead),) = (job.ranks for job in look(Meter()))
    assert alive.condition in ("running", "sleeping")
    assert (dead.condition, dead.memory_bytes) == ("dead", None)
    assert [call.name for call in dead.calls] == ["barrier"]


def test_a_job_that_was_started_again_with_fewer_ranks_has_these_alone() -> None:
    leave_page(rank=0)
    assert look(Meter()) == []  # the first one has ended
    with page(0, world_size=2), page(1, world_size=2):
        leave_page(rank=2)
        (job,) = look(Meter())
    known = [(each.rank, each.pid, each.calls) for each in job.ranks]
    assert known == [(rank, os.getpid(), ()) for rank in (0, 1)]
    assert (job.world_size, job.elsewhere) == (2, ())


def calls_of(size: int, *groups: Group) -> tuple[ObservedCall, ...]:
    """Have a rank of a large job make a call in each group, one after the other."""
    log = CallLog.of_rank(0, size, "large", model="threads")
    try:
        for group in groups:
            log.begin("barrier", group).end()
        ((seen,),) = (job.ranks for job in look(Meter()))
    finally:
        log.close()
    return seen.calls


def test_groups_of_a_large_job_have_room() -> None:
    """Many groups of many ranks, and a message to each rank."""
    groups = [Group(tuple(range(0, 4096, step)), name=f"every {step}") for step in range(1, 60)]
    groups.append(Group((0, 5, 7), name="odd"))
    messages = [pair(0, rank) for rank in range(1, 200)]
    found = {call.group: call.ranks for call in calls_of(4096, *groups, *messages, *groups)}
    assert found.items() >= {group.name: group.ranks for group in groups}.items()
    assert found["rank 0 to rank 199"] == (0, 199)


def test_groups_whose_names_hold_many_ranks_are_told_apart() -> None:
    """As those on threads and XLA."""
    members = [tuple(range(stop)) for stop in (120, 300)]
    groups = [Group(ranks, name=f"{ranks} {i}") for ranks in members for i in (1, 2)]
    calls = calls_of(300, *groups)
    assert [call.ranks for call in calls] == [group.ranks for group in groups]
    assert len({call.key for call in calls}) == len(groups)


def on_another_host(job: ObservedJob, stacks: str = "its stack") -> ObservedJob:
    """Have a job as --via brings it."""
    there = [
        replace(each, facts={**each.facts, "pid_namespace": 1}, stacks=stacks) for each in job.ranks
    ]
    return replace(job, ranks=tuple(there))


def test_jobs_of_one_name_are_one_unless_a_rank_of_both_lives() -> None:
    with page(0) as own:
        (job,) = look(Meter())
        other = on_another_host(job)
        again = replace(other, ranks=())
        for elsewhere in ([other], [again, other]):
            found = look(Meter(), elsewhere)
            assert [each.ranks[0].stacks for each in found] == [None, "its stack"]
        own.update(rank=2)
        (whole,) = look(Meter(), [other])
    assert [each.rank for each in whole.ranks] == [0, 2]


def test_what_this_host_has_read_of_its_ranks_comes_first() -> None:
    """One of the commands may lead back here, and its clock be a little off."""
    with page(0):
        (job,) = look(Meter())
        (seen,) = job.ranks
        later = replace(seen, made_ns=seen.made_ns + 1, stacks="its stack")
        back = replace(job, ranks=(later,))
        (found,) = look(Meter(), [back])
    assert [each.stacks for each in found.ranks] == [None]


def test_who_ends_in_good_order_at_this_moment_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page was there, and its process isn't any more: it has taken the page away."""
    with page(0):
        leave_page(rank=1)
        found = pages()
        monkeypatch.setattr(jobs, "pages", lambda: found)
        next(reader for reader in found if reader.facts["rank"] == 1).path.unlink()
        (job,) = look(Meter())
    assert [each.rank for each in job.ranks] == [0]


def test_the_live_view_of_one_job_stays_when_that_ends() -> None:
    view = LiveView("job a", 1.0)
    with page(0, "job b", world_size=1):
        with page(0):
            view.look()
            assert [job.name for job in view.jobs] == ["job a"]
        view.look()
        assert (view.jobs, view.report) == ([], None)


def pressed(view: LiveView, keys: str) -> None:
    for key in keys:
        view.press(key)


@pytest.mark.parametrize("typed", ["", "0"])
@pytest.mark.parametrize("other", [None, "job b"])
def test_a_job_that_ends_while_the_live_view_asks_for_a_rank_has_ended(
    typed: str, other: str | None
) -> None:
    view = LiveView(None, 1.0)
    with ExitStack() as stack:
        with page(0):
            view.look()
            pressed(view, "s")
        if other is not None:
            stack.enter_context(page(0, other))
        view.look()
        pressed(view, f"{typed}\r")
    assert view.page == ["job job a has ended"]


def test_the_live_view_stays_with_a_job_when_others_begin_and_end() -> None:
    view = LiveView(None, 1.0)
    with page(0, "job b"):
        view.look()
        for _ in range(2):
            with page(0, "job a"):
                view.look()
                assert view.report is not None
                assert (view.index, view.report["job"]) == (1, "job b")
            view.look()
            assert view.index == 0


def test_the_live_view_ends_several_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(_live, "send", lambda job, number: sent.append((job.name, number)))
    view = LiveView(None, 1.0)
    with page(0, "job a"), page(0, "job b"):
        view.look()
        pressed(view, "ky\rnky\r")
        assert view._look_at(time.monotonic() + 60) < time.monotonic() + 10
        monkeypatch.setattr(time, "monotonic", lambda: math.inf)
        view.look()
    both = ["job a", "job b"]
    assert sent == [(name, number) for number in (SIGTERM, SIGKILL) for name in both]
    assert view.ending == []


def test_a_process_with_several_ranks_is_sent_a_signal_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    with page(0), page(1), page(2):
        (job,) = look(Meter())
        monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
        jobs.send(job, SIGTERM)
    assert sent == [(os.getpid(), SIGTERM), (os.getpid(), SIGCONT)]


def test_pages_of_a_rank_are_one_and_two_threads_with_their_own_are_in_two_calls() -> None:
    with page(0) as first, page(0, model="torch.distributed") as second:
        begin(first, "barrier", 1, 10)
        thread = threading.Thread(target=begin, args=(second, "all_reduce", 1, 20))
        thread.start()
        thread.join()
        ((seen,),) = (job.ranks for job in look(Meter()))
    for calls in (seen.calls, innermost(seen.calls)):
        assert [call.name for call in calls] == ["barrier", "all_reduce"]


def test_how_busy_a_rank_is_comes_with_the_second_look() -> None:
    meter = Meter()
    with page(0):
        ((first,),) = (job.ranks for job in look(meter))
        sum(range(2_000_000))
        ((second,),) = (job.ranks for job in look(meter))
    assert first.cpu_percent is None
    assert second.cpu_percent is not None
    assert second.cpu_percent > 0
    assert (second.memory_bytes or 0) > 1 << 20


def test_a_job_is_chosen_by_name_its_beginning_a_process_or_a_program() -> None:
    facts = {"program": "my/train.py --lr 1", "cwd": "/home/me"}
    with page(0, "abc-1", **facts), page(0, "abc-2", program="train.py"), page(0, "abd", **facts):
        jobs = look(Meter())
    for program in ("train.py", "my/train.py", "my/train.py --lr 1"):
        assert chosen(jobs[:1], program).name == "abc-1"
    assert chosen(jobs[:2], "my/train.py").name == "abc-1"
    assert chosen(jobs, "abc-1").name == "abc-1"
    assert chosen(jobs, "abd").name == "abd"
    assert chosen(jobs[2:], "a").name == "abd"
    assert chosen(jobs[2:], str(os.getpid())).name == "abd"
    for wrong in ("abc", "x", "", str(os.getpid()), "train.py", None):
        with pytest.raises(ArgumentError, match=r"(?s)job abc-1: .*job abc-2: train\.py, 3 ranks"):
            chosen(jobs, wrong)
    with pytest.raises(ArgumentError, match=r"called 'my/train\.py' run, name.*\n.*in /home/me\n"):
        chosen(jobs, "my/train.py")


def test_the_report_is_plain_data() -> None:
    with page(0, backend="gloo", program="train.py") as own:
        begin(own, "all_reduce", 1, 10)
        report = reports(look(Meter()))
    (job,) = report["jobs"]
    assert (job["job"], job["program"], job["backend"]) == ("job a", "train.py", "gloo")
    assert job["verdict"]["kind"] == "unseen"
    assert job["elsewhere"] == [1, 2]
    (rank,) = job["ranks"]
    assert (rank["pid"], rank["is_in_call"]) == (os.getpid(), True)
    assert rank["call"]["name"] == "all_reduce"


def test_a_call_without_a_line_of_the_users_has_none() -> None:
    with page(0) as own:
        begin(own, "all_reduce", 1, 10)
        begin(own, "initialize", 2, 20)
        assert re.search(r" initialize 64 B +-\n", run("top", "--once").out)


def test_without_a_job_one_line_says_so() -> None:
    for words in (("top",), ("top", "--once"), ("top", "--check"), ("where",)):
        assert run(*words) == Ended(0, f"{NO_JOB}\n", "")
    assert run("top", "--json").out.count('"jobs": []') == 1


def test_an_unknown_job_is_wrong_use() -> None:
    for words in (("top", "--once", "--job", "nosuch"), ("where", "nosuch")):
        done = run(*words)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("error: no job, program or rank's process is called 'nosuch'")


def test_a_job_that_has_not_begun_does_not_hang() -> None:
    shown = run("top", "--check", "--job", "nosuch")
    assert shown == Ended(0, "no job called 'nosuch' was found\n", "")
    failed = run("top", "--check", "--via", "false")
    assert (failed.code, failed.out) == (1, "")
    assert run("top", "--check", "--json").code == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_sees_nothing(own_pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the folder of that user, nor in this one's, where its name is known."""

    def look_as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        assert run("top", "--once") == Ended(0, f"{NO_JOB}\n", "")

    for folder in (None, own_pages):
        if folder is None:
            monkeypatch.delenv("UNISONO_STATUS")
        else:
            monkeypatch.setenv("UNISONO_STATUS", str(folder))
        with page(0):
            assert "job a" in run("top", "--once").out  # and loads all that nobody may not read
            assert in_fork(look_as_nobody) == 0
