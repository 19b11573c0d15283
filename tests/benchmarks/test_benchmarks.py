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
from tests.support.requirements import require, require_backend

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
    "averaging": (("--rounds", "1"), ("one all_reduce of a flat buffer",)),
    "exact": (
        ("--rounds", "1", "--ranks", "2"),
        ("exact sum of 1 MB, float32, near, world 2", "times a plain one"),
    ),
    "starts": (
        ("--rounds", "1", "--nproc-per-node", "2"),
        ("first spawn", "a second spawn", "torchrun", "WorkerPool.run", "<= 2.000 ms"),
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
    "notebook": (("--rounds", "2"), ("the first cell", "each of the next ones")),
    "simulation": (("--ranks", "2", "64"), ("most descriptors", "farewells")),
    "tree": ((), ("ranks 2 ", "ranks 10000 ", "depth")),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_prints_its_table(name: str) -> None:
    args, words = BENCHMARKS[name]
    text = run(name, *args)
    for word in words:
        assert word in text


def test_hangs_are_named_and_what_was_not_measured_is_said(tmp_path: Path) -> None:
    program, path = ("-m", "benchmarks.hangs", "--kinds", "locked"), tmp_path / "hangs.json"
    for models in (["gloo"], ["threads"]):
        done = python(*program, "--models", *models, "--save", str(path), cwd=FOLDER.parent)
        assert done.returncode in (0, 1), done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("locked ")]
    assert [row.count("s") for row in rows] == [1, 2]  # the second adds to what the first found
    assert "NOT MEASURED: MPI: " in done.stdout
    assert "native (gloo): " not in done.stdout
    assert " of 60 named within 2 s" in done.stdout


@pytest.mark.parametrize("backend", ["mpi4py", "horovod"])
def test_sums_and_values_stand_beside_a_librarys_own(backend: str) -> None:
    require_backend(backend)
    text = run({"mpi4py": "mpi_calls", "horovod": "horovod_calls"}[backend], "--rounds", "1")
    works = ("all_reduce_(4 bytes)", "all_reduce_(16 MB)", "all_gather of 20 characters")
    for work in (*works, "broadcast of a small dict", "all_reduce of a number"):
        assert f"{work}, world 2" in text


def test_payloads_are_compared_drawn_and_counted(plot: tuple[str, ...]) -> None:
    told = json.loads(run("payloads", "--rounds", "2", "--calls", "2", "--json", *plot))
    assert (told["title"], told["ranks"]) == ("Payloads", 2)
    assert len(told["figures"]) == 12
    for figure in told["figures"]:
        assert len(figure["quartiles"]) == 2
        assert "torch" in figure["peers"]
        for peer in figure["peers"].values():
            assert peer["quartiles"][0] <= peer["median"] <= peer["quartiles"][1]
        is_section = figure["work"].startswith("one rank first")
        assert ("goal" in figure) is not is_section
        assert is_section or figure["goal"]["bound"]


def test_hosts_sum_beside_gloo() -> None:
    require("netns", virtual_hosts.why_not())
    figures = json.loads(run("hosts", "--rounds", "1", "--sizes", "64", "--json"))["figures"]
    assert [(figure["work"], *figure["peers"]) for figure in figures] == [
        ("all_reduce 64 KB", "gloo")
    ]


def test_scaling_shows_every_work_at_every_number_of_ranks(plot: tuple[str, ...]) -> None:
    few = ("--rounds", "1", "--calls", "2", "--ranks", "2", "3")
    rows = [row for row in run("scaling", *few, "--markdown", *plot).splitlines() if "|" in row]
    names = [row.split(" | ")[0] for row in rows[2:]]
    assert len(set(names)) == len(names) == 12
    assert {name.rpartition(", ")[2] for name in names} == {"2 ranks", "3 ranks"}


def test_phases_of_set_up_add_up() -> None:
    few = ("--phases", "--rounds", "1", "--ranks", "2", "3", "--json")
    rows = json.loads(run("scaling", *few))["rows"]
    assert [row.pop("ranks") for row in rows] == [2, 3]
    for row in rows:
        whole, processor = row.pop("whole"), row.pop("processor")
        assert min(row.values()) >= 0
        assert min(processor, row["copies"], row["gloo"], row["control plane"]) > 0
        assert sum(row.values()) == pytest.approx(whole)


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
