"""``unisono bench``: every figure is there and plausible; wrong use is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPERATIONS = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_every_operation_is_measured_at_every_size(backend: str) -> None:
    done = bench("--backend", backend, "--sizes", "64 4K", "--rounds", "3", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["backend"], told["ranks"], told["rounds"]) == (backend, 2, 3)
    tensors = [row for row in told["figures"] if row["payload"] == "tensor"]
    assert {(row["operation"], row["bytes"]) for row in tensors} == {
        (operation, size) for operation in OPERATIONS for size in (64, 4096)
    }
    for row in told["figures"]:
        assert row["us"] > 0
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
    for word in ("barrier", "dict of 20", "algorithm", "threads, 2 ranks"):
        assert word in done.stdout
