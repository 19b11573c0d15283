"""``unisono bench``: every figure is there and plausible; wrong use is one line."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.support.screens import on_terminal, run

OPERATIONS = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"}
THREADS = ("bench", "--backend", "threads", "--rounds", "1", "--sizes")


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_every_operation_is_measured_at_every_size(backend: str) -> None:
    done = run("bench", "--backend", backend, "--sizes", "64 4K", "--rounds", "3", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["backend"], report["ranks"], report["rounds"]) == (backend, 2, 3)
    tensors = [row for row in report["figures"] if row["payload"] == "tensor"]
    assert {(row["operation"], row["bytes"]) for row in tensors} == {
        (operation, size) for operation in OPERATIONS for size in (64, 4096)
    }
    for row in report["figures"]:
        assert 0 < row["us_q1"] <= row["us"] <= row["us_q3"]
    for row in tensors:
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        factor = 0.5 if row["operation"] not in ("broadcast", "all_reduce") else 1
        assert row["bus_gb_s"] == pytest.approx(row["algorithm_gb_s"] * factor)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--sizes", "4x"], "size '4x' should be such as 4, 64K"),
        (["--backend", "glo"], "Did you mean 'gloo'?"),
        (["-n", "0"], "--nproc-per-node"),
    ],
)
def test_wrong_use_is_one_line(args: list[str], words: str) -> None:
    done = run("bench", *args)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert len(done.err.splitlines()) == 1


def test_the_table_names_what_was_measured_and_a_terminal_shows_progress() -> None:
    shown, done = on_terminal(80, *THREADS, "4", stream="stderr")
    assert "measuring" in shown and "100%" in shown
    assert "measuring" not in done.out
    for word in ("barrier", "dict of 20", "algorithm", "threads, ranks: 2", "quartiles", "cores"):
        assert word in done.out
    assert f"torch {torch.__version__}" in done.out
    assert re.search(r"(?m)^all_reduce +tensor +8 +[\d.]+ +[\d.]+ to [\d.]+ ", done.out)
