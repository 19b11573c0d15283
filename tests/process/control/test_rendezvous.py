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
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

import unisono
from tests.process.control.contexts import heard
from tests.support.by_hand import by_hand, join, join_by_tcp, leave
from tests.support.clock import fast_clock
from unisono.context import communicator
from unisono.control import addresses, plane, rendezvous
from unisono.errors import ContextError, EnvironmentDetectionError, PeerRefusedError
from unisono.models.native import rendezvous as native_rendezvous
from unisono.topology import EVERYBODY, RankInfo

RANKS = 200


def call_itself(answer: Callable[[str], str]) -> None:
    """Let this process's host have such an address, and no variable name another."""
    vars(socket)["gethostbyname"] = answer
    del os.environ["GLOO_SOCKET_IFNAME"]


def unknown(name: str) -> str:
    raise socket.gaierror(f"{name} isn't known")


def meet(host: str | None = None) -> Any:
    """Meet twice, as the first exchange does; give the hub and what this rank was told."""
    control: Any = communicator().control
    with heard() as said:
        for _ in range(2):
            control.hubs[EVERYBODY] = hub = rendezvous.connect_group(
                control, None, plane.INLINE_BYTES, host
            )
    return hub, said


def test_hosts_that_were_taken_for_one_meet_over_tcp(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
        join_by_tcp(tmp_path, rank, "127.0.0.1")
        vars(rendezvous)["host_of_this_process"] = lambda: f"host {rank}"
        nnodes = communicator().model.topology.nnodes
        hub, said = meet()
        found = unisono.all_gather(rank)
        leave()
        return nnodes, hub is not None, said, found

    assert by_hand(fn) == [(1, True, [], [0, 1])] * 2


ADDRESSES: dict[str, tuple[Callable[[str], str], str]] = {
    "the loopback": (lambda name: "127.0.1.1", "can't reach 127.0.1.1"),
    "none": (unknown, "isn't known"),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_an_address_for_other_hosts_rank_0_is_told_once_what_to_do(
    address: str, tmp_path: Path
) -> None:
    answer, words = ADDRESSES[address]

    def fn(rank: int) -> Any:
        join_by_tcp(tmp_path, rank, "127.0.0.1")
        call_itself(answer if rank == 1 else lambda name: "10.0.0.1")
        vars(addresses)["own_address"] = addresses.own_address if rank else lambda: "127.0.0.1"
        begin = time.monotonic()
        hub, said = meet(f"host {rank}")
        seconds = time.monotonic() - begin
        found = unisono.all_gather("é" * rank)
        leave()
        return hub, said, found, seconds < rendezvous._SET_UP_S

    (hub, said, *found), other = by_hand(fn)
    assert hub is None
    assert found == [["", "é"], True]
    assert other == (None, [], *found)
    assert len(said) == 1
    for word in (
        "stays on the model's own collectives",
        "rank 1: ",
        words,
        "UNISONO_SOCKET_IFNAME",
    ):
        assert word in said[0]
    assert "rank 0: " not in said[0]


def test_ranks_of_one_host_need_no_address_for_others(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join_by_tcp(tmp_path, rank, "0.0.0.0")  # tells nobody how many nodes there are
        call_itself(unknown)
        nnodes = communicator().model.topology.nnodes
        hub, said = meet()
        leave()
        return nnodes, hub is not None, said

    assert by_hand(fn) == [(None, True, [])] * 2


def test_more_ranks_than_wait_at_a_listener_are_all_let_in() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0unisono-test-{os.getpid()}")
        listener.listen(1)
        listener.settimeout(20)
        address, waiting = listener.getsockname(), 0
        with contextlib.suppress(BlockingIOError):
            while True:
                first = stack.enter_context(socket.socket(socket.AF_UNIX))
                first.setblocking(False)
                first.connect(address)
                waiting += 1
        until, made = time.monotonic() + 20, []

        def connect() -> None:
            sock = rendezvous._connect_until(int(socket.AF_UNIX), address, until)
            made.append(stack.enter_context(sock))

        threads = [threading.Thread(target=connect) for _ in range(RANKS)]
        for thread in threads:
            thread.start()
        for _ in range(waiting + RANKS):
            stack.enter_context(listener.accept()[0])
        for thread in threads:
            thread.join()
    assert len(made) == RANKS


def test_a_listener_that_never_lets_in_is_given_up() -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(f"\0unisono-test-{os.getpid()}")
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(2):
                sock = rendezvous._connect_until(int(socket.AF_UNIX), listener.getsockname(), 0.0)
                stack.enter_context(sock)


@pytest.mark.parametrize("variable", ["UNISONO_WARN_AFTER_S", "UNISONO_FAN_OUT"])
def test_a_wrong_variable_of_one_rank_is_refused_by_all(variable: str, tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3)
        if rank == 1:
            os.environ[variable] = "many"
        for _ in range(2):
            with pytest.raises(EnvironmentDetectionError) as caught:
                unisono.barrier()
        os.environ.pop(variable, None)
        found = unisono.all_gather(rank)
        leave()
        return str(caught.value), caught.value.variable, caught.value.value, found

    told = by_hand(fn, 3)
    assert told[1:] == told[:1] * 2
    text, *rest = told[0]
    assert text.startswith(f"rank 1: {variable}='many' should be a number")
    assert rest == [variable, "many", [0, 1, 2]]


def test_of_ranks_that_wait_for_one_that_is_slow_one_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = TCPStore("127.0.0.1", 0, 8, is_master=True, wait_for_workers=False)
    job = RankInfo(0, 8, nnodes=1, master_addr="127.0.0.1", master_port=store.port)
    limit = timedelta(seconds=60)

    def come(rank: int) -> str:
        info = replace(job, rank=rank, source="torchrun", store_is_hosted=True)
        with pytest.raises(ContextError) as caught:
            native_rendezvous.Rendezvous(info, limit).store()
        return str(caught.value)

    with fast_clock(), ThreadPoolExecutor(7) as ranks:
        errors = list(ranks.map(come, range(7)))
    (record,) = caplog.records
    said = record.getMessage()
    assert re.search(r"has waited 10 s .* for ranks? (\S+ )*7\b", said)  # threads may be late too
    assert "gives up after 60 s" in said
    assert all(error.startswith("rank 7 of 8 did not come to ") for error in errors)


def test_ranks_that_dont_agree_how_many_they_are_say_so() -> None:
    """Nodes that count their own devices may differ; nobody is blamed for not coming."""
    store = TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    job = RankInfo(0, 4, nnodes=1, master_addr="127.0.0.1", master_port=store.port)

    def come(rank: int, size: int) -> str:
        info = replace(job, rank=rank, world_size=size, source="torchrun", store_is_hosted=True)
        with pytest.raises(ContextError) as caught:
            native_rendezvous.Rendezvous(info, timedelta(seconds=20)).store()
        return str(caught.value)

    with ThreadPoolExecutor(3) as ranks:
        errors = list(ranks.map(come, [0, 2, 1], [4, 4, 2]))
    assert all("as one of 4" in error and "as one of 2" in error for error in errors), errors
    assert all("nproc_per_node" in error for error in errors)


def test_a_node_that_is_early_for_the_next_run_waits_for_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both runs meet at one port, and node 0 may still have to end the first of them."""
    stores = [TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)]
    port, told = stores[0].port, threading.Event()

    def come(rank: int) -> Any:
        place = RankInfo(rank, 2, 0, 1, rank, 2, "127.0.0.1", port, "spawn", store_is_hosted=True)
        return native_rendezvous.Rendezvous(place, timedelta(seconds=30)).store()

    def run(rank: int) -> None:
        for _ in range(2):  # a rank may leave a run and come again
            come(rank)

    by_hand(run)
    gives_up = "another process has been rank 1 there, .* for 30 s"
    with fast_clock(), pytest.raises(ContextError, match=gives_up):
        come(1)
    monkeypatch.setattr(native_rendezvous, "_WARN_AFTER_S", 0.0)
    monkeypatch.setattr(caplog.handler, "emit", lambda record: told.set())
    with ThreadPoolExecutor(2) as ranks:
        early = ranks.submit(come, 1)
        assert told.wait(20)
        stores.clear()
        stores.append(TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False))
        come(0).set("from", "node 0")
        assert early.result(20).get("from") == b"node 0"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_is_told_so(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store outlives ranks that gave up; a rank that comes late isn't blamed for it."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    for name, value in {**there, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", str(1 - late))
    told = f"rank {late} of 2 did not come to .* within 30 s"
    with fast_clock(), pytest.raises(ContextError, match=told):
        unisono.initialize("gloo", timeout=30)
    monkeypatch.setenv("RANK", str(late))
    told = f"rank {late} of 2 came to .* too late: others had waited for rank {late} and given up"
    with fast_clock(), pytest.raises(ContextError, match=told):
        unisono.initialize("gloo", timeout=30)


def test_an_interface_that_gloo_is_told_to_use_and_isnt_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    with pytest.raises(ContextError, match="GLOO_SOCKET_IFNAME names nope0, .* has .*lo"):
        unisono.initialize("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")


def test_who_listens_but_is_no_rank_is_found_out(tmp_path: Path) -> None:
    def answer(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            rendezvous._read(caller, rendezvous._HELLO.size)
            caller.sendall(os.urandom(rendezvous._PROOF_BYTES + 16))
            caller.recv(1)  # until it is left

    def fn(rank: int) -> Any:
        bind = addresses.listen_locally

        def be_misled(stack: Any) -> Any:
            mine, _ = bind(stack)
            false, address = bind(stack)
            threading.Thread(target=answer, args=(false,), daemon=True).start()
            return mine, address

        if rank == 0:
            vars(rendezvous)["listen_locally"] = be_misled
        join(tmp_path, rank, 2)
        with fast_clock(5), heard() as said, pytest.raises(PeerRefusedError) as caught:
            unisono.all_gather(rank)
        leave()
        return str(caught.value), caught.value.rank, said

    (text, rank, said), other = by_hand(fn)
    assert "doesn't belong to this job" in text
    assert (rank, said) == (0, [])
    assert other == (text, rank, said)


def test_processes_of_other_users_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = socket.socketpair(socket.AF_UNIX)
    with mine, other:
        assert addresses.peer(mine).is_own_user
        other_uid = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other_uid)
        assert not addresses.peer(mine).is_own_user
