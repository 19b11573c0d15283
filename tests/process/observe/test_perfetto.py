"""A trace of all ranks in Perfetto's own trace processor, which finds in it what we find."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as idist
from tests.support.pages import ROOT, blocks
from tests.support.screens import run
from tests.support.trace_processor import TraceProcessor, require_trace_processor, trace_processor
from unisono.observe.merge import JobTrace, jobs
from unisono.observe.trace_files import read
from unisono.observe.waits import meetings

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
    assert run("trace", str(folder), "--out", str(merged)).code == 0
    (job,) = jobs(read(folder))
    with trace_processor(merged) as loaded:
        the_ten_longest_waits_are_those_that_we_find(job, loaded)
        each_rank_has_its_calls_and_waited_as_long_as_the_summary_says(job, loaded)
        an_arrow_leads_from_each_wait_to_the_call_of_the_last_rank(loaded)
        perfetto_has_nothing_to_say_against_it(loaded)


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
    page = ROOT / "docs" / "how-to" / "trace.md"
    (recipe,) = (block.text for block in blocks(page) if block.language == "sql")
    found, ours = loaded.query(recipe), our_waits(job)
    assert len(found) == 10
    for wait, own in zip(found, ours[:10], strict=True):
        assert wait["seconds"] == pytest.approx(own["seconds"], abs=1e-8)
        assert {**wait, "seconds": 0} == {**own, "seconds": 0}
    # It came last in the last step; another may be later for the first call on a busy host.
    assert "waiting for rank 2" in {wait["what"] for wait in found if wait["seconds"] > 0.5}


def each_rank_has_its_calls_and_waited_as_long_as_the_summary_says(
    job: JobTrace, loaded: TraceProcessor
) -> None:
    found = {(row["name"], row["category"]): row for row in loaded.query(TOTALS)}
    waited_s = job.waits().waited_s
    for rank, records in job.records.items():
        assert found[f"rank {rank}", "call"]["n"] == len(records)
        seconds = found[f"rank {rank}", "waiting"]["seconds"]
        assert seconds == pytest.approx(waited_s[rank], abs=1e-5)
    assert len({name for name, _ in found}) == SIZE


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


def perfetto_has_nothing_to_say_against_it(loaded: TraceProcessor) -> None:
    stats = loaded.query("SELECT name, severity, value FROM stats WHERE value > 0")
    assert [each for each in stats if each["severity"] != "info"] == []
    assert "json_display_time_unit" in {each["name"] for each in stats}
    assert loaded.query("SELECT count(*) AS n FROM slice WHERE dur < 0")[0]["n"] == 0
