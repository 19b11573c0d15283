"""``unisono top`` on a job of three hosts: of one machine, with folders and clocks of their own.

Host a has ranks 0 and 1, host b rank 2, and host c rank 3, whose clock is days ahead. All ways to c
lead through b. Real hosts are in tests/launch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import by_hand, leave, prepare
from tests.support.processes import python, until
from tests.support.screens import run
from unisono import recording
from unisono.control import rendezvous, tree
from unisono.host.status_socket import connected
from unisono.observe.jobs import Meter
from unisono.observe.report import reports

LIMIT_S = 30.0
DAYS_NS = 10**15
HOSTS = ("host-a", "host-a", "host-b", "host-c")
BETWEEN, THERE = 2, 3
(LINE,) = (
    n
    for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# here")
)


def command(*words: str) -> str:
    done = run(*words)
    assert done.code == 0, done.err
    return done.out


def told() -> dict[str, Any]:
    """Tell what ``unisono top --json`` tells, twice for the sake of its meter."""
    meter = Meter()
    for _ in range(2):
        (job,) = reports(meter)["jobs"]
    return dict(job)


def is_held_up() -> bool:
    jobs = reports(Meter())["jobs"]
    return bool(jobs and jobs[0]["verdict"]["kind"] not in ("none", "unseen"))


def be_on(folder: Path, rank: int) -> None:
    """Let this process be on its host."""
    name = HOSTS[rank]
    os.environ.update(UNISONO_STATUS=str(folder / name), UNISONO_SOCKET_IFNAME="lo")
    vars(rendezvous)["links"] = partial(tree.links, fan_out=1)
    vars(rendezvous)["host_of_this_process"] = lambda: name
    vars(socket)["gethostname"] = lambda: name
    if rank == THERE:
        clock = time.monotonic_ns
        vars(time)["monotonic_ns"] = lambda: clock() + DAYS_NS
        vars(recording)["_now"] = time.monotonic_ns  # which it may have looked up before the fork


def join(folder: Path, rank: int) -> None:
    """Make the default group, for as long as all tests of a job take."""
    store = FileStore(str(folder / "store"), len(HOSTS))
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(HOSTS), timeout=limit)


def wait(fd: int) -> None:
    os.read(fd, 1)  # here


def keep(fd: int) -> None:
    """Wait with Python's lock; a signal that asks for a stack doesn't end it."""
    ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)


@contextmanager
def job(folder: Path, late: int, *, with_lock: bool = False) -> Iterator[Path]:
    """Run four ranks, of which one waits at a pipe and the others for it; be on host a."""
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDWR)
    for host in HOSTS[1:]:
        (folder / host).mkdir(mode=0o700)

    def fn(rank: int) -> list[str]:
        be_on(folder, rank)
        join(folder, rank)
        unisono.barrier()
        if rank == late:
            fd = os.open(folder / "pipe", os.O_RDONLY)
            keep(fd) if with_lock else wait(fd)
            os.close(fd)
        unisono.barrier()
        leave()
        unisono.finalize()
        return [each.name for each in (folder / HOSTS[rank]).iterdir() if each.suffix == ".ask"]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as executor:
        patch.setenv("UNISONO_STATUS", str(folder / HOSTS[0]))
        running = executor.submit(by_hand, fn, len(HOSTS))
        try:
            until(lambda: running.done() or is_held_up(), LIMIT_S)
            yield folder
        finally:
            os.write(pipe, b"!")
            left = running.result()
            os.close(pipe)
    assert left[THERE] == []
    assert list((folder / HOSTS[0]).glob("*.ask")) == []


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The pages on host a of a job that the rank of host c holds up."""
    with job(tmp_path_factory.mktemp("held"), THERE) as folder:
        yield folder / HOSTS[0]


def test_a_rank_of_another_host_is_named_with_its_line(held: Path) -> None:
    job = told()
    (culprit,) = job["culprits"]
    assert (job["verdict"]["kind"], culprit["rank"], culprit["waiters"]) == (
        "late",
        THERE,
        [0, 1, 2],
    )
    assert (Path(culprit["file"]), culprit["line"]) == (Path(__file__), LINE)
    assert (culprit["from"], culprit["function"]) == ("stack", "wait")
    assert [each["host"] for each in job["ranks"]] == list(HOSTS)
    assert (job["elsewhere"], job["silent"], job["is_asked"]) == ([], [], True)
    assert all(each["memory_bytes"] > 1 << 20 for each in job["ranks"])
    assert all(each["cpu_percent"] is not None for each in job["ranks"])


