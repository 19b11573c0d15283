"""Tracebacks show a user's own lines; ours are counted, and shown on demand."""

from __future__ import annotations

import builtins
import gc
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import unisono
from tests.support.interrupts import alarm
from tests.support.processes import python, run_python
from unisono import tracebacks
from unisono.errors import ArgumentError, UnknownBackendError

FOLDED = "frames of unisono, UNISONO_TRACEBACK=full shows them\n"
# Of ours and of contextlib, in turns: what it prints is folded as text.
PRINTED = """
import unisono

def inner():
    total = 4
    assert total == 5

def outer():
    try:
        unisono.initialize("nobody's")
    except unisono.UnisonoError as error:
        raise KeyError("a", "b") from error

MODE()
"""


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


def fold(call: Callable[[], object]) -> str:
    error = raised(call)
    return tracebacks.fold(error, error.__traceback__)


def test_what_a_signals_handler_raises_is_an_interrupt() -> None:
    def rings() -> None:
        with alarm(1e-6, ValueError):
            signal.pause()

    assert tracebacks.is_interrupt(raised(rings))
    assert tracebacks.is_interrupt(KeyboardInterrupt())
    assert not tracebacks.is_interrupt(raised(lambda: int("x")))


def test_runs_of_our_frames_are_one_line_in_causes_too() -> None:
    def call() -> None:
        unisono.initialize("nobody's")

    def chained() -> None:
        try:
            call()
        except UnknownBackendError as error:
            raise KeyError("no") from error

    said = fold(call)
    assert said.count(FOLDED) == 1
    assert "UnknownBackendError: unknown backend" in said
    assert "unisono.initialize(" in said
    assert str(tracebacks.__file__).rpartition("/")[0] not in said
    assert fold(chained).count(FOLDED) == 1
    assert "The above exception was the direct cause" in fold(chained)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
def test_frames_within_exception_groups_are_folded_too() -> None:
    group = vars(builtins)["ExceptionGroup"]

    def grouped() -> None:
        error = raised(lambda: unisono.initialize("nobody's"))
        raise group("outer", [error, group("inner", [error])])

    said = fold(grouped)
    assert f"\n    |   ... 2 {FOLDED}" in said
    assert f"\n      |   ... 2 {FOLDED}" in said
    assert str(tracebacks.__file__).rpartition("/")[0] not in said
    assert tracebacks.fold_text(said) == said


