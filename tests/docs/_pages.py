"""The pages of the documentation, their blocks of code, their headings and their links."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ("PAGES", "ROOT", "Block", "anchors", "blocks", "links")

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_FENCE = re.compile(r"^ *```(?P<info>.*)$")
_LINK = re.compile(r"\[[^\]\[]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    marks: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def mark(self, name: str) -> str | None:
        """Give the value of ``name="..."`` in the info-string, None if it isn't there."""
        found = re.search(rf'\b{name}="([^"]*)"', self.marks)
        return found and found[1]


def blocks(page: Path) -> Iterator[Block]:
    lines: list[str] | None = None
    start, info = 0, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            if lines is not None:
                lines.append(line)
        elif lines is None:
            lines, start, info = [], number, fence["info"].strip()
        else:
            language, _, marks = info.partition(" ")
            text = textwrap.dedent("\n".join(lines) + "\n")  # in a list it is indented
            yield Block(page, start, language, marks, text)
            lines = None
    assert lines is None, f"{page}: the block of line {start} has no end"


def _prose(page: Path) -> str:
    inside, kept = False, []
    for line in page.read_text().splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def anchors(page: Path) -> set[str]:
    """List what ``#...`` may name, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ +(.+)$", _prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in plain}


def links(page: Path) -> list[str]:
    return [found["target"] for found in _LINK.finditer(_prose(page))]
