"""The table of the session, and what every case must leave behind: nothing."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from _measures import Clock, Table

import unisono

sys.path.insert(0, str(Path(__file__).parent.parent / "process"))

ROOT = Path(__file__).parents[2]
START, END = "<!-- table: written by the suite -->", "<!-- end of the table -->"
_GONE_S = 5.0
# Shared memory says not whose it is: it is looked at where no other job uses the host.
ALONE = "CI" in os.environ


TABLE = Table()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", metavar="PAGE", help="put the table into this page")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("faults")
    for line in TABLE.lines():
        terminalreporter.write_line(line)
    terminalreporter.section("the same with others, from the page on faults")
    _, _, peers = (ROOT / "docs" / "faults.md").read_text().partition("## The peers")
    for line in peers.partition("\n## ")[0].strip().splitlines():
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


@pytest.fixture(scope="session")
def table() -> Table:
    return TABLE


@pytest.fixture(scope="session", autouse=True)
def helper(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start what lives as long as this process; let all have a folder of temporary files."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("private"))
    tempfile.tempdir = None
    unisono.spawn("gloo", abs, nproc_per_node=2)


@pytest.fixture(autouse=True)
def nothing_else_is_left(helper: None) -> Iterator[None]:
    """Fail a case after which this process or this host holds something that it didn't."""
    before = _held()
    yield
    until = time.monotonic() + _GONE_S
    while (left := _left(before)) and time.monotonic() < until:
        threading.Event().wait(0.05)
    assert not left, left


def _held() -> dict[str, set[str]]:
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": {str(i) for i in range(process.num_fds())},
        "threads": {f"{t.name} {t.ident}" for t in threading.enumerate()},
        "shared memory": set(os.listdir("/dev/shm")) if ALONE else set(),
        # torchrun's agent leaves a folder of its own for every job that failed (torch 2.13).
        "temporary files": {
            name for name in os.listdir(tempfile.gettempdir()) if "torchelastic_" not in name
        },
        "listening sockets": {
            str(connection.laddr)
            for each in (process, *process.children(recursive=True))
            for connection in each.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        },
    }


def _left(before: dict[str, set[str]]) -> dict[str, set[str]]:
    now = _held()
    return {what: now[what] - before[what] for what in now if now[what] - before[what]}


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(str(tmp_path / "clock"))
