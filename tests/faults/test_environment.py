"""Variables and options that are wrong are refused at once, by name, before anything starts."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

import unisono
from tests.support.clock import fast_clock
from tests.support.measures import Table, slack
from tests.support.processes import until
from unisono.cli.run import run
from unisono.errors import UnisonoError
from unisono.models.native import rendezvous
from unisono.topology import RankInfo

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


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_variables_without_peers(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    port = free_port()
    seconds, text = refused({"MASTER_PORT": port}, monkeypatch, timeout=2)
    assert f"rank 1 of 2 did not come to 127.0.0.1:{port} within 2 s" in text
    assert "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in text
    table.add("rank 0 of 2, nobody comes, timeout 2 s", seconds, 3, text)
    seconds, text = refused({"RANK": "1", "MASTER_PORT": port}, monkeypatch, timeout=2)
    assert "rank 1 of 2" in text
    assert f"127.0.0.1:{port}" in text
    assert "nobody listened there for 2 s" in text
    table.add("rank 1 of 2, nobody listens, timeout 2 s", seconds, 3, text)


def test_set_up_has_a_limit_and_a_warning_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (rendezvous._LIMIT_S, rendezvous._WARN_AFTER_S) == (60, 10)
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 1.0)
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.3)
    limit_s = 2 * slack()
    for rank, awaited in (("0", "for rank 1"), ("1", "for somebody to listen")):
        caplog.clear()
        seconds, _ = refused({"RANK": rank, "MASTER_PORT": free_port()}, monkeypatch)
        assert seconds < limit_s
        (record,) = caplog.records
        assert awaited in record.getMessage()
        assert "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in record.getMessage()


def test_the_limit_begins_anew_while_ranks_come() -> None:
    port = int(free_port())
    info = RankInfo(0, 3, nnodes=1, master_addr="127.0.0.1", master_port=port, source="torchrun")
    first, second = (rendezvous.Rendezvous(replace(info, rank=rank), None) for rank in range(2))
    with ThreadPoolExecutor(2) as ranks:
        waits = [ranks.submit(first.store)]
        server = TCPStore("127.0.0.1", port, 3, is_master=False, wait_for_workers=False)
        store = PrefixStore("unisono/0", server)
        until(lambda: store.add("ranks/1", 0) == 1, 60)
        waits.append(ranks.submit(second.store))
        until(lambda: store.add("ranks/1", 0) == 2, 60)
        first._until = 0.0  # its limit is over
        until(lambda: first._until > 0.0, 60)  # as another one has come meanwhile, it waits on
        first._until = 0.0
        for wait in waits:  # and nobody has since then
            with pytest.raises(UnisonoError, match="rank 2 of 3 did not come to .* within 60 s"):
                wait.result(60)


def test_a_block_with_a_deadline_bounds_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with fast_clock(), unisono.deadline(30):
        _, text = refused({"MASTER_PORT": free_port()}, monkeypatch)
    assert re.search(r"within (30|2\d(\.\d)?) s", text)


def test_another_try_at_the_same_port_while_the_error_is_handled() -> None:
    options: Any = {"rank": 0, "world_size": 2, "timeout": 1}
    options["init_method"] = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(UnisonoError, match="rank 1 of 2 did not come"):
        try:
            unisono.initialize("gloo", **options)
        except UnisonoError:
            unisono.initialize("gloo", **options)


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "rank 0 under an agent"])
def test_an_address_that_does_not_resolve(
    who: str, monkeypatch: pytest.MonkeyPatch, table: Table
) -> None:
    env: dict[str, str | None] = {"RANK": who[5], "MASTER_ADDR": "no-such-host.invalid"}
    if "agent" in who:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    seconds, text = refused(env, monkeypatch)
    assert "no-such-host.invalid" in text
    assert "MASTER_ADDR" in text
    table.add(f"MASTER_ADDR doesn't resolve, {who}", seconds, AT_ONCE_S, text)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        seconds, text = refused({"MASTER_PORT": port}, monkeypatch, timeout=2)
        assert port in text
        table.add("MASTER_PORT in use by another program, timeout 2 s", seconds, 3, text)
        seconds, text = refused({"MASTER_PORT": port, "RANK": "1"}, monkeypatch, timeout=2)
        assert "didn't answer" in text
        table.add("MASTER_PORT is another program's that is silent, timeout 2 s", seconds, 4, text)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "nnode=3": ({"nnode": 3}, "nnode"),
    "master_prt=1": ({"master_prt": 1}, "master_prt"),
    "tiemout=3": ({"tiemout": 3}, "Did you mean 'timeout'"),
    "nproc_per_node=0": ({"nproc_per_node": 0}, "nproc_per_node=0"),
    "nproc_per_node=-1": ({"nproc_per_node": -1}, "nproc_per_node=-1"),
    "nproc_per_node='two'": ({"nproc_per_node": "two"}, "nproc_per_node='two'"),
    "nproc_per_node=True": ({"nproc_per_node": True}, "nproc_per_node=True"),
    "timeout=-1": ({"timeout": -1}, "timeout=-1"),
    "timeout='x'": ({"timeout": "x"}, "timeout='x'"),
    "timeout=nan": ({"timeout": float("nan")}, "timeout=nan"),
    "master_port=70000": ({"master_port": 70000}, "70000"),
    "start_method='forkk'": ({"start_method": "forkk"}, "'forkk'"),
    "launcher='procesess'": ({"launcher": "procesess"}, "procesess"),
}


def _parallel() -> None:
    with unisono.Parallel("gloo", nproc_per_node=2) as job:
        job.run(abs)


def _refused_before_anything_starts(call: Callable[[], Any]) -> tuple[float, str]:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    start = time.monotonic()
    with pytest.raises(UnisonoError) as caught:
        call()
    seconds = time.monotonic() - start
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
    return seconds, str(caught.value)


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_option(case: str, table: Table) -> None:
    given, says = OPTIONS[case]
    options = {"nproc_per_node": 2, **given}
    calls: list[Callable[[], Any]] = [lambda: unisono.spawn("gloo", abs, **options)]
    if not case.startswith(("start_method", "launcher")):  # looked at by who makes the replicas
        calls.append(lambda: unisono.WorkerPool("gloo", **options))
    for call in calls:
        seconds, text = _refused_before_anything_starts(call)
        assert says in text
        table.add(f"options: {case}", seconds, AT_ONCE_S, text)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("UNISONO_WARN_AFTER_S", "soon"),
        ("UNISONO_WARN_AFTER_S", "-1"),
        ("UNISONO_FAN_OUT", "0"),
        ("UNISONO_INLINE_BYTES", "nan"),
    ],
)
def test_a_bad_variable_of_ours_is_refused_before_anything_starts(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, table: Table
) -> None:
    monkeypatch.setenv(variable, value)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: unisono.spawn("gloo", abs, nproc_per_node=2),
        _parallel,
        lambda: unisono.WorkerPool("gloo", nproc_per_node=2),
        lambda: unisono.initialize("gloo"),
        lambda: run(__file__),
    )
    for call in calls:
        seconds, text = _refused_before_anything_starts(call)
        assert f"{variable}={value!r}" in text
        table.add(f"variables: {variable}={value}", seconds, AT_ONCE_S, text)


def test_variables_that_a_user_sets_meanwhile_stay() -> None:
    before = dict(os.environ)
    unisono.initialize("gloo", rank=0, world_size=1)
    os.environ["SET_MEANWHILE"] = "1"
    unisono.finalize()
    assert os.environ.pop("SET_MEANWHILE") == "1"
    unisono.spawn("gloo", lambda rank: os.environ.update(INSIDE="1"), nproc_per_node=2)
    assert dict(os.environ) == before
