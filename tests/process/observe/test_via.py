"""``unisono top --via`` on a job of three hosts: of one machine, with folders of their own.

Host a has ranks 0 and 1, host b rank 2, and host c rank 3. Real hosts are in tests/launch.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import by_hand, leave, prepare
from tests.support.processes import until
from tests.support.screens import Ended, run
from unisono.observe import remote
from unisono.observe.jobs import Meter, look
from unisono.observe.report import reports
from unisono.observe.verdict import Rank
from unisono.recording.status_page import ObservedCall

LIMIT_S = 30.0
DAY_NS = 86_400 * 10**9
HOSTS = ("host-a", "host-a", "host-b", "host-c")
THERE = 3
(LINE,) = (
    n
    for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# here")
)


def is_held_up() -> bool:
    """Return whether ranks of this host have waited at the second barrier for those of others."""
    jobs = reports(look(Meter()))["jobs"]
    numbers = {each["call"] and each["call"]["number"] for job in jobs for each in job["ranks"]}
    return numbers == {2} and jobs[0]["verdict"]["kind"] == "unseen"


def join(folder: Path, rank: int) -> None:
    """Be on a host, and make the default group, for as long as all tests of a job take."""
    name = HOSTS[rank]
    os.environ["UNISONO_STATUS"] = str(folder / name)
    vars(socket)["gethostname"] = lambda: name
    store = FileStore(str(folder / "store"), len(HOSTS))
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(HOSTS), timeout=limit)


def wait(fd: int) -> None:
    os.read(fd, 1)  # here


@contextmanager
def job(folder: Path) -> Iterator[None]:
    """Run four ranks, of which the last waits at a pipe and the others for it; be on host a."""
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDWR)
    for host in HOSTS[1:]:
        (folder / host).mkdir(mode=0o700)

    def fn(rank: int) -> None:
        join(folder, rank)
        unisono.barrier()
        if rank == THERE:
            wait(os.open(folder / "pipe", os.O_RDONLY))
        unisono.barrier()
        leave()
        unisono.finalize()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as executor:
        patch.setenv("UNISONO_STATUS", str(folder / HOSTS[0]))
        running = executor.submit(by_hand, fn, len(HOSTS))
        try:
            until(lambda: running.done() or is_held_up(), LIMIT_S)
            yield
        finally:
            os.write(pipe, b"!")
            running.result()
            os.close(pipe)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What leads from host a to the others, while the rank of host c holds the job up."""
    prepare()
    folder = tmp_path_factory.mktemp("held")
    with job(folder):
        yield [way(folder / host) for host in HOSTS[2:]]


def way(pages: Path) -> str:
    return shlex.join(["env", f"UNISONO_STATUS={pages}", sys.executable, "-m"])


def via(*commands: str) -> list[str]:
    return [word for command in commands for word in ("--via", command)]


def found(done: Ended) -> dict[str, Any]:
    (job,) = json.loads(done.out)["jobs"]
    return dict(job)


def test_without_a_way_there_the_other_hosts_are_not_seen(ways: list[str]) -> None:
    done = run("top", "--once", "--json")
    job = found(done)
    assert (done.code, job["verdict"]["kind"], job["elsewhere"]) == (0, "unseen", [2, THERE])
    assert (
        "ranks 2, 3: no page was found: on another host (name a command" in run("top", "--once").out
    )


def test_a_rank_of_another_host_is_named_with_its_line(ways: list[str]) -> None:
    done = run("top", "--json", *via(*ways))
    assert (done.code, done.err) == (0, "")
    job = found(done)
    (culprit,) = job["culprits"]
    kind, rank, waiters = job["verdict"]["kind"], culprit["rank"], culprit["waiters"]
    assert (kind, rank, waiters) == ("late", THERE, [0, 1, 2])
    assert (Path(culprit["file"]), culprit["line"]) == (Path(__file__), LINE)
    assert (culprit["from"], culprit["function"]) == ("stack", "wait")
    assert [each["host"] for each in job["ranks"]] == list(HOSTS)
    assert job["elsewhere"] == []
    assert all(each["memory_bytes"] > 1 << 20 for each in job["ranks"])
    assert all(each["cpu_percent"] is not None for each in job["ranks"])


def test_where_tells_its_stack_and_the_table_its_host(ways: list[str]) -> None:
    waiting, _, late = run("where", *via(*ways)).out.partition("rank 3:\n")
    assert waiting.startswith("ranks 0-2:\n")
    assert late.splitlines()[-1] == f"  {__file__}:{LINE} in wait"
    text = run("top", *via(*ways)).out
    assert "culprit: rank 3 on host-c is " in text
    rows = [line.split()[:2] for line in text.splitlines() if line.split()[1:2] == ["host-c"]]
    assert rows == [["3", "host-c"]]


def test_one_command_may_lead_to_several_hosts_and_mix_their_lines(ways: list[str]) -> None:
    """As srun does, whose tasks may also be several on a host, and be numbered."""
    words = " & ".join([*(f'{each} "$@"' for each in ways), f'{ways[1]} "$@"', "wait"])
    done = run("top", "--json", *via(f"sh -c {shlex.quote(f'({words}) | sort -R | cat -n')} sh"))
    assert (done.code, done.err) == (0, "")
    assert [each["rank"] for each in found(done)["culprits"]] == [THERE]


