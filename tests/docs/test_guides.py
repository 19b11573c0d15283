"""Commands, cells and test modules print what their pages say.

Those of Slurm and Ray do so in `tests/launch/test_guides.py`.
"""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pages import OF_CLUSTERS, ROOT, Block, blocks
from tests.support.requirements import require_backend
from tests.support.sessions import Sessions

FOLDERS = [ROOT / "docs" / "learn", ROOT / "docs" / "how-to"]
NOTEBOOK, TESTING = ROOT / "docs" / "learn" / "notebook.md", ROOT / "docs" / "learn" / "tests.md"
CONSOLES = {
    block.text: block  # what several pages show alike is run once
    for folder in FOLDERS
    for page in sorted({*folder.glob("*.md")} - {*OF_CLUSTERS, TESTING})
    for block in blocks(page)
    if block.language == "console" and "-m pip " not in block.text  # nothing is installed
}
TESTS = [block for block in blocks(TESTING) if block.language == "console"]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PROGRAMS = [path for folder in FOLDERS for path in sorted((folder / "programs").glob("*.py"))]
SCRIPTS = ROOT / "docs" / "learn" / "training-script.md"


def name_of(block: Block) -> str:
    """Give the name of its library, too, by which the session of that library takes its tests."""
    return f"{block} on mpi" if " mpi " in block.text else str(block)


@pytest.mark.parametrize("block", CONSOLES.values(), ids=name_of)
def test_a_command_prints_what_its_page_says(block: Block, tmp_path: Path) -> None:
    for program in PROGRAMS:
        shutil.copy(program, tmp_path)
    for session in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = session.partition("\n")
        words = command.split()
        if "mpi" in words:
            require_backend("mpi4py")
        if words[0] == "python":
            words[0] = sys.executable
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, expected), done.stdout + done.stderr


def test_the_steps_of_the_tutorial_lead_from_its_first_script_to_its_last(tmp_path: Path) -> None:
    """And each of them leaves a script that runs."""
    first, last = (block.text for block in blocks(SCRIPTS) if block.mark("file"))
    for block in blocks(SCRIPTS):
        if block.language != "diff":
            continue
        for hunk in re.split(r"^@@\n", block.text, flags=re.MULTILINE):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            assert first.count(before) == 1, f"{block}: {before}"
            first = first.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
        (tmp_path / "step.py").write_text(first)
        words = [sys.executable, "step.py", "--epochs", "1"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{block}: {done.stderr}"
    assert first == last


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_program_prints_what_the_first_pages_show(page: str, tmp_path: Path) -> None:
    program, shown, *_ = (
        block.text for block in blocks(ROOT / page) if block.language in ("python", "text")
    )
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


def cells() -> Iterator[tuple[Block, str]]:
    """List the cells of the page, each with the output that it shows."""
    for block, following in pairwise([*blocks(NOTEBOOK), Block(NOTEBOOK, 0, "", "", "")]):
        if block.language == "ipython":
            yield block, following.text if following.language == "text" else ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of IPython's own
def test_every_cell_shows_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="no IPython")
    traitlets = pytest.importorskip("traitlets.config", reason="no IPython")
    config = traitlets.Config({"HistoryManager": {"enabled": False}})
    shell = interactive.InteractiveShell(
        config=config, ipython_dir=str(tmp_path), colors="NoColor", xmode="Context"
    )
    try:
        for block, expected in cells():
            capsys.readouterr()
            shell.run_cell(block.text, store_history=True)
            shown = capsys.readouterr().out
            is_so = doctest.OutputChecker().check_output(expected, shown, FLAGS)
            assert is_so, f"{block} shows:\n{shown}"
    finally:
        shell.run_line_magic("unload_ext", "unisono")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has who copies all test modules of the page into a directory."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for block in blocks(TESTING):
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


@pytest.mark.parametrize("block", TESTS, ids=str)
def test_a_command_of_testing_prints_what_the_page_shows(
    block: Block, project: Path, sessions: Sessions
) -> None:
    command, _, expected = block.text.partition("\n")
    assert command.startswith("$ pytest ")
    shown = printed(sessions, project, *command.split()[2:])
    if "it doesn't answer" in shown:  # a rank has half a second to tell where it is
        shown = printed(sessions, project, *command.split()[2:])
    is_same = doctest.OutputChecker().check_output(expected, shown, FLAGS)
    assert is_same, f"{block}: {command}\n{shown}"


def test_every_module_of_the_page_is_run_by_a_command() -> None:
    modules = {block.mark("pytest") for block in blocks(TESTING)} - {None}
    run = {word for block in TESTS for word in block.text.splitlines()[0].split()}
    assert modules <= run


def test_the_command_for_ci_has_options_that_exist(project: Path, sessions: Sessions) -> None:
    """That of xdist with no worker: what that does is tested elsewhere."""
    text = next(block.text for block in blocks(TESTING) if block.language == "yaml")
    found = re.search(r"run: pytest (.*)", text)
    assert found is not None
    assert "2 passed" in printed(sessions, project, *found[1].split(), "-n0", "test_fixtures.py")


def test_the_example_project_passes(tmp_path: Path, sessions: Sessions) -> None:
    folder = Path(shutil.copytree(ROOT / "examples" / "testing", tmp_path / "testing"))
    summary = printed(sessions, folder, "-q").splitlines()[-1]
    assert re.fullmatch(r"34 passed in .*", summary), summary
