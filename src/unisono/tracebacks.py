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
import textwrap
import threading
import traceback
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_TEXT = "_unisono_text"  # attribute of an exception
_ONE_AT_A_TIME = threading.Lock()
_PACKAGE = str(Path(__file__).parent) + os.sep
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib(64)?/python3\.\d+t?)/|^<frozen")
# Frames of contextlib are between a user's ``with`` and our frames.
_CONTEXTLIB = os.sep + "contextlib.py"
# The margin is the one that an exception group puts before its tracebacks.
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
_MESSAGE_LINE = re.compile(r"\s|frame #|$")
# Characters to search before a traceback for the line that introduces it.
_MAX_PREAMBLE = 1000
_LONGEST_ASSERT = 10  # lines
_SHOWN = reprlib.Repr()
_SHOWN.maxother = _SHOWN.maxstring = _SHOWN.maxlong = 60


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is asynchronous: Ctrl-C, or raised by a signal's handler."""
    # A signal handler's frame follows the frame that the signal interrupted. The interrupted frame
    # is also the handler's second argument, perhaps in the tuple of its ``*args``.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        for value in trace.tb_frame.f_locals.values():
            if any(each is interrupted for each in (value if type(value) is tuple else (value,))):
                return True
    return not isinstance(error, Exception)


def is_full() -> bool:
    """Return whether the user wants every frame."""
    return os.environ.get("UNISONO_TRACEBACK", "").lower() == "full"


def hides(_: object = None) -> bool:
    """Return whether pytest must hide a module's frames, as its ``__tracebackhide__``."""
    return not is_full()


def is_ours(file: str) -> bool:
    """Return whether a file belongs to this package."""
    return file.startswith(_PACKAGE)


