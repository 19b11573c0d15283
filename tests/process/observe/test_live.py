"""The full-screen view, in a real terminal."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.screens import picture, top_in_terminal
from tests.support.tops import job_of_processes

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("own_pages")
SHOWN, HIDDEN = "\x1b[?1049h", "\x1b[?1049l"
NO_JOB, NAMED, WHICH = "no job of this user runs", "culprit: rank 1", "stacks of which rank? [1]"


def test_keys_show_stacks_and_end_the_job_and_the_terminal_is_as_it_was() -> None:
    with top_in_terminal("--every", "0.3") as screen:
        screen.wait_for(NO_JOB)  # it waits for one
        with job_of_processes("locked"):
            text = screen.wait_for(NAMED, "rank 1 is idle", "waits for rank 1")
            assert re.search(r"hangs\.py:\d+ locked", text)
            assert "q quit" in text
            screen.press("s", WHICH)
            assert "in locked" in screen.press("\n", "rank 1:", "in work")
            screen.press("x", NAMED)
            screen.press("s", WHICH)
            screen.press("7\r", "there isn't a rank 7 here")
            screen.press("x", NAMED)
            screen.press("a", "ranks 0, 2:", "in barrier of all ranks")
            text = screen.press("\x1b[B", "rank 1:", "in locked", hidden="ranks 0, 2:")
            assert "ranks 0, 2:" not in text  # one line down
            screen.press("x", NAMED)
            assert "culprit:" in picture(screen.frame())
            screen.press("k", "end the 3 ranks of job")
            screen.press("\r", NAMED)  # the default is no
            screen.press("k", "end the 3 ranks of job")
            screen.press("y\r", NO_JOB)
        screen.press("q")
        written = screen.rest()
        assert screen.process.wait() == 0
    assert written.index(SHOWN) < written.index(HIDDEN)
    assert "\x1b[?25h" in written[written.index(HIDDEN) - 200 :]  # the cursor is back


def test_ctrl_c_ends_it() -> None:
    with top_in_terminal() as screen:
        screen.wait_for(NO_JOB)
        screen.process.send_signal(signal.SIGINT)
        written = screen.rest()
        assert screen.process.wait() == 130
    assert HIDDEN in written


def test_the_picture_in_the_docs_shows_what_the_view_shows() -> None:
    drawn = (ROOT / "docs" / "_static" / "top.svg").read_text().replace("&#160;", " ")
    for words in ("culprit: rank 1", "waits for rank 1", "q quit", "train.py"):
        assert words in drawn
