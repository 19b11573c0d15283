"""Variables and options that are wrong are refused at once, by name, before anything starts."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import psutil
import pytest

import unisono
from _measures import Table
from unisono.errors import UnisonoError

AT_ONCE_S = 0.1
GOOD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511"}  # fmt: skip
BAD: dict[str, tuple[dict[str, str | None], str]] = {
    "RANK is missing": ({"RANK": None}, "RANK"),
    "RANK=5 of 2": ({"RANK": "5"}, "RANK=5"),
    "RANK=-1": ({"RANK": "-1"}, "RANK='-1'"),
    "RANK=abc": ({"RANK": "abc"}, "RANK='abc'"),
    "WORLD_SIZE is missing": ({"WORLD_SIZE": None}, "WORLD_SIZE"),
    "WORLD_SIZE=0": ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
    "LOCAL_RANK=7 of 2": ({"LOCAL_RANK": "7"}, "LOCAL_RANK=7"),
    "MASTER_PORT=99999": ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
    "MASTER_PORT=abc": ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc'"),
    "MASTER_ADDR has a space": ({"MASTER_ADDR": "a b"}, "MASTER_ADDR='a b'"),
}


def refused(env: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        for name, value in {**GOOD, **env}.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        before = dict(os.environ)
        start = time.monotonic()
        with pytest.raises(UnisonoError) as caught:
            unisono.initialize("gloo", **options)
        seconds = time.monotonic() - start
        assert dict(os.environ) == before
    return seconds, str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_variable(case: str, monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    env, says = BAD[case]
    seconds, text = refused(dict(env), monkeypatch)
    assert says in text
    table.add(f"variables: {case}", seconds, AT_ONCE_S, text)


def test_variables_without_peers(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    seconds, text = refused({"MASTER_PORT": port}, monkeypatch, timeout=2)
    assert "rank 0 of 2" in text
    # torch's store waits a whole second more (2.13).
    table.add("rank 0 of 2, nobody comes, timeout 2 s", seconds, 3.5, text)
    seconds, text = refused({"RANK": "1", "MASTER_PORT": port}, monkeypatch, timeout=2)
    assert "rank 1 of 2" in text
    assert port in text
    table.add("rank 1 of 2, nobody listens, timeout 2 s", seconds, 3, text)


def test_an_address_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    seconds, text = refused(
        {"RANK": "1", "MASTER_ADDR": "no-such-host.invalid"}, monkeypatch, timeout=2
    )
    assert "no-such-host.invalid" in text
    table.add("MASTER_ADDR doesn't resolve, timeout 2 s", seconds, 3, text)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        seconds, text = refused({"MASTER_PORT": port}, monkeypatch, timeout=2)
        assert port in text
        table.add("MASTER_PORT in use by another program, timeout 2 s", seconds, 3, text)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "nnode=3": ({"nnode": 3}, "nnode"),
    "master_prt=1": ({"master_prt": 1}, "master_prt"),
    "tiemout=3": ({"tiemout": 3}, "Did you mean 'timeout'"),
    "nproc_per_node=0": ({"nproc_per_node": 0}, "nproc_per_node=0"),
    "nproc_per_node=-1": ({"nproc_per_node": -1}, "nproc_per_node=-1"),
    "nproc_per_node='2'": ({"nproc_per_node": "2"}, "nproc_per_node='2'"),
    "nproc_per_node=True": ({"nproc_per_node": True}, "nproc_per_node=True"),
    "timeout=-1": ({"timeout": -1}, "timeout=-1"),
    "timeout='x'": ({"timeout": "x"}, "timeout='x'"),
    "timeout=nan": ({"timeout": float("nan")}, "timeout=nan"),
    "master_port=70000": ({"master_port": 70000}, "70000"),
    "start_method='forkk'": ({"start_method": "forkk"}, "'forkk'"),
    "launcher='procesess'": ({"launcher": "procesess"}, "procesess"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_option(case: str, table: Table) -> None:
    options, says = OPTIONS[case]
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    start = time.monotonic()
    with pytest.raises(UnisonoError) as caught:
        unisono.spawn("gloo", abs, **{"nproc_per_node": 2, **options})
    seconds = time.monotonic() - start
    assert says in str(caught.value)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
    table.add(f"options: {case}", seconds, AT_ONCE_S, str(caught.value))


def test_variables_that_a_user_sets_meanwhile_stay() -> None:
    before = dict(os.environ)
    unisono.initialize("gloo", rank=0, world_size=1)
    os.environ["SET_MEANWHILE"] = "1"
    unisono.finalize()
    assert os.environ.pop("SET_MEANWHILE") == "1"
    unisono.spawn("gloo", lambda rank: os.environ.update(INSIDE="1"), nproc_per_node=2)
    assert dict(os.environ) == before
