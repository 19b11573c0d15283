"""`check` reports models and laws that fail in any way, and never waits forever."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import unisono as idist
from tests.support.processes import run_python
from unisono import cli, registry
from unisono.models.threads import ThreadsModel
from unisono.testing import LAWS, Conformance, Kept, Outcome, check

FIRST, SECOND, THIRD = list(LAWS)[:3]
check_second = LAWS[SECOND].check
FOREVER_S = 300


def sleeps() -> None:
    time.sleep(FOREVER_S)


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(FOREVER_S)


def ends_the_process() -> None:
    os._exit(7)


def aborts() -> None:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.abort()


def makes_one_call_more() -> None:
    check_second()
    idist.barrier()


def broken_on_rank_1(
    local_rank: int, what: Callable[[], None], fn: Callable[..., Any], *args: Any
) -> Any:
    """Call `fn` in a replica; on rank 1 the second law calls `what` instead of its check."""
    if idist.get_rank() == 1:
        LAWS[SECOND] = replace(LAWS[SECOND], check=what)
    return fn(local_rank, *args)


def breaking(what: Callable[[], None]) -> Callable[..., Any]:
    def launch(backend: str, fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> Any:
        return idist.spawn(backend, broken_on_rank_1, args=(what, fn, *args), **options)

    return launch


@pytest.mark.parametrize("what", [sleeps, holds_the_interpreter])
def test_a_law_that_hangs_fails_with_the_stacks_of_all_ranks(what: Callable[[], None]) -> None:
    laws = [FIRST, SECOND, THIRD]
    begin = time.monotonic()
    outcomes = check("gloo", 3, laws=laws, timeout_s=5.0, launch=breaking(what))
    assert time.monotonic() - begin < FOREVER_S / 3
    assert [o.law for o in outcomes] == laws
    assert [o.status == "failed" for o in outcomes] == [False, True, False]
    reason = outcomes[1].reason
    assert "wasn't done after 5 s" in reason
    ranks = reason.split("rank ")[1:]
    assert [text[0] for text in ranks] == ["0", "1", "2"]
    assert f"in {what.__name__}" in ranks[1]
    for text in (ranks[0], ranks[2]):
        assert f"in {SECOND}" in text
        assert "keep_laws" not in text


@pytest.mark.parametrize(("what", "how"), [(ends_the_process, "exit code 7"), (aborts, "SIGABRT")])
def test_a_rank_that_dies_in_a_law_is_a_failure_of_that_law(
    what: Callable[[], None], how: str
) -> None:
    outcomes = check("gloo", 2, laws=[FIRST, SECOND, THIRD], launch=breaking(what))
    assert [o.status == "failed" for o in outcomes] == [False, True, False]
    assert "rank 1 of 2" in outcomes[1].reason
    assert how in outcomes[1].reason


def test_a_rank_that_is_out_of_step_is_a_failure_of_that_law() -> None:
    laws = [FIRST, SECOND, THIRD]
    outcomes = check("gloo", 2, laws=laws, launch=breaking(makes_one_call_more))
    assert [o.status == "failed" for o in outcomes] == [False, True, False]
    assert "CollectiveMismatchError" in outcomes[1].reason


class StaysAway(ThreadsModel):
    name = "stayaway"
    backends = ("stayaway",)
    given_up: ClassVar = threading.Event()  # other ranks set it, so that later laws hold

    def reduce(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if self.topology.rank == 1:
            self.given_up.wait(60)
        try:
            return super().reduce(*args, **kwargs)
        finally:
            self.given_up.set()


class OnlyGathers(ThreadsModel):
    name = "onlygathers"
    backends = ("onlygathers",)


for member in ("all_reduce", "reduce", "broadcast"):
    setattr(OnlyGathers, member, getattr(idist.ComputationModel, member))


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    for cls in (StaysAway, OnlyGathers):
        registry.register_model(cls)
    yield
    for cls in (StaysAway, OnlyGathers):
        registry.unregister_model(cls)


@pytest.fixture(autouse=True)
def no_one_has_given_up() -> None:
    StaysAway.given_up.clear()


def test_what_the_contract_derives_is_named() -> None:
    name = "all_reduce_takes_every_shape_and_layout"
    assert check("threads", 2, laws=[name])[0].status == "passed"
    outcome = check("onlygathers", 2, laws=[name])[0]
    assert outcome.status == "derived"
    assert outcome.reason == "derived: all_reduce"


def test_no_replica_is_no_failure_of_a_law() -> None:
    def launch(*_: Any, **__: Any) -> list[list[Kept]]:
        raise idist.errors.LaunchError("no host")

    with pytest.raises(idist.errors.LaunchError, match="outside of any law: no host"):
        check("threads", 2, launch=launch)


def test_the_class_for_pytest_lists_what_does_not_hold() -> None:
    class Mine(Conformance):
        backend = "stayaway"
        sizes = (2,)
        options = {
            "timeout": 5.0,  # enough for other laws on a slow host, too
            "laws": [law for law in LAWS if law.startswith(("all_gather_", "reductions_agree_"))],
        }

    with pytest.raises(AssertionError) as caught:
        Mine().test_every_law_holds(2)
    lines = str(caught.value).splitlines()
    law = "reductions_agree_with_the_derived_ones, nproc=2:"
    assert any(line.startswith(law) for line in lines)
    assert not any(line.startswith("all_gather_") for line in lines)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


class TestCommand:
    def test_a_table_law_by_law(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, "check", "onlygathers", "-n", "1", "-n", "2", "--law", "gives_the")
        assert code == 0
        assert "onlygathers, 1 replica" in text
        assert "onlygathers, 2 replicas" in text
        assert "derived: all_reduce" in text
        assert "1 passed, 1 derived" in text
        assert "derived: the law holds; the model lacks some members" in text

    def test_the_sizes_are_those_of_the_kit(self, capsys: pytest.CaptureFixture[str]) -> None:
        law = ("--law", "broadcast ignores")  # names are taken with spaces, too
        code, text = run(capsys, "check", "threads", *law)
        assert code == 0
        for size in ("1 replica", "2 replicas", "3 replicas"):
            assert f"threads, {size}" in text
        code, text = run(capsys, "check", "serial", *law)
        assert code == 0
        assert "not checked with 2 replicas: the serial model is one replica" in text

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text = run(capsys, "check", "serial", "-n", "1", "--json")
        report = json.loads(text)
        assert code == 0
        assert [(row["law"], row["nproc"]) for row in report["laws"]] == [(law, 1) for law in LAWS]
        assert {row["status"] for row in report["laws"]} <= {"passed", "derived"}
        assert report["model"] == "serial"

    def test_a_failed_law_is_exit_code_1(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("--law", "reduce_gives_the_result_to_its_root", "--timeout", "1")
        code, text = run(capsys, "check", "stayaway", "-n", "2", *words)
        assert code == 1
        assert "1 failed" in text
        assert "--law reduce_gives_the_result_to_its_root_alone" in text
        assert "rank 0, in reduce_gives_the_result_to_its_root_alone" in text
        StaysAway.given_up.clear()
        code, text = run(capsys, "check", "stayaway", "-n", "2", *words, "--json")
        assert code == 1
        (row,) = json.loads(text)["laws"]
        assert row["status"] == "failed"
        assert row["reason"].count("rank ") == 2  # one stack of each thread replica

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (("nosuch",), "unknown backend 'nosuch'"),
            (("threads", "--law", "nosuch"), "none of the"),
            (("threads", "-n", "0"), "-n"),
            (("serial", "-n", "2"), "one replica"),
        ],
    )
    def test_wrong_use_is_exit_code_2(
        self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
    ) -> None:
        code, text = run(capsys, "check", *words)
        assert code == 2
        assert part in text

    def test_from_a_shell(self) -> None:
        words = ("-m", "unisono", "check", "gloo", "-n", "2", "--law", "ranks_are_numbered")
        assert "1 passed" in run_python(*words)


def test_outcomes_are_told_as_soon_as_they_are_known() -> None:
    outcomes: list[Outcome] = []
    done = check("serial", 1, laws=[FIRST, SECOND], on_outcome=outcomes.append)
    assert outcomes == done
