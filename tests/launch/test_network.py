"""A job of two hosts whose network fails: it goes on where that passes, else it ends in time."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.launch.conftest import known, on_both, on_hosts
from tests.support.command import Started
from tests.support.measures import Table, says_little
from tests.support.processes import until
from tests.support.requirements import require
from tests.support.virtual_hosts import Hosts, Wire, ip, virtual_wire, why_no_wire
from unisono.control import addresses

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
print("STEP", type(communicator().control.memory(None)).__name__, flush=True)
while True:
    unisono.all_reduce_(torch.ones(50_000))
"""
Jobs = list[Started]
Run = Callable[..., AbstractContextManager[Jobs]]


def steps(job: Started) -> list[float]:
    """Give when steps were done, by the clock that all processes share."""
    return [float(when) for when in re.findall(r"^STEP (.*)\n", job.out(), re.MULTILINE)]


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
def run(place: tuple[Hosts, Wire], tmp_path: Path) -> Run:
    """Run ranks of a program, half of them on each host, once they have done something.

    The file "end" ends a job once it is there.
    """

    @contextmanager
    def run(timeout_s: float, program: str = JOB, n: int = 2, n_ready: int = 1) -> Iterator[Jobs]:
        words = [[sys.executable, "-c", program, str(timeout_s), str(tmp_path / "end")]] * n
        where = {
            "WORLD_SIZE": str(n),
            "MASTER_ADDR": place[0].addresses[0],
            "MASTER_PORT": "29500",  # of a namespace that nobody else uses
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        ranks = [{**where, "RANK": str(rank)} for rank in range(n)]
        with on_hosts(place[0], words, *ranks) as jobs:
            for job in jobs:
                job.wait_for("STEP", n_ready)
            yield jobs

    return run


def last_step(jobs: Jobs, begin: float, count: int) -> float:
    """Give when so many steps were done after a time."""
    later = until(lambda: [done for done in steps(jobs[0]) if done >= begin][count - 1 :], 100)
    return later[0]


def errors_of(jobs: Jobs) -> list[str]:
    for job in jobs:
        job.process.wait(100)
    return [job.err() for job in jobs]


def test_a_link_that_is_bad_for_a_while_only_costs_time(
    run: Run, wire: Wire, tmp_path: Path, table: Table
) -> None:
    said = "(no error)"
    with run(60.0) as job:
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
        (tmp_path / "end").touch()
        for each in job:
            assert each.process.wait(100) == 0, each.err()
            assert each.out().endswith("DONE\n")


@pytest.mark.parametrize("has_vanished", [False, True])
def test_a_link_that_stays_down_is_an_error_at_the_deadline(
    has_vanished: bool, run: Run, wire: Wire, table: Table
) -> None:
    """Also where it is half-open: the other side is gone, and nothing says so."""
    with run(TIMEOUT_S) as job:
        wire.is_cut = True
        if has_vanished:
            job[1].process.kill()
        start = time.monotonic()
        errors = errors_of(job)
        seconds = time.monotonic() - start
    for error in errors[: 1 if has_vanished else 2]:
        assert "CollectiveTimeoutError: rank" in error
        says_little(error.rpartition("CollectiveTimeoutError: ")[2], None)
    assert "CollectiveTimeoutError: rank 1 never" in errors[0]
    named = next(line for line in errors[0].splitlines() if "rank 1 never" in line)
    case = "one vanishes" if has_vanished else "the link stays down"
    table.add(f"two hosts: {case}, timeout 5 s", seconds, TIMEOUT_S + LATER_S, named)


def test_a_host_that_cannot_be_reached_is_named(
    place: tuple[Hosts, Wire], run: Run, wire: Wire
) -> None:
    """As behind a firewall that drops packets: no answer, and no refusal either."""
    wire.is_cut = True
    start = time.monotonic()
    with run(3.0, n_ready=0) as job:
        errors = errors_of(job)
    assert time.monotonic() - start < 30
    where = f"{place[0].addresses[0]}:29500"
    assert f"rank 1 of 2 did not reach {where} within 3 s" in errors[0].splitlines()[-1]
    assert f"rank 1 of 2 can't reach the rendezvous at {where}" in errors[1].splitlines()[-1]


def test_hosts_of_two_ranks_sum_in_two_levels(run: Run, wire: Wire, table: Table) -> None:
    """And all learn who died on the other host."""
    with run(60.0, LEVELS, n=4) as job:
        assert [each.out() for each in job] == ["STEP TwoLevels\n"] * 4
        job[3].process.kill()
        start = time.monotonic()
        errors = errors_of(job[:3])
        seconds = time.monotonic() - start
    for error in errors:
        assert "PeerFailedError" in error
        assert "rank 3" in error.rpartition("PeerFailedError: ")[2], error
    named = errors[0].splitlines()[-1]
    table.add("two hosts of two: a rank dies", seconds, WHOLE_S, named)


NODE = """
import sys, unisono

def work(local_rank):
    return unisono.all_gather(unisono.get_rank(), group=unisono.new_group([0, 1]))

print(unisono.spawn("gloo", work, nproc_per_node=1, nnodes=2, node_rank=int(sys.argv[1]),
                    master_addr=sys.argv[2], master_port=23456, timeout=30))
"""


@pytest.mark.parametrize("is_named", [True, False])
def test_hosts_that_call_themselves_by_their_loopback_meet(
    is_named: bool, place: tuple[Hosts, Wire]
) -> None:
    """As the installers of Debian and Ubuntu write it; the first one by its name, too."""
    hosts, _ = place
    where = (hosts.names if is_named else hosts.addresses)[0]
    words = [[sys.executable, "-c", NODE, str(node), where] for node in (0, 1)]
    with ExitStack() as stack:
        for name, addr, file in zip(hosts.names, hosts.addresses, hosts.files, strict=True):
            edit = partial(re.sub, f"{addr} {name}", f"127.0.1.1 {name}")
            stack.enter_context(known([file], edit))
            # What a default route does, but for name servers, which would be waited for.
            ip("-n", name, "route", "replace", addresses._ELSEWHERE, "dev", "eth0")
        done = on_both(hosts, words)
    assert [each.out for each in done] == ["[[0, 1]]\n"] * 2
    assert all("control plane" not in each.err for each in done)
