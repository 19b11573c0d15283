"""What pages and examples show of clusters, on a real Slurm and Ray, and on two hosts as pods."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import PATH, on_both, pods
from tests.support.command import run
from tests.support.examples import EXAMPLES, JOBS, numbers
from tests.support.pages import OF_CLUSTERS, Block, blocks
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
COMMANDS = [
    block for page in OF_CLUSTERS for block in blocks(page) if block.language in ("bash", "console")
]


def commands_of(block: Block) -> tuple[list[str], str]:
    """Give a block's commands, and what they print."""
    if block.language == "bash":
        return [block.text], ""
    lines = block.text.splitlines(keepends=True)
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return commands, "".join(line for line in lines if not line.startswith("$ "))


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_print_what_their_page_says(
    block: Block, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    variables = request.getfixturevalue(block.page.stem) or {}  # the fixture of the cluster
    for program in (block.page.parent / "programs").glob("*.py"):
        shutil.copy(program, tmp_path)
    commands, expected = commands_of(block)
    script = "".join(("set -eu\n", f"cd {tmp_path}\n", *commands))
    done = run(["bash", "-c", script], PATH=PATH, **variables)
    assert done.code == 0, done.err + done.out
    if expected:
        assert done.out == expected, done.err
    else:
        assert "backends" in done.out  # of the doctor


def test_every_page_of_a_cluster_shows_what_its_commands_print() -> None:
    shown = {block.page for block in COMMANDS if commands_of(block)[1]}
    assert shown == set(OF_CLUSTERS)


def test_the_batch_script_trains_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    script = str(EXAMPLES / "cluster" / "train.sbatch")

    def job(*options: str, epochs: int) -> str:
        words = ["sbatch", "--wait", f"--chdir={tmp_path}", "--output=out", *options]
        done = run([*words, script, "--epochs", str(epochs)], PATH=PATH, **slurm)
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
    words = [
        [{"python": sys.executable}.get(word, word) for word in [*pod, "--epochs=2"]]
        for pod in pods(name, hosts)
    ]
    done = on_both(hosts, words)
    assert numbers(done[0].out, "workers") == [4]
    assert numbers(done[1].out, "workers") == []  # rank 0 alone prints
