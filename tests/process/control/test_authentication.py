"""Another user of the host tries to be a rank: at the store, at gloo's sockets, at our own."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

import unisono
from tests.process.control.contexts import in_ranks
from tests.support.by_hand import by_hand, join
from tests.support.clock import fast_clock
from tests.support.processes import Pipe
from tests.support.ways import Way
from unisono.context import communicator
from unisono.control import rendezvous
from unisono.errors import CollectiveError, PeerRefusedError
from unisono.launchers.job import store as job_store
from unisono.topology import Topology

NOBODY = 65534
ATTACKS = int(os.environ.get("UNISONO_ATTACKS", "1"))
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells users apart there"),
    pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="takes another user"),
]


def load() -> None:
    """Import all that is imported late: another user may not read this user's files."""
    "x".encode("idna")
    unisono.initialize("gloo")
    unisono.all_gather({1})
    unisono.sync()
    unisono.finalize()


@pytest.fixture(autouse=True, scope="module")
def _ready() -> None:
    load()


class Evil:
    """What runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


@contextlib.contextmanager
def as_nobody(work: Callable[[], None]) -> Iterator[int]:
    """Run something in a fork of this process that is another user's."""
    child = os.fork()
    if child == 0:
        try:
            become_nobody()
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        os.waitpid(child, 0)


def take_the_seat_of_rank_1(port: int, pwned: str, reached: int) -> None:
    """Come to the job's store before any rank does, and be one."""
    store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
    ours = PrefixStore("unisono/0", store)
    ours.add("arrived/1", 1)
    ours.add("ranks/1", 1)
    os.write(reached, b".")
    with contextlib.suppress(Exception):
        unisono.initialize(
            "gloo", rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{port}", timeout=20
        )
        unisono.all_gather(Evil(pwned))


@contextlib.contextmanager
def stranger_at(port: int, pwned: Path) -> Iterator[None]:
    """Have a stranger take the seat of rank 1 at a store first."""
    there, reached = os.pipe()
    with as_nobody(lambda: take_the_seat_of_rank_1(port, str(pwned), reached)):
        os.close(reached)
        assert os.read(there, 1) == b"."
        os.close(there)
        yield


@contextlib.contextmanager
def attacked(monkeypatch: pytest.MonkeyPatch, pwned: Path) -> Iterator[list[int]]:
    """Let the stranger be at the store of each job before its first rank is."""
    host, ports = job_store.host, list[int]()
    with contextlib.ExitStack() as held:

        def host_and_be_visited(*where: Any) -> int:
            ports.append(host(*where))
            held.enter_context(stranger_at(ports[-1], pwned))
            return ports[-1]

        monkeypatch.setattr(job_store, "host", host_and_be_visited)
        yield ports


@pytest.fixture(params=range(ATTACKS))
def pwned(tmp_path: Path) -> Path:
    """Where the stranger would leave its mark, and could.

    Chance decides some races: ``UNISONO_ATTACKS=50`` repeats what uses this as often.
    """
    tmp_path.chmod(0o777)
    return tmp_path / "pwned"


def gathers(local_rank: int) -> list[int]:
    assert unisono.all_gather(local_rank, group=[0, 1]) == [0, 1]
    found: list[int] = unisono.all_gather(local_rank)
    return found


@pytest.mark.parametrize("runner", ["spawn", "WorkerPool"])
def test_a_stranger_at_the_store_is_no_rank_of_spawn(
    monkeypatch: pytest.MonkeyPatch, pwned: Path, runner: str
) -> None:
    """Nor of a pool."""
    with attacked(monkeypatch, pwned) as ports:
        assert Way(runner).run(gathers, nproc_per_node=2, timeout=30) == [[0, 1]] * 2
    assert ports
    assert not pwned.exists()


SCRIPT = """
import os, sys, unisono
from pathlib import Path
from tests.support.processes import say, until
say(sys.argv[1], os.environ["MASTER_PORT"])
until(Path(sys.argv[2]).exists, 60)
unisono.initialize("gloo", timeout=30)
print("SAW", unisono.all_gather(unisono.get_rank()), flush=True)
"""


def test_a_stranger_at_the_store_is_no_rank_of_a_script(pwned: Path, tmp_path: Path) -> None:
    script, go_on = tmp_path / "script.py", tmp_path / "go_on"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "unisono", "run", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Pipe(tmp_path) as said:
        words += [said.path, str(go_on)]
        job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        try:
            port, _ = said.read(2)
            with stranger_at(int(port), pwned):
                go_on.touch()
                out, _ = job.communicate(timeout=60)
        finally:
            job.terminate()
            job.wait()
    assert job.returncode == 0
    assert out.count("SAW [0, 1]") == 2
    assert not pwned.exists()


