"""Stacks as faulthandler writes them, the user's line in them, and equal ones."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.support.hanging import hanging
from unisono.observe.stacks import (
    Frame,
    equal,
    folded,
    is_before,
    of_ranks,
    own_frame,
    parse,
    silent,
)

TEXT = """\
Stack (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "data.py", line ??? in load
  File "/home/me/train, 2.py", line 9 in <lambda>
  ...
"""


def test_what_faulthandler_writes_is_read() -> None:
    assert parse(TEXT) == (
        Frame("/usr/lib/python3.11/threading.py", 327, "wait"),
        Frame("data.py", 0, "load"),
        Frame("/home/me/train, 2.py", 9, "<lambda>"),
    )
    assert parse("") == parse("nothing of this kind") == ()


def test_the_users_line_is_outside_of_libraries() -> None:
    own = Frame("/home/me/train.py", 9, "load")
    inner = Frame(json.__file__, 1, "loads")
    ours = Frame(sys.modules[own_frame.__module__].__file__ or "", 1, "wait")
    site = Frame("/opt/x/site-packages/torch/nn.py", 2, "forward")
    frozen = Frame("<frozen importlib._bootstrap>", 1, "_load")
    assert own_frame([inner, site, frozen, ours, own, Frame("run.py", 1, "<module>")]) == own
    assert own_frame([inner, site]) == inner
    assert own_frame([]) is None


def test_a_project_that_is_called_like_us_is_not_ours() -> None:
    own = Frame("/home/me/unisono/train.py", 9, "load")
    assert own_frame([Frame(json.__file__, 1, "loads"), own]) == own


def test_the_inside_of_a_collective_is_folded() -> None:
    """Ranks of one call differ there, as one of them is the root of their tree."""
    ours = Frame(sys.modules[own_frame.__module__].__file__ or "", 1, "wait")
    library, own = Frame(json.__file__, 1, "loads"), Frame("/home/me/train.py", 9, "load")
    site = Frame("/opt/x/site-packages/torch/nn.py", 2, "forward")
    assert folded([library, ours, site, own, ours, library]) == (site, own, library)
    assert folded([library, own, ours]) == (library, own)
    assert folded([library, ours]) == (library, ours)
    started = Frame("<string>", 5, "<module>")
    assert folded([own, ours, started]) == (own,)
    assert folded([own, started]) == (own, started)


def test_who_has_yet_to_come_to_a_line_is_before_it() -> None:
    main = Frame("train.py", 40, "main")
    here, load = Frame("train.py", 9, "step"), Frame("data.py", 3, "load")
    before, past = Frame("train.py", 8, "step"), Frame("train.py", 10, "step")
    elsewhere = Frame("train.py", 8, "save")
    assert is_before((load, before, main), (here, main))
    assert not is_before((load, past, main), (here, main))
    assert not is_before((load, elsewhere, main), (here, main))
    assert not is_before((here, main), (load, here, main))
    assert not is_before((), (here, main))


def test_equal_stacks_are_told_once_the_most_ranks_first() -> None:
    a, b = (Frame("a.py", 1, "a"),), (Frame("b.py", 1, "b"),)
    assert equal({3: a, 1: b, 0: a, 2: a}) == [((0, 2, 3), a), ((1,), b)]


@pytest.mark.parametrize("how", ["lock", "loop", "C with the interpreter lock"])
def test_a_process_that_hangs_tells_its_stacks(how: str) -> None:
    with hanging(how) as process:
        found = of_ranks({0: (process.facts, False), 5: (process.facts, False)}, 20.0)
        for stacks in found.values():
            assert not isinstance(stacks, str)
            own = own_frame(stacks[0].frames)
            assert own is not None
            assert own.function == "hang"
            assert Path(own.file).name == "hanging.py"
        assert process.is_alive()


def test_a_stopped_process_says_so_or_is_read_from_outside() -> None:
    with hanging("lock") as process:
        process.stop()
        (found,) = of_ranks({0: (process.facts, True)}, 0.2).values()
        if isinstance(found, str):
            assert "is stopped" in found
        else:
            assert "hang" in [frame.function for frame in found[0].frames]


def test_own_threads_stack_comes_first() -> None:
    with hanging("thread") as process:
        (found,) = of_ranks({0: (process.facts, False)}, 20.0, all_threads=True).values()
        assert not isinstance(found, str)
        assert "hang" in [frame.function for frame in found[0].frames]
        assert found[0].ident == process.facts["thread_id"]
        assert found[1].ident != found[0].ident


def test_who_has_no_signal_is_not_sent_one() -> None:
    ended = threading.Event()  # the default of the signal would end this process
    facts = {"pid": 0, "signal": int(signal.SIGRTMAX), "stacks_fd": 0, "stacks_inode": 0}
    with hanging("lock") as process:
        (found,) = of_ranks({0: ({**facts, "pid": process.pid}, False)}, 0.2).values()
        assert process.is_alive()
        assert not ended.is_set()
        assert isinstance(found, (str, list))


def test_why_a_rank_did_not_answer_is_not_claimed_to_be_known() -> None:
    """It may also block the signal, or be in a call of the kernel that nothing interrupts."""
    assert silent(0.3, {}) == silent(0.3, {"at_rest": 0}) == "doesn't answer within 0.3 s"
    text = silent(0.3, {"at_rest": 1})
    assert text.startswith("doesn't answer within 0.3 s; on Python 3.10 it doesn't where")
