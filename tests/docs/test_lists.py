"""What the documentation lists is what there is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import get_args

from tests.support.pages import ROOT
from unisono.testing import cases, runner


def section(page: str, heading: str) -> str:
    """Give the text under a heading of a page, to the next one of its level."""
    text = (ROOT / page).read_text()
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"{page} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def folders(of: Path) -> set[str]:
    return {each.name for each in of.iterdir() if each.is_dir() and each.name[0] not in "._"}


def test_contributing_names_every_folder_of_tests() -> None:
    table = section("CONTRIBUTING.md", "Where does a test go")
    named = re.findall(r"^\| `tests/(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(folders(ROOT / "tests"))


def test_contributing_names_sessions_that_there_are() -> None:
    table = section("CONTRIBUTING.md", "Where does a test go")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"\|([^|]+)\|$", table, re.MULTILINE))))
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r"^@nox\.session.*\n(?:@nox.*\n)?def (\w+)", noxfile, re.MULTILINE)
    assert named
    assert named <= set(sessions)


def test_models_names_every_way_in_which_a_law_ends() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    sentence = text.partition("A law ends as ")[2].partition(" with the rank")[0]
    assert set(re.findall(r"`([a-z]+)`", sentence)) == set(get_args(runner.Status))


def test_the_page_of_support_has_a_title_for_every_group_of_laws() -> None:
    groups = runpy.run_path(str(ROOT / ".ci" / "support.py"))["GROUPS"]
    modules = Path(cases.__file__).parent.glob("[!_]*.py")
    assert sorted(groups) == sorted(path.stem for path in modules)
