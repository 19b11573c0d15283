"""A job of two hosts whose network fails: it goes on where that passes, else it ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.measures import Table, says_little
from tests.support.requirements import require
from tests.support.virtual_hosts import Hosts, Wire, virtual_wire, why_no_wire

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
TIMEOUT_S = 5.0
LATER_S = 4.0  # an interpreter ends within that, too
WHOLE_S = 25.0
STEPS = 4
JOB = """
import os, sys, time, torch, unisono

unisono.initialize("gloo", timeout=float(sys.argv[1]))
rank, step = unisono.get_rank(), 0
while not unisono.broadcast(os.path.exists(sys.argv[2]), src=0):
    total = unisono.all_reduce(torch.full((50_000,), rank + 1.0))  # too long for a round
    assert total.eq(3).all(), total
    assert unisono.all_gather((rank, step)) == [(0, step), (1, step)]
    assert unisono.broadcast("x" * 10_000, src=step % 2) == "x" * 10_000
    print("STEP", time.monotonic(), flush=True)
    step += 1
unisono.finalize()
print("DONE", flush=True)
"""
LEVELS = """
import torch, unisono
from unisono.context import communicator

unisono.initialize("gloo", timeout=60)
rank = unisono.get_rank()
for count in (50_000, 1_200_000):  # by the first rank of each host, and in slices
    total = unisono.all_reduce(torch.full((count,), rank + 1.0))
    assert total.eq(10).all(), total
    mean = unisono.all_reduce(torch.full((count,), rank + 1.0), "AVERAGE")
    assert mean.eq(2.5).all(), mean
    assert unisono.all_gather(torch.full((count,), rank)).view(4, -1).sum(0).eq(6).all()
print(type(communicator().control.memory(None)).__name__, flush=True)
while True:
    unisono.all_reduce_(torch.ones(50_000))
