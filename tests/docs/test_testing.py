"""The page on testing, and the example project: each of their tests and commands is run."""

from __future__ import annotations

import doctest
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, blocks
from tests.support.processes import python

PAGE = ROOT / "docs" / "testing.md"
COMMANDS = [block for block in blocks(PAGE) if block.language == "console"]
PLUGINS = ("-p", "unisono.testing.ranks.plugin", "-p", "xdist.plugin")
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LIMIT_S = 200.0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has who copies all test modules of the page into a directory."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for block in blocks(PAGE):
        name = block.mark("pytest")
        if name is not None:
            (folder / name).write_text(block.text)
    return folder


def session(folder: Path, *arguments: str) -> str:
    """Run pytest in a directory, with our plug-in and xdist alone; give what it prints."""
    own = {"COLUMNS": "80", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables = {**os.environ, **own}
    words = ("-m", "pytest", "-p", "no:cacheprovider", *PLUGINS, *arguments)
    done = python(*words, limit_s=LIMIT_S, env=variables, cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_prints_what_the_page_shows(block: Block, project: Path) -> None:
    command, _, expected = block.text.partition("\n")
    assert command.startswith("$ pytest ")
    printed = session(project, *command.split()[2:])
    if "it doesn't answer" in printed:  # a rank has half a second to tell where it is
        printed = session(project, *command.split()[2:])
    is_same = doctest.OutputChecker().check_output(expected, printed, SAME)
    assert is_same, f"{block}: {command}\n{printed}"


def test_every_module_of_the_page_is_run_by_a_command() -> None:
    modules = {block.mark("pytest") for block in blocks(PAGE)} - {None}
    run = {word for block in COMMANDS for word in block.text.splitlines()[0].split()}
    assert modules <= run


def test_the_command_for_ci_has_options_that_exist(project: Path) -> None:
    text = next(block.text for block in blocks(PAGE) if block.language == "yaml")
    found = re.search(r"run: pytest (.*)", text)
    assert found is not None
    assert "2 passed" in session(project, *found[1].split(), "test_fixtures.py")


def test_the_example_project_passes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "examples" / "testing", tmp_path / "testing"))
    summary = session(folder, "-q").splitlines()[-1]
    assert re.fullmatch(r"34 passed in .*", summary), summary
