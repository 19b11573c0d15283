"""Tracebacks for users: their own lines, with this package's frames folded into one line.

``UNISONO_TRACEBACK=full`` shows all frames.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
import os
import re
import reprlib
import sys
import sysconfig
import textwrap
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_TEXT = "_unisono_text"  # attribute of an exception
_ONE_AT_A_TIME = threading.Lock()
_PACKAGE = str(Path(__file__).parent) + os.sep
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib/python3\.\d+)/|^<frozen")
# Its frames are between a user's ``with`` and our frames.
_BETWEEN = os.sep + "contextlib.py"
# The margin is that of an exception group.
_FRAME = re.compile(
    r'^(?P<margin>(?: +\| )?)  File "(?P<file>[^"\n]*)", line (?P<line>\d+)(?:, in (?P<name>.*))?\n'
    r"(?P<source>(?:(?P=margin)    .*\n)*)(?:(?P=margin)  \[Previous line .*\n)?",
    re.MULTILINE,
)
_HEAD = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
_CHAINED = re.compile(
    r"\n\n(?:The above exception was|During handling of the above exception).*\n\n\Z"
)
_IGNORED = re.compile(r"^Exception ignored .*\n\Z", re.MULTILINE)  # before a traceback
_STACK = re.compile(rf"(?:{_FRAME.pattern})+", re.MULTILINE)
_OF_A_MESSAGE = re.compile(r"\s|frame #|$")
_LONGEST_MARK = 1000  # of text before a traceback that belongs to it
_LONGEST_ASSERT = 10  # lines
_SHOWN = reprlib.Repr()
_SHOWN.maxother = _SHOWN.maxstring = _SHOWN.maxlong = 60


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is asynchronous: Ctrl-C, or raised by a signal's handler."""
    # Handlers receive the frame that they interrupt.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        for given in trace.tb_frame.f_locals.values():
            if any(each is frame for each in (given if type(given) is tuple else (given,))):
                return True
    return not isinstance(error, Exception)


def is_full() -> bool:
    """Return whether the user wants every frame."""
    return os.environ.get("UNISONO_TRACEBACK", "").lower() == "full"


def hides(_: object = None) -> bool:
    """Return whether pytest must hide a module's frames: its ``__tracebackhide__``."""
    return not is_full()


def is_ours(file: str) -> bool:
    """Return whether a file belongs to this package."""
    return file.startswith(_PACKAGE)


