"""Tests that hang, die, leave something behind or race: the session names them, and goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sessions import Sessions
from unisono.testing.ranks.delays import _COLLECTIVES, Delays

TWENTY = """
import os
import signal
import time

import pytest
import unisono as idist

pytestmark = pytest.mark.ranks(2, on="gloo")


@pytest.mark.parametrize("value", range(8))
def test_before(world, value):
    assert idist.all_reduce(value) == 2 * value


@pytest.mark.ranks(2, on="gloo", timeout=4)
def test_hangs(world):
    if world.only(1):
        time.sleep(1000)
    idist.barrier()


def test_dies(world):
    if world.only(1):
        os.kill(os.getpid(), signal.SIGSEGV)
    idist.barrier()


def test_leaks(world):
    os.environ["LEFT_BEHIND"] = "here"


def test_fails_on_one(world):
    idist.barrier()
    assert world.rank != 1, "as it should"
    idist.barrier()


@pytest.mark.parametrize("value", range(8))
def test_after(world, value):
    assert "LEFT_BEHIND" not in os.environ
    assert idist.all_reduce(value) == 2 * value
"""


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_session_names_what_went_wrong_and_goes_on(
    sessions: Sessions, tmp_path: Path, options: list[str]
) -> None:
    result = sessions.run(tmp_path, *options, test_twenty=TWENTY)
    result.assert_outcomes(passed=16, failed=4)
    result.stdout.fnmatch_lines_random(
        [
            "*ranks 0,1 of 2 weren't done after 4 s (gloo)*",
            "*time.sleep(1000)",
            "rank 1 of 2 was ended by SIGSEGV*",
            "the test left behind: environment variable LEFT_BEHIND='here'",
            "rank 1 of 2 (gloo):",
            "E       AssertionError: as it should",
            "*rank 0 of 2 still ran, and were ended*",
        ]
    )


LEAKS = """
import os
import threading

import pytest
import torch
import unisono as idist

kept = []


@pytest.fixture(scope="module")
def lasting(request):
    if "OF_THE_MODULE" not in os.environ:
        os.environ["OF_THE_MODULE"] = "fine"
    kept.append(open(__file__))
    return "fine"


@pytest.mark.ranks(2)
def test_fine(world, lasting, tmp_path):
    assert os.environ["OF_THE_MODULE"] == lasting
    with open(tmp_path / str(world.rank), "w"):
        pass
    group = idist.new_group([0, 1])
    idist.all_reduce(torch.ones(100_000), group=group)
    thread = threading.Thread(target=print)
    thread.start()


@pytest.mark.ranks(2)
def test_still_fine(world, lasting):
    assert os.environ["OF_THE_MODULE"] == lasting


@pytest.mark.ranks(2)
def test_variable(world):
    os.environ.pop("HOME", None)


@pytest.mark.ranks(2)
def test_folder(world, tmp_path):
    os.chdir(tmp_path)


@pytest.mark.ranks(2)
def test_thread(world):
    threading.Thread(target=threading.Event().wait, name="mine", daemon=True).start()


@pytest.mark.ranks(2)
def test_file(world):
    if world.only(1):
        kept.append(open(__file__, "a"))


@pytest.mark.ranks(2, on="gloo")
def test_group(world):
    torch.distributed.destroy_process_group()


@pytest.mark.ranks(2, on="threads")
def test_dtype(world):
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)


@pytest.mark.ranks(2)
def test_all_is_as_it_was(world):
    assert torch.ones(1).dtype is torch.float32
    assert "HOME" in os.environ
    assert os.path.exists("leaks_of_tests.py")
    assert idist.all_reduce(1) == 2
