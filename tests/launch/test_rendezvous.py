"""Where ranks meet: URLs under a launcher, and addresses that nobody answers at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import unisono
from tests.launch.test_nodes import free_port
from tests.support.command import UNISONO, run
from unisono.context import communicator

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]
BY_URL = """
import sys, unisono
with unisono.Parallel("gloo", init_method=sys.argv[1]) as parallel:
    print("SUM", parallel.run(lambda local_rank: unisono.all_reduce(1)))
"""


@pytest.mark.parametrize("name", ["processes", "torchrun"])
def test_a_tcp_url_works_where_a_store_is_hosted(name: str, tmp_path: Path) -> None:
    script = tmp_path / "by_url.py"
    script.write_text(BY_URL)
    words = [*UNISONO, "run", "--launcher", name, "--nproc-per-node", "2", str(script)]
    done = run([*words, f"tcp://127.0.0.1:{free_port()}"])
    assert done.code == 0, done.err
    assert done.out.count("SUM [2]") == 2


PRIVATE = """
import os, unisono
from unisono.context import communicator
unisono.initialize("gloo")
known = communicator().control.secret is not None  # before ranks could agree on one
print("PRIVATE", "UNISONO_PRIVATE_STORE" in os.environ, known, unisono.all_gather(known))
"""


@pytest.fixture(params=["processes", "torchrun", "mpi"])
def on_one_host(request: pytest.FixtureRequest) -> str:
    """Each launcher whose ranks are all on this host."""
    name: str = request.param
    if name == "mpi":
        request.getfixturevalue("mpi")
    return name


def test_ranks_of_a_script_meet_where_only_their_user_can_come(
    on_one_host: str, tmp_path: Path
) -> None:
    script = tmp_path / "private.py"
    script.write_text(PRIVATE)
    words = [*UNISONO, "run", "--launcher", on_one_host, "--nproc-per-node", "2", str(script)]
    done = run(words)
    assert done.code == 0, done.err
    assert done.out.count("PRIVATE True True [True, True]") == 2


def test_ranks_of_a_function_meet_where_only_their_user_can_come(on_one_host: str) -> None:
    def fn(local_rank: int) -> tuple[bool, bool]:
        is_known = vars(communicator().control)["secret"] is not None
        return "UNISONO_PRIVATE_STORE" in os.environ, is_known

    found = unisono.spawn("gloo", fn, nproc_per_node=2, launcher=on_one_host)
    assert found == [(True, True)] * 2