def test_what_a_failing_command_has_told_is_shown_and_its_failure_too(ways: list[str]) -> None:
    half = f"""sh -c '{ways[1]} "$@"; echo "node7: no such node" >&2; exit 3' sh"""
    done = run("top", "--json", *via(ways[0], half))
    assert (done.code, found(done)["elsewhere"]) == (1, [])
    assert done.err == f"error: --via {half!r}: exit code 3: node7: no such node\n"


NOT_PLAIN, OF_OTHERS = (
    base64.b64encode(zlib.compress(text)).decode() for text in (b"[]", b'{"version": "9.8"}')
)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'exit 5'", "exit code 5"),
        ("sh -c 'unisono-is-not-here'", "exit code 127: .* not found; if unisono isn't on"),
        ("/nosuch/ssh node2", "it cannot be run: .*No such file"),
        ("sh -c 'kill -9 $$'", "exit code -9"),
        ("true", r"its output is not that of unisono top: ''"),
        ("echo {}", r"its output is not that of unisono top: '\{\} unisono top --packed'"),
        ("sh -c 'echo unisono-top a-1 1/2 AAAA'", "a part of its answer is missing"),
        ("sh -c 'echo unisono-top a-1 1/1 AAAA'", r"its answer cannot be read \(.*same version"),
        (f"sh -c 'echo unisono-top a-1 1/1 {NOT_PLAIN}'", "its answer cannot be read"),
        (
            f"sh -c 'echo unisono-top a-1 1/1 {OF_OTHERS}'",
            rf"\(unisono is 9\.8 there and {unisono.__version__} here\): install the same version",
        ),
    ],
)
def test_a_command_that_fails_is_an_error_beside_the_view(
    command: str, why: str, own_pages: Path
) -> None:
    done = run("top", "--json", *via(command))
    assert (done.code, json.loads(done.out)["jobs"]) == (1, [])
    assert done.err.startswith(f"error: --via {command!r}: ")
    assert re.search(why, done.err)


@pytest.mark.parametrize("command", ["", " ", "'"])
def test_what_is_no_command_is_wrong_use(command: str, own_pages: Path) -> None:
    assert run("top", *via(command)).code == 2


def test_a_command_that_does_not_end_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, own_pages: Path, tmp_path: Path
) -> None:
    """One of them ignores SIGTERM, and keeps the output open."""
    monkeypatch.setattr(remote, "_LIMIT_S", 1.0)
    monkeypatch.setattr(remote, "_END_S", 0.2)
    program = f"(trap '' TERM; while :; do sleep 0.1; done) & wait # {tmp_path}"

    def running() -> list[Any]:
        lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
        return [line for line in lines if program in line]

    with ThreadPoolExecutor(1) as executor:
        ended = executor.submit(remote.jobs_via, [shlex.join(["sh", "-c", program])], "")
        until(lambda: len(running()) == 2, LIMIT_S)
        jobs, (why,) = ended.result()
    assert (jobs, why.endswith("it did not end within 1 s"), running()) == ([], True, [])


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_command_of_another_user_is_left(
    monkeypatch: pytest.MonkeyPatch, own_pages: Path
) -> None:
    """As one that was begun by sudo."""

    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(remote, "_LIMIT_S", 0.2)
    monkeypatch.setattr(remote, "_END_S", 0.2)
    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    monkeypatch.setattr(psutil.Process, "kill", refuse)
    jobs, (why,) = remote.jobs_via(["sh -c 'exec sleep 61.7'"], "")
    children = psutil.Process().children()
    (left,) = [each for each in children if each.cmdline() == ["sleep", "61.7"]]
    left.send_signal(signal.SIGKILL)
    left.wait(LIMIT_S)
    gc.collect()  # of the Popen, which warns that its process was left
    assert (jobs, why.endswith("it did not end within 0.2 s")) == ([], True)


@pytest.mark.parametrize("skew_ns", [0, 7 * DAY_NS, -7 * DAY_NS])
def test_ages_are_those_of_the_clock_there_whatever_the_time_of_day(
    skew_ns: int, own_pages: Path
) -> None:
    """Neither clock is this host's; a moment outside of the command's run can't be right."""
    call = ObservedCall("barrier", "gloo", "all ranks", (0, 1), 1, "a.py", 1, 3 * DAY_NS)
    rank = Rank(0, 7, "sleeping", (call,), DAY_NS, {"world_size": 2}, stacks="why not")
    plain = {
        "unix_ns": time.time_ns() + skew_ns,
        "monotonic_ns": 4 * DAY_NS,
        "jobs": [["a", 4 * DAY_NS, [asdict(rank)]]],
    }
    (job,) = remote._decoded_jobs(plain, time.time_ns() - 10**9)
    (seen,) = job.ranks
    assert job.at_ns - seen.made_ns == 3 * DAY_NS
    assert job.at_ns - seen.calls[0].begin_ns == DAY_NS
    assert (seen.calls[0].end_ns, seen.calls[0].ranks) == (0, (0, 1))
    assert 0 <= time.monotonic_ns() - job.at_ns < 60 * 10**9
    assert (seen.stacks, job.elsewhere) == ("why not", (1,))
