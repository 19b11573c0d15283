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
from dataclasses import dataclass
from datetime import timedelta
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
from unisono.control import rendezvous
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is.

    Args:
        folder: what holds the pages of each host.
        fd: of the pipe that a rank waits for.
    """

    folder: Path
    fd: int

    def pages(self, host: str) -> Path:
        return self.folder / host

    def command(self, *words: str) -> str:
        """Run a command on host a."""
        with self.on_host_a():
            done = run(*words)
        assert done.code == 0, done.err
        return done.out

    def told(self) -> dict[str, Any]:
        """Tell what ``unisono top --json`` on host a tells, twice for the sake of its meter."""
        meter = Meter()
        for _ in range(2):
            (job,) = self.reported(meter)
        return dict(job)

    def reported(self, meter: Meter) -> list[dict[str, Any]]:
        with self.on_host_a():
            return list(reports(meter)["jobs"])

    @contextmanager
    def on_host_a(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNISONO_STATUS", str(self.pages("host-a")))
            yield

    def is_held_up(self) -> bool:
        jobs = self.reported(Meter())
        return bool(jobs and jobs[0]["verdict"]["kind"] not in ("none", "unseen"))


def be_on(folder: Path, rank: int) -> None:
    """Let this process be on its host."""
    name = HOSTS[rank]
    os.environ.update(UNISONO_STATUS=str(folder / name), UNISONO_SOCKET_IFNAME="lo")
    os.environ["UNISONO_FAN_OUT"] = "1"
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
def job(folder: Path, late: int, *, with_lock: bool = False) -> Iterator[Place]:
    """Run four ranks; one waits at a pipe, and the others for it."""
    os.mkfifo(folder / "pipe")
    place = Place(folder, os.open(folder / "pipe", os.O_RDWR))
    for host in HOSTS[1:]:
        place.pages(host).mkdir(mode=0o700)

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

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(by_hand, fn, len(HOSTS))
        try:
            until(lambda: running.done() or place.is_held_up(), LIMIT_S)
            yield place
        finally:
            os.write(place.fd, b"!")
            left = running.result()
            os.close(place.fd)
    assert left[THERE] == []
    assert list(place.pages("host-a").glob("*.ask")) == []


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A job that the rank of host b holds up."""
    with job(tmp_path_factory.mktemp("held"), THERE) as place:
        yield place


def test_a_rank_of_another_host_is_named_with_its_line(held: Place) -> None:
    told = held.told()
    (culprit,) = told["culprits"]
    assert (told["verdict"]["kind"], culprit["rank"], culprit["waiters"]) == (
        "late",
        THERE,
        [0, 1, 2],
    )
    assert (Path(culprit["file"]), culprit["line"]) == (Path(__file__), LINE)
    assert (culprit["from"], culprit["function"]) == ("stack", "wait")
    assert [each["host"] for each in told["ranks"]] == list(HOSTS)
    assert (told["elsewhere"], told["silent"], told["is_asked"]) == ([], [], True)
    assert all(each["memory_bytes"] > 1 << 20 for each in told["ranks"])
    assert all(each["cpu_percent"] is not None for each in told["ranks"])


def test_ages_are_those_of_its_own_clock(held: Place) -> None:
    """By the clock of host a it would have left its last call days from now."""
    told = held.told()
    ages = [each["since_s"] for each in told["ranks"]]
    # It left the first barrier before the others came to the second one, give or take its end.
    assert max(ages[:2]) - 1.0 < ages[THERE] < max(ages[:2]) + LIMIT_S
    assert told["culprits"][0]["lost_s"] < 3 * told["up_s"]


def test_where_tells_its_stack(held: Place) -> None:
    waiting, _, late = held.command("where").partition("rank 3:\n")
    assert waiting.startswith("ranks 0-2:\n")
    assert late.splitlines()[-1] == f"  {__file__}:{LINE} in wait"


def test_the_table_has_a_column_for_the_host(held: Place) -> None:
    text = held.command("top", "--once")
    assert "culprit: rank 3 on host-c is " in text
    rows = [line.split()[:2] for line in text.splitlines() if line.split()[1:2] == ["host-c"]]
    assert rows == [["3", "host-c"]]


def test_a_host_that_does_not_answer_is_named(held: Place) -> None:
    """And so is the one that is reached through it."""
    pid = held.told()["ranks"][BETWEEN]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        told, text = held.told(), held.command("top", "--once")
    finally:
        os.kill(pid, signal.SIGCONT)
    silent = [(each["host"], each["ranks"]) for each in told["silent"]]
    assert silent == [("host-b", [BETWEEN]), ("host-c", [THERE])]
    assert told["elsewhere"] == [BETWEEN, THERE]
    assert told["verdict"]["kind"] == "unseen"
    assert "host host-b (rank 2): no answer within 1 s: it can't be reached, or rank 2" in text


def test_any_rank_can_be_asked_and_nonsense_harms_nobody(held: Place) -> None:
    """The second rank of host a is connected to the first alone."""
    request = {"ranks": [], "limit_s": LIMIT_S}
    for path in held.pages("host-a").glob("*.ask"):
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
def test_a_socket_is_closed_to_other_users(held: Place) -> None:
    """By the folder; and by what the kernel says of who connects, where that is open."""
    words = ["-c", AS_NOBODY, str(held.pages("host-a"))]
    refused = python(*words)
    assert (refused.returncode, refused.stdout) == (0, "PermissionError\n" * 2), refused.stderr
    sockets = list(held.pages("host-a").glob("*.ask"))
    assert len(sockets) == 2
    try:
        for path in (held.pages("host-a"), *sockets):
            path.chmod(0o777)
        found = python(*words)
    finally:
        for path in sockets:
            path.chmod(0o600)
        held.pages("host-a").chmod(0o700)
    assert (found.returncode, found.stdout) == (0, "b''\n" * 2), found.stderr


def test_where_the_first_rank_keeps_the_lock_it_is_named_and_the_host_too(tmp_path: Path) -> None:
    """Its own page is here. The other rank answers, but all its ways lead through the first."""
    with job(tmp_path, 0, with_lock=True) as place:
        told = place.told()
    (culprit,) = told["culprits"]
    assert (told["verdict"]["kind"], culprit["rank"]) == ("late", 0)
    assert [each["host"] for each in told["silent"]] == ["host-b", "host-c"]
    for silent in told["silent"]:
        assert "rank 0, through which this host asks, doesn't answer" in silent["why"]


def test_the_first_rank_is_asked_where_another_keeps_the_lock(tmp_path: Path) -> None:
    with job(tmp_path, 1, with_lock=True) as place:
        told = place.told()
    assert [each["rank"] for each in told["culprits"]] == [1]
    assert told["culprits"][0]["waiters"] == [0, BETWEEN, THERE]
    assert (told["silent"], told["elsewhere"]) == ([], [])
