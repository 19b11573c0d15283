"""Traces of real ranks: every rank's file, also of one that is killed, and one picture of all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import unisono as idist
from tests.support.measures import slack
from tests.support.processes import python, until
from tests.support.screens import run as run_command
from tests.support.worlds import REAL, run
from unisono.errors import WorkerFailedError
from unisono.observe.merge import jobs
from unisono.observe.trace_files import read
from unisono.observe.waits import Waits

MOST_LOST_S = 1.0
LATE_S = 0.2
PROGRAM = """
import time
import torch
import unisono as idist

idist.initialize("gloo")
idist.all_reduce(torch.ones(5))  # loads what the first call needs, on some ranks later
for _ in range(6):
    if idist.get_rank() == 1:
        time.sleep(0.2)
    idist.all_reduce(torch.ones(5))
with idist.one_rank_first():
    pass
idist.finalize()
"""


def waits_in(folder: Path) -> Waits:
    (job,) = jobs(read(folder))
    return job.waits()


@pytest.mark.fast
def test_a_script_is_traced_merged_and_summed_up_by_commands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    folder, merged = tmp_path / "traces", tmp_path / "job.json"
    done = python("-m", "unisono", "run", "-n", "2", "--trace", str(folder), str(script))
    assert done.returncode == 0, done.stderr
    assert len(list(folder.iterdir())) == 2
    ended = run_command("trace", str(folder), "--out", str(merged), "--summary")
    assert ended.code == 0, ended.err
    assert f"{merged}: 18 calls of 2 ranks" in ended.out
    assert "9 calls of 2 ranks" in ended.out
    assert "rank 1 is slow" in ended.out
    assert "all_reduce      train.py:11" in ended.out
    events = json.loads(merged.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2
    calls = [event["name"] for event in events if event.get("cat") == "call"]
    assert sorted(set(calls)) == ["all_reduce", "initialize", "one_rank_first"]
    late = [e["dur"] for e in events if e["name"] == "waiting for rank 1" and e["dur"] > 50_000]
    assert len(late) >= 6


def test_the_summary_of_a_folder_without_a_trace_is_wrong_use(tmp_path: Path) -> None:
    ended = run_command("trace", str(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    assert "holds no trace" in ended.err


SERIAL = """
import unisono as idist

if idist.get_rank() == 0:
    idist.all_reduce(1)
"""


def test_a_program_that_is_alone_is_traced(tmp_path: Path) -> None:
    """It has neither a backend nor a call that makes ranks."""
    script, folder = tmp_path / "alone.py", tmp_path / "traces"
    script.write_text(SERIAL)
    done = python(str(script), env={**os.environ, "UNISONO_TRACE": str(folder)})
    assert done.returncode == 0, done.stderr
    (trace,) = read(folder)
    (record,) = trace.records
    assert (record.name, record.file, record.line) == ("all_reduce", str(script), 5)
    assert (trace.rank, trace.world_size, trace.job) == (0, 1, f"alone.py-{trace.pid}")
    assert waits_in(folder).calls == 1


def late_in_a_block(local_rank: int, folder: str) -> None:
    with idist.trace(folder):
        for _ in range(3):
            if idist.get_rank() == idist.get_world_size() - 1:
                time.sleep(LATE_S)
            idist.all_reduce(torch.ones(7))
        idist.barrier()
    idist.barrier()


@pytest.mark.parametrize(
    ("backend", "size"),
    [pytest.param("threads", 3, id="threads-3"), pytest.param("gloo", 2, id="gloo-2"), *REAL],
)
def test_each_rank_has_a_file_whatever_ranks_are(backend: str, size: int, tmp_path: Path) -> None:
    run(backend, size, late_in_a_block, str(tmp_path))
    traces = read(tmp_path)
    assert [trace.rank for trace in traces] == list(range(size))
    for trace in traces:
        names = [record.name for record in trace.records]
        assert names[:4] == ["all_reduce"] * 3 + ["barrier"]
        assert {record.rank for record in trace.records} == {trace.rank}
    found = waits_in(tmp_path)
    assert found.slowest == size - 1
    assert found.lost_s[size - 1] >= 2 * LATE_S * 0.9  # the others may be late for the first


def call_in_a_profile(local_rank: int, folder: str) -> set[str]:
    model = idist.auto_model(torch.nn.Linear(4, 4))
    with idist.trace(folder), torch.profiler.profile() as profile:
        started = idist.all_reduce(torch.ones(3), async_op=True), idist.all_gather(1, async_op=True)
        idist.barrier()
        for each in started:
            each.wait()
        model(torch.ones(2, 4)).sum().backward()
        with idist.one_rank_first():
            pass
    path = Path(folder, f"profile-{idist.get_rank()}.json")
    profile.export_chrome_trace(str(path))
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_calls_of_every_kind_are_in_the_profile_of_torch(tmp_path: Path) -> None:
    names = ("all_reduce", "all_gather", "barrier", "gradients", "one_rank_first")
    for found in run("gloo", 2, call_in_a_profile, str(tmp_path)):
        assert {f"unisono.{name}" for name in names} <= found


def die_once_it_is_written(local_rank: int, folder: str) -> None:
    idist.barrier()
    idist.all_reduce(1)
    called = time.monotonic()
    if idist.get_rank() == 1:
        files = Path(folder)  # each begins with facts and group, and three calls follow
        until(lambda: [f for f in files.glob("rank-1-*") if f.read_text().count("\n") >= 5], 60)
        Path(folder, "took").write_text(str(time.monotonic() - called))
        os.kill(os.getpid(), signal.SIGKILL)
    idist.barrier()


def test_a_killed_rank_loses_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = MOST_LOST_S * slack() / 2  # that second, where nothing else runs
    monkeypatch.setenv("UNISONO_TRACE", str(tmp_path))
    with pytest.raises(WorkerFailedError):
        idist.spawn("gloo", die_once_it_is_written, (str(tmp_path),), nproc_per_node=2)
    assert float((tmp_path / "took").read_text()) < limit_s
    by_rank = {trace.rank: [each.name for each in trace.records] for trace in read(tmp_path)}
    assert by_rank[1] == ["initialize", "barrier", "all_reduce"]
    assert by_rank[0][:3] == by_rank[1]


def sum_up(local_rank: int) -> int:
    return idist.all_reduce(1)


def test_the_variable_traces_jobs_of_any_kind_each_rank_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("spawn", "pool"):
        folder = tmp_path / kind
        monkeypatch.setenv("UNISONO_TRACE", str(folder))
        if kind == "spawn":
            idist.spawn("gloo", sum_up, nproc_per_node=2)
        else:
            with idist.WorkerPool("gloo", nproc_per_node=2) as pool:
                pool.run(sum_up)
        names = [[each.name for each in trace.records] for trace in read(folder)]
        assert len(names) == 2
        assert all(each.count("all_reduce") == 1 for each in names)
