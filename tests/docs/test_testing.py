"""The page on testing, and the example project: each of their tests and commands is run."""

from __future__ import annotations

import doctest
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, blocks
from tests.support.sessions import Sessions

PAGE = ROOT / "docs" / "testing.md"
COMMANDS = [block for block in blocks(PAGE) if block.language == "console"]
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


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


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """With our plug-in and xdist alone."""
    with Sessions({"COLUMNS": "80", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}) as warm:
        yield warm


def printed(sessions: Sessions, folder: Path, *arguments: str) -> str:
    done = sessions.run(folder, "-p", "no:cacheprovider", "-p", "xdist.plugin", *arguments)
    assert done.ret in (0, 1), "\n".join(done.outlines + done.errlines)
    return "\n".join([*done.outlines, ""])


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_prints_what_the_page_shows(
    block: Block, project: Path, sessions: Sessions
) -> None:
    command, _, expected = block.text.partition("\n")
    assert command.startswith("$ pytest ")
    shown = printed(sessions, project, *command.split()[2:])
    if "it doesn't answer" in shown:  # a rank has half a second to tell where it is
        shown = printed(sessions, project, *command.split()[2:])
    is_same = doctest.OutputChecker().check_output(expected, shown, SAME)
    assert is_same, f"{block}: {command}\n{shown}"


def test_every_module_of_the_page_is_run_by_a_command() -> None:
    modules = {block.mark("pytest") for block in blocks(PAGE)} - {None}
    run = {word for block in COMMANDS for word in block.text.splitlines()[0].split()}
    assert modules <= run


def test_the_command_for_ci_has_options_that_exist(project: Path, sessions: Sessions) -> None:
    """That of xdist with no worker: what that does is tested elsewhere."""
    text = next(block.text for block in blocks(PAGE) if block.language == "yaml")
    found = re.search(r"run: pytest (.*)", text)
    assert found is not None
    assert "2 passed" in printed(sessions, project, *found[1].split(), "-n0", "test_fixtures.py")


def test_the_example_project_passes(tmp_path: Path, sessions: Sessions) -> None:
    folder = Path(shutil.copytree(ROOT / "examples" / "testing", tmp_path / "testing"))
    summary = printed(sessions, folder, "-q").splitlines()[-1]
    assert re.fullmatch(r"34 passed in .*", summary), summary
