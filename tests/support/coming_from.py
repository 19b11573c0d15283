"""The pairs of programs of docs/coming-from, and their output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.pages import ROOT

PROGRAMS = ROOT / "docs" / "coming-from" / "programs"
PAIRS = sorted(
    (path.parent.name, path.stem) for path in PROGRAMS.glob("*/*.py") if path.parent.name != "ours"
)
# Some launchers join the output of two ranks into one line, or put a rank's number before it.
_LINE = re.compile(r"rank \d(?:(?!rank \d).)*")


def theirs(library: str, job: str) -> Path:
    return PROGRAMS / library / f"{job}.py"


def ours(job: str, backend: str, folder: Path) -> Path:
    """Write our program of a job with another backend in place of gloo; return its path."""
    text = (PROGRAMS / "ours" / f"{job}.py").read_text()
    assert text.count('"gloo"') == 1
    program = folder / f"{job}_{backend}.py"
    program.write_text(text.replace('"gloo"', f'"{backend}"'))
    return program


def lines_in(printed: Mapping[str, str], name: str) -> list[str]:
    """Return the lines that a program's ranks printed, sorted by rank."""
    lines = sorted(line.strip() for line in _LINE.findall(printed[name]))
    assert lines, printed[name]
    return lines