def frame_of(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a thread of this process; None if it has no such thread."""
    # A garbage collection during this call can deadlock on a lock that the call holds:
    # https://github.com/python/cpython/issues/106883, until Python 3.11.9 is the oldest 3.11.
    with _ONE_AT_A_TIME:  # a second thread would find collections disabled and leave them disabled
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if was_enabled:
                gc.enable()


def place_of(file: str, line: int) -> str:
    """Return file and line; a file below the working directory is relative to it."""
    try:
        directory = os.getcwd() + os.sep
    except OSError:
        directory = file + os.sep  # the directory was deleted, so no file is below it
    return f"{file[len(directory) :] if file.startswith(directory) else file}:{line}"


def where(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code, else of another library."""
    others = [frame for frame in frames if not is_ours(frame.filename)]
    of_user = [frame for frame in others if not is_of_a_library(frame.filename)]
    return next(reversed(of_user or others), None)


def is_of_a_library(file: str) -> bool:
    """Return whether a file belongs to Python or is installed, here or in another environment."""
    return _INSTALLED.search(file) is not None


def fold(error: BaseException, frames: TracebackType | None) -> str:
    """Return the traceback of an exception and of its causes, with our frames folded."""
    return fold_text("".join(traceback.format_exception(type(error), error, frames)))


def fold_text(text: str) -> str:
    """Fold our frames in tracebacks that Python has printed."""
    return text if is_full() else _STACK.sub(_fold_stack, text)


def _fold_stack(stack: re.Match[str]) -> str:
    """Replace each run of our frames in a printed stack by one line, unless all are ours."""
    frames = list(_FRAME.finditer(stack[0]))
    ours = [is_ours(frame["file"]) for frame in frames]
    # Frames of contextlib are hidden only next to ours, because users' code has some, too.
    beside = [any(ours[max(0, index - 1) : index + 2]) for index in range(len(frames))]
    hidden = [
        ours[index] or (beside[index] and frame["file"].endswith(_CONTEXTLIB))
        for index, frame in enumerate(frames)
    ]
    if all(hidden):  # else the stack would show no line at all
        return stack[0]
    lines: list[str] = []
    for is_hidden, run in groupby(range(len(frames)), hidden.__getitem__):
        indices = list(run)
        if not is_hidden:
            lines += [frames[index][0] for index in indices]
            continue
        count = "1 frame" if len(indices) == 1 else f"{len(indices)} frames"
        note = f"  ... {count} of unisono, UNISONO_TRACEBACK=full shows them\n"
        lines.append(frames[indices[0]]["margin"] + note)
    return "".join(lines)


def _last_traceback(text: str) -> str:
    """Return the last traceback that Python has printed, without those of its causes."""
    begin, is_quoted = -1, False  # where the last one begins; whether its message quotes another
    for head in _HEAD.finditer(text):
        before = text[max(0, head.start() - _MAX_PREAMBLE) : head.start()]
        if _IGNORED.search(before):  # for example in a finalizer; the process continued
            continue
        is_chained = begin >= 0 and _CHAINED.search(before) is not None
        # The message of our error may quote a traceback together with those of its causes.
        if begin >= 0 and (is_quoted or not is_chained) and _quotes(text[begin : head.start()]):
            is_quoted = True
            continue
        begin, is_quoted = head.start(), False
    return "" if begin < 0 else text[begin:]


def _quotes(block: str) -> bool:
    """Return whether the exception's message contains another traceback."""
    # Our errors end a quoted traceback with an empty line.
    stack = _STACK.search(block)
    return (
        stack is not None
        and block.startswith("unisono.errors.", stack.end())
        and block.endswith("\n\n")
    )


def last_exception(text: str, max_lines_after: int) -> tuple[str, str]:
    """Return the last exception that Python printed, and the user's line that raised it.

    Both are empty if more than `max_lines_after` unrelated lines follow.
    """
    last = _last_traceback(text)
    stack = _STACK.search(last)
    if stack is None or _count_unrelated_lines(last[stack.end() :]) > max_lines_after:
        return "", ""
    raised = last[stack.end() :].partition("\n")[0].strip()
    matches = list(_FRAME.finditer(stack[0]))
    frames = [  # with an empty line, because None would make Python read the file
        traceback.FrameSummary(m["file"], int(m["line"]), m["name"] or "?", line="")
        for m in matches
    ]
    innermost = where(frames)
    source = matches[-1]["source"].strip().partition("\n")[0]
    # An assert without a message has no text.
    if raised == "AssertionError" and source.startswith("assert "):
        raised = f"{raised}: {source}"
    return raised, "" if innermost is None else line_of(innermost)


def _count_unrelated_lines(rest: str) -> int:
    """Count the lines after an exception that aren't part of its message."""
    # Only indented lines and C++ frames are known to belong to the message.
    rest = re.split(r"^Exception ignored ", rest, flags=re.MULTILINE)[0]
    if rest.startswith("unisono.errors."):  # its message may quote another traceback
        rest = _HEAD.split(rest)[0]
    # The first line is the exception itself.
    return sum(not _MESSAGE_LINE.match(line) for line in rest.splitlines()[1:])


def line_of(frame: traceback.FrameSummary) -> str:
    """Return file, line and function of a frame."""
    return f"{place_of(frame.filename, frame.lineno or 0)}, in {frame.name}"


def raised_here(error: E) -> E:
    """Return an exception without the frames that it has passed so far."""
    return error if is_full() else error.with_traceback(None)


def say_instead(error: BaseException, text: str) -> None:
    """Print a text instead of a traceback if an exception stays uncaught."""
    # A `sys.excepthook` of the program is kept.
    if sys.excepthook in (sys.__excepthook__, _hook) and not is_full():
        setattr(error, _TEXT, text)
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print the text that `say_instead` gave the exception, else its traceback."""
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
            text = _describe_assert(error.__traceback__)
    text = text.strip().partition("\n")[0]
    return f"{name}: {text}" if text else name


def _describe_assert(frames: TracebackType | None) -> str:
    """Return the source of a failed assert, and the values of the names in it."""
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return ""
    statement = _parse_assert(frames.tb_frame.f_code.co_filename, frames.tb_lineno)
    if statement is None:
        return ""
    variables = frames.tb_frame.f_locals
    names = [
        n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name) and n.id in variables
    ]
    values = [f"{name} = {_SHOWN.repr(variables[name])}" for name in dict.fromkeys(names)]
    # A value has to fit into one line, and the repr of a function adds nothing to its name.
    values = [" ".join(value.split()) for value in values if " = <function " not in value]
    text = ast.unparse(statement)
    return f"{text}, where {', '.join(values)}" if values else text


def _parse_assert(file: str, line: int) -> ast.Assert | None:
    """Parse the assert that begins at a line of a file; None if none does."""
    lines: list[str] = []
    for number in range(line, line + _LONGEST_ASSERT):
        lines.append(linecache.getline(file, number))
        try:
            body = ast.parse(textwrap.dedent("".join(lines))).body
        except (SyntaxError, ValueError):  # the statement continues in the next line
            continue
        first = body[0] if body else None
        return first if isinstance(first, ast.Assert) else None
    return None
