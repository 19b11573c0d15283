"""``unisono top --via`` on a job of two hosts, each with its own network, /dev/shm and clock."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.conftest import on_hosts
from tests.support.command import LIMIT_S, UNISONO, Started, environ
from tests.support.processes import until
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).with_name("hang.py")
(LINE,) = (n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if "# here" in line)
_OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm; exec "$@"'
_OWN_CLOCK = ["unshare", "--time", "--monotonic", "1000000", "--fork"]
Ask = Callable[..., str]


def main_of(job: Started, host: int) -> Any:
    """Give the process of ``unisono run``, which host 1 runs within another."""
    process = psutil.Process(job.process.pid)
    return process.children()[0] if host else process


@pytest.fixture(scope="module")
def ask(hosts: Hosts) -> Iterator[Ask]:
    """Run a job of two ranks on each host; give what runs a command of unisono beside them."""
    where = ["--nnodes", "2", "--master-addr", hosts.addresses[0], "--master-port", "29531"]
    words = []
    for i, clock in enumerate((["env"], _OWN_CLOCK)):
        job = [*UNISONO, "run", *where, "--node-rank", str(i), "--nproc-per-node", "2"]
        words.append(["sh", "-c", _OWN_MEMORY, "sh", *clock, *job, str(PROGRAM)])
    with on_hosts(hosts, words) as jobs:

        def enter(host: int) -> list[str]:
            target = f"--target={main_of(jobs[host], host).pid}"
            return ["nsenter", target, "--net", "--mount", "--uts", "--time"]

        def command(host: int, *words: str) -> str:
            way = shlex.join([*enter(1 - host), *UNISONO[:-1]])
            done = subprocess.run(
                [*enter(host), *UNISONO, *words, "--via", way],
                env=environ(jobs[host].mark),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        def is_clear() -> bool:
            assert all(job.process.poll() is None for job in jobs), [job.err() for job in jobs]
            found = json.loads(command(0, "top", "--json"))["jobs"]
            return bool(found and found[0]["culprits"])

        until(lambda: psutil.Process(jobs[1].process.pid).children(), LIMIT_S)
        until(is_clear, LIMIT_S)
        yield command
        for host, started_job in enumerate(jobs):
            main_of(started_job, host).terminate()
            started_job.process.wait(LIMIT_S)


@pytest.mark.parametrize("host", [0, 1])
def test_the_rank_of_another_host_is_named_with_its_line(ask: Ask, hosts: Hosts, host: int) -> None:
    (job,) = json.loads(ask(host, "top", "--json"))["jobs"]
    assert (job["verdict"]["kind"], job["elsewhere"]) == ("late", [])
    (culprit,) = job["culprits"]
    assert (culprit["rank"], culprit["waiters"]) == (3, [0, 1, 2])
    place = (Path(culprit["file"]), culprit["line"], culprit["from"])
    assert place == (PROGRAM, LINE, "stack")
    assert [each["host"] for each in job["ranks"]] == [*hosts.names[:1] * 2, *hosts.names[1:] * 2]
    ages = [each["since_s"] for each in job["ranks"][:3]]
    assert max(ages) - min(ages) < 5.0  # by one clock, whatever each host's says
    assert all(each["memory_bytes"] > 1 << 20 for each in job["ranks"])
    assert all(each["cpu_percent"] is not None for each in job["ranks"])


def test_where_and_a_table_say_which_rank_is_where(ask: Ask, hosts: Hosts) -> None:
    waiting, _, late = ask(0, "where").partition("rank 3:\n")
    assert waiting.startswith("ranks 0-2:\n")
    assert late.splitlines()[-1] == f"  {PROGRAM}:{LINE} in <module>"
    text = ask(0, "top")
    assert f"culprit: rank 3 on {hosts.names[1]} is idle outside of calls, at " in text
    rows = [line.split()[:2] for line in text.splitlines() if line[:5].split()[:1] == ["3"]]
    assert rows == [["3", hosts.names[1]]]
