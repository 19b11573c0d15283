"""Variables and options that are wrong are refused at once, by name, before anything starts."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
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
Env = Mapping[str, str | None]
GOOD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511"}  # fmt: skip
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
BAD: dict[str, tuple[Env, str]] = {
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
    **{
        f"MASTER_ADDR doesn't resolve, {who}": (
            {"RANK": who[5], "MASTER_ADDR": "no-such-host.invalid", **more},
            r"no-such-host\.invalid.*MASTER_ADDR",
        )
        for who, more in (("rank 0", {}), ("rank 1", {}), ("rank 0 under an agent", AGENT))
    },
}


Refused = Callable[..., tuple[float, str]]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Make a call, else initialize as a rank of torchrun's, with variables: it's refused.

    And nothing is changed or started. Gives how long that took, and the text.
    """

    def run(env: Env, call: Callable[[], Any] | None = None, **options: Any) -> tuple[float, str]:
        with monkeypatch.context() as patch:
            for name, value in (env if call else {**GOOD, **env}).items():
                patch.setenv(name, value or "")
                if value is None:
                    patch.delenv(name)
            before, children = dict(os.environ), _children()
            start = time.monotonic()
            with pytest.raises(UnisonoError) as caught:
                call() if call else unisono.initialize("gloo", **options)
            seconds = time.monotonic() - start
            assert dict(os.environ) == before
            assert _children() <= children
        return seconds, str(caught.value)

    return run


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_variable(case: str, refused: Refused, table: Table) -> None:
    env, says = BAD[case]
    seconds, text = refused(env)
    assert re.search(says, text)
    table.add(f"variables: {case}", seconds, AT_ONCE_S, text)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


THEIRS = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
WITHOUT_PEERS = {
    "rank 0 of 2, nobody comes": (("rank 1 of 2 did not reach AT within 2 s", THEIRS), 3),
    "rank 1 of 2, nobody listens": (("rank 1 of 2", "AT", "no listener there within 2 s"), 3),
    "rank 0 of 2, MASTER_PORT in use by another program": (("AT",), 3),
    "rank 1 of 2, MASTER_PORT is another program's that is silent": (("AT", "did not answer"), 4),
}


@pytest.mark.parametrize("case", WITHOUT_PEERS)
def test_variables_without_peers(case: str, refused: Refused, table: Table) -> None:
    says, limit_s = WITHOUT_PEERS[case]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        if "program" not in case:
            taken.close()
        seconds, text = refused({"RANK": case[5], "MASTER_PORT": port}, timeout=2)
    for each in says:
        assert each.replace("AT", f"127.0.0.1:{port}") in text
    table.add(f"{case}, timeout 2 s", seconds, limit_s, text)


def test_set_up_has_a_limit_and_a_warning_of_its_own(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (rendezvous._LIMIT_S, rendezvous._WARN_AFTER_S) == (60, 10)
    monkeypatch.setattr(rendezvous, "_LIMIT_S", 1.0)
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.3)
    limit_s = 2 * slack()
    for rank, awaited in (("0", "for rank 1"), ("1", "for a listener")):
        caplog.clear()
        seconds, _ = refused({"RANK": rank, "MASTER_PORT": free_port()})
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
            with pytest.raises(UnisonoError, match="rank 2 of 3 did not reach .* within 60 s"):
                wait.result(60)


def test_a_block_with_a_deadline_bounds_set_up(refused: Refused) -> None:
    with fast_clock(), unisono.deadline(30):
        _, text = refused({"MASTER_PORT": free_port()})
    assert re.search(r"within (30|2\d(\.\d)?) s", text)


def test_another_try_at_the_same_port_while_the_error_is_handled() -> None:
    options: Any = {"rank": 0, "world_size": 2, "timeout": 1}
    options["init_method"] = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(UnisonoError, match="rank 1 of 2 did not reach"):
        try:
            unisono.initialize("gloo", **options)
        except UnisonoError:
            unisono.initialize("gloo", **options)


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


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_option(case: str, refused: Refused, table: Table) -> None:
    given, says = OPTIONS[case]
    options = {"nproc_per_node": 2, **given}
    calls: list[Callable[[], Any]] = [lambda: unisono.spawn("gloo", abs, **options)]
    if not case.startswith(("start_method", "launcher")):  # looked at by who makes the replicas
        calls.append(lambda: unisono.WorkerPool("gloo", **options))
    for call in calls:
        seconds, text = refused({}, call)
        assert says in text
        table.add(f"options: {case}", seconds, AT_ONCE_S, text)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("UNISONO_WARN_AFTER_S", "soon"),
        ("UNISONO_WARN_AFTER_S", "-1"),
        ("UNISONO_SHARED_BYTES", "nan"),
    ],
)
def test_a_bad_variable_of_ours_is_refused_before_anything_starts(
    variable: str, value: str, refused: Refused, table: Table
) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: unisono.spawn("gloo", abs, nproc_per_node=2),
        _parallel,
        lambda: unisono.WorkerPool("gloo", nproc_per_node=2),
        lambda: unisono.initialize("gloo"),
        lambda: run(__file__),
    )
    for call in calls:
        seconds, text = refused({variable: value}, call)
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
