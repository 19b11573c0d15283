"""The commands of the recipes for Slurm and Ray print what their pages say, on the real thing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.command import run
from tests.support.pages import OF_CLUSTERS, Block, blocks

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
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    commands, expected = commands_of(block)
    script = "".join(("set -eu\n", f"cd {tmp_path}\n", *commands))
    done = run(["bash", "-c", script], PATH=path, **variables)
    assert done.code == 0, done.err + done.out
    if expected:
        assert done.out == expected, done.err
    else:
        assert "backends" in done.out  # of the doctor


def test_every_page_of_a_cluster_shows_what_its_commands_print() -> None:
    shown = {block.page for block in COMMANDS if commands_of(block)[1]}
    assert shown == set(OF_CLUSTERS)