def test_frames_of_a_section_are_ours_and_a_context_manager_of_the_users_is_not() -> None:
    def section() -> None:
        with unisono.one_rank_first(rank=3):
            pass

    assert "contextlib" not in fold(section)

    @contextmanager
    def own() -> Iterator[None]:
        yield 1 / 0  # type: ignore[misc]

    assert "contextlib" in fold(own().__enter__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare raise brings all frames back")
@pytest.mark.parametrize("is_full", [False, True])
def test_an_error_of_a_collective_has_the_users_frames(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TRACEBACK", "full" if is_full else "")
    error = raised(lambda: unisono.broadcast(1, src=7))
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    assert (files == {__file__}) == (not is_full)


def test_all_frames_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    error = raised(lambda: unisono.initialize("nobody's"))
    said = tracebacks.fold(error, error.__traceback__)
    assert said == "".join(traceback.format_exception(error))
    assert tracebacks.fold_text(said) == said
    assert not tracebacks.hides()


@pytest.mark.parametrize("mode", ["inner", "outer"])
def test_a_traceback_that_was_printed_is_read_and_folded(mode: str, tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRINTED.replace("MODE", mode))
    words = python(str(script)).stderr
    said, line = tracebacks.last_exception(words, 0)
    folded = tracebacks.fold_text(words)
    if mode == "inner":
        assert (said, line) == ("AssertionError: assert total == 5", f"{script}:6, in inner")
        assert folded == words
    else:
        assert (said, line) == ("KeyError: ('a', 'b')", f"{script}:12, in outer")
        assert folded.count(FOLDED) == 1
        assert folded.count("  File ") < words.count("  File ")


def test_what_is_no_traceback_raised_nothing() -> None:
    for text in ("", "no\n", "Traceback (most recent call last):\nValueError: x\n"):
        assert tracebacks.last_exception(text, 0) == ("", "")


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (KeyError(), "KeyError"),
        (ArgumentError("x"), "unisono.errors.ArgumentError: x"),
        (Odd(), f"{__name__}.Odd: <its text can't be had>"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_summary_is_one_line(error: Exception, said: str) -> None:
    assert tracebacks.summary(error) == said


def test_an_assert_is_summed_up_by_what_is_known_of_it() -> None:
    class array:
        pass

    def long() -> None:
        n = 10**5000
        assert n == 0

    def named() -> None:
        x = array()
        assert x is None

    def worded() -> None:
        raise AssertionError("said by the user")

    for call in (long, named, worded):  # of which some can't be shown
        assert tracebacks.summary(raised(call)).startswith("AssertionError")
    space: dict[str, Any] = {}
    path = unisono.__file__  # no line of it is an assert
    exec(compile("def bare():\n    raise AssertionError\n", path, "exec"), space)
    assert tracebacks.summary(raised(space["bare"])) == "AssertionError"


def test_files_below_the_working_directory_are_short(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracebacks.place_of(str(tmp_path / "a" / "train.py"), 3) == "a/train.py:3"
    assert tracebacks.place_of("/elsewhere/train.py", 3) == "/elsewhere/train.py:3"


HEAD = "Traceback (most recent call last):\n"
FRAME = '  File "/u/train.py", line {}, in <module>\n    work()\n'
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def test_a_chain_within_a_message_is_no_chain_of_the_exception() -> None:
    remote = f"{HEAD}{FRAME.format(1)}KeyError: 1\n{DURING}{HEAD}{FRAME.format(2)}ValueError: 2\n"
    failed = "unisono.errors.PeerFailedError: rank 1 raised ValueError: 2 in guarded"
    whole = f"{HEAD}{FRAME.format(3)}{failed}\n\n{remote}"
    assert tracebacks.last_exception(whole, 0) == (failed, "/u/train.py:3, in <module>")
    chained = f"{HEAD}{FRAME.format(3)}unisono.errors.LaunchError: no\n{DURING}{remote}"
    assert tracebacks.last_exception(chained, 0)[0] == "ValueError: 2"


HANDLED = f"ERROR:root:goes on\n{HEAD}{FRAME.format(7)}ZeroDivisionError: handled an hour ago\n"
LOST = f"{HEAD}{FRAME.format(7)}ConnectionResetError: Connection reset by peer\n"
FAILED = f"{HEAD}{FRAME.format(7)}ValueError: no data\n"
IGNORED = f"Exception ignored in: <function f at 0x1>\n{HEAD}{FRAME.format(7)}RuntimeError: late\n"


@pytest.mark.parametrize("before", [LOST, HANDLED, IGNORED, HANDLED + "step 7\n" * 30])
@pytest.mark.parametrize("after", ["", IGNORED, "[W] process group wasn't destroyed\n"])
def test_the_last_exception_is_the_programs_end_if_few_lines_follow(
    before: str, after: str
) -> None:
    said = tracebacks.last_exception(before + FAILED + after, 10)
    assert said == ("ValueError: no data", "/u/train.py:7, in <module>")
    assert tracebacks.last_exception(HANDLED + "step\n" * 30, 10) == ("", "")
    assert tracebacks.last_exception(HANDLED + "giving up\n", 0) == ("", "")


def test_a_traceback_of_our_frames_alone_is_read() -> None:
    text = f'{HEAD}  File "{tracebacks.__file__}", line 1, in told\n    x\nValueError: x\n'
    assert tracebacks.last_exception(text, 0) == ("ValueError: x", "")


def test_packages_are_never_the_users_own_code() -> None:
    own = traceback.FrameSummary("/u/train.py", 1, "f", line="")
    for folder in ("/u/.local/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"):
        installed = traceback.FrameSummary(f"{folder}/lib.py", 1, "g", line="")
        assert tracebacks.where([own, installed]) is own


def test_a_thread_s_frame_is_found_while_garbage_has_locals_of_threads() -> None:
    """Python 3.11.0 to 3.11.8 waits for itself if it collects them within that call."""
    program = """
        import gc, threading
        from unisono.tracebacks import frame_of

        event = threading.Event()
        thread = threading.Thread(target=event.wait)
        thread.start()
        gc.set_threshold(1)
        for _ in range(200):
            ring = [threading.local()]
            ring[0].value = 1
            ring.append(ring)
            del ring
            assert frame_of(thread.ident) is not None
        assert frame_of(0) is None
        assert gc.isenabled()
        event.set()
    """
    assert run_python("-c", textwrap.dedent(program)) == ""


def test_threads_that_ask_at_once_leave_collections_enabled() -> None:
    def ask() -> None:
        for _ in range(20_000):
            tracebacks.frame_of(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(ask) for _ in range(16)]:
                done.result()
        assert gc.isenabled()
    finally:
        gc.enable()
        sys.setswitchinterval(before)
