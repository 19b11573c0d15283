"""Launchers and environments of somebody else's, found by their entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _command import JOB, Done

MODULE = """
from unisono.launchers.processes import launch as local
from unisono import RankInfo

def launch(entry, plan, *, environ=None):
    print("launched by mine", flush=True)
    return local(entry, plan, environ=environ)

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
