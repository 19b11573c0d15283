"""The process that tells what another one printed last."""

from __future__ import annotations

from tests.support.processes import run_python

FORKS = """
import os
import signal

from unisono.testing._last_words import Witness

with Witness("mine"):
    child = os.fork()
    if not child:
        signal.alarm(60)  # and no longer, where the test fails
        signal.pause()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print("left")
"""


def test_a_fork_that_is_left_keeps_nobody_waiting() -> None:
    assert run_python("-c", FORKS) == "left"
