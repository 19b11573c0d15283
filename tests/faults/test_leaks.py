"""What the suite looks for after every case is found: a check that can't fail is none."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.measures import Table
from tests.support.processes import gone

ORPHAN = """
import os, signal
child = os.fork()
if child:
    os.write(1, b"%d" % child)
else:
    os.close(1)
    signal.pause()
"""


@contextmanager
def an_orphan() -> Iterator[None]:
    """Leave a process whose parent has ended."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, timeout=60)
    try:
        yield
    finally:
        assert gone([int(done.stdout)], 0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(done.stdout), 0)


@contextmanager
def a_listener(path: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield


@contextmanager
def shared_memory() -> Iterator[None]:
    path = Path(f"/dev/shm/unisono-test-{os.getpid()}")
    path.write_text("x")
    try:
        yield
    finally:
        path.unlink()


LEFT: dict[str, Callable[[], Any]] = {
    "shared memory": shared_memory,
    "listening Unix sockets": lambda: a_listener(f"\0unisono-test-{os.getpid()}"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_found(what: str, held: Callable[..., dict[str, set[str]]]) -> None:
    """That of another test on this host has another name."""

    def is_found() -> bool:
        return any(f"unisono-test-{os.getpid()}" in name for name in held(before).get(what, ()))

    before = held()
    with LEFT[what]():
        assert is_found()
    assert not is_found()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_process_that_lost_its_parent_is_found() -> None:
    children = set(psutil.Process().children(recursive=True))
    with an_orphan():
        assert len(set(psutil.Process().children(recursive=True)) - children) == 1


def test_what_fills_the_table_has_measured_how_slow_the_host_is(table: Table) -> None:
    assert table.slack >= 2
    with pytest.raises(AssertionError, match="limit"):
        table.add("too late", 1.01 * table.slack, 1.0, "nobody")
    del table.rows["too late"]
