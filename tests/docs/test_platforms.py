"""The page of platforms has a recipe and the variables of each."""

from __future__ import annotations

import re
import runpy

from tests.support.pages import ROOT
from tests.support.platforms import ELASTIC, JOBS, NODES
from unisono.environments.platforms import PLATFORMS

PAGE = (ROOT / "docs" / "how-to" / "clusters.md").read_text()


def test_the_table_has_every_variable() -> None:
    """The site writes it out of the code; what that gives is here."""
    rows = runpy.run_path(str(ROOT / "docs" / "extensions" / "platforms.py"))["rendered"]()
    table = "\n".join(rows)
    assert table.count("* -") == 1 + len(PLATFORMS)
    for each in PLATFORMS:
        hosts = () if each.hosts is None else (*each.hosts.variables, *each.hosts.own)
        names = (*each.marks, *each.node_rank, *each.nnodes, *each.leader, *each.port, *hosts)
        for name in (*names, *each.nproc_per_node, *each.main):
            assert f"``{name}``" in table, (each.NAME, name)
        for name in (*each.max_restarts, *each.meets_by):
            assert f"`{name}" in PAGE, (each.NAME, name)
        assert each.documentation in table


def test_every_platform_has_a_recipe_that_shows_what_it_sets() -> None:
    shown = re.findall(r"\{literalinclude\} \.\./\.\./(tests/data/\S+)", PAGE)
    assert all((ROOT / path).is_file() for path in shown)
    assert {path.rpartition("/")[2] for path in shown if "platforms" in path} == {
        f"{job}.node1.env" for job in (*JOBS, *ELASTIC)
    }
    recipes = PAGE.partition("## Recipes")[2].split("\n### ")[1:]
    for recipe in recipes:
        title = recipe.partition("\n")[0]
        assert "literalinclude" in recipe, title
        assert "unisono" in recipe and "run" in recipe and "total.py" in recipe, title


def test_what_a_dump_names_is_the_page_of_its_platform() -> None:
    pages = {each.NAME: each.documentation for each in PLATFORMS}
    for node in NODES.values():
        if node.name.partition(".")[0] in pages:
            assert node.documentation == pages[node.name.partition(".")[0]], node.name
