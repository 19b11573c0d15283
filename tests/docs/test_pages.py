"""What the documentation says is so: code runs, links lead somewhere, lists are complete."""

from __future__ import annotations

import doctest
import itertools
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pages import PAGES, ROOT, Block, anchors, blocks, links

import unisono

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CODE = [block for page in PAGES for block in blocks(page) if block.language in ("python", "pycon")]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.language == "pycon" or block.text.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(
            block.text, names, str(block), str(block.page), block.line
        )
        wrong: list[str] = []
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=wrong.append, clear_globs=False)
        names.update(test.globs)
        assert not wrong, "".join(wrong)
    else:
        padded = "\n" * block.line + block.text
        exec(compile(padded, str(block.page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_python_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Blocks of one page follow each other, as in a session of a reader who types them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language not in ("python", "pycon") or block.mark("file"):
            continue
        if block.mark("not-run"):
            if block.language == "python":
                compile(block.text, str(block), "exec")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _run(block, names)


def test_what_does_not_run_says_why() -> None:
    for block in CODE:
        unknown = re.sub(r'\b(not-run|file)="[^"]+"', "", block.marks).strip()
        assert not unknown, f"{block}: {unknown}"


def test_code_that_is_a_file_is_that_file() -> None:
    named = [(block, block.mark("file")) for page in PAGES for block in blocks(page)]
    found = [(block, file) for block, file in named if file]
    for block, file in found:
        assert block.text == (ROOT / file).read_text(), f"{block} isn't {file}"
    shown = {file for _, file in found}
    assert {"tests/plugin/src/unisono_kvstore/__init__.py", "tests/plugin/pyproject.toml"} <= shown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_link_is_dead(page: Path) -> None:
    for target in links(page):
        if target.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)}: {target}"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    for page in (ROOT / "docs").glob("*.md"):
        assert page == index or page.resolve() in linked, f"docs/index.md doesn't link {page.name}"


def test_every_error_has_its_section() -> None:
    sections = anchors(ROOT / "docs" / "errors.md")
    missing = {name for name in unisono.errors.__all__ if name.lower() not in sections}
    assert not missing


def _rows(page: str) -> Iterator[list[str]]:
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("|") and not line.startswith(("|-", "| -", "|:")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_idist_has_every_name_of_it() -> None:
    ignite = pytest.importorskip("ignite.distributed", reason="pytorch-ignite isn't installed")
    theirs = {name for name in dir(ignite) if not name.startswith("_")}
    modules = {"auto", "comp_models", "launcher", "utils"}
    shown = set(itertools.chain(*(re.findall(r"`(\w+)", row[0]) for row in _rows("idist.md"))))
    assert theirs - modules <= shown, theirs - modules - shown


def test_the_guide_names_the_whole_facade() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    missing = [name for name in unisono.__all__ if not re.search(rf"\b{name}\b", text)]
    modules = {name: str(getattr(getattr(unisono, name), "__module__", "")) for name in missing}
    # The helpers for training have a page of their own.
    assert not [name for name in missing if not modules[name].startswith("unisono.training")]


def test_the_changelog_can_be_rendered_and_has_every_fragment() -> None:
    render = runpy.run_path(str(ROOT / "docs" / "changelog.py"))["render"]
    text = render()
    fragments = list((ROOT / "docs" / "changelog.d").glob("*"))
    assert fragments
    for fragment in fragments:
        body = fragment.read_text().strip()
        assert body in text, fragment.name
        assert body.startswith("- "), f"{fragment.name} should have bullet lines"


def test_every_fault_of_the_peers_has_a_row_and_every_named_test_is_there() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    found = re.findall(r"^\| ([A-E]\d+) \|.*\| (?:`([^`]+)`)? ?\|$", page, re.MULTILINE)
    counts = {"A": 14, "B": 16, "C": 17, "D": 14, "E": 8}
    assert [row for row, _ in found] == [f"{x}{i + 1}" for x, n in counts.items() for i in range(n)]
    for row, test in found:
        path, _, name = test.partition("::")
        assert not test or f"def {name}(" in (ROOT / path).read_text(), f"{row}: {test}"
