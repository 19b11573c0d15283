"""A status page is whole whenever it is read, and only its user's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import in_fork
from tests.support.records import begin_in
from unisono.recording import status_page
from unisono.recording.status_page import (
    END,
    Lane,
    PageReader,
    StatusPage,
    encode_call,
    pages,
    short_name,
)

CALLS = 20_000


pytestmark = pytest.mark.usefixtures("own_pages")


def made(**facts: Any) -> StatusPage:
    page = StatusPage.make({"rank": 0, "job": "a", "groups": {}, "world_size": 1, **facts})
    assert page is not None
    return page


def lane_of(page: StatusPage) -> Lane:
    lane = page.lane()
    assert lane is not None
    return lane


def begin(page: StatusPage, number: int, name: str = "barrier") -> tuple[Lane, int]:
    lane = lane_of(page)
    text = encode_call(name, "all ranks", "train.py", 7)
    return lane, begin_in(lane, text, number, 8, 100 + number)


def begin_elsewhere(page: StatusPage, number: int) -> None:
    thread = threading.Thread(target=begin, args=(page, number))
    thread.start()
    thread.join()


def test_calls_and_facts_are_read_as_they_were_written(own_pages: Path) -> None:
    own_pages.rmdir()  # it is made where it isn't there
    page = made(program="train.py")
    assert stat.S_IMODE(own_pages.stat().st_mode) == 0o700
    lane, stamp = begin(page, 3)
    (reader,) = pages()
    (record,) = reader.calls()
    assert (record.name, record.file, record.line, record.group) == (
        *("barrier", "train.py", 7, "all ranks"),
    )
    assert (record.number, record.size_bytes, record.begin_ns, record.end_ns) == (3, 8, 103, 0)
    assert record.thread_id == threading.get_native_id()
    assert reader.facts["program"] == "train.py"
    lane.write(stamp, END, 555)
    assert reader.calls()[0].end_ns == 555
    page.update(rank=4)
    assert pages()[0].facts["rank"] == 4
    page.close()
    assert not pages()


def test_the_last_calls_of_each_thread_are_kept() -> None:
    page = made()
    lane = lane_of(page)
    first = begin_in(lane, encode_call("first", "g", "f", 1), 1, 0, 1)
    for number in range(2, 301):
        begin_in(lane, encode_call("next", "g", "f", 1), number, 0, number)
    lane.write(first, END, 9)  # others have its place by now
    begin_elsewhere(page, 1000)
    records = pages()[0].calls()
    assert [record.number for record in records] == [*range(173, 301), 1000]
    assert not any(record.end_ns for record in records)
    assert records[-1].thread_id != records[0].thread_id
    page.close()


def test_lanes_of_ended_threads_are_used_again() -> None:
    page = made()
    for number in range(1, 50):
        begin_elsewhere(page, number)
    assert pages()[0].calls()[-1].number == 49
    page.close()


def test_a_signals_handler_may_call_while_a_page_is_written() -> None:
    page = made()

    def write_within() -> None:
        with page._lock:  # where the signal comes
            begin(page, 1, "in the handler")
            page.update(rank=2)

    thread = threading.Thread(target=write_within, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert pages()[0].calls()[0].name == "in the handler"
    page.close()


def test_without_proc_there_are_no_pages(own_pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = made()

    def readlink(path: str) -> str:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", readlink)
        assert StatusPage.make({"rank": 1, "job": "a"}) is None
        assert pages() == []
    assert list(own_pages.iterdir()) == [page.path]
    page.close()


def test_a_page_has_room_for_long_names() -> None:
    page = made(groups={str(i): list(range(2000)) for i in range(50)})
    text = encode_call("all_reduce", "gr\u00fc\u00dfe " * 40, f"/{'d' * 400}/train.py", 1234567)
    begin_in(lane_of(page), text, 1, 0, 1)
    (reader,) = pages()
    assert reader.facts["groups"] == {}  # too long
    assert reader.facts["rank"] == 0
    (record,) = reader.calls()
    assert (record.name, record.line) == ("all_reduce", 1234567)
    assert record.file.endswith("dd/train.py")
    assert record.group == short_name("gr\u00fc\u00dfe " * 40)
    begin_in(lane_of(page), encode_call("\u00fc" * 300, "g" * 100, "train.py", 7), 2, 0, 2)
    long_name = reader.calls()[-1]
    assert (long_name.name, long_name.group) == ("\u00fc" * 30, "g" * 100)
    assert (long_name.file, long_name.line) == ("train.py", 7)
    page.close()


def write() -> None:
    """Write until this process is ended."""
    page = made()
    lane = lane_of(page)
    done = 0
    while True:
        for number in range(done + 1, done + 1000):
            text = encode_call("x", "g", "f" * 90, number % 1000)
            stamp = begin_in(lane, text, number, number * 7, number * 3)
            lane.write(stamp, END, number * 5)
            done = number
        page.update(count=done, twice=2 * done)


def test_a_reader_never_sees_half_a_state() -> None:
    command = f"from {__name__} import write; write()"
    with subprocess.Popen([sys.executable, "-c", command]) as writer:
        seen: set[int] = set()
        while len(seen) < CALLS and writer.poll() is None:
            for reader in pages():
                facts = reader.facts
                assert facts.get("twice", 0) == 2 * facts.get("count", 0)
                for record in reader.calls():
                    number = record.number
                    seen.add(number)
                    assert record.size_bytes == number * 7
                    assert record.begin_ns == number * 3
                    assert record.line == number % 1000
                    assert record.end_ns in (0, number * 5)
        assert writer.poll() is None
        writer.kill()


def of_the_dead(page: StatusPage) -> Path:
    """Let a page be that of a process that isn't here."""
    path = page.path.rename(page.path.with_name("999999999-1-1"))
    page.update(pid=999999999, start_ticks=1)
    return path


