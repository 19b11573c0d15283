"""What every test must leave behind: no context, no replica, the environment as it was."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import unisono
from tests.support.durations import RECORD, Durations, SharedSetUp, is_fast, recorded
from tests.support.measures import TABLE, Clock, Table, slack

# A shell starts what it runs in the background deaf to Ctrl-C, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
_END_S = 5.0  # for threads and processes that are about to end
collect_ignore = ["compat/programs"]  # which tests run, and pytest would import for doctests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--set", choices=("fast", "rest"), help="the tests that are fast, or not")
    parser.addoption("--durations-to", metavar="FILE", help="FOLDER/SESSION for the record")


def pytest_configure(config: pytest.Config) -> None:
    to = config.getoption("--durations-to")
    if to is not None:
        config.pluginmanager.register(SharedSetUp())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Durations(Path(to).parent, Path(to).name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--set")
    if chosen is not None:
        slow = recorded(json.loads(RECORD.read_text()))
        left = [item for item in items if is_fast(item, slow) != (chosen == "fast")]
        items[:] = [item for item in items if is_fast(item, slow) == (chosen == "fast")]
        config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a replica, a process, a context or a changed environment."""
    if unisono.is_distributed():  # this is a rank, and others look what is left in it
        yield
        return
    environ, processes, threads = _environ(), set(_children()), set(threading.enumerate())
    yield
    left = _threads_left(threads) + _processes_left(processes)
    assert not left  # a thread that is left would answer for the context too
    was_distributed = unisono.is_distributed()
    unisono.finalize()
    assert not was_distributed
    assert _environ() == environ


@pytest.fixture
def table() -> Table:
    """What every way to fail costs: printed by tests/faults."""
    TABLE.slack = slack()
    return TABLE


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(str(tmp_path / "clock"))


def _threads_left(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before
    threads = [thread for thread in new if thread.name.startswith("unisono-rank-")]
    for thread in threads:
        thread.join(_END_S)
    return [thread.name for thread in threads if thread.is_alive()]


def _processes_left(before: set[Any]) -> list[str]:
    new = set(_children()) - before - _helpers()
    _, alive = psutil.wait_procs(new, timeout=_END_S)
    left = [f"{process.pid} {process.cmdline()}" for process in alive]
    for process in alive:
        process.kill()
    return left


def _environ() -> dict[str, str]:
    # sklearn, torch's compiler, and ignite beside Horovod set theirs when they are imported.
    others = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "HOROVOD_DYNAMIC_PROCESS_SETS")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


def _children() -> list[Any]:
    """List this process's descendants, the helpers of before among them: warm ranks keep them."""
    children: list[Any] = psutil.Process().children(recursive=True)
    return children


def _helpers() -> set[Any]:
    """List the helpers in use, which live as long as this process does."""
    launcher = sys.modules.get("unisono.launchers.local")
    pids = {helper.process.pid for helper in launcher._fork_servers[-1:]} if launcher else set()
    return {process for process in _children() if process.pid in pids}


@pytest.fixture
def own_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let these tests see the pages of their own jobs alone."""
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("UNISONO_STATUS", str(folder))
    return folder
