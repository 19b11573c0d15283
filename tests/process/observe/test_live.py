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


def test_keys_show_stacks_and_the_terminal_is_as_it_was() -> None:
    with job_of_processes("locked"), top_in_terminal("--every", "0.3") as screen:
        text = screen.wait_for("culprit: rank 1", "rank 1 is idle", "waits for rank 1")
        assert re.search(r"hangs\.py:\d+ locked", text)
        assert "q quit" in text
        screen.press("s")
        screen.wait_for("stacks of which rank? [1]")
        screen.press("\n")
        assert "in locked" in screen.wait_for("rank 1:", "in work")
        screen.press("x")
        screen.wait_for("culprit: rank 1")
        screen.press("s")
        screen.wait_for("stacks of which rank? [1]")
        screen.press("7\r")
        screen.wait_for("there isn't a rank 7 here")
        screen.press("x")
        screen.wait_for("culprit: rank 1")
        screen.press("a")
        screen.wait_for("ranks 0, 2:", "in barrier of all ranks")
        screen.press("\x1b[B")  # one line down
        assert "ranks 0, 2:" not in screen.wait_for("rank 1:", "in locked", hidden="ranks 0, 2:")
        screen.press("x")
        screen.wait_for("culprit: rank 1")
        drawn = picture(screen.frame())
        assert "culprit:" in drawn
        screen.press("q")
        written = screen.rest()
        assert screen.process.wait() == 0
        assert written.index(SHOWN) < written.index(HIDDEN)
        assert "\x1b[?25h" in written[written.index(HIDDEN) - 200 :]  # the cursor is back


def test_a_key_ends_the_job_once_it_is_confirmed() -> None:
    with job_of_processes("locked"), top_in_terminal("--every", "0.3") as screen:
        screen.wait_for("culprit: rank 1")
        screen.press("k")
        screen.wait_for("end the 3 ranks of job")
        screen.press("\r")  # the default is no
        screen.wait_for("culprit: rank 1")
        screen.press("k")
        screen.wait_for("end the 3 ranks of job")
        screen.press("y\r")
        screen.wait_for("no job of this user runs on this host")
        screen.press("q")
        screen.rest()
        assert screen.process.wait() == 0


def test_without_a_job_it_waits_for_one_and_ctrl_c_ends_it() -> None:
    with top_in_terminal() as screen:
        screen.wait_for("no job of this user runs on this host")
        screen.process.send_signal(signal.SIGINT)
        written = screen.rest()
        assert screen.process.wait() == 130
        assert HIDDEN in written


def test_the_picture_in_the_docs_shows_what_the_view_shows() -> None:
    drawn = (ROOT / "docs" / "_static" / "top.svg").read_text().replace("&#160;", " ")
    for words in ("culprit: rank 1", "waits for rank 1", "q quit", "train.py"):
        assert words in drawn
