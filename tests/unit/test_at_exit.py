"""What a process does after its exit handlers."""

from __future__ import annotations

import subprocess
import sys


def test_exit_handlers_leave_them_to_the_rank_and_peers_get_time_before_they_are_ended() -> None:
    program = """
import atexit
from unisono.at_exit import LastCalls

LastCalls.add(lambda: print("first"))
LastCalls.add(lambda: print("second"), ends_peers="a call was given up")
LastCalls.leave_to_rank()
atexit._run_exitfuncs()
print("handlers have run")
LastCalls.make(print)
LastCalls.make(print)
"""
    assert output_of(program) == ["handlers have run", "a call was given up", "second", "first"]


def test_without_a_rank_that_makes_them_an_exit_handler_does() -> None:
    program = """
from unisono.at_exit import LastCalls

LastCalls.add(lambda: print("end"), ends_peers="there is no rank that waits for them")
print("begin")
"""
    assert output_of(program) == ["begin", "end"]


def output_of(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
