"""A signal to the first process of a container, and to tasks of Slurm, gives ranks time to save."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil
import pytest

from tests.launch.conftest import PATH, all_save, on_hosts, pods
from tests.support.command import JOB, LIMIT_S, Started, started
from tests.support.examples import JOBS
from tests.support.pages import ROOT, blocks
from tests.support.processes import until
from tests.support.requirements import require
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
BLOCKS = [*blocks(ROOT / "docs" / "how-to" / "preemption.md")]
PAGE = {block.language: block.text for block in BLOCKS}
SAVES = [JOB, "save", "gloo"]


@pytest.fixture(scope="session")
def containers(hosts: Hosts) -> Hosts:
    """Hosts on which programs can be the first process of a namespace."""
    done = subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True, text=True)
    require("netns", f"no PID namespace can be made: {done.stderr}" if done.returncode else None)
    return hosts


def saving(words: Sequence[str], script: str) -> list[str]:
    """Give a command with a script that saves in place of its own, and of what follows that."""
    own = [*itertools.takewhile(lambda word: not word.endswith(script), words)]
    assert len(own) < len(words)
    return [
        *IN_A_CONTAINER,
        *(sys.executable if word == "python" else word for word in own),
        *SAVES,
    ]


def signal_first(job: Started) -> None:
    """Send SIGTERM to the first process of a job's namespace, as whoever ends a container does."""
    (first,) = psutil.Process(job.process.pid).children()
    first.send_signal(signal.SIGTERM)


def of_docker() -> list[str]:
    words: list[str] = json.loads(PAGE["dockerfile"].removeprefix("CMD "))
    return words


def of_kubernetes() -> list[str]:
    (found,) = re.findall(r"command: \[(.+)\]", PAGE["yaml"])
    return str(found).split(", ")


@pytest.mark.parametrize("words", [of_docker(), of_kubernetes()], ids=["docker", "kubernetes"])
def test_a_container_that_is_stopped(containers: Hosts, words: list[str]) -> None:
    with started(containers.on(0, saving(words, "train.py"))) as job:
        job.wait_for("READY", 2)
        signal_first(job)
        all_save(job)
        assert "interrupted by SIGTERM: all ranks have left by themselves" in job.err()


@pytest.mark.parametrize("name", JOBS)
def test_the_pods_of_a_job_that_is_deleted(containers: Hosts, name: str) -> None:
    words = [saving(pod, "images.py") for pod in pods(name, containers)]
    with on_hosts(containers, words) as jobs:
        for job in jobs:
            job.wait_for("READY", 2)
        for job in jobs:
            signal_first(job)
        all_save(*jobs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_tasks_of_slurm(slurm: dict[str, str], number: int) -> None:
    """SIGTERM comes from scancel; SIGUSR1 by the page's option, half a minute after the start."""
    (line,) = (each.text.strip() for each in BLOCKS if "--launcher slurm" in each.text)
    if number == signal.SIGUSR1:
        line = line.replace("time=2:00:00", "time=2").replace("USR1@120", "USR1@60")
    line = line.replace("train.py", " ".join(SAVES)).replace("-o time", "-o job-name=saves -o time")
    run = "sbatch --quiet --wait --output out.txt --error out.txt job.sh"
    with started(["bash", "-c", f"set -eu\n{line}\n{run}"], PATH=PATH, **slurm) as job:
        until(lambda: printed(job).count("READY") == 2, LIMIT_S)
        if number == signal.SIGTERM:
            words = ["scancel", "--signal=TERM", "--name=saves"]
            subprocess.run(words, check=True, env={**os.environ, **slurm})
        all_save(job, out=printed)


def printed(job: Started) -> str:
    """Give what a batch job has printed."""
    out = job.folder / "out.txt"
    return out.read_text() if out.exists() else job.err()
