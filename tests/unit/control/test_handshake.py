"""A peer that proves itself is accepted at once, no matter who else connects."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.control import handshake, rendezvous
from unisono.control.addresses import listen_locally, peer
from unisono.control.handshake import accept, answer, call, receive
from unisono.topology import Topology

WORD = b"open sesame"


def admit(sock: socket.socket) -> str | None:
    """Ask twice, and answer in between."""
    if receive(sock, 4) != WORD[:4]:
        return None
    sock.sendall(b"?")
    return "member" if receive(sock, len(WORD) - 4) == WORD[4:] else None


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, held: ExitStack) -> socket.socket:
    if request.param == "unix":
        return listen_locally(held)[0]
    made = held.enter_context(socket.socket())
    made.bind(("127.0.0.1", 0))
    made.listen(128)
    return made


def knock(listener: socket.socket, held: ExitStack, data: bytes = b"") -> socket.socket:
    made = held.enter_context(socket.socket(listener.family))
    made.settimeout(20)
    made.connect(listener.getsockname())
    made.sendall(data)
    return made


def accept_member(listener: socket.socket) -> None:
    """Accept one who says the word, and let go of all others."""
    with closing(accept(listener, admit, set(), time.monotonic() + 20)) as members:
        sock, found = next(members)
        sock.close()
    assert found == "member"


def test_strangers_take_no_time_of_a_member(listener: socket.socket, held: ExitStack) -> None:
    said = (b"", b"x", WORD[:4], b"garbage" * 9, WORD[:4] + b"!" * 7)
    strangers = [knock(listener, held, said[turn % 5]) for turn in range(40)]
    knock(listener, held, WORD)
    accept_member(listener)
    for stranger in strangers:  # all are sent away, also those who hadn't spoken yet
        with suppress(ConnectionResetError):
            assert stranger.recv(8) in (b"", b"?")


def test_a_member_that_is_slow_is_let_in(
    listener: socket.socket, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with more ranks than cores; strangers come meanwhile."""
    late_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
    monkeypatch.setattr(handshake, "time", clock)

    def prove() -> None:
        member = knock(listener, held, WORD[:4])
        assert member.recv(1) == b"?"
        late_s[0] = 10.0
        with suppress(ConnectionResetError):
            assert knock(listener, held, b"garbage").recv(1) == b""  # it has looked meanwhile
        for byte in WORD[4:]:
            member.sendall(bytes([byte]))

    with ThreadPoolExecutor(1) as thread:
        proved = thread.submit(prove)
        accept_member(listener)
        proved.result()


def test_the_oldest_makes_room(
    listener: socket.socket, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_MAX_PENDING", 3)
    strangers = [knock(listener, held) for _ in range(20)]
    knock(listener, held, WORD)
    with closing(accept(listener, admit, set(), time.monotonic() + 20)) as members:
        sock, found = next(members)
        sock.close()
        assert found == "member"
        assert strangers[0].recv(1) == b""


def test_both_ends_prove_themselves_or_neither() -> None:
    for secret in (b"s" * 32, b"another"):
        ours, theirs = socket.socketpair()
        with ours, theirs, ThreadPoolExecutor(1) as thread:
            calling = thread.submit(call, theirs, secret, b"hello", time.monotonic() + 20)
            ours.settimeout(20)
            hello = answer(ours, b"s" * 32, 5)
            is_ours = secret == b"s" * 32
            assert (hello, calling.result()) == (b"hello" if is_ours else None, is_ours)


def test_who_sends_back_what_it_hears_proves_nothing() -> None:
    def reflect(mirror: socket.socket) -> None:
        while data := mirror.recv(1 << 10):
            mirror.sendall(data)

    for is_caller in (True, False):
        ours, mirror = socket.socketpair()
        with mirror, ThreadPoolExecutor(1) as thread, ours:
            thread.submit(reflect, mirror)
            ours.settimeout(20)
            if is_caller:
                assert not call(ours, b"s" * 32, b"", time.monotonic() + 20)
            else:
                assert answer(ours, b"s" * 32, 0) is None


def test_a_caller_that_drips_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for all that is received, not for each piece."""
    ours, theirs = socket.socketpair()
    late_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
    monkeypatch.setattr(handshake, "time", clock)
    with ours, theirs:
        theirs.sendall(b"x")
        receive(ours, 1, clock.monotonic() + 10)
        theirs.sendall(b"y")
        late_s[0] = 20.0
        with pytest.raises(TimeoutError):
            receive(ours, 2, time.monotonic() + 10)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel")
def test_the_kernel_says_who_connected(held: ExitStack) -> None:
    listener, _ = listen_locally(held)
    knock(listener, held)
    sock, _ = listener.accept()
    with sock:
        assert (peer(sock).pid, peer(sock).is_own_user) == (os.getpid(), True)
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    os.seteuid(65534)
    try:
        stranger = knock(listener, held, WORD)
    finally:
        os.seteuid(0)
    knock(listener, held, WORD)
    accept_member(listener)
    with suppress(ConnectionResetError):
        assert stranger.recv(1) == b""


def test_a_proof_travels_on_the_device_of_the_model_or_on_that_which_is_named() -> None:
    devices: list[str] = []

    class Wire:
        topology = Topology(0, 1)
        transport_device = torch.device("meta")

        def all_gather(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
            devices.append(tensor.device.type)
            return torch.zeros((1, *tensor.shape), dtype=torch.uint8)

        def all_to_all(self, rows: torch.Tensor, group: Any = None) -> torch.Tensor:
            devices.append(rows.device.type)
            return torch.zeros(rows.shape, dtype=torch.uint8)

    for device in (None, torch.device("cpu")):
        rendezvous.authenticate(Wire(), None, b"secret", "all", device)  # type: ignore[arg-type]
    assert devices == ["meta", "meta", "cpu", "cpu"]


def test_many_that_wait_are_closed_at_once() -> None:
    pending: handshake.Pending[bytes] = handshake.Pending(lambda sock: sock.recv(1), 1000)
    with socket.create_server(("127.0.0.1", 0), backlog=500) as listener, ExitStack() as held:
        for _ in range(400):  # more than one direction of a socket holds bytes of one
            held.enter_context(socket.create_connection(listener.getsockname()))
            assert pending.accept(listener)
        pending.close()
        pending.close()
