"""Replicas that ranks make of their own are said to be that, and are there all the same."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.processes import python, run_python
from tests.support.ways import Way

RUNNERS = ("spawn", "Parallel", "WorkerPool")
SAID = r"replicas within a rank: {} is called in rank 0 of 2 \({}\)"


def total(local_rank: int) -> Any:
    return unisono.all_reduce(local_rank + 1)


def test_rank_0_says_that_each_rank_would_make_its_own() -> None:
    def nests(local_rank: int) -> tuple[Any, list[tuple[str, str]]]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = [Way(runner, "threads").run(total, nproc_per_node=3) for runner in RUNNERS]
        return found, [(str(each.message), Path(each.filename).name) for each in heard]

    (mine, said), (other, nothing) = unisono.spawn("gloo", nests, nproc_per_node=2)
    assert mine == other == [[6, 6, 6]] * 3
    assert nothing == []
    for (text, file), call in zip(said, ("spawn", "spawn", "WorkerPool"), strict=True):
        assert re.match(SAID.format(call, "native-dist"), text)
        assert "use Parallel() without nproc_per_node" in text
        assert file == "ways.py"  # where they are called


def test_replicas_that_are_threads_say_so_too() -> None:
    with pytest.raises(unisono.errors.WorkerFailedError, match=SAID.format("spawn", "threads")):
        Way("spawn", "threads").run(lambda _: Way("spawn", "threads").run(total), nproc_per_node=2)


def test_the_environment_says_who_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    unisono.spawn("threads", total, nproc_per_node=2)  # a partial set says nothing
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=SAID.format("spawn", "torchrun environment")):
        assert unisono.spawn("threads", total, nproc_per_node=2) == [3, 3]
    with pytest.raises(unisono.errors.ArgumentError, match="several nodes"):  # and no warning
        unisono.spawn("threads", total, nproc_per_node=2, nnodes=2, master_addr="h", master_port=1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert unisono.spawn("threads", total, nproc_per_node=2) == [3, 3]


def test_a_script_that_spawns_says_so_under_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import unisono\n"
        "def total(local_rank): return unisono.all_reduce(1)\n"
        "if __name__ == '__main__':\n"
        "    print(unisono.spawn('threads', total, nproc_per_node=2))\n"
    )
    done = python("-m", "unisono", "run", "-n", "2", str(script), env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2, 2]") == 2
    assert done.stderr.count("UserWarning") == 1
    assert "train.py:4: UserWarning: replicas within a rank" in done.stderr


CHILD = "import unisono; unisono.initialize({!r}); print(unisono.all_reduce(1))"
PARENT = f"""
import subprocess, sys, unisono
unisono.initialize("gloo")
for is_rank in (True, False):
    done = subprocess.run([sys.executable, "-c", {CHILD.format("gloo")!r}], capture_output=True)
    print(done.stderr.decode().splitlines()[-1:], done.stdout.decode().split())
    unisono.finalize()
"""


@pytest.mark.ranks(2, on="gloo", timeout=200)
def test_a_program_that_a_rank_starts_isnt_that_rank() -> None:
    done = python("-c", CHILD.format("gloo"))
    assert f"rank {unisono.get_rank()} of 2 is process {os.getpid()}, which has" in done.stderr
    assert run_python("-c", CHILD.format("serial")) == "1"
    assert unisono.all_reduce(1) == 2


def test_a_program_that_a_rank_starts_may_take_its_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PARENT)
    done = python("-m", "unisono", "run", "-n", "2", str(script))
    first, then = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert all("ContextError: rank" in line for line in first), done
    assert sorted(then) == ["[0] [] ['2']", "[1] [] ['2']"]
