"""Where the parent of a job listens for its ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from unisono.errors import LaunchError
from unisono.launchers.job import store
from unisono.topology import LaunchPlan


def test_an_address_that_is_translated_is_listened_for_everywhere() -> None:
    plan = LaunchPlan(1, nnodes=2, node_rank=0, master_addr="203.0.113.7", master_port=0)
    with ExitStack() as held:
        hosted = store.hold(plan, held)
        assert hosted.master_addr == "203.0.113.7"
        assert hosted.master_port is not None
        socket.create_connection(("127.0.0.1", hosted.master_port), 5).close()


def test_an_address_of_one_host_is_its_own() -> None:
    plan = LaunchPlan(1, master_addr="203.0.113.7", master_port=0)
    with pytest.raises(LaunchError, match=r"can't listen at master_addr='203.0.113.7'"):
        store.hold(plan, ExitStack())


DOWN = """
import unisono
for make in (unisono.spawn, lambda *args: unisono.WorkerPool("gloo", 1).run(int)):
    try:
        make("gloo", int)
    except unisono.errors.LaunchError as error:
        print(error)
"""


def test_a_loopback_that_is_down_is_said_at_once() -> None:
    command = ["unshare", "--net", sys.executable, "-c", DOWN]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare failed" in done.stderr:
        pytest.skip("no network namespace can be made here")
    assert done.stdout.count("can connect to 127.0.0.1: ") == 2, done.stderr
    assert "ip link set lo up" in done.stdout
