"""How the nodes of a job by torchrun find the first one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

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


def test_a_name_that_gets_known_later_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("train-0.train", after=3)
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    with socket.create_server(("127.0.0.1", 0)) as leader:
        torchrun._wait_for_node_0(node(1, 60.0), "train-0.train", leader.getsockname()[1])
    assert names.count > 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_stays_unknown_is_named_with_the_remedy(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names("train-0.train", after=float("inf"))
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    wanted = rf"^node {rank} of 2 couldn't reach node 0 at train-0\.train:29500 in 0.5 s \(.*known"
    with pytest.raises(LaunchError, match=rf"{wanted}.*headless Service"):
        torchrun._wait_for_node_0(node(rank, 0.5), "train-0.train", 29500)
    assert names.count > 1
