"""A status page is whole whenever it is read, and only its user's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from unisono.host import status_page
from unisono.host.status_page import CALLED, PageReader, StatusPage, pages

CALLS = 20_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "pages"
    monkeypatch.setenv("UNISONO_STATUS", str(place))
    return place


def made(**facts: Any) -> StatusPage:
    page = StatusPage.make({"rank": 0, "job": "a", **facts})
    assert page is not None
    return page


def begin(page: StatusPage, number: int, name: str = "barrier") -> tuple[Any, int]:
    lane = page.lane()
    assert lane is not None
    words = page.words_of(name, "train.py", 7, "all ranks")
    return lane, lane.begin(*words, number, 8, 100 + number, CALLED)


def test_calls_and_facts_are_read_as_they_were_written() -> None:
    page = made(program="train.py")
    lane, stamp = begin(page, 3)
    (reader,) = pages()
    (record,) = reader.records()
    assert (record.name, record.file, record.line, record.group) == (
        *("barrier", "train.py", 7, "all ranks"),
    )
    assert (record.number, record.size_bytes, record.begin_ns, record.end_ns) == (3, 8, 103, 0)
    assert record.thread_id == threading.get_native_id()
    assert reader.facts["program"] == "train.py"
    lane.end(stamp, 555)
    assert reader.records()[0].end_ns == 555
    page.update(rank=4)
    assert pages()[0].facts["rank"] == 4
    page.close()
    assert not pages()


def test_the_last_calls_of_each_thread_are_kept() -> None:
    page = made()
    lane = page.lane()
    assert lane is not None
    first = lane.begin(*page.words_of("first", "f", 1, "g"), 1, 0, 1, CALLED)
    for number in range(2, 301):
        lane.begin(*page.words_of("next", "f", 1, "g"), number, 0, number, CALLED)
    lane.end(first, 9)  # others have its place by now
    thread = threading.Thread(target=begin, args=(page, 1000, "elsewhere"))
    thread.start()
    thread.join()
    records = pages()[0].records()
    assert [record.number for record in records] == [*range(173, 301), 1000]
    assert not any(record.end_ns for record in records)
    assert records[-1].thread_id != records[0].thread_id
    page.close()


def test_lanes_of_ended_threads_are_used_again() -> None:
    page = made()
    for number in range(1, 50):
        thread = threading.Thread(target=begin, args=(page, number))
        thread.start()
        thread.join()
    assert pages()[0].records()[-1].number == 49
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
    assert pages()[0].records()[0].name == "in the handler"
    page.close()


def test_a_full_page_goes_on_without_names() -> None:
    page = made(groups={str(i): list(range(200)) for i in range(50)})
    lane = page.lane()
    assert lane is not None
    for number in range(100):
        words = page.words_of(f"{number} {'x' * 300}", "f", 1, "g")
        lane.begin(*words, number, 0, number, CALLED)
    reader = pages()[0]
    assert reader.facts["groups"] == {}  # too long
    assert reader.facts["rank"] == 0
    names = [record.name for record in reader.records()]
    assert names[0].startswith("0 x")
    assert names[-1] == ""
    page.close()


def write() -> None:
    """Write until this process is ended."""
    page = made()
    lane = page.lane()
    assert lane is not None
    done = 0
    while True:
        for number in range(done + 1, done + 1000):
            words = page.words_of("x", "f", number % 1000, "g")
            stamp = lane.begin(*words, number, number * 7, number * 3, CALLED)
            lane.end(stamp, number * 5)
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
                for record in reader.records():
                    number = record.number
                    seen.add(number)
                    assert record.size_bytes == number * 7
                    assert record.begin_ns == number * 3
                    assert record.line == number % 1000
                    assert record.end_ns in (0, number * 5)
        assert writer.poll() is None
        writer.kill()


def test_pages_of_the_dead_stay_while_their_job_lives() -> None:
    other, page = made(job="a"), made(job="a")
    dead = page.path.with_name("999999999-1-1")
    page.path.rename(dead)
    page.update(pid=999999999, start_ticks=1)
    assert sorted(reader.is_alive() for reader in pages()) == [False, True]
    made(job="b").close()
    assert dead.exists()
    other.close()
    made(job="b").close()
    assert not dead.exists()


def test_what_is_no_page_is_passed_over(folder: Path) -> None:
    page = made()
    (folder / "1-2-3").write_bytes(b"nothing")
    (folder / "1-2-4").write_bytes(bytes(page._memory[:])[:-8])
    (folder / "1-2-5").symlink_to(page.path)
    os.mkfifo(folder / "1-2-6")  # which nobody writes to
    assert [reader.path for reader in pages()] == [page.path]
    with pytest.raises(ValueError, match="isn't a status page"):
        PageReader(folder / "1-2-3")
    page.close()


def test_other_files_in_the_folder_stay(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    names = {"2", "2024", "2024-notes.txt", "1-2", "notes"}
    for name in names:
        (folder / name).write_text("mine")
    made().close()
    assert {path.name for path in folder.iterdir()} == names


def test_pages_of_another_container_are_not_read_and_stay() -> None:
    """It has process ids of its own, and may share the folder: ``--ipc=host`` does that."""
    page = made(job="elsewhere")
    there = page.path.with_name("999999999-1-1")  # which lives there, and nothing says so here
    page.path.rename(there)
    page.update(pid=999999999, start_ticks=1, pids=page.facts["pids"] + 1)
    assert pages() == []
    made(job="b").close()
    assert there.exists()
    page.update(pids=page.facts["pids"] - 1)
    assert [reader.path for reader in pages()] == [there]


def test_pages_of_another_host_are_not_read_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may share the folder, too, on a file server; its processes aren't to be seen here."""
    monkeypatch.setattr(status_page, "boot_id", lambda: "another")
    page = made(job="elsewhere")
    there = page.path.with_name("999999999-1-1")
    page.path.rename(there)
    page.update(pid=999999999, start_ticks=1)
    monkeypatch.undo()
    monkeypatch.setenv("UNISONO_STATUS", str(there.parent))
    assert pages() == []
    made(job="b").close()
    assert there.exists()


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert StatusPage.make({}) is None
    assert pages() == []


def test_no_pages_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_STATUS", "0")
    assert StatusPage.make({}) is None
    assert pages() == []


def test_no_page_where_there_is_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert StatusPage.make({}) is None
    assert list(folder.iterdir()) == []


def test_a_fork_leaves_its_parents_page_alone() -> None:
    page = made()
    pid = os.fork()
    if pid == 0:
        page.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(pages()) == 1
    page.close()
