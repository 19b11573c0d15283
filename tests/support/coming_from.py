"""The pairs of programs of docs/coming-from: which there are, and how each is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.pages import ROOT

PROGRAMS = ROOT / "docs" / "coming-from" / "programs"
PAIRS = sorted(
    (path.parent.name, path.stem) for path in PROGRAMS.glob("*/*.py") if path.parent.name != "ours"
)
# Some launchers put what two ranks print into one line, or a rank's number before it.
_LINE = re.compile(r"rank \d(?:(?!rank \d).)*")


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


def lines_in(printed: Mapping[str, str], name: str) -> list[str]:
    """Give what the ranks of a program printed, by rank."""
    lines = sorted(line.strip() for line in _LINE.findall(printed[name]))
    assert lines, printed[name]
    return lines
