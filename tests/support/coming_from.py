"""The pairs of programs of docs/coming-from: which there are, and how each is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import unisono
from tests.support.pages import ROOT

__all__ = ("PAIRS", "PYTHON", "jobs_of", "lines_of", "ours", "theirs")

PROGRAMS = ROOT / "docs" / "coming-from" / "programs"
PAIRS = sorted(
    (path.parent.name, path.stem) for path in PROGRAMS.glob("*/*.py") if path.parent.name != "ours"
)
# Some launchers put what two ranks print into one line, or a rank's number before it.
_LINE = re.compile(r"rank \d(?:(?!rank \d).)*")
PYTHON = (sys.executable,)
_LIMIT_S = 150
# How gloo's thread may end a process of plain torch that is done with its work.
_ABORTED = "terminate called without an active exception"


def jobs_of(library: str) -> list[str]:
    return [job for name, job in PAIRS if name == library]


def theirs(library: str, job: str) -> Path:
    return PROGRAMS / library / f"{job}.py"


def ours(job: str, backend: str, folder: Path) -> Path:
    """Give our program of a job, with another backend in the place of gloo."""
    text = (PROGRAMS / "ours" / f"{job}.py").read_text()
    assert text.count('"gloo"') == 1
    program = folder / f"{job}_{backend}.py"
    program.write_text(text.replace('"gloo"', f'"{backend}"'))
    return program


def lines_of(command: Sequence[str], program: Path, folder: Path) -> list[str]:
    """Run a program as its reader does; give what its ranks print, by rank."""
    (folder / "tmp").mkdir(exist_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(unisono.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder / "tmp"),
    }
    for _ in range(3):
        done = subprocess.run(
            [*command, str(program)],
            env=environ,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode == 0 or program.parents[1] != PROGRAMS or _ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.strip() for line in _LINE.findall(done.stdout))
    assert lines, done.stdout + done.stderr
    return lines
