"""What ``unisono trace`` makes of a folder, besides the file for Perfetto."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import steps
from unisono.cli.trace import trace
from unisono.errors import ArgumentError
from unisono.observe.trace_files import TraceFile


def written(folder: Path, size: int, job: str) -> None:
    """Traces of a job whose last rank is late."""
    folder.mkdir(exist_ok=True)
    for records in steps(*[[*[0] * (size - 1), 200]] * 4).values():
        file = TraceFile(folder, records[0]._replace(job=job))
        file.append(records)
        file.close()


def test_a_picture_shows_each_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed")
    sizes = []
    for size in (2, 3):
        written(tmp_path / "traces", size, "one")
        assert trace(tmp_path / "traces", picture=tmp_path / "waits.svg") == 0
        said = capsys.readouterr().out
        assert said == f"{tmp_path}/waits.svg: who was waited for, and who waited\n"
        sizes.append(len((tmp_path / "waits.svg").read_text()))
    assert 1.5 < sizes[1] / sizes[0] < 3  # a second job, below the first


def test_a_picture_may_come_with_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed")
    written(tmp_path / "traces", 2, "one")
    assert trace(tmp_path / "traces", picture=tmp_path / "waits.png", summary=True) == 0
    assert "4 calls of 2 ranks" in capsys.readouterr().out
    assert (tmp_path / "waits.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed")
    written(tmp_path / "traces", 2, "one")
    for name in ("waits.xyz", "none/waits.png"):
        with pytest.raises(ArgumentError, match=f"--picture: .*{name} can't be written"):
            trace(tmp_path / "traces", picture=tmp_path / name)
