"""What the lines and the process of a rank are called."""

from __future__ import annotations

import io
import os
import selectors
import sys
from types import ModuleType
from typing import Any

import pytest

from unisono.control import signatures
from unisono.control.signatures import call_head
from unisono.launchers.job.output import Pipes, begin_lines_with_rank
from unisono.launchers.job.process_state import name_process


def test_lines_end_at_newlines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    begin_lines_with_rank(3)
    print("half \x0b\x0c\x85\u2028 a line")  # noqa: T201
    sys.stdout.write("a")
    sys.stdout.writelines(["b\n", "\n", "c\nd"])
    sys.stdout.flush()
    mine = "[rank 3] "
    lines = ["half \x0b\x0c\x85\u2028 a line", "ab", "", "c", "d"]
    assert out.getvalue() == "\n".join(mine + line for line in lines)
    assert err.getvalue() == ""


def test_pipes_give_whole_lines_with_their_ends() -> None:
    """Progress bars stay what they are, and a line end that is torn over two reads is one."""
    reader, writer = os.pipe()
    pipes = Pipes()
    with open(reader, "rb", buffering=0) as pipe:
        pipes.selector.register(pipe, selectors.EVENT_READ, 2)
        found = []
        for chunk in (b"a\r", b"\nb\n\r50%", b"\r60%\nlast"):
            os.write(writer, chunk)
            found += [line for _, line in pipes.read(1.0)]
        assert found == [b"a\r\n", b"b\n", b"\r", b"50%\r", b"60%\n"]
        assert pipes.rests() == [(2, b"last")]  # another process may hold the pipe
        os.close(writer)
        assert pipes.read(1.0) == []
        pipes.close()
    assert pipes.rests() == []


def test_processes_are_named_where_setproctitle_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "setproctitle", None)
    name_process(1, 2, "train.py")
    named: list[str] = []
    module: Any = ModuleType("setproctitle")
    module.setproctitle = module.setthreadtitle = named.append
    monkeypatch.setitem(sys.modules, "setproctitle", module)
    name_process(1, 2, "/of/mine/train.py")
    assert named == ["unisono rank 1 of 2: train.py", "rank 1 of 2"]


def test_a_call_is_described_in_a_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    long = compile("line = site()", f"/{'x' * 80}/train.py", "exec")
    names: dict[str, Any] = {"site": signatures.site}
    exec(long, names)
    head = call_head("barrier", names["line"])

    def gone(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.path.realpath", gone)
    assert signatures.describe(head).startswith("barrier at ...")
    assert signatures.describe(head).endswith("train.py:1")
