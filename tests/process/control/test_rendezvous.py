"""How ranks meet for the control plane: with hosts that nobody told of, and with strangers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

import unisono
from tests.process.control.contexts import heard, in_ranks, start
from tests.support.by_hand import by_hand, join, join_by_tcp, leave
from tests.support.clock import fast_clock
from unisono.context import communicator
from unisono.control import addresses, handshake, rendezvous
from unisono.errors import ContextError, EnvironmentDetectionError, PeerRefusedError
from unisono.models.native import rendezvous as native_rendezvous
from unisono.topology import EVERYBODY, RankInfo

RANKS = 200


def call_itself(answer: Callable[[str], str]) -> None:
    """Let this process's host have such an address, and no variable name another."""
    vars(addresses)["_address_to"] = answer
    del os.environ["GLOO_SOCKET_IFNAME"]


def unknown(name: str) -> str:
    raise socket.gaierror(f"{name} isn't known")


def meet(host: str = "") -> Any:
    """Meet twice, as the first exchange does; give the hub and what this rank was told."""
    control: Any = communicator().control
    if host:
        vars(rendezvous)["host_of_this_process"] = lambda: host
    with heard() as said:
        for _ in range(2):
            hub = rendezvous.connect_group(control, None)
            control.hubs[EVERYBODY] = hub
    return hub, said


@in_ranks()
def test_hosts_that_were_taken_for_one_meet_over_tcp(rank: int, folder: Path) -> None:
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    join_by_tcp(folder, rank, "127.0.0.1")
    vars(rendezvous)["host_of_this_process"] = lambda: f"host {rank}"
    assert communicator().model.topology.nnodes == 1
    hub, said = meet()
    assert hub is not None
    assert said == []
    assert unisono.all_gather(rank) == [0, 1]
    leave()


@in_ranks()
def test_hosts_of_one_name_are_two_nodes(rank: int, folder: Path) -> None:
    """As machines of one image may be: in a context of ours, and in one made by hand."""
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    vars(rendezvous)["boot_id"] = lambda: f"boot {rank}"
    for is_ours in (True, False):
        if is_ours:
            start(folder, rank, 2)
        else:
            join(folder, rank, 2, "by hand")
        unisono.sync()
        assert (unisono.get_nnodes(), unisono.get_local_rank()) == (2, 0)
        assert unisono.local_group().ranks == (rank,)
        if is_ours:
            unisono.finalize()
    leave()


@pytest.mark.parametrize(
    ("settings", "checks"),
    [(("1", ""), True), (("0", "1"), True), (("0", ""), None), (("0", "0"), False)],
)
@in_ranks()
def test_whether_calls_are_compared_is_agreed_on(
    rank: int, folder: Path, settings: tuple[str, str], checks: bool | None
) -> None:
    """One terminal has the variable: its rank would compare calls that the others don't."""
    os.environ.update(UNISONO_SOCKET_IFNAME="lo", UNISONO_DEBUG=settings[rank])
    join_by_tcp(folder, rank, "127.0.0.1")
    vars(rendezvous)["host_of_this_process"] = lambda: f"host {rank}"
    assert [unisono.all_reduce(torch.ones(n))[0] for n in (3, 300_000)] == [2, 2]
    assert communicator().control.checks(None) is checks
    leave()


@pytest.mark.parametrize(
    ("answer", "words"),
    [(lambda name: "127.0.1.1", "can't reach 127.0.1.1"), (unknown, "isn't known")],
    ids=["the loopback", "none"],
)
@in_ranks()
def test_without_an_address_for_other_hosts_rank_0_is_told_once_what_to_do(
    rank: int, folder: Path, answer: Callable[[str], str], words: str
) -> None:
    join_by_tcp(folder, rank, "127.0.0.1")
    call_itself(answer if rank == 1 else lambda name: "10.0.0.1")
    vars(addresses)["own_address"] = addresses.own_address if rank else lambda: "127.0.0.1"
    begin = time.monotonic()
    hub, said = meet(f"host {rank}")
    assert time.monotonic() - begin < rendezvous._SET_UP_S
    assert hub is None
    assert unisono.all_gather("é" * rank) == ["", "é"]
    leave()
    assert len(said) == 1 - rank
    for text in said:
        assert "falling back to the backend's collectives" in text
        assert "rank 1: " in text
        assert words in text
        assert "UNISONO_SOCKET_IFNAME" in text
        assert "rank 0: " not in text


@in_ranks()
def test_ranks_of_one_host_need_no_address_for_others(rank: int, folder: Path) -> None:
    join_by_tcp(folder, rank, "0.0.0.0")  # tells nobody how many nodes there are
    call_itself(unknown)
    assert communicator().model.topology.nnodes is None
    hub, said = meet()
    assert hub is not None
    assert said == []
    leave()


