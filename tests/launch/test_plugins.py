"""Launchers and environments of somebody else's, found by their entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import JOB, LIMIT_S, Done

pytestmark = pytest.mark.timeout(400)  # each command is five processes that import torch
MODULE = """
import pickle, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import cloudpickle
from unisono.launchers.processes import launch as local
from unisono import RankInfo
from unisono.launching import host_job
from unisono.rendezvous import host_store

START = "import pickle, sys; entry, info = pickle.load(sys.stdin.buffer); r = entry(info); "
START += "sys.stdout.flush(); sys.stdout.buffer.write(b'END' + pickle.dumps(r))"

def launch(entry, plan, *, environ=None):
    print("launched by mine", flush=True)
    return local(entry, plan, environ=environ)

def raises(entry, plan, *, environ=None):
    try:
        return local(entry, plan, environ=environ)
    except Exception as error:
        raise RuntimeError(f"rank failed: {error.__cause__!r}")  # and loses who it was

def by_hand(entry, plan, *, environ=None):
    with host_store(plan) as hosted, ThreadPoolExecutor(plan.world_size) as pool:
        made = [
            pool.submit(subprocess.run, [sys.executable, "-c", START], check=True, timeout=150,
                        input=cloudpickle.dumps((entry, hosted.info(local_rank))), stdout=-1)
            for local_rank in range(plan.nproc_per_node)
        ]
        return [pickle.loads(each.result().stdout.rpartition(b"END")[2]) for each in made]

def tasks(entry, plan, *, environ=None):
    pool = ThreadPoolExecutor(plan.world_size)
    with host_job(entry, plan, environ=environ) as job, pool:
        return job.results([pool.submit(task) for task in job.tasks])

def none(entry, plan, *, environ=None):
    pass

class Mine:
    NAME = "mine"

    @staticmethod
    def detect(env):
        if "MINE_RANK" not in env:
            return None
        return RankInfo(int(env["MINE_RANK"]), 3, source="mine")
"""
POINTS = """
[unisono.launchers]
mine = mine_module:launch
raises = mine_module:raises
by_hand = mine_module:by_hand
tasks = mine_module:tasks
none = mine_module:none
broken = mine_module:nothing

[unisono.environments]
mine = mine_module:Mine
broken = mine_module:nothing
"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """A distribution with entry points; gives the variables that make it importable."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "mine_module.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


def unisono(*words: str, **variables: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "unisono", *words],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return Done(done.returncode, done.stdout, done.stderr, 0.0)


def test_a_script_runs_by_a_launcher_of_functions(plugin: dict[str, str]) -> None:
    words = ["run", "--launcher", "mine", "--nproc-per-node", "2", JOB]
    done = unisono(*words, "facts", "gloo", **plugin)
    assert done.code == 0, done.err
    assert "launched by mine" in done.out
    assert [fact["local_rank"] for fact in done.facts()] == [0, 1]
    done = unisono(*words, "exit", "gloo", **plugin)
    assert done.code == 7, done.err
    done = unisono("run", "--launcher", "mine", "--max-restarts", "1", JOB, "facts", **plugin)
    assert done.code == 2
    assert "takes no --max-restarts" in done.err


def test_an_environment_is_asked_after_ours(plugin: dict[str, str]) -> None:
    done = unisono("doctor", "--json", MINE_RANK="2", **plugin)
    found = json.loads(done.out)
    assert found["environment"]["source"] == "mine"
    assert found["environment"]["findings"][0]["facts"]["rank"] == 2
    assert found["environment"]["findings"][0]["variables"] == {"MINE_RANK": "2"}
    assert found["launchers"]["mine"] is None
    done = unisono("doctor", "--json", MINE_RANK="2", RANK="0", WORLD_SIZE="1", **plugin)
    verdicts = {e["source"]: e["verdict"] for e in json.loads(done.out)["environment"]["findings"]}
    assert verdicts == {"torchrun": "won", "mine": "disagrees"}


