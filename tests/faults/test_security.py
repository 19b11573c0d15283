"""Nobody outside of a job reaches it; nobody beside it learns its secrets."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.support.listeners import listeners, listening_unix_sockets
from tests.support.processes import Pipe, say
from unisono import WorkerPool
from unisono.errors import PayloadError, WorkerFailedError

SIZE = 3


@contextmanager
def turns(folder: Path) -> Iterator[tuple[Pipe, str, Callable[[int], int]]]:
    """Give what ranks write into, what they read from, and what lets so many of them go on."""
    go_on = str(folder / "go_on")
    os.mkfifo(go_on)
    with Pipe(folder) as pipe, open(go_on, "r+b", buffering=0) as stream:
        yield pipe, go_on, lambda count: stream.write(b"." * count)


@contextmanager
def job(
    folder: Path, size: int, fn: Callable[..., Any]
) -> Iterator[tuple[Any, Pipe, Callable[[int], int]]]:
    """Run ranks of a function that is given what it says, and what lets it go on."""
    with turns(folder) as (pipe, go_on, release):
        made = unisono.spawn("gloo", fn, (pipe.path, go_on), nproc_per_node=size, join=False)
        try:
            yield made, pipe, release
        finally:
            made.terminate()


def other_addresses() -> list[str]:
    return [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]


def only_the_loopback() -> list[Any]:
    found = listeners()
    assert found, "torch's store and gloo should be there"
    assert {address.ip for address in found} == {"127.0.0.1"}
    return found


# The host's name is an address of the host that isn't the loopback, where the test may say so.
OWN_NAME = 0x04000000  # CLONE_NEWUTS


def named_otherwise() -> None:
    addresses = other_addresses()
    if addresses and ctypes.CDLL(None).unshare(OWN_NAME) == 0:
        socket.sethostname(addresses[0])


SCRIPT = """
import sys
import torch, torch.distributed as dist, unisono
from tests.faults.test_security import named_otherwise
from tests.support.processes import say

_, said, go_on = sys.argv
named_otherwise()
with open(go_on, "rb", buffering=0) as heard:
    unisono.initialize("gloo")
    unisono.all_reduce(torch.ones(300_000), group=[0, 1])
    unisono.barrier()
    say(said, "here")
    heard.read(1)
    unisono.finalize()
    dist.init_process_group("gloo")
    unisono.barrier()
    say(said, "here")
    heard.read(1)
    dist.destroy_process_group()
"""


def test_ranks_of_a_script_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    """By unisono's own set-up, and by torch's."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with turns(tmp_path) as (pipe, go_on, release):
        words = ["-m", "unisono", "run", "-n", "2", str(script), pipe.path, go_on]
        with subprocess.Popen([sys.executable, *words], env=env) as job:
            try:
                for _ in range(2):
                    pipe.read(2)
                    only_the_loopback()
                    release(2)
                assert job.wait(30) == 0
            finally:
                job.terminate()