"""


def test_what_a_test_leaves_behind_is_named(sessions: Sessions, tmp_path: Path) -> None:
    result = sessions.run(tmp_path, "leaks_of_tests.py", leaks_of_tests=LEAKS)
    result.assert_outcomes(passed=6, failed=10)
    behind = "the test left behind: "
    result.stdout.fnmatch_lines_random(
        [
            f"{behind}environment variable HOME is gone",
            f"{behind}working directory *test_folder*, which was *",
            f"{behind}thread 'mine', which still runs Event.wait*",
            f"{behind}open file *leaks_of_tests.py (descriptor *)",
            f"{behind}torch's default dtype torch.float64, which was *; *deterministic*",
            f"{behind}the context of its ranks, which it ended or replaced",
            "ranks 0,1 of 2 (threads), one process:",
            "rank 1 of 2 (gloo):",
        ]
    )


SLOW = """
import time

import pytest
import unisono as idist

@pytest.mark.ranks(2)
def test_takes_its_time(world, request):
    begin = time.perf_counter()
    for _ in range(20):
        idist.all_gather("x")
    print("seconds", request.node.name, time.perf_counter() - begin)


@pytest.mark.ranks(2, on="threads")
def test_fails(world):
    assert world.rank < 0
"""


def test_delays_come_before_collectives_and_the_seed_is_printed(
    sessions: Sessions, tmp_path: Path
) -> None:
    result = sessions.run(tmp_path, "slow_tests.py", "--ranks-delay=7", "-rP", slow_tests=SLOW)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["ranks: collectives are delayed by --ranks-delay=7"])
    result.stdout.fnmatch_lines(["*- Random delays -*", "--ranks-delay=7 repeats them"])
    spent = [line.split()[1:] for line in result.outlines if line.startswith("seconds ")]
    for on in ("threads", "gloo"):
        name = f"test_takes_its_time[2-{on}]"
        spent_s = [float(seconds) for of, seconds in spent if of == name]
        delays = drawn(7, f"slow_tests.py::{name}", 0)
        assert len(spent_s) == 2
        assert min(spent_s) >= sum(delays[:20]) > 0


def drawn(seed: int, test: str, rank: int) -> list[float]:
    model: Any = SimpleNamespace(**dict.fromkeys(_COLLECTIVES, len))
    delays = Delays(model, seed, rank)
    delays.begin(test)
    return [delays.seconds() for _ in range(100)]


def test_delays_are_the_same_for_the_same_seed_test_and_rank() -> None:
    first = drawn(1, "test", 0)
    assert first == drawn(1, "test", 0)
    assert first not in (drawn(2, "test", 0), drawn(1, "other", 0), drawn(1, "test", 1))
    assert 0 in first
    assert 0 < max(first) < 0.1


def test_a_seed_that_is_none_is_refused(sessions: Sessions, tmp_path: Path) -> None:
    result = sessions.run(tmp_path, "--ranks-delay=soon")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--ranks-delay: SEED should be a whole number, or random: 'soon'"]
    )


LIMITED = """
import time

import pytest
import unisono as idist

@pytest.mark.timeout(4)
@pytest.mark.ranks(2, on="gloo")
def test_hangs(world):
    if world.only(1):
        time.sleep(1000)
    idist.barrier()

@pytest.mark.ranks(2, on="gloo")
def test_goes_on(world):
    assert idist.all_reduce(1) == 2
"""


def test_the_limit_of_another_plugin_ends_a_test_in_ranks(
    sessions: Sessions, tmp_path: Path
) -> None:
    result = sessions.run(tmp_path, test_limited=LIMITED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Timeout (>4.0s) from pytest-timeout*"])


COUNTED = """
def one_or_two(rank):
    if rank == 0:
        return 1
    return 2
"""
COUNTS = """
import counted
import pytest

@pytest.mark.ranks(2, on="gloo")
def test_counted(world):
    assert counted.one_or_two(world.rank) == world.rank + 1
"""


def test_coverage_counts_what_ranks_ran(tmp_path: Path) -> None:
    """It has to be there before the process that ranks are forks of."""
    settings = "[run]\nparallel = true\npatch = subprocess, fork, _exit\nsource = .\n"
    (tmp_path / ".coveragerc").write_text(settings)
    modules = {"counted": COUNTED, "test_counted": COUNTS}
    with Sessions(is_warm=False) as sessions:
        result = sessions.run(tmp_path, "-p", "pytest_cov", "--cov=.", **modules)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["counted.py * 4 * 0 * 100%"])