def test_a_broken_plugin_is_said_when_it_is_asked_for(plugin: dict[str, str]) -> None:
    done = unisono("doctor", "--json", "--launcher", "broken", **plugin)
    assert done.code == 1
    assert "nothing" in json.loads(done.out)["problems"][0]
    done = unisono("run", "--launcher", "broken", JOB, "facts", **plugin)
    assert done.code == 2
    assert "launcher 'broken'" in done.err
    assert "mine" in done.err


@pytest.mark.parametrize("name", ["mine", "raises", "tasks"])
def test_a_script_ends_with_its_own_exit_code_whatever_its_launcher_raises(
    plugin: dict[str, str], name: str
) -> None:
    words = ["run", "--launcher", name, "--nproc-per-node", "2", JOB]
    done = unisono(*words, "exit", "gloo", **plugin)
    assert done.code == 7, done.err
    assert "error: rank 1 of 2" in done.err
    assert "ended with exit code 7" in done.err
    assert "\x1e" not in done.err  # a report's line of base64
    assert "typer" not in done.err


def test_a_script_that_a_launcher_loses_is_named(plugin: dict[str, str]) -> None:
    words = ["run", "--launcher", "raises", "--nproc-per-node", "2", JOB]
    done = unisono(*words, "raise", "gloo", **plugin)
    assert done.code == 1, done.err
    assert done.err.rstrip().endswith("ValueError: the failure")
    done = unisono(*words, "kill", "gloo", **plugin)
    assert done.code == 128 + 9, done.err
    assert "was ended by SIGKILL" in done.err


PROGRAM = """
import unisono as idist
def work(local_rank):
    return idist.get_rank(), idist.all_reduce(1)
def fails(local_rank):
    if local_rank == 1:
        raise KeyError("mine")
    idist.barrier()
if __name__ == "__main__":
    import sys
    fn = {"work": work, "fails": fails}[sys.argv[2]]
    try:
        print("RESULT", idist.spawn("gloo", fn, nproc_per_node=2, launcher=sys.argv[1]))
    except idist.UnisonoError as error:
        print("RESULT", type(error).__name__, getattr(error, "rank", None), str(error))
        print("CAUSE", repr(error.__cause__))
"""


@pytest.mark.parametrize(
    ("name", "fn", "said"),
    [
        ("by_hand", "work", "RESULT [(0, 2), (1, 2)]"),
        ("tasks", "work", "RESULT [(0, 2), (1, 2)]"),
        ("tasks", "fails", "RESULT WorkerFailedError 1 rank 1 of 2 raised KeyError: 'mine'"),
        (
            "raises",
            "fails",
            "RESULT LaunchError None launcher 'raises' of distribution mine failed",
        ),
        ("none", "work", "RESULT LaunchError None launcher 'none' of distribution mine returned"),
    ],
)
def test_functions_by_a_plugin(
    plugin: dict[str, str], tmp_path: Path, name: str, fn: str, said: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), name, fn],
        env={**os.environ, **plugin},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert said in done.stdout, done.stdout + done.stderr
    if fn == "fails":
        assert {"tasks": "CAUSE KeyError", "raises": "CAUSE RuntimeError"}[name] in done.stdout


def test_a_plugin_is_checked_from_a_shell(plugin: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--law", "order_of_ranks", "--save", str(file)]
    done = unisono("check", "--launcher", "tasks", *words, **plugin)
    assert done.code == 0, done.out + done.err
    found = json.loads(file.read_text())
    assert (found["launcher"], found["backend"]) == ("tasks", "gloo")
    assert [law["status"] for law in found["laws"]] == ["passed"]
    assert found["laws"][0]["group"] == "launchers"
    done = unisono("check", "--environment", "mine", **plugin)
    assert done.code == 1, done.err  # it refuses nothing
    assert "a_malformed_variable_is_refused_by_name" in done.out
    for words in (["gloo", "--environment", "slurm"], [], ["--launcher", "nope"]):
        assert unisono("check", *words, **plugin).code == 2
