"""What ``unisono trace`` makes of a folder, besides the file for Perfetto."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import recorded, steps
from unisono.cli.trace import trace
from unisono.errors import ArgumentError
from unisono.recording.trace_file import TraceFile


def written(folder: Path, size: int, job: str) -> None:
    """Traces of a job whose last rank is late."""
    folder.mkdir(exist_ok=True)
    for records in steps(*[[*[0] * (size - 1), 200]] * 4).values():
        file = TraceFile(folder, records[0]._replace(job=job))
        file.append(records)
        file.close()


def test_a_picture_shows_each_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed")
    traces, picture, sizes = tmp_path / "traces", tmp_path / "waits.svg", []
    for size in (2, 3):
        written(traces, size, "one")
        assert trace(traces, picture=picture) == 0
        assert capsys.readouterr().out == f"{picture}: waiting times by rank\n"
        sizes.append(len(picture.read_text()))
    assert 1.5 < sizes[1] / sizes[0] < 3  # a second job, below the first
    png = tmp_path / "waits.png"
    assert trace(traces, picture=png, summary=True) == 0
    assert "4 calls of 2 ranks" in capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    for name in ("waits.xyz", "none/waits.png"):
        with pytest.raises(ArgumentError, match=f"--picture: .*{name} can't be written"):
            trace(traces, picture=tmp_path / name)


def test_the_summary_lists_calls_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late, wrong = "CollectiveTimeoutError: rank 3 is late", "ArgumentError: op='x'"
    ranks = range(4)
    for rank in ranks:
        records = [recorded(rank, 1, 0, 1, ranks=ranks)]
        if rank < 3:  # the last one has never reached this call
            records.append(recorded(rank, 2, 5, 900, ranks=ranks, line=9, error=late))
        if rank == 1:
            records.append(recorded(rank, 0, 950, 0, ranks=ranks, name="barrier", error=wrong))
        file = TraceFile(tmp_path, records[0])
        file.append(records)
        file.close()
    assert trace(tmp_path, summary=True) == 0
    out = capsys.readouterr().out
    assert "1 calls of 4 ranks" in out
    title, _, *rows = out[out.index("calls that failed") :].splitlines()
    assert [row.split(maxsplit=3) for row in rows] == [
        ["all_reduce", "train.py:9", "ranks", f"0-2  {late}"],
        ["barrier", "train.py:7", "rank", f"1     {wrong}"],
    ]
