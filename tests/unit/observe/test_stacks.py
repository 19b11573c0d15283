"""Stacks as faulthandler writes them, the user's line in them, and equal ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.hanging import hanging, takes_stacks
from unisono.observe.jobs import STOPPED, stacks_of
from unisono.observe.stacks import Frame, equal, folded, is_before, user_frame
from unisono.observe.verdict import Rank
from unisono.recording import stack_signal

TEXT = """\
Stack (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "data.py", line ??? in load
  File "/home/me/train, 2.py", line 9 in <lambda>
  ...
"""


def test_what_faulthandler_writes_is_read() -> None:
    assert stack_signal.parse(TEXT) == [
        ("/usr/lib/python3.11/threading.py", 327, "wait"),
        ("data.py", 0, "load"),
        ("/home/me/train, 2.py", 9, "<lambda>"),
    ]
    assert stack_signal.parse("") == stack_signal.parse("nothing of this kind") == []


OURS = Frame(sys.modules[user_frame.__module__].__file__ or "", 1, "wait")
LIBRARY = Frame(json.__file__, 1, "loads")
SITE = Frame("/opt/x/site-packages/torch/nn.py", 2, "forward")
STARTED = Frame("<string>", 5, "<module>")
OWN = Frame("/home/me/unisono/train.py", 9, "load")  # of a project that is called like us


def test_the_users_line_is_outside_of_libraries() -> None:
    frozen = Frame("<frozen importlib._bootstrap>", 1, "_load")
    assert user_frame([LIBRARY, SITE, frozen, OURS, OWN, Frame("run.py", 1, "<module>")]) == OWN
    assert user_frame([OURS, LIBRARY, SITE]) == LIBRARY
    assert user_frame([OURS, STARTED]) is user_frame([]) is None
    elsewhere = Frame("/opt/clone/src/unisono/control/hub.py", 354, "_sleep")
    assert user_frame([elsewhere, OWN]) == OWN
    assert folded([OWN, elsewhere, STARTED]) == (OWN,)


def test_the_inside_of_a_collective_is_folded() -> None:
    """Ranks of one call differ there, as one of them is the root of their tree."""
    assert folded([LIBRARY, OURS, SITE, OWN, OURS, LIBRARY]) == (SITE, OWN, LIBRARY)
    assert folded([LIBRARY, OWN, OURS]) == (LIBRARY, OWN)
    assert folded([LIBRARY, OURS]) == (LIBRARY, OURS)
    assert folded([OWN, OURS, STARTED]) == (OWN,)
    assert folded([OWN, STARTED]) == (OWN, STARTED)


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
    assert equal({3: a, 1: b, 0: a, 2: a}) == [(a, [0, 2, 3]), (b, [1])]


def ranks_of(facts: Mapping[str, Any], condition: str, *ranks: int) -> list[Rank]:
    return [Rank(rank, facts["pid"], condition, facts=facts) for rank in ranks]


@takes_stacks
def test_a_stopped_process_says_so() -> None:
    with hanging("lock") as process:
        process.stop()
        (rank,) = ranks_of(process.facts, "stopped", 0)
        assert stacks_of([rank], 0.2) == {0: STOPPED}


@takes_stacks
def test_own_threads_stack_comes_first() -> None:
    with hanging("thread") as process:
        ranks = ranks_of(process.facts, "sleeping", 0, 5)
        found = stacks_of(ranks, 20.0, all_threads=True)
        assert sorted(found) == [0, 5]
        for stacks in found.values():
            assert not isinstance(stacks, str)
            own = user_frame(stacks[0].frames)
            assert own is not None and own.function == "hang"
            assert Path(own.file).name == "hanging.py"
            assert stacks[0].thread_id == process.facts["thread_id"]
            assert stacks[1].thread_id != stacks[0].thread_id


def test_why_a_rank_did_not_answer_is_not_claimed_to_be_known() -> None:
    """It may also block the signal, or be in a call of the kernel that nothing interrupts."""

    def told(**facts: int) -> object:
        (rank,) = ranks_of({"pid": os.getpid(), **facts}, "sleeping", 0)
        return stacks_of([rank], 0.3)[0]

    assert told(signal=60) == "doesn't answer within 0.3 s"
    assert "takes Python 3.11 or later" in str(told())
