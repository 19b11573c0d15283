"""What the documentation says is so: code runs, links lead somewhere, lists are complete."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.pages import PAGES, ROOT, anchors, blocks, links, prose, run, run_in_a_rank

CODE = [block for page in PAGES for block in blocks(page) if block.is_python]
FIRST = (ROOT / "README.md", ROOT / "docs" / "learn" / "first-steps.md")
BY_PAGE = [pytest.param(page, marks=pytest.mark.fast if page in FIRST else ()) for page in PAGES]
FOR_ANY_SIZE = [page for page in PAGES if any(block.is_for_any_rank for block in blocks(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", BY_PAGE, ids=name_of)
def test_every_block_of_python_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Blocks of one page follow each other, as in a session of a reader who types them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.runs:
            run(block, names)
        elif block.language == "python" and not block.mark("file"):
            compile(block.text, str(block), "exec")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[unisono.WorkerPool]:
    """Two processes for all pages, which are there before any test looks what it leaves."""
    with unisono.WorkerPool("gloo", nproc_per_node=2, deadline_s=60) as pool:
        assert pool.run(_rank) == [0, 1]
        yield pool


def _rank(local_rank: int) -> int:
    return unisono.get_rank()


@pytest.mark.parametrize("page", FOR_ANY_SIZE, ids=name_of)
def test_every_block_that_makes_no_ranks_runs_on_two(
    page: Path, two_ranks: unisono.WorkerPool, tmp_path: Path
) -> None:
    """What runs alone runs in each of several ranks; what makes its ranks did so above."""
    first, second = two_ranks.run(run_in_a_rank, page, tmp_path)
    assert first == second
    assert first


def test_what_does_not_run_says_why() -> None:
    for block in CODE:
        unknown = re.sub(r'\b(not-run|file|needs|pytest)="[^"]+"', "", block.marks).strip()
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
    """The index links the pages of its folder, and the index of a folder those of the folder."""
    reached: set[Path] = set()
    ahead = [ROOT / "docs" / "index.md"]
    while ahead:
        index = ahead.pop()
        linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
        ahead += [page for page in linked - reached if page.name == "index.md"]
        reached |= linked
    missing = [name_of(page) for page in PAGES if ROOT / "docs" in page.parents]
    missing = [name for name in missing if ROOT / name not in reached | {ROOT / "docs/index.md"}]
    assert not missing, f"no index links {missing}"


def test_every_error_has_its_section() -> None:
    sections = anchors(ROOT / "docs" / "reference" / "errors.md")
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
    shown = set(
        itertools.chain(*(re.findall(r"`(\w+)", row[0]) for row in _rows("coming-from/ignite.md")))
    )
    assert theirs - modules <= shown, theirs - modules - shown


def test_the_reference_names_the_whole_facade_and_nothing_else() -> None:
    page = prose(ROOT / "docs" / "reference" / "index.md")
    section = page.partition("\n## All names\n")[2].partition("\n## ")[0]
    spans = re.findall(r"`([^`]+)`", section)
    words = {word for span in spans for word in span.split() if word.isidentifier()}
    assert words - {"unisono", "with", "except"} == set(dir(unisono))


def test_every_fault_of_the_peers_has_a_row_and_every_named_test_is_there() -> None:
    page = (ROOT / "docs" / "facts" / "faults.md").read_text()
    found = re.findall(r"^\| ([A-E]\d+) \|.*\| (?:`([^`]+)`)? ?\|$", page, re.MULTILINE)
    rows = [row for row, _ in found]
    assert {row[0] for row in rows} == set("ABCDE")
    numbers = {x: [int(row[1:]) for row in rows if row[0] == x] for x in "ABCDE"}
    assert all(each == list(range(1, len(each) + 1)) for each in numbers.values()), numbers
    for row, test in found:
        path, _, name = test.partition("::")
        assert not test or f"def {name}(" in (ROOT / path).read_text(), f"{row}: {test}"


# What isn't English, or not today's, and what to write instead.
BETTER = {
    r"(?<!\bthere )\b(is|are|was|were) no\b(?! more| longer| one\b)": "isn't a, aren't",
    r"\bwhoever\b": "a rank that, no matter who",
    r"\bshall\b": "should, or the present tense",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"(^|[.:!?\"] *|: )(?-i:Whom)\b": "the rank that",
    r"\bin the guise of\b": "emulated by",
    r"\bcan't travel\b": "can't be sent",
    r"\bisn't heard\b": "is ignored",
}
ANY = re.compile("|".join(f"(?:{pattern})" for pattern in BETTER), re.IGNORECASE)


def test_no_phrase_has_come_back() -> None:
    for path in (*PAGES, *(ROOT / "src").rglob("*.py")):
        text = re.sub(r"\s+(# )?", " ", path.read_text())
        found = [text[max(0, m.start() - 40) : m.end() + 40] for m in ANY.finditer(text)]
        assert not found, f"{path}: {found}, better one of {BETTER}"
