"""Launchers and environments of somebody else's, found by their entry points."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.command import JOB, Done
from tests.support.processes import SOURCES
from unisono import registry
from unisono.cli import main
from unisono.environments.detection import environments
from unisono.errors import LaunchError, WorkerFailedError

ROOT = str(Path(__file__).parents[2])
pytestmark = [
    pytest.mark.timeout(400),  # each rank of a script imports torch
    pytest.mark.filterwarnings("ignore:.*is left out:RuntimeWarning"),  # the broken one
]
MODULE = """
import pickle, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import cloudpickle
from unisono.launchers.local import launch as local
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


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install a distribution with entry points for this process and what it starts."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "mine_module.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), SOURCES, ROOT)))
        _forget()
        yield
    _forget()
    sys.modules.pop("mine_module", None)


def _forget() -> None:
    for plugins in (registry.launchers, environments):
        plugins._scanned = plugins._loaded = None  # read again at the next use


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command of unisono in this process."""

    def run(*words: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return Done(int(ended.value.code or 0), *capfd.readouterr(), 0.0)

    return run


def test_a_script_runs_by_a_launcher_of_functions(command: Callable[..., Done]) -> None:
    words = ["run", "--launcher", "mine", "--nproc-per-node", "2", JOB, "facts", "gloo"]
    done = command(*words)
    assert done.code == 0, done.err
    assert "launched by mine" in done.out
    assert [fact["local_rank"] for fact in done.facts()] == [0, 1]
    done = command("run", "--launcher", "mine", "--max-restarts", "1", JOB, "facts")
    assert done.code == 2
    assert "does not support --max-restarts" in done.err


def test_an_environment_is_asked_after_ours(
    command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_RANK", "2")
    found = json.loads(command("doctor", "--json").out)
    assert found["environment"]["source"] == "mine"
    assert found["environment"]["findings"][0]["facts"]["rank"] == 2
    assert found["environment"]["findings"][0]["variables"] == {"MINE_RANK": "2"}
    assert found["launchers"]["mine"] is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    found = json.loads(command("doctor", "--json").out)
    verdicts = {each["source"]: each["verdict"] for each in found["environment"]["findings"]}
    assert verdicts == {"torchrun": "won", "mine": "disagrees"}


def test_a_broken_plugin_is_said_when_it_is_asked_for(command: Callable[..., Done]) -> None:
    done = command("doctor", "--json", "--launcher", "broken")
    assert done.code == 1
    assert "nothing" in json.loads(done.out)["problems"][0]
    done = command("run", "--launcher", "broken", JOB, "facts")
    assert done.code == 2
    assert "launcher 'broken'" in done.err
    assert "mine" in done.err


@pytest.mark.parametrize(
    ("name", "mode", "code", "said"),
    [
        *((name, "exit", 7, "ended with exit code 7") for name in ("mine", "raises", "tasks")),
        ("raises", "raise", 1, "error: rank 1 of 2 raised ValueError: the failure"),
        ("raises", "kill", 128 + 9, "was ended by SIGKILL"),
    ],
)
def test_a_script_ends_with_its_own_exit_code_whatever_its_launcher_raises(
    command: Callable[..., Done], name: str, mode: str, code: int, said: str
) -> None:
    done = command("run", "--launcher", name, "--nproc-per-node", "2", JOB, mode, "gloo")
    assert done.code == code, done.err
    assert "error: rank 1 of 2" in done.err
    assert said in done.err
    assert "\x1e" not in done.err  # a report's line of base64
    assert "typer" not in done.err


def work(local_rank: int) -> tuple[int, int]:
    return unisono.get_rank(), unisono.all_reduce(1)


def fails(local_rank: int) -> None:
    if local_rank == 1:
        raise KeyError("mine")
    unisono.barrier()


def spawned(name: str, fn: Callable[[int], Any]) -> Any:
    return unisono.spawn("gloo", fn, nproc_per_node=2, launcher=name)


@pytest.mark.parametrize("name", ["by_hand", "tasks"])
def test_functions_by_a_plugin(name: str) -> None:
    assert spawned(name, work) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("name", "fn", "said", "cause"),
    [
        ("tasks", fails, "rank 1 of 2 raised KeyError: 'mine'", KeyError),
        ("raises", fails, "'raises' of distribution mine failed", RuntimeError),
        ("none", work, "launcher 'none' of distribution mine returned", type(None)),
    ],
)
def test_functions_that_fail_by_a_plugin(name: str, fn: Any, said: str, cause: type) -> None:
    error = WorkerFailedError if name == "tasks" else LaunchError
    with pytest.raises(error, match=said) as caught:
        spawned(name, fn)
    assert getattr(caught.value, "rank", None) == (1 if name == "tasks" else None)
    assert type(caught.value.__cause__) is cause


def test_a_plugin_is_checked_from_a_shell(command: Callable[..., Done], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--law", "order_of_ranks", "--save", str(file)]
    done = command("check", "--launcher", "tasks", *words)
    assert done.code == 0, done.out + done.err
    found = json.loads(file.read_text())
    assert (found["launcher"], found["backend"]) == ("tasks", "gloo")
    assert [law["status"] for law in found["laws"]] == ["passed"]
    assert found["laws"][0]["group"] == "launchers"
    done = command("check", "--environment", "mine")
    assert done.code == 1, done.err  # it refuses nothing
    assert "a_malformed_variable_is_refused_by_name" in done.out
    for words in (["gloo", "--environment", "slurm"], [], ["--launcher", "nope"]):
        assert command("check", *words).code == 2
