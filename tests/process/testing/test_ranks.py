"""The pytest plug-in, in a few sessions of pytest with many tests each."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import MARK, marked, python
from tests.support.sessions import Sessions

LEFT_S = 20.0  # time for a session's processes to end


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """One interpreter for all sessions of these tests; no process of it may be left."""
    mark = uuid.uuid4().hex
    with Sessions({MARK: mark}) as warm:
        yield warm
    assert not marked(mark, LEFT_S)


PASSES = """
import os
import threading

import pytest
import unisono as idist

made = []


@pytest.fixture(scope="session")
def of_the_session():
    made.append("session")
    yield idist.get_rank()
    assert idist.all_reduce(1) == idist.get_world_size()


@pytest.fixture(scope="module")
def of_the_module(of_the_session):
    made.append("module")
    return threading.Lock()  # can't be pickled


@pytest.mark.ranks(1, 2, 3)
def test_sum(world):
    assert (world.rank, world.size) == (idist.get_rank(), idist.get_world_size())
    assert idist.all_reduce(1) == world.size


@pytest.mark.ranks(2)
class TestClass:
    def setup_method(self):
        self.rank = idist.get_rank()

    @pytest.mark.parametrize("cannot_be_pickled", [threading.Lock(), lambda: 1])
    def test_fixtures(self, world, of_the_session, of_the_module, cannot_be_pickled):
        assert self.rank == of_the_session == world.rank
        if world.only(0):
            assert made.count("module") == made.count("session")

    def test_paths(self, world, tmp_path, tmp_path_factory):
        world.same(str(tmp_path))
        (tmp_path / str(world.rank)).touch()
        idist.barrier()
        assert len(list(tmp_path.iterdir())) == world.size
        own = idist.all_gather(str(tmp_path_factory.mktemp("own")))
        assert len(set(own)) == world.size

    def test_world(self, world):
        with world.raises_on(1, ValueError):
            if world.only([1]):
                raise ValueError
        world.same(world.rank // 2, among=[0, 1])
        with pytest.raises(AssertionError, match="(?s)different values:.*rank 0: 0.*rank 1: 1"):
            world.same(world.rank)
        with world.raises_on([0, 1], AssertionError), world.raises_on(world.rank, ValueError):
            pass


@pytest.mark.ranks(2)  # on processes, because of the fixture
def test_fixtures_of_a_process(world, capsys, monkeypatch):
    monkeypatch.setenv("RANKS", str(world.rank))
    print("rank", world.rank)
    assert capsys.readouterr().out == f"rank {world.rank}\\n"


@pytest.fixture
def of_threads():
    yield
    idist.barrier()  # all ranks are in their teardown
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # as a faster rank of this process does
    idist.barrier()


@pytest.mark.ranks(2, on="threads")
def test_threads(world, of_threads):
    idist.barrier()


def test_alone():
    assert idist.all_reduce(3) == 3  # earlier ranks that were threads have ended


def work(x, scale=1):
    return idist.all_reduce(x) * scale


def test_parent(ranks, tmp_path):
    assert ranks(2, on="gloo").run(work, 5, scale=2) == [20, 20]
    assert ranks(2).run(lambda: idist.get_rank()) == [0, 1]
    with pytest.raises(idist.errors.WorkerFailedError, match="rank 1 of 2 raised ZeroDivision"):
        ranks(2).run(lambda: 1 / (idist.get_rank() - 1) and idist.barrier())
    with pytest.raises(idist.errors.PayloadError, match="can't be pickled.*lock"):
        ranks(2).run(print, threading.Lock())
    with pytest.raises(idist.errors.CollectiveTimeoutError, match="(?s)rank 0 of 1:.*wait"):
        ranks(1, timeout=0.2).run(lambda: threading.Event().wait(20))
"""


@pytest.mark.fast
def test_bodies_and_their_fixtures_run_in_ranks(sessions: Sessions, tmp_path: Path) -> None:
    result = sessions.run(tmp_path, "-v", "-W", "error", test_passes=PASSES)
    result.assert_outcomes(passed=18)
    ids = [f"test_sum[[]{size}-{on}[]]" for size in (1, 2, 3) for on in ("threads", "gloo")]
    result.stdout.fnmatch_lines([f"*::{each} PASSED*" for each in ids])


FAILS = """
import os
import warnings

import pytest
import unisono as idist

pytestmark = pytest.mark.ranks(2, on="threads")


@pytest.mark.ranks(4)
def test_several(world):
    values = [world.size, 2]
    if world.only([1, 3]):
        assert values == [world.size, 3]
    idist.barrier()


@pytest.mark.ranks(2)
def test_output(world):
    print("the same everywhere")
    print(f"only rank {world.rank}")
    warnings.warn("from a rank", stacklevel=1)
    assert idist.all_reduce(1) == 3


@pytest.fixture
def broken(world):
    yield 1 / (1 - world.rank)


def test_setup(broken):
    pass


def test_refused(monkeypatch):
    pass


@pytest.mark.ranks(2)
def test_skip(world):
    if world.only(1):
        pytest.skip("rank 1 can't")
    idist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_xfail(world):
    if world.only(1):
        raise ValueError
    idist.barrier()


@pytest.mark.xfail(raises=ValueError, strict=True)
def test_xfail_of_another_kind(world):
    assert world.only(1)


@pytest.mark.xfail(strict=True)
def test_xpass(world):
    pass


def test_xfail_call(world):
    pytest.xfail("not yet")


@pytest.mark.skipif(True, reason="not at all")
def test_skipif(world):
    raise SystemExit


@pytest.mark.ranks(2, on="abacus")
def test_unknown(world):
    pass


@pytest.mark.ranks(2, on="threads", timeout=3)
def test_waits_for_one_that_is_done(world):
    if world.only(0):
        idist.barrier()


@pytest.mark.ranks(2, on="gloo")
@pytest.mark.parametrize("pid", [os.getpid()])
def test_parameters_of_each_process(pid):
    pass
"""


ENDS = """
import pytest


def test_world_of_the_parent(world):
    pass


@pytest.fixture(scope="module")
def ends_badly():
    yield
    raise RuntimeError("the module's end")


@pytest.mark.ranks(2, on="threads")
def test_module(ends_badly):
    pass
"""


def test_failures_are_told_once_and_by_rank(sessions: Sessions, tmp_path: Path) -> None:
    result = sessions.run(tmp_path, "-rA", test_ends=ENDS, test_fails=FAILS)
    result.assert_outcomes(failed=9, errors=4, passed=1, skipped=3, xfailed=3)
    for on in ("threads", "gloo"):
        result.stdout.fnmatch_lines(
            [
                f"ranks 1, 3 of 4 ({on}):",
                ">           assert values == [[]world.size, 3[]]",
                "E           assert [[]4, 2[]] == [[]4, 3[]]",
                "E             At index 1 diff: 2 != 3",
                "*ranks 0, 2 of 4 still ran, and were ended*",
                '  File "*test_fails.py", line *, in test_several',
                "    idist.barrier()",
            ]
        )
        result.stdout.fnmatch_lines(
            [
                f"*_ test_output[[]2-{on}[]] _*",
                f"ranks 0, 1 of 2 ({on}):",
                ">       assert idist.all_reduce(1) == 3",
                "*Captured stdout call (rank 0 of 2)*",
                "only rank 0",
                "*Captured stdout call (rank 1 of 2)*",
                "only rank 1",
            ]
        )
    result.stdout.fnmatch_lines(["ERROR *test_setup* - rank 1 of 2 (threads): Zero*"])
    result.stdout.fnmatch_lines(["FAILED *test_several* - ranks 1, 3 of 4 (threads): as*"])
    result.stdout.fnmatch_lines(["*the fixture monkeypatch affects the whole process*gloo*"])
    result.stdout.fnmatch_lines(["ERROR test_ends.py::test_module*"])
    result.stdout.fnmatch_lines(
        ["*ranks 0, 1 of 2*", "*this rank collects no test *must be the same*"]
    )
    result.stdout.fnmatch_lines(["*mark this one @pytest.mark.ranks(2)*"])
    done = ["rank 1 of 2 was done", "rank 0 of 2:", "    idist.barrier()"]
    result.stdout.fnmatch_lines(["*rank 0 of 2 wasn't done after 3 s*", *done])
    summary = [f"*::test_output[[]2-{on}[]]" for on in ("threads", "gloo")]
    result.stdout.fnmatch_lines(["*warnings summary*", *summary, "*UserWarning: from a rank"])
    again = sessions.run(tmp_path, "--lf", "--maxfail=2", "-s", "-k", "output or setup")
    again.assert_outcomes(failed=2, deselected=10)
    for line in ("[[]rank 0[]] only rank 0", "[[]rank 1[]] only rank 1") * 2:
        again.stdout.fnmatch_lines_random(line)


CALLS = """
import pytest
import unisono as idist


def test_alone():
    idist.gather_results(1, size=2)


@pytest.mark.ranks(2, on="threads")
def test_in_ranks(world):
    idist.gather_results(1, size=2)
"""


def test_frames_of_the_library_are_shown_only_on_request(
    sessions: Sessions, tmp_path: Path
) -> None:
    for options, count in (((), 0), (("--full-trace",), 2)):
        result = sessions.run(tmp_path, *options, test_calls=CALLS)
        result.assert_outcomes(failed=2)
        shown = re.findall(r"^\S*unisono/training/evaluation.py:\d+", str(result.stdout), re.M)
        assert len(shown) == count


DRAWS = """
import pytest
import unisono as idist
from hypothesis import given, settings, strategies as st


@pytest.mark.ranks(2)
@given(x=st.integers())
def test_refused(world, x):
    pass


def work(x):
    assert idist.get_rank() == 0 or x < 10
    return idist.all_reduce(x)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(x=st.integers(-1000, 9))
def test_drawn_once(ranks, x):
    assert ranks(2).run(work, x) == [2 * x, 2 * x]


@settings(deadline=None, derandomize=True, max_examples=20)
@given(x=st.integers(-1000, 1000))
def test_smallest(ranks, x):
    ranks(2, on="gloo").run(work, x)
"""


def test_hypothesis_draws_in_the_parent(tmp_path: Path) -> None:
    """A separate session, because it needs the plug-in of hypothesis, which checks fixtures."""
    (tmp_path / "test_draws.py").write_text(DRAWS)
    printed = python("-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path).stdout
    assert "1 failed, 1 passed, 2 errors" in printed, printed
    assert "mark ranks isn't for tests of hypothesis" in printed
    assert re.search(r"E +unisono.errors.WorkerFailedError: rank 1 of 2[^\x00]*E +x=10,", printed)


DEBUGGED = """
import pytest
import unisono as idist


@pytest.mark.ranks(2)
def test_one(world):
    secret = 6 * 7
    assert world.only(0)
    idist.barrier()


@pytest.mark.ranks(2)
def test_both(world):
    assert world.size == 3
"""


def test_the_debugger_is_in_the_rank_that_failed(sessions: Sessions, tmp_path: Path) -> None:
    look = "p ('seen', world.rank, secret)\nq\n"
    (tmp_path / "test_debugged.py").write_text(DEBUGGED)
    result = sessions.run(tmp_path, "--pdb", "--ranks-on=gloo", stdin=look)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*entering PDB in rank 1 of 2*", "*('seen', 1, 42)*", "*Quitting*"]
    )
    look = "p ('seen', world.rank)\nc\np ('seen', world.rank)\nc\n"
    result = sessions.run(tmp_path, "--pdb", "--ranks-pdb=1", "--ranks-on=threads", stdin=look)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*in rank 1 of 2*", "*('seen', 1)*", "*('seen', 1)*"])


LOADED = """
import sys

def pytest_sessionfinish(session):
    print({name for name in ("torch", "unisono.errors") if name in sys.modules})
"""


def test_torch_waits_for_a_test_that_wants_ranks(tmp_path: Path) -> None:
    with Sessions(is_warm=False) as sessions:
        alone = "def test_alone(): pass"
        result = sessions.run(tmp_path, "-s", conftest=LOADED, test_alone=alone)
    result.stdout.fnmatch_lines(["*set()*"])


TWENTY = """
import os
import signal
import time

import pytest
import torch
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


def test_ends_the_context(world):
    if world.only(1):
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("value", range(8))
def test_after(world, value):
    assert idist.all_reduce(value) == 2 * value
"""


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_session_names_what_went_wrong_and_goes_on(
    sessions: Sessions, tmp_path: Path, options: list[str]
) -> None:
    result = sessions.run(tmp_path, *options, test_twenty=TWENTY)
    result.assert_outcomes(passed=17, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*ranks 0, 1 of 2 weren't done after 4 s (gloo)*",
            "*time.sleep(1000)",
            "rank 1 of 2 was ended by SIGSEGV*",
        ]
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


COUNTS = """
import pytest

@pytest.mark.ranks(2, on="gloo")
def test_counted(world):
    if world.rank == 0:
        assert world.size == 2
    else:
        assert world.size == 2
"""


def test_coverage_counts_what_ranks_ran(tmp_path: Path) -> None:
    """A new interpreter, as coverage must be active before the ranks' fork server starts."""
    settings = "[run]\nparallel = true\npatch = subprocess, fork, _exit\nsource = .\n"
    (tmp_path / ".coveragerc").write_text(settings)
    with Sessions(is_warm=False) as sessions:
        result = sessions.run(tmp_path, "-p", "pytest_cov", "--cov=.", test_counted=COUNTS)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_counted.py * 6 * 0 * 100%"])