def test_ranks_that_meet_by_themselves_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    """By hand, by hand with a URL, and by the variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def fn(local_rank: int, said: str, go_on: str) -> None:
        unisono.finalize()
        named_otherwise()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        by_hand: dict[str, Any] = {"rank": local_rank, "world_size": 2}
        with open(go_on, "rb", buffering=0) as heard:
            for options in (by_hand, {**by_hand, "init_method": f"tcp://127.0.0.1:{port}"}, {}):
                if not options:
                    os.environ.update(RANK=str(local_rank), WORLD_SIZE="2")
                unisono.initialize("gloo", timeout=30, **options)
                unisono.all_reduce(torch.ones(300_000), group=[0, 1])
                unisono.barrier()
                say(said, "here")
                heard.read(1)
                unisono.finalize()

    with job(tmp_path, 2, fn) as (made, pipe, release):
        for _ in range(3):
            pipe.read(2)
            only_the_loopback()
            release(2)
        made.join(30)


GARBAGE = {
    "random bytes": os.urandom(4096),
    "zeros": bytes(4096),
    "huge lengths": struct.pack("<QQQQ", *(2**62,) * 4) * 16,
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing": b"",
}


def memory_of(pids: list[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in [os.getpid(), *pids])


def test_a_job_of_one_host_listens_on_the_loopback_alone_and_no_garbage_changes_it(
    tmp_path: Path,
) -> None:
    """A local stranger can reach the ports of torch's store and of gloo."""

    def fn(local_rank: int, said: str, go_on: str) -> Any:
        unisono.barrier()
        unisono.all_reduce(torch.ones(300_000))
        unisono.all_reduce(1, group=[0, 1])
        found = []
        with open(go_on, "rb", buffering=0) as heard:
            for turn in range(len(GARBAGE)):
                say(said, os.getpid())
                if local_rank == 0:
                    heard.read(1)
                total = unisono.all_reduce(torch.full((300_000,), float(turn)))
                found.append((unisono.all_gather("x" * turn), total[0].item()))
        return found

    with job(tmp_path, SIZE, fn) as (made, pipe, release), contextlib.ExitStack() as half_open:
        for turn, data in enumerate(GARBAGE.values()):
            pids = [int(pid) for pid in pipe.read(SIZE)]
            if turn == 0:
                before = memory_of(pids)
                found = only_the_loopback()
                assert listening_unix_sockets() == []
                for host in other_addresses():
                    for address in found:
                        with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
                            stranger.connect((host, address.port))
            for address in listeners():
                for _ in range(5):
                    stranger = half_open.enter_context(socket.socket())
                    stranger.settimeout(5)
                    with contextlib.suppress(OSError):
                        stranger.connect((address.ip, address.port))
                        stranger.sendall(data)
            assert memory_of(pids) - before < 128 << 20
            release(1)
        results = made.join(60)
    wanted = [(["x" * turn] * SIZE, SIZE * float(turn)) for turn in range(len(GARBAGE))]
    assert results == [wanted] * SIZE
    assert listeners() == []


def test_a_pool_listens_nowhere() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        pool.run(lambda local_rank: unisono.all_gather(local_rank))
        assert {address.ip for address in listeners()} <= {"127.0.0.1"}
        assert listening_unix_sockets() == []


def test_without_pickle_plain_values_travel_and_objects_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [1, 2.5, True, None, "é", b"x", [1, (2,)], {"a": {1j}}, Path("p")]

    def fn(local_rank: int) -> Any:
        found = [unisono.all_gather(value) for value in values]
        with pytest.raises(PayloadError, match="UNISONO_NO_PICKLE=1"):
            unisono.all_gather(range(2) if local_rank == 1 else 1)
        unisono.all_reduce(torch.ones(3))
        return found

    monkeypatch.setenv("UNISONO_NO_PICKLE", "1")
    wanted = [[value] * 2 for value in values]
    assert unisono.spawn("gloo", fn, nproc_per_node=2) == [wanted] * 2


def test_nothing_is_evaluated_and_no_shell_is_run() -> None:
    found = []
    package = Path(unisono.__file__).parent
    cells = package / "notebook" / "cell.py"  # runs what its user has just typed, as notebooks do
    for path in set(package.rglob("*.py")) - {cells}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                words = {ast.unparse(keyword) for keyword in node.keywords}
                if name in ("eval", "exec", "os.system", "os.popen") or "shell=True" in words:
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert found == []


def test_a_multi_host_job_listens_where_the_user_said() -> None:
    with pytest.raises((unisono.errors.LaunchError, WorkerFailedError), match=r"192\.0\.2\.1"):
        unisono.spawn(
            "gloo", abs, nproc_per_node=1, nnodes=2, node_rank=0, master_addr="192.0.2.1",
            master_port=29533, timeout=3,
        )  # fmt: skip
