"""Traces of real ranks: every rank's file, also of one that is killed, and one picture of all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as idist
from tests.support.measures import slack
from tests.support.pages import ROOT, blocks
from tests.support.processes import python, until
from tests.support.screens import run as run_command
from tests.support.trace_processor import TraceProcessor, require_trace_processor, trace_processor
from tests.support.ways import Way
from tests.support.worlds import REAL, run
from unisono.errors import WorkerFailedError
from unisono.observe.perfetto import JobTrace, jobs
from unisono.observe.waits import Watch, meetings
from unisono.recording.trace_file import read

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


def waits_in(folder: Path) -> Watch:
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
        files = Path(folder)  # each begins with two lines, and three calls follow
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


@pytest.mark.parametrize("runner", ["spawn", "WorkerPool"])
def test_the_variable_traces_jobs_of_any_kind_each_rank_once(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TRACE", str(tmp_path))
    Way(runner).run(lambda local_rank: idist.all_reduce(1), nproc_per_node=2)
    names = [[each.name for each in trace.records] for trace in read(tmp_path)]
    assert [each.count("all_reduce") for each in names] == [1, 1]


SIZE, STEPS = 4, 6
ARROWS = """
SELECT wait.name AS wait, wait.ts + wait.dur AS ended, call.name AS call, call.ts AS began,
  waiting.name AS waiting, came.name AS came, parent.name AS inside,
  extract_arg(parent.arg_set_id, 'args.number') AS own,
  extract_arg(call.arg_set_id, 'args.number') AS number
FROM flow
JOIN slice AS wait ON flow.slice_out = wait.id
JOIN slice AS parent ON wait.parent_id = parent.id
JOIN thread_track AS out_track ON wait.track_id = out_track.id
JOIN thread AS out_thread ON out_thread.utid = out_track.utid
JOIN process AS waiting ON waiting.upid = out_thread.upid
JOIN slice AS call ON flow.slice_in = call.id
JOIN thread_track AS in_track ON call.track_id = in_track.id
JOIN thread AS in_thread ON in_thread.utid = in_track.utid
JOIN process AS came ON came.upid = in_thread.upid
"""
TOTALS = """
SELECT process.name AS name, category, count(*) AS n, sum(dur) / 1e9 AS seconds
FROM slice JOIN thread_track ON slice.track_id = thread_track.id
JOIN thread USING (utid) JOIN process USING (upid) GROUP BY 1, 2
"""


def train(local_rank: int) -> None:
    for step in range(STEPS):
        if idist.get_rank() == step % 3:
            time.sleep(0.05 * (step + 1) if step + 1 < STEPS else 1.0)
        idist.all_reduce(torch.ones(5))
        idist.broadcast("é", src=1)
    pair = idist.new_group([1, 3])
    if idist.get_rank() in (1, 3):
        started = idist.all_reduce(torch.ones(5), group=pair, async_op=True)
        idist.barrier(pair)
        started.wait()


def test_perfetto_finds_what_we_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_trace_processor()
    folder, merged = tmp_path / "traces", tmp_path / "job.json"
    monkeypatch.setenv("UNISONO_TRACE", str(folder))
    idist.spawn("gloo", train, nproc_per_node=SIZE)
    assert run_command("trace", str(folder), "--out", str(merged)).code == 0
    (job,) = jobs(read(folder))
    with trace_processor(next(folder.glob("rank-1-*"))) as loaded:  # the file of one rank
        (calls,) = loaded.query("SELECT count(*) AS n FROM slice WHERE category = 'call'")
        assert calls["n"] == len(job.records[1])
    with trace_processor(merged) as loaded:
        the_ten_longest_waits_are_those_that_we_find(job, loaded)
        an_arrow_leads_from_each_wait_to_the_call_of_the_last_rank(loaded)
        found = {(row["name"], row["category"]): row for row in loaded.query(TOTALS)}
        stats = loaded.query("SELECT name, severity, value FROM stats WHERE value > 0")
        assert loaded.query("SELECT count(*) AS n FROM slice WHERE dur < 0")[0]["n"] == 0
    for rank, waited_s in enumerate(job.waits().waited_s):
        assert found[f"rank {rank}", "call"]["n"] == len(job.records[rank])
        assert found[f"rank {rank}", "waiting"]["seconds"] == pytest.approx(waited_s, abs=1e-5)
    assert len({name for name, _ in found}) == SIZE
    assert [each for each in stats if each["severity"] != "info"] == []
    assert "json_display_time_unit" in {each["name"] for each in stats}


def our_waits(job: JobTrace) -> list[dict[str, Any]]:
    """Return all waits as we work them out, the longest first."""
    found = [
        {
            "seconds": meeting.waited_ns(rank) / 1e9,
            "who": f"rank {rank}",
            "what": f"waiting for rank {meeting.last}",
            "call": record.name,
            "line": f"{record.file}:{record.line}",
        }
        for meeting in meetings(job.records)
        for rank, record in meeting.records.items()
    ]
    return sorted(found, key=lambda wait: -wait["seconds"])


def the_ten_longest_waits_are_those_that_we_find(job: JobTrace, loaded: TraceProcessor) -> None:
    """By the query of the page on traces."""
    page = ROOT / "docs" / "how-to" / "slow-rank.md"
    (recipe,) = (block.text for block in blocks(page) if block.language == "sql")
    found, ours = loaded.query(recipe), our_waits(job)
    assert len(found) == 10
    for wait, own in zip(found, ours[:10], strict=True):
        assert wait["seconds"] == pytest.approx(own["seconds"], abs=1e-8)
        assert {**wait, "seconds": 0} == {**own, "seconds": 0}
    # It came last in the last step; another may be later for the first call on a busy host.
    assert "waiting for rank 2" in {wait["what"] for wait in found if wait["seconds"] > 0.5}


def an_arrow_leads_from_each_wait_to_the_call_of_the_last_rank(loaded: TraceProcessor) -> None:
    arrows = loaded.query(ARROWS)
    (waits,) = loaded.query("SELECT count(*) AS n FROM slice WHERE category='waiting'")
    assert len(arrows) == waits["n"] >= STEPS * (SIZE - 1)  # in sums; the others may be together
    for arrow in arrows:
        assert arrow["wait"] == f"waiting for {arrow['came']}"
        assert arrow["came"] != arrow["waiting"]
        # Torch makes a group on a rank before all have come, so a wait there may end before.
        is_left = arrow["call"] == "new_group" and arrow["ended"] < arrow["began"]
        assert arrow["ended"] == arrow["began"] or is_left
        assert arrow["inside"] == arrow["call"]
        assert arrow["own"] == arrow["number"]
