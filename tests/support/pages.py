"""The pages of the documentation, their blocks of code, their headings and their links."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
OF_CLUSTERS = tuple(ROOT / "docs" / "how-to" / f"{name}.md" for name in ("ray", "slurm"))
"""Pages whose commands need a cluster."""
_MARKDOWN = MarkdownIt()
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MAKES_RANKS = re.compile(r"\b(spawn|host_job|WorkerPool|Parallel|initialize|init_process_group)\(")
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
        """Return the value of ``name="..."`` in the info-string, None if it isn't there."""
        found = re.search(rf'\b{name}="([^"]*)"', self.marks)
        return found and found[1]

    @property
    def is_python(self) -> bool:
        return self.language in ("python", "pycon")

    @property
    def needs(self) -> list[str]:
        """The libraries that the block imports and the tests don't need otherwise."""
        return (self.mark("needs") or "").split()

    @property
    def runs(self) -> bool:
        """Whether the block is run here, where some libraries may be missing."""
        if not self.is_python or any(map(self.mark, ("file", "not-run", "pytest"))):
            return False
        return all(importlib.util.find_spec(name) is not None for name in self.needs)

    @property
    def makes_ranks(self) -> bool:
        """Whether the block starts its ranks itself, or gives their number."""
        return bool(_MAKES_RANKS.search(self.text))

    @property
    def is_for_any_rank(self) -> bool:
        """Whether the block may run with any number of ranks."""
        return self.runs and not self.makes_ranks


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    for token in _MARKDOWN.parse(page.read_text()):
        if token.type == "fence" and token.map is not None:
            begin, end = token.map
            assert lines[end - 1].strip() == token.markup, f"{page}:{begin + 1} has no end"
            language, _, marks = token.info.strip().partition(" ")
            yield Block(page, begin + 1, language, marks, token.content)


def prose(page: Path) -> str:
    lines = page.read_text().splitlines()
    for block in reversed([*blocks(page)]):
        del lines[block.line - 1 : block.line + 1 + block.text.count("\n")]
    return "\n".join(lines)


def anchors(page: Path) -> set[str]:
    """List the targets of ``#...`` links, as GitHub derives them from headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def links(page: Path) -> list[str]:
    return [found["target"] for found in _LINK.finditer(prose(page))]


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block as if a reader typed it; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading a library may warn
        for name in block.needs:
            importlib.import_module(name)
        warnings.simplefilter("error")
        if block.language == "pycon" or block.text.startswith(">>>"):
            _run_session(block, names)
        else:
            padded = "\n" * block.line + block.text
            exec(compile(padded, str(block.page), "exec"), names)


def _run_session(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(
        block.text, names, str(block), str(block.page), block.line
    )
    wrong: list[str] = []
    doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=wrong.append, clear_globs=False)
    names.update(test.globs)
    assert not wrong, "".join(wrong)


def run_in_a_rank(local_rank: int, page: Path, folder: Path) -> list[str]:
    """Run a page's blocks for any rank, with the imports and definitions of its other blocks."""
    before = Path.cwd()
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    done = []
    try:
        for block in blocks(page):
            if block.is_for_any_rank:
                run(block, names)
                done.append(str(block))
            elif block.runs and block.language == "python":
                exec(_definitions(block), names)
    finally:
        os.chdir(before)
    return done


def _definitions(block: Block) -> Any:
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    parsed = ast.parse(block.text)
    parsed.body = [node for node in parsed.body if isinstance(node, kinds)]
    return compile(parsed, str(block), "exec")
