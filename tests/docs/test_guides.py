"""The commands of the tutorials and recipes print what their pages say.

Those of Slurm and Ray do so in `tests/launch/test_guides.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import OF_CLUSTERS, ROOT, Block, blocks
from tests.support.requirements import require_backend

FOLDERS = [ROOT / "docs" / "learn", ROOT / "docs" / "how-to"]
CONSOLES = {
    block.text: block  # what several pages show alike is run once
    for folder in FOLDERS
    for page in sorted({*folder.glob("*.md")} - set(OF_CLUSTERS))
    for block in blocks(page)
    if block.language == "console"
}
PROGRAM = ROOT / "docs" / "how-to" / "programs" / "total.py"


def run(words: list[str], folder: Path) -> str:
    if words[0] == "python":
        words = [sys.executable, *words[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", CONSOLES.values(), ids=str)
def test_a_command_prints_what_its_page_says(block: Block, tmp_path: Path) -> None:
    command, _, expected = block.text.partition("\n")
    words = re.sub(r"^\$ ", "", command).split()
    if "mpi" in words:
        require_backend("mpi4py")
    shutil.copy(PROGRAM, tmp_path)
    assert run(words, tmp_path) == expected
