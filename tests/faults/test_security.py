"""Nobody outside of a job reaches it; nobody beside it learns its secrets."""

from __future__ import annotations

import ast
import base64
import contextlib
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.support.listeners import listeners, listening_unix_sockets, ours
from tests.support.processes import Pipe, say
from unisono import WorkerPool
from unisono.errors import PayloadError, WorkerFailedError

SIZE = 3


@contextmanager
def job(folder: Path, turns: int = 1) -> Iterator[Any]:
    """Run replicas that have met in every way, and that go on when the test says so."""

    def fn(local_rank: int, said: str, go_on: str) -> Any:
        unisono.barrier()
        unisono.all_reduce(torch.ones(300_000))
        unisono.all_reduce(1, group=[0, 1])
        found = []
        with open(go_on) as heard:
            for turn in range(turns):
                say(said, os.getpid())
                if local_rank == 0:
                    heard.readline()
                total = unisono.all_reduce(torch.full((300_000,), float(turn)))
                found.append((unisono.all_gather("x" * turn), total[0].item()))
        return found, psutil.Process().memory_info().rss

    with Pipe(folder) as pipe:
        go_on = str(folder / "go_on")
        os.mkfifo(go_on)
        keep = os.open(go_on, os.O_RDWR)
        made = unisono.spawn("gloo", fn, (pipe.path, go_on), nproc_per_node=SIZE, join=False)
        try:
            yield made, pipe, keep
        finally:
            made.terminate()
            os.close(keep)


def other_addresses() -> list[str]:
    return [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]


def test_a_job_of_one_host_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    with job(tmp_path) as (made, pipe, keep):
        assert len({*pipe.read(SIZE)}) == SIZE
        found = listeners()
        assert found, "torch's store and gloo should be there"
        assert {address.ip for address in found} == {"127.0.0.1"}
        assert listening_unix_sockets() == []
        for host in other_addresses():
            for address in found:
                with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
                    stranger.connect((host, address.port))
        os.write(keep, b"\n")
        made.join(60)
    assert listeners() == []


SCRIPT = """
import sys
import torch, torch.distributed as dist, unisono
from tests.support.processes import say

how, said, go_on, *place = sys.argv[1:]
if how == "torch":
    dist.init_process_group("gloo")
else:
    ranks = dict(zip(("rank", "world_size"), map(int, place)))
    unisono.initialize("gloo", **ranks, timeout=30)
unisono.all_reduce(torch.ones(300_000), group=[0, 1])
unisono.barrier()
with open(go_on) as heard:
    say(said, "here")
    heard.readline()
dist.destroy_process_group() if how == "torch" else unisono.finalize()
"""
# The host's name is an address of the host that isn't the loopback, where the test may say so.
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')


def named_otherwise() -> list[str]:
    words = [*NAMED, *other_addresses()[:1]]
    is_allowed = shutil.which("unshare") and len(words) > len(NAMED)
    if is_allowed and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
        return words
    return []


