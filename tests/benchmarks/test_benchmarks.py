"""Every benchmark runs and prints its figures; tests don't judge how fast that was."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import virtual_hosts
from tests.support.processes import python
from tests.support.requirements import require

FOLDER = Path(__file__).parents[2] / "benchmarks"
PNG = b"\x89PNG\r\n"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def plot(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Options that draw a picture, where matplotlib is; and the test draws one."""
    path = tmp_path / "figure.png"
    options = ("--plot", str(path)) if importlib.util.find_spec("matplotlib") else ()
    yield options
    assert not options or path.read_bytes().startswith(PNG)


def run(name: str, *args: str, timeout: float = 200) -> str:
    """Run a benchmark; whether its goals are met doesn't count, that it comes to its end does."""
    variables = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = python(str(FOLDER / f"{name}.py"), *args, limit_s=timeout, env=variables)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return done.stdout


BENCHMARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "imports": (("--rounds", "1"), ("import unisono, after import torch", "Loaded: none")),
    "dispatch": (("--rounds", "2"), ("get_rank(), serial", "all_reduce_(4 bytes), gloo, world 2")),
    "recording": (
        ("--rounds", "1"),
        ("all_reduce_(4 bytes), status page, world 1", "status page and trace, world 2"),
    ),
    "exact": (
        ("--rounds", "1", "--ranks", "2"),
        ("exact sum of 1 MB, float32, near, world 2", "times a plain one"),
    ),
    "starts": (
        ("--rounds", "1", "--nproc-per-node", "2"),
        ("first spawn", "a second spawn", "torchrun", "WorkerPool.run", "<= 2.000 ms"),
    ),
    "scripts": (
        ("--rounds", "1", "--nproc-per-node", "2"),
        ("a script of torch.distributed", ">= 2.5 times", "a rank's end, CPU", "<= 60.0 ms"),
    ),
    "sessions": (
        ("--rounds", "1", "--tests", "3", "--few", "2"),
        ("3 tests on threads", "3 tests on gloo", "DeepSpeed's pattern", "<= 3.000 s"),
    ),
    "calls": (
        ("--rounds", "2"),
        ("calls of ours", "sys._getframe", "all_reduce(torch.ones(1 << 20))", "barrier()"),
    ),
    "gradients": (
        ("--rounds", "1", "--ranks", "2", "--models", "tiny"),
        ("161 gradients, beside one flat gloo call", ">= 4.5 times", "DDP, our hook"),
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_prints_its_table(name: str) -> None:
    args, words = BENCHMARKS[name]
    text = run(name, *args)
    for word in words:
        assert word in text


def test_payloads_are_compared_drawn_and_counted(plot: tuple[str, ...]) -> None:
    told = json.loads(run("payloads", "--rounds", "2", "--calls", "2", "--json", *plot))
    assert (told["title"], told["ranks"]) == ("Payloads", 2)
    assert len(told["figures"]) == 14 + 5
    assert sum([*figure["peers"]] == ["a bare socket"] for figure in told["figures"]) == 5
    for figure in told["figures"]:
        assert len(figure["quartiles"]) == 2
        assert "torch" in figure["peers"] or figure["work"].endswith(", beside a socket")
        assert 0 <= figure["slow_rounds"] <= 1
        for peer in figure["peers"].values():
            assert peer["quartiles"][0] <= peer["median"] <= peer["quartiles"][1]
        is_section = figure["work"].startswith("one rank first")
        assert ("goal" in figure) is not is_section
        assert is_section or figure["goal"]["bound"]


def test_programs_of_others_are_started_and_counted() -> None:
    rows = json.loads(run("scripts", "--starts", "1", "--nproc-per-node", "2", "--json"))["figures"]
    assert [row["by"] for row in rows] == ["unisono", "torchrun"] * 2
    assert {row["exit code 0"] for row in rows if row["by"] == "unisono"} == {"1"}


def test_hosts_send_beside_gloo_over_a_wire_that_is_measured_first() -> None:
    require("netns", virtual_hosts.why_no_wire())
    few = ("--rounds", "1", "--only", "string", "64 KB", "--delay", "1", "--json")
    figures = json.loads(run("hosts", *few))["figures"]
    names = [figure["work"].split(", wire ")[0] for figure in figures]
    assert names == ["string", "64 KB"]
    assert all("gloo" in figure["peers"] for figure in figures)
    # Without the wire's delay there and back, a string would be faster.
    assert figures[0]["median"] >= 2000


def test_hosts_on_a_bridge_have_no_wire() -> None:
    require("netns", virtual_hosts.why_not())
    few = ("--rounds", "1", "--ranks", "1", "--only", "number", "--json")
    figures = json.loads(run("hosts", *few))["figures"]
    assert [figure["work"] for figure in figures] == ["number"]


def test_tensors_are_judged_listed_and_drawn(plot: tuple[str, ...]) -> None:
    few = ("--rounds", "1", "--ranks", "2", "--sizes", "4", "1024", "--dtypes", "float32", "int64")
    rows = [row for row in run("tensors", *few, "--markdown", *plot).splitlines() if "|" in row]
    names = [row.split("|")[1].strip() for row in rows]
    assert {"all_reduce of 1 MB", "broadcast of 1 MB", "scatter float32"} < set(names)
    assert {"all_to_all int64", "reduce_scatter int64"} < set(names)


def test_calls_of_ours_are_some_of_pythons_in_fewer_files() -> None:
    figures = json.loads(run("calls", "--rounds", "2", "--json"))["figures"]
    assert len(figures) == 6
    for figure in figures:
        files, ours = figure["files of ours"], figure["calls of ours"]
        assert 1 < files < ours < figure["python calls"]


def test_calls_are_listed_in_order_by_depth() -> None:
    lines = run("calls", "--rounds", "2", "--list", "barrier").splitlines()
    depths = [(len(line) - len(line.lstrip())) // 2 for line in lines]
    assert depths[0] == 0
    assert all(1 <= depth <= before + 1 for before, depth in itertools.pairwise(depths))
    assert lines[0].startswith("unisono/collectives/")
    assert any(line.endswith(":barrier") for line in lines)
