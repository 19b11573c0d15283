"""A status socket goes with its process, and leads to it alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.processes import in_fork, python
from unisono.host import status_page
from unisono.host.status_page import StatusPage, pages, start_ticks
from unisono.host.status_socket import StatusSocket, connected, sockets_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / ("a folder whose name is longer than an address of a socket " * 3)
    monkeypatch.setenv("UNISONO_STATUS", str(place))
    return place


def own() -> tuple[int, int]:
    return os.getpid(), start_ticks(os.getpid())


def made() -> StatusSocket:
    sock = StatusSocket.make()
    assert sock is not None
    return sock


def test_who_asks_is_connected(folder: Path) -> None:
    sock = made()
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sockets_of([own(), (1, 1)]) == {own(): path}
    assert sockets_of([(own()[0], 1)]) == {}  # a later process of that id
    asker = connected(path, 1.0)
    assert asker is not None
    served, _ = sock.sock.accept()
    with asker, served:
        asker.sendall(b"?")
        assert served.recv(1) == b"?"
    sock.close()
    sock.close()
    assert list(folder.iterdir()) == []
    assert connected(path, 1.0) is None


def test_a_fork_leaves_the_file_alone(folder: Path) -> None:
    sock = made()
    assert in_fork(sock.close) == 0
    assert len(list(folder.iterdir())) == 1
    sock.close()


ENDS = """
import os, sys
from unisono.host.status_socket import StatusSocket
kept = StatusSocket.make()
os._exit(0) if sys.argv[1] == "at once" else sys.exit()
"""


def test_it_goes_at_the_end_of_the_process_or_with_the_next_page(folder: Path) -> None:
    assert python("-c", ENDS, "in good order").returncode == 0
    assert list(folder.iterdir()) == []
    sock = made()
    assert python("-c", ENDS, "at once").returncode == 0
    assert len(list(folder.iterdir())) == 2
    page = StatusPage.make({"rank": 0, "job": "a"})
    assert page is not None
    (known,) = sockets_of([own()]).values()
    assert sorted(folder.iterdir()) == sorted([known, page.path])
    assert [each.path for each in pages()] == [page.path]  # a socket isn't taken for one
    page.close()
    sock.close()


def test_that_of_another_host_is_not_found_and_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hosts share the folder; no process of that id is here."""
    assert python("-c", ENDS, "at once").returncode == 0
    (there,) = folder.iterdir()
    pid, ticks = map(int, there.stem.split("-")[:2])
    assert sockets_of([(pid, ticks)]) == {(pid, ticks): there}
    monkeypatch.setattr(status_page, "boot_id", lambda: "another")
    assert sockets_of([(pid, ticks)]) == {}
    page = StatusPage.make({"rank": 0, "job": "a"})
    assert page is not None
    page.close()
    assert there.exists()


def test_there_is_none_without_pages_or_where_others_may_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o755)
    for place in (str(folder), "0"):
        monkeypatch.setenv("UNISONO_STATUS", place)
        assert StatusSocket.make() is None
        assert sockets_of([own()]) == {}
