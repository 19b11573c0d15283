"""How the nodes of a job by torchrun find the first one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from unisono.control.addresses import why_unreachable
from unisono.errors import LaunchError
from unisono.launchers import torchrun
from unisono.launchers.script.script import Script

LOOK_UP = socket.getaddrinfo


class Names:
    """Name lookups in which one name gets known after some of them."""

    def __init__(self, name: str, after: float) -> None:
        self.name = name
        self.after = after
        self.count = 0

    def getaddrinfo(self, host: str, *args: Any, **kwargs: Any) -> Any:
        if host != self.name:
            return LOOK_UP(host, *args, **kwargs)
        self.count += 1
        if self.count <= self.after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return LOOK_UP("127.0.0.1", *args, **kwargs)


def node(rank: int, timeout_s: float) -> Script:
    return Script(("train.py",), 1, 2, 2, rank, timeout_s=timeout_s)


def test_a_name_that_gets_known_later_is_reached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names("train-0.train", after=3)
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    limits: list[float] = []

    def reach(addr: str, port: int, limit_s: float) -> OSError | None:
        limits.append(limit_s)
        return why_unreachable(addr, port, limit_s)

    monkeypatch.setattr(torchrun, "why_unreachable", reach)
    with socket.create_server(("127.0.0.1", 0)) as leader:
        torchrun._reach(node(1, 60.0), "train-0.train", leader.getsockname()[1])
    assert names.count > 3
    assert limits[0] <= 60.0 - 3 * torchrun._TRY_S  # one timeout for both
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1  # once, however often it is looked up
    assert warnings[0].startswith("node 1: --master-addr 'train-0.train' doesn't resolve yet (")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_stays_unknown_is_named_with_the_remedy(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names("train-0.train", after=float("inf"))
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    wanted = rf"^node {rank}: --master-addr 'train-0.train' still doesn't resolve after 0.5 s: "
    with pytest.raises(LaunchError, match=rf"{wanted}.*correct it, or make the name known"):
        torchrun._reach(node(rank, 0.5), "train-0.train", 29500)
    assert names.count > 1