def frame_of(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a thread of this process; None if there isn't one."""
    # A collection within this call may wait for a lock that the call itself holds:
    # https://github.com/python/cpython/issues/106883, until Python 3.11.9 is the oldest 3.11.
    with _ONE_AT_A_TIME:  # a second thread would find collections disabled, and leave them so
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if was_enabled:
                gc.enable()


def place_of(file: str, line: int) -> str:
    """Return file and line, the file relative to the working directory if it is below."""
    try:
        here = os.getcwd() + os.sep
    except OSError:
        here = file + os.sep  # the directory was deleted: no file is below
    return f"{file[len(here) :] if file.startswith(here) else file}:{line}"


def where(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code, else of another library."""
    foreign = [frame for frame in frames if not is_ours(frame.filename)]
    own = [frame for frame in foreign if not is_of_a_library(frame.filename)]
    return next(reversed(own or foreign), None)


def is_of_a_library(file: str) -> bool:
    """Return whether a file belongs to Python or is installed, here or in another environment."""
    return bool(_INSTALLED.search(file)) or file.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib"))


def fold(error: BaseException, frames: TracebackType | None) -> str:
    """Return the traceback of an exception and of its causes, with our frames folded."""
    return fold_text("".join(traceback.format_exception(type(error), error, frames)))


def _runs(files: Sequence[str]) -> list[tuple[bool, list[int]]]:
    """Group frame indices into runs, with whether each is folded; never folds all of them."""
    ours = [is_ours(file) for file in files]
    # Frames of contextlib are hidden only next to ours, as users have some, too.
    beside = [any(ours[max(0, index - 1) : index + 2]) for index in range(len(files))]
    hidden = [
        is_own or (is_beside and file.endswith(_BETWEEN))
        for is_own, is_beside, file in zip(ours, beside, files, strict=True)
    ]
    if all(hidden):
        hidden = [False] * len(files)
    return [(key, list(run)) for key, run in groupby(range(len(files)), hidden.__getitem__)]


def _note(count: int) -> str:
    frames = "1 frame" if count == 1 else f"{count} frames"
    return f"  ... {frames} of unisono, UNISONO_TRACEBACK=full shows them\n"


def fold_text(text: str) -> str:
    """Fold our frames in tracebacks that Python has printed."""
    return text if is_full() else _STACK.sub(_folded, text)


def _folded(stack: re.Match[str]) -> str:
    frames = list(_FRAME.finditer(stack[0]))
    lines: list[str] = []
    for is_hidden, indices in _runs([frame["file"] for frame in frames]):
        note = frames[indices[0]]["margin"] + _note(len(indices))
        lines += [note] if is_hidden else [frames[index][0] for index in indices]
    return "".join(lines)


def _last_part(text: str) -> str:
    """Return the last traceback that Python has printed, without those of its causes."""
    own, is_quoted = -1, False
    for head in _HEAD.finditer(text):
        before = text[max(0, head.start() - _LONGEST_MARK) : head.start()]
        if _IGNORED.search(before):  # as in a finalizer: the process goes on
            continue
        is_chained = own >= 0 and _CHAINED.search(before) is not None
        # The message of our error may quote a traceback, with those of its causes.
        if own >= 0 and (is_quoted or not is_chained) and _quotes(text[own : head.start()]):
            is_quoted = True
            continue
        own, is_quoted = head.start(), False
    return "" if own < 0 else text[own:]


def _quotes(block: str) -> bool:
    """Return whether the exception's message contains another traceback."""
    # Our errors end a quoted traceback with an empty line.
    stack = _STACK.search(block)
    return (
        stack is not None
        and block.startswith("unisono.errors.", stack.end())
        and block.endswith("\n\n")
    )


def last_exception(text: str, most_after: int) -> tuple[str, str]:
    """Return the last exception that Python printed, and its line; nothing if more lines follow."""
    own = _last_part(text)
    stack = _STACK.search(own)
    if stack is None or _n_after(own[stack.end() :]) > most_after:
        return "", ""
    raised = own[stack.end() :].partition("\n")[0].strip()
    matches = list(_FRAME.finditer(stack[0]))
    frames = [
        traceback.FrameSummary(m["file"], int(m["line"]), m["name"] or "?", line="")
        for m in matches
    ]
    innermost = where(frames)
    source = matches[-1]["source"].strip().partition("\n")[0]
    # An assert without a message has no text.
    if raised == "AssertionError" and source.startswith("assert "):
        raised = f"{raised}: {source}"
    return raised, "" if innermost is None else line_of(innermost)


def _n_after(rest: str) -> int:
    """Count the lines after an exception that aren't part of its message."""
    # Only indented lines and C++ frames are known to belong to it.
    rest = re.split(r"^Exception ignored ", rest, flags=re.MULTILINE)[0]
    if rest.startswith("unisono.errors."):
        rest = _HEAD.split(rest)[0]
    return sum(not _OF_A_MESSAGE.match(line) for line in rest.splitlines()[1:])


def line_of(frame: traceback.FrameSummary) -> str:
    """Return file, line and function of a frame."""
    return f"{place_of(frame.filename, frame.lineno or 0)}, in {frame.name}"


def raised_here(error: E) -> E:
    """Return an exception without the frames it has passed so far."""
    return error if is_full() else error.with_traceback(None)


def say_instead(error: BaseException, text: str) -> None:
    """Print a text instead of a traceback if an exception stays uncaught."""
    # A `sys.excepthook` of the program is kept.
    if sys.excepthook in (sys.__excepthook__, _print) and not is_full():
        setattr(error, _TEXT, text)
        sys.excepthook = _print


def _print(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    text = getattr(error, _TEXT, "")
    if text and sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
    else:
        sys.__excepthook__(kind, error, frames)


def summary(error: BaseException) -> str:
    """Return an exception in one line: its type and text, and the source of a bare assert."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error)
    except Exception:  # an exception's own __str__ may raise anything
        text = "<its text can't be had>"
    if not text and isinstance(error, AssertionError):
        with contextlib.suppress(Exception):  # a value's own __repr__ may raise anything
            text = _assertion(error.__traceback__)
    text = text.strip().partition("\n")[0]
    return f"{name}: {text}" if text else name


def _assertion(frames: TracebackType | None) -> str:
    """Return the source of a failed assert, and the values of the names in it."""
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return ""
    statement = _statement(frames.tb_frame.f_code.co_filename, frames.tb_lineno)
    if statement is None:
        return ""
    variables = frames.tb_frame.f_locals
    names = [
        n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name) and n.id in variables
    ]
    values = [f"{name} = {_SHOWN.repr(variables[name])}" for name in dict.fromkeys(names)]
    values = [" ".join(value.split()) for value in values if " = <function " not in value]
    text = ast.unparse(statement)
    return f"{text}, where {', '.join(values)}" if values else text


def _statement(file: str, line: int) -> ast.Assert | None:
    lines: list[str] = []
    for number in range(line, line + _LONGEST_ASSERT):
        lines.append(linecache.getline(file, number))
        try:
            body = ast.parse(textwrap.dedent("".join(lines))).body
        except (SyntaxError, ValueError):  # the statement goes on in the next line
            continue
        first = body[0] if body else None
        return first if isinstance(first, ast.Assert) else None
    return None