def test_more_ranks_than_wait_at_a_listener_are_all_let_in() -> None:
    """And one that never lets in is given up."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(RANKS) as ranks:
        listener.bind(f"\0unisono-test-{os.getpid()}")
        listener.listen(0)
        listener.settimeout(20)
        connect = partial(rendezvous._connect_until, int(socket.AF_UNIX), listener.getsockname())
        with contextlib.ExitStack() as stack, pytest.raises(BlockingIOError):
            for _ in range(2):
                stack.enter_context(connect(0.0))
        made = [ranks.submit(connect, time.monotonic() + 20) for _ in range(RANKS)]
        for _ in range(1 + RANKS):
            listener.accept()[0].close()
        for each in made:
            each.result().close()


@pytest.mark.parametrize("variable", ["UNISONO_WARN_AFTER_S", "UNISONO_SHARED_BYTES"])
@in_ranks(3)
def test_a_wrong_variable_of_one_rank_is_refused_by_all(
    rank: int, folder: Path, variable: str
) -> None:
    join(folder, rank, 3)
    if rank == 1:
        os.environ[variable] = "many"
    for _ in range(2):
        with pytest.raises(EnvironmentDetectionError) as caught:
            unisono.barrier()
    os.environ.pop(variable, None)
    (text,) = {*unisono.all_gather(str(caught.value))}
    leave()
    assert text.startswith(f"rank 1: {variable}='many' should be a number")
    assert (caught.value.variable, caught.value.value) == (variable, "many")


def come(port: int, rank: int, size: int, limit_s: float) -> Any:
    place = RankInfo(rank, size, 0, 1, rank, size, "127.0.0.1", port, "spawn", store_is_hosted=True)
    return native_rendezvous.Rendezvous(place, timedelta(seconds=limit_s)).store()


def come_in_vain(port: int, rank: int, size: int, limit_s: float) -> str:
    with pytest.raises(ContextError) as caught:
        come(port, rank, size, limit_s)
    return str(caught.value)


def test_of_ranks_that_wait_for_one_that_is_slow_one_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = TCPStore("127.0.0.1", 0, 8, is_master=True, wait_for_workers=False)
    with fast_clock(), ThreadPoolExecutor(7) as ranks:
        errors = list(ranks.map(lambda rank: come_in_vain(store.port, rank, 8, 60), range(7)))
    (record,) = caplog.records
    said = record.getMessage()
    assert re.search(r"has waited 10 s .* for ranks? (\S+ )*7\b", said)  # threads may be late too
    assert "gives up after 60 s" in said
    assert all(error.startswith("rank 7 of 8 did not reach ") for error in errors)


def test_ranks_that_dont_agree_how_many_they_are_say_so() -> None:
    """Nodes that count their own devices may differ; nobody is blamed for not coming."""
    store = TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(3) as ranks:
        errors = list(ranks.map(come_in_vain, [store.port] * 3, [0, 2, 1], [4, 4, 2], [20] * 3))
    assert all("size 4" in error and "size 2" in error for error in errors), errors
    assert all("nproc_per_node" in error for error in errors)


def test_a_node_that_is_early_for_the_next_run_waits_for_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both runs meet at one port, and node 0 may still have to end the first of them."""
    stores = [TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)]
    port, told = stores[0].port, threading.Event()

    def run(rank: int) -> None:
        for _ in range(2):  # a rank may leave a run and come again
            come(port, rank, 2, 30)

    by_hand(run)
    with fast_clock():
        gives_up = come_in_vain(port, 1, 2, 30)
    assert re.search("another process has been rank 1 there, .* for 30 s", gives_up)
    monkeypatch.setattr(native_rendezvous, "_WARN_AFTER_S", 0.0)
    monkeypatch.setattr(caplog.handler, "emit", lambda record: told.set())
    with ThreadPoolExecutor(2) as ranks:
        early = ranks.submit(come, port, 1, 2, 30)
        assert told.wait(20)
        stores.clear()
        stores.append(TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False))
        come(port, 0, 2, 30).set("from", "node 0")
        assert early.result(20).get("from") == b"node 0"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_is_told_so(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store outlives ranks that gave up; a rank that comes late isn't blamed for it."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    for name, value in {**there, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", str(1 - late))
    told = f"rank {late} of 2 did not reach .* within 30 s"
    with fast_clock(), pytest.raises(ContextError, match=told):
        unisono.initialize("gloo", timeout=30)
    monkeypatch.setenv("RANK", str(late))
    told = f"rank {late} of 2 reached .* too late: the other ranks had timed out .* rank {late}"
    with fast_clock(), pytest.raises(ContextError, match=told):
        unisono.initialize("gloo", timeout=30)


def test_an_interface_that_gloo_is_told_to_use_and_isnt_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    with pytest.raises(ContextError, match="GLOO_SOCKET_IFNAME names nope0, .* has .*lo"):
        unisono.initialize("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")


def test_where_gloo_listens_and_what_to_do_where_nothing_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(addresses, "_address_to", lambda host: "127.0.1.1")
    info = RankInfo(0, 2, 0, 1, 0, 2, "this-host", 1)
    assert native_rendezvous.gloo_interface(info) == ""
    assert native_rendezvous.wrong_interface(info).endswith(addresses._REMEDY)
    for here in (replace(info, nnodes=1), replace(info, master_addr="127.0.0.1")):
        assert native_rendezvous.gloo_interface(here) == "lo"
        assert native_rendezvous.wrong_interface(here) == ""


@in_ranks()
def test_who_listens_but_is_no_rank_is_found_out(rank: int, folder: Path) -> None:
    bind = addresses.listen_locally

    def answer(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            handshake.answer(caller, b"another secret", rendezvous._HELLO.size)
            caller.recv(1)  # until it is left

    def be_misled(stack: Any) -> Any:
        mine, _ = bind(stack)
        false, address = bind(stack)
        threading.Thread(target=answer, args=(false,), daemon=True).start()
        return mine, address

    if rank == 0:
        vars(rendezvous)["listen_locally"] = be_misled
    join(folder, rank, 2)
    with fast_clock(5), heard() as said, pytest.raises(PeerRefusedError) as caught:
        unisono.all_gather(rank)
    leave()
    assert "does not belong to this job" in str(caught.value)
    assert (caught.value.rank, said) == (0, [])
