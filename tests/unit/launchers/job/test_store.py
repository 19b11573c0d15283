"""Where the parent of a job listens for its ranks."""

from __future__ import annotations

import ctypes
import socket
import subprocess
from contextlib import ExitStack

import pytest

import unisono
from tests.support.processes import in_fork
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


_NEWNET = 0x40000000  # CLONE_NEWNET; until Python 3.12, whose os has it


def test_a_loopback_that_is_down_is_said_at_once() -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")

    def start() -> None:
        assert ctypes.CDLL(None).unshare(_NEWNET) == 0
        remedy = "can connect to 127.0.0.1: .*ip link set lo up"
        with pytest.raises(LaunchError, match=remedy):
            unisono.spawn("gloo", int)
        with pytest.raises(LaunchError, match=remedy), unisono.WorkerPool("gloo", 1) as pool:
            pool.run(int)

    assert in_fork(start) == 0