def test_pages_of_the_dead_stay_while_their_job_lives() -> None:
    other, dead = made(job="a"), of_the_dead(made(job="a"))
    assert sorted(reader.is_alive() for reader in pages()) == [False, True]
    made(job="b").close()
    assert dead.exists()
    other.close()
    made(job="b").close()
    assert not dead.exists()


def test_what_is_no_page_is_passed_over(own_pages: Path) -> None:
    page = made()
    (own_pages / "folder").mkdir()
    (own_pages / "1-2-3").write_bytes(b"nothing")
    (own_pages / "1-2-4").write_bytes(bytes(page._memory[:])[:-8])
    (own_pages / "1-2-5").symlink_to(page.path)
    os.mkfifo(own_pages / "1-2-6")  # which nobody writes to
    assert [reader.path for reader in pages()] == [page.path]
    with pytest.raises(ValueError, match="isn't a status page"):
        PageReader(own_pages / "1-2-3")
    page.close()


def test_other_files_in_the_folder_stay(own_pages: Path) -> None:
    names = {"2", "2024", "2024-notes.txt", "1-2", "notes"}
    for name in names:
        (own_pages / name).write_text("mine")
    made().close()
    assert {path.name for path in own_pages.iterdir()} == names


def test_pages_of_another_container_are_not_read_and_stay() -> None:
    """It has process ids of its own, and may share the folder: ``--ipc=host`` does that."""
    page = made(job="elsewhere")
    there = of_the_dead(page)  # which lives there, and nothing says so here
    here = page.facts["pid_namespace"]
    page.update(pid_namespace="another")
    assert pages() == []
    made(job="b").close()
    assert there.exists()
    page.update(pid_namespace=here)
    assert [reader.path for reader in pages()] == [there]


def test_pages_of_another_host_are_not_read_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may share the folder, too, on a file server; its processes aren't to be seen here."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(status_page, "pid_namespace", lambda: "another")
        there = of_the_dead(made(job="elsewhere"))
    assert pages() == []
    made(job="b").close()
    assert there.exists()


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_others_can_read_or_write_to_is_not_used(
    own_pages: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    page = made()
    own_pages.chmod(mode)
    assert StatusPage.make({}) is None
    assert pages() == []
    (warning,) = caplog.messages
    assert f"{own_pages} isn't a folder that only you can access" in warning
    own_pages.chmod(0o700)
    assert len(pages()) == 1
    page.close()


def test_no_pages_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_STATUS", "0")
    assert StatusPage.make({}) is None
    assert pages() == []


def test_no_page_where_there_is_no_room(own_pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert StatusPage.make({}) is None
    assert list(own_pages.iterdir()) == []


def test_a_fork_leaves_its_parents_page_alone() -> None:
    page = made()
    assert in_fork(page.close) == 0
    assert len(pages()) == 1
    page.close()
