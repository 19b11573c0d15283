"""What the documentation lists is what there is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import get_args

from tests.support.pages import ROOT
from tests.support.platforms import ELASTIC, JOBS
from unisono.environments import platforms
from unisono.environments.platforms import PLATFORMS
from unisono.testing import cases, runner

CLUSTERS = (ROOT / "docs" / "how-to" / "clusters.md").read_text()


def test_contributing_names_every_folder_of_tests_and_sessions_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("\n## Where does a test go\n")[2].partition("\n## ")[0]
    folders = [each.name for each in (ROOT / "tests").iterdir() if each.is_dir()]
    rows = re.findall(r"^\| `tests/(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(name for name in folders if name[0] not in "._")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"\|([^|]+)\|$", table, re.MULTILINE))))
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r"^@nox\.session.*\n(?:@nox.*\n)?def (\w+)", noxfile, re.MULTILINE)
    assert named
    assert named <= set(sessions)


def test_models_names_every_way_in_which_a_law_ends() -> None:
    text = (ROOT / "docs" / "how-to" / "write-a-model.md").read_text()
    sentence = text.partition("A law ends as ")[2].partition(" with the rank")[0]
    assert set(re.findall(r"`([a-z]+)`", sentence)) == set(get_args(runner.Status))


def test_the_page_of_support_has_a_title_for_every_group_of_laws() -> None:
    groups = runpy.run_path(str(ROOT / ".ci" / "support.py"))["GROUPS"]
    modules = Path(cases.__file__).parent.glob("[!_]*.py")
    assert sorted(groups) == sorted(path.stem for path in modules)


def test_the_page_of_support_has_a_row_for_every_law() -> None:
    page = (ROOT / "docs" / "facts" / "support.md").read_text()
    of_laws = page.partition("\n## ")[2].partition("\n## What failed\n")[0]
    rows = re.findall(r"^\| (.+?) \|", of_laws, re.MULTILINE)
    laws = [name.replace("_", " ") for name in runner.law_names()]
    assert sorted(set(rows) - {"law"}) == sorted(laws), "run nox -s support"


def test_the_table_of_platforms_has_every_variable() -> None:
    """The site writes it out of the code; what that gives is here."""
    rows = runpy.run_path(str(ROOT / "docs" / "extensions" / "platforms.py"))["rendered"]()
    table = "\n".join(rows)
    assert table.count("* -") == 1 + len(PLATFORMS)
    for each in PLATFORMS:
        names = (*each.marks, *each.node_rank, *each.nnodes, *each.leader, *each.port, *each.hosts)
        for name in (*names, *each.nproc_per_node):
            assert f"``{name}``" in table, (each.NAME, name)


def test_the_page_of_clusters_has_every_variable_that_one_platform_alone_has() -> None:
    """Those are in no column of the table."""
    quoted = set(re.findall(r'"([A-Z][A-Z0-9_*]{3,})"', Path(platforms.__file__).read_text()))
    table = runpy.run_path(str(ROOT / "docs" / "extensions" / "platforms.py"))["rendered"]()
    assert "PET_RDZV_BACKEND" in quoted
    for name in quoted - set(re.findall(r"``([A-Z0-9_*]+)``", "\n".join(table))):
        assert f"`{name}" in CLUSTERS, name


def test_every_platform_has_a_recipe_that_shows_what_it_sets() -> None:
    shown = re.findall(r"\{literalinclude\} \.\./\.\./(tests/data/\S+)", CLUSTERS)
    assert all((ROOT / path).is_file() for path in shown)
    assert {path.rpartition("/")[2] for path in shown if "platforms" in path} == {
        f"{job}.node1.env" for job in (*JOBS, *ELASTIC)
    }
    recipes = CLUSTERS.partition("## Recipes")[2].split("\n### ")[1:]
    for recipe in recipes:
        title = recipe.partition("\n")[0]
        assert "literalinclude" in recipe, title
        assert "unisono" in recipe and "run" in recipe and "total.py" in recipe, title
