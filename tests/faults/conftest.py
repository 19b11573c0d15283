"""The table of the session, and what every case must leave behind: nothing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import unisono
from tests.support.listeners import listening_unix_sockets
from tests.support.measures import TABLE
from unisono.recording import stack_signal

START, END = "<!-- table: written by the suite -->", "<!-- end of the table -->"
_GONE_S = 5.0
# torchrun's agent leaves a folder for every job that failed (torch 2.13), a killed mpiexec its own.
_OTHERS = ("torchelastic_", "ompi.")
_SHARED = "/dev/shm"
_MULTIPROCESSING = "sem.mp-"  # its semaphores: none is ours, and a killed program leaves its own
_BE_SUBREAPER = 36  # prctl's number: orphans become children of this process

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_BE_SUBREAPER, 1, 0, 0, 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", metavar="PAGE", help="put the table into this page")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not TABLE.rows:  # as in a session of several processes, each of which has its own
        return
    terminalreporter.section("faults")
    for line in TABLE.lines():
        terminalreporter.write_line(line)
    page = config.getoption("--write-table")
    if page:
        text = Path(page).read_text()
        before, _, rest = text.partition(START)
        known, _, after = rest.partition(END)
        told = "\n".join(_merged(known.strip().splitlines(), TABLE.lines()))
        Path(page).write_text(f"{before}{START}\n\n{told}\n\n{END}{after}")


def _merged(known: list[str], lines: list[str]) -> list[str]:
    """Put rows into a table in the place of those of the same case: Horovod has its own session."""
    rows = {line.split("|")[1]: line for line in (*lines[:2], *known[2:], *lines[2:])}
    return list(rows.values())


@pytest.fixture(scope="session", autouse=True)
def helper(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start what lives as long as this process; let all have a folder of temporary files."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("private"))
    tempfile.tempdir = None
    unisono.spawn("gloo", abs, nproc_per_node=2)
    stack_signal.install()


@pytest.fixture(autouse=True)
def nothing_else_is_left(helper: None) -> Iterator[None]:
    """Fail a case after which this process or this host holds something that it didn't.

    Processes are looked for in tests/conftest.py; here, those that lost their parent are found too.
    """
    before = _held()
    yield
    until = time.monotonic() + _GONE_S
    while (left := _left(before)) and time.monotonic() < until:
        threading.Event().wait(0.05)
    assert not left, left


@pytest.fixture
def held() -> Callable[..., dict[str, set[str]]]:
    """What this process holds; given what it held before, what it holds besides."""
    return lambda before=None: _held() if before is None else _left(before)


def _held() -> dict[str, set[str]]:
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": {str(i) for i in range(process.num_fds())},
        "threads": {f"{t.name} {t.ident}" for t in threading.enumerate()},
        "shared memory": {
            name for name in os.listdir(_SHARED) if not name.startswith(_MULTIPROCESSING)
        },
        "temporary files": {
            name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(_OTHERS)
        },
        "listening sockets": {
            str(connection.laddr)
            for each in (process, *process.children(recursive=True))
            for connection in _connections(each)
            if connection.status == psutil.CONN_LISTEN
        },
        "listening Unix sockets": set(listening_unix_sockets()),
    }


def _connections(process: Any) -> list[Any]:
    with contextlib.suppress(psutil.Error):  # it has ended
        return list(process.net_connections("inet"))
    return []


def _left(before: dict[str, set[str]]) -> dict[str, set[str]]:
    now = _held()
    left = {what: now[what] - before[what] for what in now}
    if left["shared memory"]:
        left["shared memory"] -= _shared_memory_in_use()
    return {what: names for what, names in left.items() if names}


def _shared_memory_in_use() -> set[str]:
    """List what a process has mapped: of other jobs on this host; what is left over nobody has."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            for line in maps.read_text().splitlines():
                _, _, name = line.partition(f"{_SHARED}/")
                found.add(name.removesuffix(" (deleted)"))
    return found
