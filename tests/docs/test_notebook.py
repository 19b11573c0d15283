"""The page about notebooks: its blocks are cells of one session, and show what they say."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, blocks

interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython isn't installed")
traitlets = pytest.importorskip("traitlets.config", reason="IPython isn't installed")
PAGE = ROOT / "docs" / "notebook.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def cells() -> Iterator[tuple[Block, str]]:
    """List the cells of the page, each with the output that it shows."""
    for block, following in pairwise([*blocks(PAGE), Block(PAGE, 0, "", "", "")]):
        if block.language == "ipython":
            yield block, following.text if following.language == "text" else ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of IPython's own
def test_every_cell_shows_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