@pytest.mark.parametrize(
    "how", ["unisono run", "torch", "torchrun's variables", "by hand", "by hand, URL"]
)
def test_ranks_of_one_host_listen_on_the_loopback_alone_whoever_started_them(
    how: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "script.py"
    url = f', init_method="tcp://127.0.0.1:{port}"' if how == "by hand, URL" else ""
    script.write_text(SCRIPT.replace("timeout=30", f"timeout=30{url}"))
    go_on = str(tmp_path / "go_on")
    os.mkfifo(go_on)
    keep = os.open(go_on, os.O_RDWR)
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with Pipe(tmp_path) as pipe, contextlib.ExitStack() as stack:
        words = [*named_otherwise(), sys.executable]
        args = [str(script), how, pipe.path, go_on]
        if how in ("unisono run", "torch"):
            command = [*words, "-m", "unisono", "run", "--nproc-per-node", "2"]
            jobs = [subprocess.Popen([*command, *args], env=env)]
        elif how == "torchrun's variables":
            ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
            jobs = [subprocess.Popen([*words, *args], env={**env, **rank}) for rank in ranks]
        else:
            jobs = [subprocess.Popen([*words, *args, str(rank), "2"], env=env) for rank in range(2)]
        for job in jobs:
            stack.callback(job.wait, 30)
            stack.callback(job.terminate)
        pipe.read(2)
        found = listeners()
        os.close(keep)
        codes = [job.wait(30) for job in jobs]
    assert found, "torch's store and gloo should be there"
    assert {address.ip for address in found} == {"127.0.0.1"}
    assert codes == [0] * len(jobs)


def test_a_pool_listens_nowhere_once_its_replicas_are_there() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        pool.run(lambda local_rank: unisono.all_gather(local_rank))
        assert {address.ip for address in listeners()} <= {"127.0.0.1"}
        assert listening_unix_sockets() == []


GARBAGE = {
    "random bytes": os.urandom(4096),
    "zeros": bytes(4096),
    "huge lengths": struct.pack("<QQQQ", *(2**62,) * 4) * 16,
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing": b"",
}


def test_garbage_on_every_port_changes_nothing(tmp_path: Path) -> None:
    """The ports of torch's store and of gloo: a local stranger can reach them."""
    turns = len(GARBAGE)
    with job(tmp_path, turns) as (made, pipe, keep), contextlib.ExitStack() as half_open:
        pids = [int(pid) for pid in pipe.read(SIZE)]
        before = sum(psutil.Process(pid).memory_info().rss for pid in [os.getpid(), *pids])
        for turn, data in enumerate(GARBAGE.values()):
            if turn:
                pipe.read(SIZE)
            for address in listeners():
                for _ in range(5):
                    stranger = half_open.enter_context(socket.socket())
                    stranger.settimeout(5)
                    with contextlib.suppress(OSError):
                        stranger.connect((address.ip, address.port))
                        stranger.sendall(data)
            if turn == turns - 1:
                after = sum(psutil.Process(pid).memory_info().rss for pid in [os.getpid(), *pids])
                assert after - before < 128 << 20
            os.write(keep, b"\n")
        results = made.join(60)
    wanted = [(["x" * turn] * SIZE, SIZE * float(turn)) for turn in range(turns)]
    assert [found for found, _ in results] == [wanted] * SIZE


def test_the_secret_of_a_pool_is_in_no_argv_environment_or_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG), WorkerPool("gloo", nproc_per_node=2) as pool:
        pool.run(abs)
        assert pool._replicas is not None
        secret = pool._replicas._secret
        shapes = [secret, secret.hex().encode(), base64.b64encode(secret), repr(secret).encode()]
        for process in ours():
            for name in ("cmdline", "environ"):
                shown = Path(f"/proc/{process.pid}/{name}").read_bytes()
                assert not any(shape in shown for shape in shapes)
        assert not any(shape.decode("latin-1") in caplog.text for shape in shapes)


def test_a_stranger_at_the_pools_door_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes first, twice: once it says nothing true, once it gives no word at all."""
    from unisono.pool import replicas

    listen = vars(replicas)["listen_locally"]
    strangers: list[socket.socket] = []

    def listen_and_be_visited(stack: contextlib.ExitStack) -> Any:
        made = listen(stack)
        for data in (os.urandom(36), b""):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(made[1].replace("@", "\0", 1))
            stranger.sendall(data)
            strangers.append(stranger)
        return made

    monkeypatch.setattr(replicas, "listen_locally", listen_and_be_visited)
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        assert pool.run(lambda local_rank: unisono.all_gather(local_rank)) == [[0, 1]] * 2
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_without_pickle_plain_values_travel_and_objects_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [1, 2.5, True, None, "é", b"x", [1, (2,)], {"a": 1}, Path("p")]

    def fn(local_rank: int) -> Any:
        found = [unisono.all_gather(value) for value in values]
        with pytest.raises(PayloadError, match="UNISONO_NO_PICKLE=1"):
            unisono.all_gather({1, 2} if local_rank == 1 else 1)
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
    def fn(local_rank: int) -> None:
        raise AssertionError("no replica is made")

    with pytest.raises((unisono.errors.LaunchError, WorkerFailedError)) as caught:
        unisono.spawn(
            "gloo", fn, nproc_per_node=1, nnodes=2, node_rank=0, master_addr="192.0.2.1",
            master_port=29533, timeout=3,
        )  # fmt: skip
    assert "192.0.2.1" in str(caught.value)
