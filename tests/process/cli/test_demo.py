"""``unisono demo``: it trains well, workers change nothing, and wrong use is one line."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import python
from tests.support.screens import run
from unisono.cli import demo


@pytest.mark.fast
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("threads", 3)])
def test_workers_learn_the_same_as_one_alone(backend: str, size: int) -> None:
    done = run("demo", "--backend", backend, "-n", str(size))
    assert (done.code, done.err) == (0, "")
    *_, accuracy, verdict, last = lines = done.out.splitlines()
    ranks = [line.partition(":")[0] for line in lines if line.startswith("rank ")]
    assert ranks == [f"rank {rank}" for rank in range(size)]
    assert re.match(r"(100|9[5-9])\.\d% of 600 points", accuracy)
    assert verdict.startswith("one worker alone reaches the same parameters")
    assert last.startswith("next, make a script of your own distributed")
    assert last.endswith(f" shows: python -m unisono run -n {size} script.py")


def test_it_needs_no_optional_package_and_rank_0_reports() -> None:
    code = "import sys; sys.modules['sklearn'] = None; from unisono.cli import main; main(['demo'])"
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    losses = re.findall(r"^\[rank 0\] epoch \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert "[rank 1]" not in done.stdout


def test_parameters_that_differ_and_a_missed_goal_are_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = ("demo", "--backend", "serial", "-n", "1")
    monkeypatch.setattr(demo, "_EPOCHS", 1)
    assert run(*alone).code == 1
    monkeypatch.undo()
    monkeypatch.setattr(demo, "_TOLERANCE", -1.0)
    done = run(*alone)
    assert done.code == 1
    assert "DIFFERENT parameters" in done.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--backend", "goo"], "unknown backend 'goo'. Did you mean 'gloo'?"),
        (["--backend", "serial"], "serial model is one replica, not nproc_per_node=2"),
        (["--nproc-per-node", "0"], "'--nproc-per-node'"),
        (["--bakend", "gloo"], "--bakend"),
        (["gloo"], "gloo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_is_one_line_and_nothing_is_started(args: list[str], words: str) -> None:
    done = run("demo", *args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1, done.err
    assert words in done.err
