"""A process that hangs tells its stacks to others of its user, and to nobody by accident."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.hanging import THREADS_OF_C, hanging, takes_stacks
from tests.support.processes import run_python, until
from unisono.recording import stack_signal

ASKED = 100  # the stacks of all threads, told by one of them, ended it after some 20

pytestmark = takes_stacks


@pytest.mark.parametrize("how", ["lock", "loop", "C with the interpreter lock"])
def test_a_hanging_process_writes_its_stacks_whole_each_time(how: str) -> None:
    with hanging(how) as process:
        answers = [
            stack_signal.ask(process.pid, process.facts, process.pid, 20.0) for _ in range(3)
        ]
        for text in answers:
            assert text is not None
            assert "in hang\n" in text
            assert text.rstrip().endswith("in _run_module_as_main")
        memory = Path(f"/proc/{process.pid}/fd/{process.facts['stacks_fd']}")
        assert memory.stat().st_ino == process.facts["stacks_inode"]
        assert memory.read_text().endswith("".join(text or "" for text in answers))


def test_a_process_whose_threads_run_outlives_being_asked() -> None:
    """A thread that reads the stacks of others while they run ends the process sooner or later."""
    with hanging("calls") as process:
        for _ in range(ASKED):
            for thread in process.threads():
                assert stack_signal.ask(process.pid, process.facts, thread, 20.0) is not None
        assert process.is_alive()


def test_threads_that_run_no_python_take_no_longer_than_there_is_time() -> None:
    with hanging("threads of C") as process:
        until(lambda: len(process.threads()) > THREADS_OF_C, 20)
        begin_s = time.monotonic()
        texts = stack_signal.texts(process.pid, process.facts, process.pid, 1.0, True)
        assert time.monotonic() - begin_s < THREADS_OF_C / 4  # not a second for each
        assert texts is not None
        assert "in hang\n" in texts[process.pid]


def test_two_who_ask_one_process_get_the_stacks_of_their_own_threads() -> None:
    with hanging("locks") as process:
        threads = sorted(process.threads())

        def asked(thread: int) -> list[str | None]:
            return [
                stack_signal.ask(process.pid, process.facts, thread, 20.0) for _ in range(ASKED)
            ]

        with ThreadPoolExecutor(3) as executor:
            own, *others = executor.map(asked, threads)
        assert all("in hang\n" in (text or "") for text in own)
        assert all("in _wait\n" in (text or "") for each in others for text in each)


def test_a_stopped_process_is_asked_once_and_answers_when_it_goes_on() -> None:
    with hanging("lock") as process:
        memory = Path(f"/proc/{process.pid}/fd/{process.facts['stacks_fd']}")
        before = memory.read_text().count("in hang\n")
        process.stop()
        for _ in range(3):
            assert stack_signal.ask(process.pid, process.facts, process.pid, 0.05) is None
        os.kill(process.pid, signal.SIGCONT)
        text = stack_signal.ask(process.pid, process.facts, process.pid, 20.0)
        assert text is not None
        asked = memory.read_text().count("in hang\n") - before
        assert asked in (1, 2)  # one that waited, and perhaps this one


def test_nothing_is_written_to_a_file_that_has_the_number_of_the_memory(tmp_path: Path) -> None:
    """An inode's number is that of a file in one file system; a descriptor's is used again."""
    with (tmp_path / "mine").open("w+b") as file:
        file.truncate(stack_signal._MAX_BYTES + 1)
        inode = os.fstat(file.fileno()).st_ino
        facts = {**stack_signal.install(), "stacks_fd": file.fileno(), "stacks_inode": inode}
        ident = threading.get_native_id()
        assert stack_signal.ask(os.getpid(), facts, ident, 0.5) is None
        assert os.fstat(file.fileno()).st_size == stack_signal._MAX_BYTES + 1


def test_nothing_is_sent_to_a_process_that_does_not_listen() -> None:
    """The default of the signal would end it: another descriptor, or another program."""
    with hanging("lock") as process:
        wrong = {**process.facts, "stacks_inode": process.facts["stacks_inode"] + 1}
        assert stack_signal.ask(process.pid, wrong, process.pid, 0.5) is None
        other = {**process.facts, "signal": process.facts["signal"] - 1}
        assert stack_signal.ask(process.pid, other, process.pid, 0.5) is None
        assert stack_signal.ask(process.pid, {}, process.pid, 0.5) is None
        assert process.is_alive()
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        try:
            assert stack_signal.ask(sleeping.pid, process.facts, sleeping.pid, 0.5) is None
            assert sleeping.poll() is None
        finally:
            sleeping.kill()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_asked_by_the_signal_and_the_memory_of_its_parent() -> None:
    facts, sleeping = stack_signal.install(), threading.Event()
    pid = os.fork()
    if not pid:
        sleeping.wait()
    try:
        text = stack_signal.ask(pid, facts, pid, 20.0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert "in test_a_fork_is_asked" in (text or "")


TAKEN = """
import signal
from unisono.recording import stack_signal
for number in (signal.SIGRTMAX - 4, signal.SIGRTMAX - 5):
    signal.signal(number, lambda *_: None)
print(int(signal.SIGRTMAX) - stack_signal.install()["signal"])
"""


def test_a_signal_that_the_program_uses_is_not_taken() -> None:
    assert run_python("-c", TAKEN) == "6"


def test_no_command_loads_torch_for_it() -> None:
    code = (
        "import sys\nimport unisono.cli.top, unisono.cli.where, unisono.cli._live\n"
        "print('torch' in sys.modules)"
    )
    assert run_python("-c", code) == "False"
