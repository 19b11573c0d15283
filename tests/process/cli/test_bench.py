"""``unisono bench``: every figure is there and plausible; wrong use is one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import python, read_terminal

OPERATIONS = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "unisono", "bench", *args)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_every_operation_is_measured_at_every_size(backend: str) -> None:
    done = bench("--backend", backend, "--sizes", "64 4K", "--rounds", "3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
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
    done = bench(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_table_names_what_was_measured(tmp_path: Path) -> None:
    done = bench("--backend", "threads", "--sizes", "4", "--rounds", "1")
    assert done.returncode == 0
    for word in ("barrier", "dict of 20", "algorithm", "threads, 2 ranks", "quartiles", " cores, "):
        assert word in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    assert re.search(r"all_reduce +tensor +8 B +[\d.]+ (us|ms|s) ", done.stdout)


def test_times_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.png"
    done = bench("--backend", "threads", "--sizes", "4 64", "--rounds", "1", "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert f"wrote {path}" in done.stderr


def test_progress_is_shown_on_a_terminal() -> None:
    leader, end = os.openpty()
    command = [sys.executable, "-m", "unisono", "bench", "--backend", "threads", "--sizes", "4"]
    with subprocess.Popen([*command, "--rounds", "1"], stdout=subprocess.PIPE, stderr=end) as made:
        os.close(end)
        shown = read_terminal(leader)
        assert made.stdout is not None
        table = made.stdout.read().decode()
    assert made.returncode == 0
    assert b"measuring" in shown and b"100%" in shown
    assert "barrier" in table and "measuring" not in table
