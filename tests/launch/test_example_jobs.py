"""The jobs of examples/ on a real Slurm, a real Ray, and two hosts in the place of two pods."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.command import LIMIT_S, run, started
from tests.support.examples import EXAMPLES, JOBS, command_of, numbers, pods_of
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def test_the_batch_script_trains_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    variables = {"PATH": path, **slurm}
    script = str(EXAMPLES / "cluster" / "train.sbatch")

    def job(*options: str, epochs: int) -> str:
        words = ["sbatch", "--wait", f"--chdir={tmp_path}", "--output=out", *options]
        done = run([*words, script, "--epochs", str(epochs)], **variables)
        text = (tmp_path / "out").read_text()
        assert done.code == 0, done.err + text
        return text

    first = job(epochs=2)
    assert re.findall(r"^epoch (\d)", first, re.MULTILINE) == ["1", "2"]
    assert numbers(first, "workers") == [4]
    second = job("--nodes=1", epochs=3)  # as requeued, where fewer nodes are free
    assert re.findall(r"^epoch (\d)", second, re.MULTILINE) == ["3"]
    assert numbers(second, "workers") == [2]
    assert numbers(second, "accuracy")[0] > 0.85


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.usefixtures("ray")
def test_the_job_of_ray_trains(size: int) -> None:
    script = str(EXAMPLES / "cluster" / "ray_job.py")
    done = run([sys.executable, script, "--workers", str(size), "--steps", "100"])
    assert done.code == 0, done.err
    assert re.findall(r"rank (\d) on", done.out) == [str(rank) for rank in range(size)]
    assert numbers(done.out, "accuracy")[0] > 0.9


@pytest.mark.parametrize("name", JOBS)
def test_the_pods_command_trains_on_two_hosts(name: str, hosts: Hosts) -> None:
    template, count = pods_of(name)
    with ExitStack() as stack:
        pods = []
        for index in range(count):
            found = command_of(template, index)
            words = [re.sub(r"(--master-addr)=.*", rf"\1={hosts.addresses[0]}", w) for w in found]
            words = [str(EXAMPLES.parent / w) if w.startswith("examples/") else w for w in words]
            words = [sys.executable if w == "python" else w for w in words]
            pods.append(stack.enter_context(started(hosts.on(index, [*words, "--epochs=2"]))))
        for pod in pods:
            code = pod.process.wait(LIMIT_S)
            assert code == 0, pod.err() + pod.out()
        assert numbers(pods[0].out(), "workers") == [4]
        assert numbers(pods[1].out(), "workers") == []  # rank 0 alone prints
