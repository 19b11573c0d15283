"""What the suite looks for after every case is found: a check that can't fail is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.measures import Table
from tests.support.processes import gone, run_python

ORPHAN = """
import os, signal
if child := os.fork():
    print(child)
else:
    os.closerange(0, 3)
    signal.pause()
"""


def test_what_is_left_is_found(held: Callable[..., dict[str, set[str]]]) -> None:
    """Memory and a socket, and a process whose parent has ended; others have other names."""
    name, before = f"unisono-test-{os.getpid()}", held()
    children, memory = set(psutil.Process().children(recursive=True)), Path("/dev/shm", name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        memory.write_text("x")
        found = held(before)
        memory.unlink()
    for what in ("shared memory", "listening Unix sockets"):
        assert any(name in each for each in found[what])
    assert name not in str(held(before))
    orphan = int(run_python("-c", ORPHAN))
    found_ids = [each.pid for each in {*psutil.Process().children(recursive=True)} - children]
    assert gone([orphan], 0) == found_ids == [orphan]
    os.waitpid(orphan, 0)


def test_what_fills_the_table_has_measured_how_slow_the_host_is(table: Table) -> None:
    assert table.slack >= 2
    with pytest.raises(AssertionError, match="limit"):
        table.add("too late", 1.01 * table.slack, 1.0, "nobody")
    del table.rows["too late"]
