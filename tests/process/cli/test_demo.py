"""The main job on real data: what it learns, that workers change nothing, and its mistakes."""

from __future__ import annotations

import functools
import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.processes import python
from tests.support.screens import run
from unisono.cli import _digits

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.py"
SETTINGS = _digits.Settings(epochs=20, batch_size=64, seed=0)
GOAL, TOLERANCE = 0.95, 1e-5
WAYS = [("threads", 3), ("gloo", 2)]


def unseen(epochs: int) -> Any:
    return nullcontext(lambda metrics: None)


@functools.cache
def digits() -> _digits.Digits:
    return _digits.load()


@functools.cache
def alone() -> _digits.Outcome:
    (outcome,) = unisono.spawn("serial", _digits.train, (digits(), SETTINGS, unseen))
    assert isinstance(outcome, _digits.Outcome)
    return outcome


def accuracy(outcome: _digits.Outcome) -> float:
    return (outcome.predictions == digits().held_out_labels).double().mean().item()


def test_the_data_are_real_and_held_out_images_are_not_learnt_from() -> None:
    data = digits()
    assert data.images.shape == (1437, 64)
    assert data.held_out_images.shape == (360, 64)
    assert set(data.labels.tolist()) == set(data.held_out_labels.tolist()) == set(range(10))
    assert 0 == data.images.min() < data.images.max() == 1


@pytest.mark.parametrize(("backend", "workers"), WAYS)
def test_the_number_of_workers_changes_nothing(backend: str, workers: int) -> None:
    outcomes = unisono.spawn(
        backend, _digits.train, (digits(), SETTINGS, unseen), nproc_per_node=workers
    )
    assert len(outcomes) == workers
    assert alone().workers[0]["model"] == "serial"
    for outcome in outcomes:
        assert [row["rank"] for row in outcome.workers] == list(range(workers))
        assert (outcome.parameters - alone().parameters).abs().max() <= TOLERANCE
        assert torch.equal(outcome.predictions, alone().predictions)
        assert outcome.metrics == pytest.approx(alone().metrics, abs=TOLERANCE)
        assert accuracy(outcome) >= GOAL


def test_only_the_seed_of_rank_0_counts() -> None:
    def train(local_rank: int, seed_of_0: int) -> torch.Tensor:
        seed = seed_of_0 if local_rank == 0 else 17
        settings = _digits.Settings(epochs=1, batch_size=64, seed=seed)
        return _digits.train(local_rank, digits(), settings, unseen).parameters

    one, other = unisono.spawn("threads", train, (5,), nproc_per_node=2)
    elsewhere, _ = unisono.spawn("threads", train, (6,), nproc_per_node=2)
    assert torch.equal(one, other)
    assert not torch.equal(one, elsewhere)


def test_rank_0_alone_reports_every_epoch() -> None:
    reports: list[tuple[int, float]] = []

    def watch(epochs: int) -> Any:
        rank = unisono.get_rank()
        return nullcontext(lambda metrics: reports.append((rank, metrics["loss"])))

    settings = _digits.Settings(epochs=3, batch_size=64, seed=0)
    unisono.spawn("threads", _digits.train, (digits(), settings, watch), nproc_per_node=2)
    assert [rank for rank, _ in reports] == [0, 0, 0]
    losses = [loss for _, loss in reports]
    assert losses == sorted(losses, reverse=True)


def test_more_workers_than_images_in_a_batch_is_no_mistake() -> None:
    data = digits()
    few = _digits.Digits(
        data.images[:8], data.labels[:8], data.held_out_images[:2], data.held_out_labels[:2]
    )
    args = (few, _digits.Settings(epochs=1, batch_size=2, seed=0), unseen)
    one = unisono.spawn("threads", _digits.train, args, nproc_per_node=1)
    many = unisono.spawn("threads", _digits.train, args, nproc_per_node=3)
    assert (many[2].parameters - one[0].parameters).abs().max() <= TOLERANCE


def test_the_module_runs_as_a_command_and_compares(tmp_path: Path) -> None:
    args = ("demo", "--backend", "threads", "--epochs", "10")
    done = python("-m", "unisono", *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 workers learnt 1,437 handwritten digits" in done.stdout
    assert "All reached the same parameters" in done.stdout
    assert "Held-out accuracy: 0.9" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast
def test_the_command_shows_who_ran_where_on_gloo() -> None:
    done = run("demo", "--no-compare", "--epochs", "10", "--nproc-per-node", "2")
    assert (done.code, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines() if "native-dist" in line]
    assert [(row[0], row[-1]) for row in rows] == [("0", "gloo"), ("1", "gloo")]
    assert "same parameters" not in done.out


def test_a_goal_that_is_missed_is_said_and_is_the_exit_code() -> None:
    alone = ("--backend", "serial", "--nproc-per-node", "1", "--no-compare")
    done = run("demo", *alone, "--epochs", "1")
    assert done.code == 1
    assert "below the goal of 0.95: try more --epochs" in done.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--backend", "goo"], "unknown backend 'goo'. Did you mean 'gloo'?"),
        (["--backend", "serial"], "serial model is one replica, not nproc_per_node=2"),
        (["--nproc-per-node", "0"], "'--nproc-per-node'"),
        (["--epochs", "0"], "'--epochs'"),
        (["--batch-size", "0"], "'--batch-size'"),
        (["--seed", "-1"], "'--seed'"),
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


def test_without_scikit_learn_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    done = run("demo")
    assert (done.code, done.out) == (2, "")
    assert 'python -m pip install "unisono[demo]"' in done.err
    assert len(done.err.splitlines()) == 1


def test_the_example_gives_the_same_however_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Alone, and as a program that starts ranks itself; other tests start it by launchers."""
    path, found = tmp_path / "result.json", []
    for facts in (("serial", 1, None), ("native-dist", 2, "gloo")):
        words = [str(EXAMPLE), "--epochs", "10", "--json", str(path)]
        if facts[2] is None:
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(str(EXAMPLE), run_name="__main__")
            out = capfd.readouterr().out
        else:
            options = ("--backend", facts[2], "--nproc-per-node", str(facts[1]))
            done = python(*words, *options, env={"PATH": ""})
            assert done.returncode == 0, done.stderr
            out = done.stdout
        assert out.count("held-out accuracy: 0.9") == 1
        result = json.loads(path.read_text())
        assert (result["model"], result["world_size"], result["backend"]) == facts
        assert result["accuracy"] >= GOAL
        assert len(result["checksums"]) == facts[1]
        found.append(torch.tensor(result["parameters"]))
    assert (found[0] - found[1]).abs().max() <= TOLERANCE
