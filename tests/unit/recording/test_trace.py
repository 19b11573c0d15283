"""The files of a trace: what is written can be read, whatever goes wrong meanwhile."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import unisono as idist
from tests.support.processes import in_fork
from tests.support.records import recorded
from unisono.errors import ArgumentError
from unisono.observe.waits import waits
from unisono.recording.records import CollectiveRecord
from unisono.recording.trace_file import TraceFile, read

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def written(folder: Path, *batches: list[CollectiveRecord]) -> Path:
    file = TraceFile(folder, batches[0][0])
    for records in batches:
        file.append(records)
    file.close()
    (path,) = folder.iterdir()
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    records = [
        recorded(1, 1, 5, 2),
        recorded(1, 1, 8, 2, group='the "é" group', ranks=(1, 5), error='Value\n"Error"'),
        recorded(1, 2, 11, 0.25, dtype="", plane="control", file="a b.py", size_bytes=2**40),
        recorded(1, 3, 12, 0.25, overlap_ns=1000),
    ]
    written(tmp_path, records[:1], records[1:])
    (trace,) = read(tmp_path)
    same_size = [*records[:1], *records[2:]]
    assert [each for each in trace.records if each.group == "all ranks"] == same_size
    assert trace.records[1].ranks == (1, 5)
    assert trace.records[1].error == 'Value\n"Error"'
    assert (trace.rank, trace.world_size, trace.job, trace.pid) == (1, 2, "job", os.getpid())


def test_a_process_that_can_start_no_more_threads_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a process, or at a limit of the system."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with idist.trace(tmp_path):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert [idist.all_reduce(1) for _ in range(2)] == [1, 1]
        monkeypatch.undo()
    (trace,) = read(tmp_path)
    assert [each.name for each in trace.records] == ["all_reduce"] * 2


def test_a_line_that_its_rank_did_not_live_to_end_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, [recorded(0, 1, 5, 2), recorded(0, 2, 9, 2)])
    path.write_bytes(path.read_bytes()[:-9])
    (trace,) = read(tmp_path)
    assert [each.number for each in trace.records] == [1]


@pytest.mark.parametrize("text", ["[]", "{}", "no", '{"args":{"unisono_trace":99}},'])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.unisono.json").write_text(f"[\n{text}\n")
    with pytest.raises(ArgumentError, match=r"rank-0\.unisono\.json is"):
        read(tmp_path)


def test_a_folder_without_a_trace_or_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArgumentError, match="holds no trace"):
            read(folder)
    (tmp_path / "file").write_text("")
    refused = pytest.raises(ArgumentError, match="the folder can't be made")
    with refused, idist.trace(tmp_path / "file"):
        pass


def test_a_block_is_written_at_its_end_and_no_more(tmp_path: Path) -> None:
    with idist.trace(tmp_path / "a" / "b") as folder, idist.trace(folder):
        idist.all_reduce(torch.ones(3, dtype=torch.float64))
    idist.barrier()
    (trace,) = read(folder)
    (record,) = trace.records
    assert (record.name, record.size_bytes, record.dtype) == ("all_reduce", 24, "float64")
    assert (record.file, record.number > 0) == (__file__, True)
    assert "unisono-trace" not in {thread.name for thread in threading.enumerate()}


def test_a_folder_that_has_two_names_is_traced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setenv("UNISONO_TRACE", str(link))
    monkeypatch.setattr("unisono.recording.trace._is_asked", False)  # as in a program that begins

    def work() -> None:
        idist.initialize("serial")
        with idist.trace(link):
            idist.all_reduce(1)

    assert in_fork(work) == 0
    (trace,) = read(real)
    assert [each.name for each in trace.records] == ["initialize", "all_reduce"]
    assert (trace.rank, trace.world_size) == (0, 1)


def test_where_it_cannot_be_written_a_warning_says_so_and_the_program_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), idist.trace(tmp_path / "a") as folder:
        folder.rmdir()
        folder.write_text("")  # which can be no folder
        for _ in range(3):
            assert idist.all_reduce(2) == 2
    (message,) = (each.getMessage() for each in caplog.records)
    assert "the trace in" in message
    assert "the program goes on" in message


def test_a_full_disk_ends_the_trace_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with idist.trace(tmp_path):
            for _ in range(500):
                idist.all_reduce(1)
        assert idist.all_reduce(3) == 3
        (warning,) = (each.getMessage() for each in caplog.records)
        assert "the program goes on" in warning

    assert in_fork(work) == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_call_that_a_hook_refuses_is_over_in_the_profile_and_has_no_number(
    tmp_path: Path,
) -> None:
    def refuse(record: CollectiveRecord) -> None:
        raise ZeroDivisionError("not now")

    with idist.trace(tmp_path), torch.profiler.profile() as profile:
        remove = idist.add_hook(before=refuse)
        with pytest.raises(ZeroDivisionError):
            idist.all_reduce(torch.ones(3))
        remove()
        idist.barrier()
    ranges = {e.name: e.time_range for e in profile.events() or () if "unisono" in e.name}
    assert ranges["unisono.all_reduce"].end <= ranges["unisono.barrier"].start
    (trace,) = read(tmp_path)
    first, second = trace.records
    assert (first.name, first.number, first.error) == (
        *("all_reduce", 0, "ZeroDivisionError: not now"),
    )
    assert (second.name, second.number > 0, second.error) == ("barrier", True, "")
    assert waits({0: trace.records}).calls == 1


def test_a_fork_writes_a_file_of_its_own(tmp_path: Path) -> None:
    with ExitStack() as block:
        block.enter_context(idist.trace(tmp_path))
        idist.all_reduce(1)

        def work() -> None:
            idist.barrier()
            block.close()

        assert in_fork(work) == 0
    by_pid = {trace.pid: [each.name for each in trace.records] for trace in read(tmp_path)}
    assert by_pid.pop(os.getpid()) == ["all_reduce"]
    assert list(by_pid.values()) == [["barrier"]]