def test_ages_are_those_of_its_own_clock(held: Path) -> None:
    """By the clock of host a it would have left its last call days from now."""
    job = told()
    ages = [each["since_s"] for each in job["ranks"]]
    # It left the first barrier before the others came to the second one, give or take its end.
    assert max(ages[:2]) - 1.0 < ages[THERE] < max(ages[:2]) + LIMIT_S
    assert job["culprits"][0]["lost_s"] < 3 * job["up_s"]


def test_where_tells_its_stack_and_the_table_its_host(held: Path) -> None:
    waiting, _, late = command("where").partition("rank 3:\n")
    assert waiting.startswith("ranks 0-2:\n")
    assert late.splitlines()[-1] == f"  {__file__}:{LINE} in wait"
    text = command("top", "--once")
    assert "culprit: rank 3 on host-c is " in text
    rows = [line.split()[:2] for line in text.splitlines() if line.split()[1:2] == ["host-c"]]
    assert rows == [["3", "host-c"]]


def test_a_host_that_does_not_answer_is_named(held: Path) -> None:
    """And so is the one that is reached through it."""
    pid = told()["ranks"][BETWEEN]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        job, text = told(), command("top", "--once")
    finally:
        os.kill(pid, signal.SIGCONT)
    silent = [(each["host"], each["ranks"]) for each in job["silent"]]
    assert silent == [("host-b", [BETWEEN]), ("host-c", [THERE])]
    assert job["elsewhere"] == [BETWEEN, THERE]
    assert job["verdict"]["kind"] == "unseen"
    assert "host host-b (rank 2): no answer within 1 s: it can't be reached, or rank 2" in text


def test_any_rank_can_be_asked_and_nonsense_harms_nobody(held: Path) -> None:
    """The second rank of host a is connected to the first alone."""
    request = {"ranks": [], "limit_s": LIMIT_S}
    for path in held.glob("*.ask"):
        assert [*answers(path, b"\xff\n"), *answers(path, b"{}\n")] == []
        *told, last = answers(path, json.dumps(request).encode() + b"\n")
        assert sorted(each["place"] for each in told) == [BETWEEN, THERE]
        assert last == {"silent": []}


def answers(path: Path, request: bytes) -> list[dict[str, Any]]:
    """Ask a rank, and read what it says after its greeting."""
    sock = connected(path, LIMIT_S)
    assert sock is not None
    with sock, sock.makefile("rb") as lines:
        assert "place" in json.loads(lines.readline())
        sock.sendall(request)
        return [json.loads(line) for line in lines]


AS_NOBODY = """
import os, pathlib, socket, sys
folder = pathlib.Path(sys.argv[1])
paths = sorted(folder.glob("*.ask"))
fd = os.open(folder, os.O_PATH)  # as nobody may not come so far
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for path in paths:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(f"/proc/self/fd/{fd}/{path.name}")
            print(sock.recv(100))
        except OSError as error:
            print(type(error).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_socket_is_closed_to_other_users(held: Path) -> None:
    """By the folder; and by what the kernel says of who connects, where that is open."""
    words = ["-c", AS_NOBODY, str(held)]
    refused = python(*words)
    assert (refused.returncode, refused.stdout) == (0, "PermissionError\n" * 2), refused.stderr
    sockets = list(held.glob("*.ask"))
    assert len(sockets) == 2
    try:
        for path in (held, *sockets):
            path.chmod(0o777)
        found = python(*words)
    finally:
        for path in sockets:
            path.chmod(0o600)
        held.chmod(0o700)
    assert (found.returncode, found.stdout) == (0, "b''\n" * 2), found.stderr


def test_where_the_first_rank_keeps_the_lock_it_is_named_and_the_host_too(tmp_path: Path) -> None:
    """Its own page is here. The other rank answers, but all its ways lead through the first."""
    with job(tmp_path, 0, with_lock=True):
        found = told()
    (culprit,) = found["culprits"]
    assert (found["verdict"]["kind"], culprit["rank"]) == ("late", 0)
    assert [each["host"] for each in found["silent"]] == ["host-b", "host-c"]
    for silent in found["silent"]:
        assert "rank 0, through which this host asks, doesn't answer" in silent["why"]


def test_the_first_rank_is_asked_where_another_keeps_the_lock(tmp_path: Path) -> None:
    with job(tmp_path, 1, with_lock=True):
        found = told()
    assert [each["rank"] for each in found["culprits"]] == [1]
    assert found["culprits"][0]["waiters"] == [0, BETWEEN, THERE]
    assert (found["silent"], found["elsewhere"]) == ([], [])