def test_a_rank_of_another_user_is_refused_in_a_job_that_others_started(pwned: Path) -> None:
    """Nothing keeps it from the store there; nothing that it sends is decoded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def fn(rank: int) -> Any:
        url = f"tcp://127.0.0.1:{port}"
        load()
        if rank == 1:
            become_nobody()
        with pytest.raises(CollectiveError) as caught:
            unisono.initialize("gloo", rank=rank, world_size=2, init_method=url, timeout=20)
            unisono.all_gather(Evil(str(pwned)))
        return type(caught.value).__name__, str(caught.value), getattr(caught.value, "rank", None)

    (kind, text, rank), _ = by_hand(fn)
    assert (kind, rank) == ("PeerRefusedError", 1)
    assert f"a process of user {NOBODY}" in text
    assert not pwned.exists()


@pytest.mark.parametrize("liar", [0, 1])
def test_one_that_lies_about_its_user_is_found_out_by_the_kernel(liar: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    def fn(rank: int) -> Any:
        load()
        join(tmp_path, rank, 2)
        vars(rendezvous)["host_of_this_process"] = lambda: "here"
        if rank == liar:
            become_nobody()
        with fast_clock(5), pytest.raises(CollectiveError) as caught:
            unisono.sync()
            rendezvous.connect_group(cast("Any", communicator().control), None)
        return type(caught.value).__name__, str(caught.value), os.getpid()

    (tmp_path / "store").touch()
    (tmp_path / "store").chmod(0o666)
    told = by_hand(fn)
    kind, text, _ = told[1 - liar]
    assert kind == "PeerRefusedError"
    assert f"a process of user {NOBODY} (pid {told[liar][2]})" in text


@in_ranks(3)
def test_who_hasnt_the_secret_is_refused_on_the_data_plane(rank: int, folder: Path) -> None:
    """The one who took the seat of rank 1 in gloo, with all that a rank may know but the secret."""
    join(folder, rank, 3)
    control: Any = communicator().control
    control.secret = secrets.token_bytes(32) if rank == 1 else b"s" * 32
    with pytest.raises(PeerRefusedError) as caught:
        unisono.all_gather(rank)
    assert caught.value.rank == (0 if rank == 1 else 1)


@in_ranks(3)
def test_ranks_agree_on_a_secret_that_the_kernel_vouches_for_and_prove_it_in_each_group(
    rank: int, folder: Path
) -> None:
    """Where others started them."""
    join(folder, rank, 3)
    control: Any = communicator().control
    assert control.secret is None
    unisono.all_gather(rank)
    found: Any = unisono.all_gather(control.secret)
    assert found == found[:1] * 3
    assert len(found[0]) == 32
    unisono.new_group([0, 1, 2])
    if rank == 1:
        control.secret = b"x" * 32
    with pytest.raises(PeerRefusedError, match="authentication failed"):
        unisono.new_group([0, 1, 2])


def test_a_proof_is_of_one_direction_one_group_and_one_time() -> None:
    """What a stranger heard, or gets from another rank, serves nowhere else."""
    sent: list[bytes] = []

    class Wire:
        def __init__(self, rank: int) -> None:
            self.topology = Topology(rank, 2)
            self.transport_device = torch.device("cpu")

        def members(self, group: Any) -> range:
            return range(2)

        def all_gather(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
            return torch.stack([tensor, tensor])  # reflects what it hears

        def all_to_all(self, rows: torch.Tensor, group: Any = None) -> torch.Tensor:
            sent.append(bytes(rows[1].tolist()))
            return rows.flip(0)

    for label in ("a", "b", "a"):
        with pytest.raises(PeerRefusedError, match="rejected the process that answered as rank 1"):
            rendezvous.authenticate(Wire(0), None, b"s" * 32, label)  # type: ignore[arg-type]
    assert len(set(sent)) == 3


@pytest.mark.parametrize("is_forbidden", [False, True], ids=["no name", "a folder"])
def test_the_store_of_a_job_is_closed_to_other_users(
    is_forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory without a name is forbidden, as a seccomp profile may do."""

    def forbid(name: str) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if is_forbidden:
        monkeypatch.setattr(os, "memfd_create", forbid)

    def fn(local_rank: int) -> Any:
        path = os.environ["UNISONO_PRIVATE_STORE"]
        there, here = os.pipe()

        def open_it() -> None:
            try:
                os.close(os.open(path, os.O_RDWR))
                os.write(here, b"opened")
            except OSError as error:
                os.write(here, type(error).__name__.encode())

        with as_nobody(open_it):
            os.close(here)  # so that a child that dies without a word is the end of the file
            found = os.read(there, 100).decode()
        return path, found

    (path, *told), _ = unisono.spawn("gloo", fn, nproc_per_node=2)
    assert told == ["PermissionError"]
    assert bool(re.fullmatch(rf"/proc/{os.getpid()}/fd/\d+", path)) is not is_forbidden
    assert not os.path.exists(path)