"""
Job = list["subprocess.Popen[str]"]


def step_of(process: subprocess.Popen[str]) -> float:
    """Give when the next step was done, by the clock that all processes share."""
    assert process.stdout is not None
    word, _, when = process.stdout.readline().partition(" ")
    assert word == "STEP"
    return float(when)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Wire]]:
    require("netns", why_no_wire())
    with virtual_wire(Path(tmp_path_factory.mktemp("wire"))) as made:
        yield made


@pytest.fixture
def wire(place: tuple[Hosts, Wire]) -> Iterator[Wire]:
    """The wire, whole at first."""
    yield place[1]
    place[1].mend()


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """The file that ends a job once it is there."""
    return tmp_path / "end"


@pytest.fixture
def job(place: tuple[Hosts, Wire], wire: Wire, end: Path) -> Iterator[Job]:
    """A rank on each host, in the midst of its steps, whose timeout is short."""
    with running(place[0], end, TIMEOUT_S) as processes:
        yield processes


@contextmanager
def running(hosts: Hosts, end: Path, timeout_s: float) -> Iterator[Job]:
    with started(hosts, str(end), timeout_s) as processes:
        for process in processes:
            assert step_of(process) > 0
        yield processes


@contextmanager
def started(
    hosts: Hosts, end: str, timeout_s: float, program: str = JOB, local_size: int = 1
) -> Iterator[Job]:
    processes: Job = []
    for rank in range(2 * local_size):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(2 * local_size),
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": "29500",  # of a namespace that nobody else uses
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        words = [sys.executable, "-c", program, str(timeout_s), end]
        processes.append(
            subprocess.Popen(
                hosts.on(rank // local_size, words),
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def last_step(job: Job, begin: float, count: int) -> float:
    """Give when so many steps were done after a time; what a rank said before it is left out."""
    done = 0.0
    while done < begin:
        done = step_of(job[0])
    for _ in range(count - 1):
        done = step_of(job[0])
    return done


def test_a_link_that_is_bad_for_a_while_only_costs_time(
    place: tuple[Hosts, Wire], wire: Wire, end: Path, table: Table
) -> None:
    said = "(no error)"
    with running(place[0], end, 60.0) as job:
        start, wire.loss = time.monotonic(), 0.05
        seconds = last_step(job, start, STEPS) - start
        assert wire.lost > 0
        table.add(f"two hosts: 5 % loss, {STEPS} steps", seconds, WHOLE_S, said)
        wire.mend()
        start, wire.delay_s = time.monotonic(), 0.2
        seconds = last_step(job, start, STEPS) - start
        assert seconds > 2 * 0.2
        table.add(f"two hosts: 200 ms delay, {STEPS} steps", seconds, WHOLE_S, said)
        wire.mend()
        cut, wire.is_cut = time.monotonic(), True
        threading.Event().wait(1.5)  # how long the link is down
        mended, wire.is_cut = time.monotonic(), False
        done = last_step(job, cut + 0.5, 1)
        assert done >= mended
        table.add("two hosts: a link comes back, to the next step", done - mended, WHOLE_S, said)
        end.touch()
        for process in job:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            assert out.endswith("DONE\n")


def test_a_link_that_stays_down_is_an_error_at_the_deadline(
    job: Job, wire: Wire, table: Table
) -> None:
    wire.is_cut = True
    start = time.monotonic()
    errors = [process.communicate(timeout=60)[1] for process in job]
    seconds = time.monotonic() - start
    for error in errors:
        assert "CollectiveTimeoutError: rank" in error
        says_little(error.rpartition("CollectiveTimeoutError: ")[2], None)
    named = next(line for line in errors[0].splitlines() if "rank 1 never came" in line)
    table.add("two hosts: the link stays down, timeout 5 s", seconds, TIMEOUT_S + LATER_S, named)


def test_a_host_that_vanishes_is_an_error_at_the_deadline(
    job: Job, wire: Wire, table: Table
) -> None:
    """Half-open: the other side is gone, and nothing says so."""
    wire.is_cut = True
    os.killpg(job[1].pid, signal.SIGKILL)
    start = time.monotonic()
    error = job[0].communicate(timeout=60)[1]
    seconds = time.monotonic() - start
    assert "CollectiveTimeoutError: rank 1 never came" in error
    named = next(line for line in error.splitlines() if "rank 1 never came" in line)
    table.add("two hosts: one vanishes, timeout 5 s", seconds, TIMEOUT_S + LATER_S, named)


def test_a_host_that_cannot_be_reached_is_named(
    place: tuple[Hosts, Wire], wire: Wire, end: Path
) -> None:
    """As behind a firewall that drops packets: no answer, and no refusal either."""
    wire.is_cut = True
    start = time.monotonic()
    with started(place[0], str(end), 3.0) as job:
        errors = [process.communicate(timeout=60)[1] for process in job]
    assert time.monotonic() - start < 30
    where = f"{place[0].addresses[0]}:29500"
    assert f"rank 1 of 2 did not come to {where} within 3 s" in errors[0].splitlines()[-1]
    assert f"rank 1 of 2 can't reach the rendezvous at {where}" in errors[1].splitlines()[-1]


def test_hosts_of_two_ranks_sum_in_two_levels(
    place: tuple[Hosts, Wire], wire: Wire, table: Table
) -> None:
    """And all learn who died on the other host."""
    with started(place[0], "", 60.0, LEVELS, 2) as job:
        for process in job:
            assert process.stdout is not None
            word = process.stdout.readline()
            assert word == "TwoLevels\n", process.communicate()[1]
        os.killpg(job[3].pid, signal.SIGKILL)
        start = time.monotonic()
        errors = [process.communicate(timeout=100)[1] for process in job[:3]]
        seconds = time.monotonic() - start
    for error in errors:
        assert "PeerFailedError" in error
        assert "rank 3" in error.rpartition("PeerFailedError: ")[2], error
    named = errors[0].splitlines()[-1]
    table.add("two hosts of two: a rank dies", seconds, WHOLE_S, named)


NODE = """
import sys, unisono

def work(local_rank):
    return unisono.all_gather(unisono.get_rank())

print(unisono.spawn("gloo", work, nproc_per_node=1, nnodes=2, node_rank=int(sys.argv[1]),
                    master_addr=sys.argv[2], master_port=23456, timeout=30))
"""


def test_a_host_that_calls_itself_by_its_loopback_is_met(place: tuple[Hosts, Wire]) -> None:
    hosts, _ = place
    file, name = hosts.files[0], hosts.names[0]
    before = file.read_text()
    # As the installers of Debian and Ubuntu write it.
    file.write_text(before.replace(f"{hosts.addresses[0]} {name}", f"127.0.1.1 {name}"))
    processes = [
        subprocess.Popen(
            hosts.on(node, [sys.executable, "-c", NODE, str(node), name]),
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=WHOLE_S * 4) for process in processes]
    finally:
        file.write_text(before)
        for process in processes:
            process.kill()
            process.wait()
    assert [out for out, _ in said] == ["[[0, 1]]\n"] * 2, said
