"""The control plane over sockets: who is missing, who is gone, who called something else."""

from __future__ import annotations

import itertools
import logging
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import by_hand, join, leave, prepare
from unisono.context import communicator
from unisono.control import addresses, plane, rendezvous
from unisono.errors import (
    ArgumentError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    EnvironmentDetectionError,
    PayloadError,
    PeerFailedError,
)
from unisono.topology import EVERYBODY

ACCEPTS = "00010000"  # the flag of a listening socket in Linux's /proc/net/unix
BIG = 300_000  # elements: more than what travels in a round


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield


WAITS: dict[str, Callable[[], Any]] = {
    "barrier": unisono.barrier,
    "all_gather": lambda: unisono.all_gather("x"),
    "small all_reduce": lambda: unisono.all_reduce(torch.ones(3)),
    "all_reduce": lambda: unisono.all_reduce(torch.ones(BIG)),
    "all_gather of tensors": lambda: unisono.all_gather(torch.ones(BIG)),
    "group": lambda: unisono.barrier(group=[0, 1, 2, 3]),
}


@pytest.mark.timed
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank_is_named_by_all_others_within_a_second(
    wait: str, victim: int, tmp_path: Path
) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 4)
        WAITS[wait]()
        ended = os.pidfd_open(unisono.all_gather(os.getpid())[victim])
        unisono.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([ended], [], [])
        start = time.monotonic()
        with pytest.raises(PeerFailedError, match=f"rank {victim}") as caught:
            WAITS[wait]()
        return caught.value.rank, time.monotonic() - start

    results = by_hand(fn, 4, killed=victim)
    del results[victim]
    assert [rank for rank, _ in results] == [victim] * 3
    assert max(seconds for _, seconds in results) < 3  # one second where nothing else runs


CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, str]]] = {
    "another collective": (
        lambda: unisono.all_reduce(torch.ones(3)),
        lambda: unisono.broadcast("x"),
        ("all_reduce SUM of float32[3]", "broadcast from 0"),
    ),
    "another shape": (
        lambda: unisono.all_reduce(torch.ones(3)),
        lambda: unisono.all_reduce(torch.ones(4)),
        ("float32[3]", "float32[4]"),
    ),
    "another dtype of the same size": (
        lambda: unisono.all_reduce(torch.ones(3)),
        lambda: unisono.all_reduce(torch.ones(3, dtype=torch.int32)),
        ("float32[3]", "int32[3]"),
    ),
    "another operation": (
        lambda: unisono.all_reduce(1),
        lambda: unisono.all_reduce(1, "MAX"),
        ("all_reduce SUM", "all_reduce MAX"),
    ),
    "another source": (
        lambda: unisono.broadcast(1, src=0),
        lambda: unisono.broadcast(1, src=1),
        ("broadcast from 0", "broadcast from 1"),
    ),
    "a barrier": (unisono.barrier, lambda: unisono.all_gather(1), ("barrier", "all_gather")),
}


def _mistake(local_rank: int, name: str) -> str:
    first, second, _ = CALLS[name]
    unisono.barrier()
    try:
        (second if local_rank else first)()
    except CollectiveMismatchError as error:
        assert unisono.all_gather(local_rank) == [0, 1, 2]  # the ranks are in step again
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("backend", ["gloo", "threads"])
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_call_different_things_learn_it_at_once(backend: str, name: str) -> None:
    words = CALLS[name][2]
    if backend == "threads" and "float32" in words[0]:
        pytest.skip("threads compare tensors on their data plane, in other words")
    for message in unisono.spawn(backend, _mistake, args=(name,), nproc_per_node=3):
        lines = message.splitlines()
        assert words[0] in lines[1]
        assert words[1] in lines[2]
        assert "test_plane.py:" in lines[1]


LARGE: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce SUM": unisono.all_reduce,
    "all_reduce MAX": lambda tensor: unisono.all_reduce(tensor, "MAX"),
    "all_reduce SUM in place": unisono.all_reduce_,
    "all_reduce SUM later": lambda tensor: unisono.all_reduce(tensor, async_op=True).wait(),
    "reduce SUM to 0": unisono.reduce,
    "reduce SUM to 1": lambda tensor: unisono.reduce(tensor, dst=1),
    "reduce_scatter SUM": unisono.reduce_scatter,
    "broadcast_ from 0": unisono.broadcast_,
    "broadcast_ from 1": lambda tensor: unisono.broadcast_(tensor, src=1),
    "all_to_all": unisono.all_to_all,
    "all_gather_tensors_with_shapes": lambda tensor: unisono.all_gather_tensors_with_shapes(
        tensor, [list(tensor.shape)] * 2
    ),
    "barrier": lambda _: unisono.barrier(),
}


def _mismatches(local_rank: int) -> list[str]:
    wrong = []
    pairs = list(itertools.combinations(LARGE, 2))
    for mine, other in pairs:
        name = other if local_rank else mine
        if mine.partition(" in ")[0] == other.partition(" later")[0].partition(" in ")[0]:
            continue  # the same call
        try:
            LARGE[name](torch.ones(BIG))
            wrong.append(f"{mine} and {other}: nobody noticed")
        except CollectiveMismatchError as error:
            for rank, call in enumerate((mine, other)):
                if f"rank {rank}: {' '.join(call.split()[:2])}" not in str(error):
                    wrong.append(f"{mine} and {other}: {error}")
    others = (torch.ones(BIG + 2), torch.ones(BIG, dtype=torch.int32), torch.ones(2, BIG // 2))
    for name in sorted(LARGE.keys() - {"barrier"}):
        for tensor in others:
            with pytest.raises(CollectiveMismatchError):
                LARGE[name](tensor if local_rank else torch.ones(BIG))
    assert unisono.all_gather(local_rank) == [0, 1]
    return wrong


def test_large_tensors_are_compared_before_they_travel() -> None:
    assert unisono.spawn("gloo", _mismatches, nproc_per_node=2) == [[], []]


def test_what_one_rank_refuses_the_others_do_not_wait_for() -> None:
    def fn(local_rank: int) -> list[str]:
        bad: list[Callable[[bool], Any]] = [
            lambda is_bad: unisono.all_reduce(_sparse(3) if is_bad else torch.ones(3)),
            lambda is_bad: unisono.all_reduce(_sparse(BIG) if is_bad else torch.ones(BIG)),
            lambda is_bad: unisono.all_reduce_(_sparse(BIG) if is_bad else torch.ones(BIG)),
            lambda is_bad: unisono.reduce(_sparse(BIG) if is_bad else torch.ones(BIG)),
            lambda is_bad: unisono.reduce_scatter(torch.ones(3 if is_bad else 4)),
            lambda is_bad: unisono.all_to_all(torch.ones(3 if is_bad else 4)),
            lambda is_bad: unisono.broadcast_(_sparse(3) if is_bad else torch.ones(3)),
            lambda is_bad: unisono.all_gather(_sparse(3) if is_bad else torch.ones(3)),
            lambda is_bad: unisono.gather(_sparse(3) if is_bad else torch.ones(3)),
            lambda is_bad: unisono.all_gather_tensors_with_shapes(
                torch.ones(3 if is_bad else 4), [[4], [4]]
            ),
        ]
        said = []
        unisono.barrier()  # connects
        for call in bad:
            with pytest.raises((CollectiveMismatchError, PayloadError, ArgumentError)) as caught:
                call(local_rank == 1)
            said.append(str(caught.value))
        assert unisono.all_gather(local_rank) == [0, 1]
        return said

    for first, second in zip(*unisono.spawn("gloo", fn, nproc_per_node=2), strict=True):
        assert "rank 1" in first
        assert second.partition(":")[0] in first  # the others learn what it refuses, and why


def _sparse(size: int) -> torch.Tensor:
    return torch.ones(size).to_sparse()


def test_one_call_too_many_on_one_rank_is_noticed_in_the_next(tmp_path: Path) -> None:
    def fn(local_rank: int) -> str:
        unisono.all_gather("before")
        with pytest.raises(CollectiveMismatchError) as caught:
            for step in range(3):
                if step == 1 and local_rank == 0:
                    unisono.all_gather("forgotten")
                unisono.all_gather(step)
                unisono.all_gather(-step)
        unisono.barrier()  # in step again, by chance of where it was noticed
        return str(caught.value)

    for backend in ("gloo", "threads"):
        for said in unisono.spawn(backend, fn, nproc_per_node=3):
            assert "rank 0 has made one call more than the others, probably at " in said
            lines = [int(line) for line in re.findall(r"test_plane\.py:(\d+)", said)]
            assert lines[0] == lines[1] == lines[2] - 1 == lines[3] - 1 == lines[4] - 2


def test_the_same_call_on_other_lines_is_no_mistake() -> None:
    def fn(local_rank: int) -> list[Any]:
        found: list[Any] = []
        for step in range(4):
            if local_rank == 0:
                found.append(unisono.broadcast(step))
            else:
                found.append(unisono.broadcast())
            if step % 2 == local_rank:  # they take turns
                found.append(unisono.all_gather(step))
            else:
                found.append(unisono.all_gather(None))
        return found

    expected = [0, [0, None], 1, [None, 1], 2, [2, None], 3, [None, 3]]
    assert unisono.spawn("gloo", fn, nproc_per_node=2) == [expected] * 2


def test_a_stopped_rank_is_named_at_the_deadline_with_those_who_came(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        store = FileStore(str(tmp_path / "store"), 3)
        unisono.initialize("gloo", rank=rank, world_size=3, store=store, timeout=3)
        pids = unisono.all_gather(os.getpid())
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED:
            pass
        with pytest.raises(CollectiveTimeoutError) as caught:
            unisono.barrier()
        return str(caught.value)

    leader, _, member = by_hand(fn, 3, killed=1)
    for message in (leader, member):
        assert message.startswith("rank 1 never came to barrier: it is stopped by a signal\n")
        assert re.search(r"its process is \d+ on this host", message)
        assert "  ranks 0 and 2 wait in barrier at " in message


def test_who_waits_long_is_told_once_who_is_missing_and_where_that_is(tmp_path: Path) -> None:
    def compute_for_long(done: Path) -> None:
        while not done.exists():
            pass

    def fn(rank: int) -> list[str]:
        os.environ["UNISONO_WARN_AFTER_S"] = "0.2"
        said: list[str] = []
        handler = logging.Handler()
        done = tmp_path / "done"

        def keep(record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if rank == 1:
                done.touch()

        handler.emit = keep  # type: ignore[method-assign]
        logging.getLogger("unisono").addHandler(handler)
        join(tmp_path, rank, 3)
        unisono.barrier()
        if rank == 2:
            compute_for_long(done)
        unisono.barrier()
        leave()
        return said

    results = by_hand(fn, 3)
    assert [len(said) for said in results] == [1, 1, 0]
    for said in results[:2]:
        first = "rank 0 of 3 is still waiting: rank 2 never came to barrier: it is at "
        assert said[0].startswith(first)
        assert "  ranks 0 and 1 wait in barrier at " in said[0]
        assert "  its last collective was barrier at " in said[0]
        assert "compute_for_long" in said[0]
        assert "round" not in said[0]


def test_after_an_interrupted_round_the_next_one_says_so(tmp_path: Path) -> None:
    def wake(*_: object) -> None:
        raise KeyboardInterrupt

    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        unisono.barrier()
        if rank == 0:
            signal.signal(signal.SIGALRM, wake)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                unisono.all_gather("x")
            with pytest.raises(CollectiveError, match="KeyboardInterrupt interrupted all_gather"):
                unisono.all_gather("y")
        leave()

    assert by_hand(fn) == [None, None]


def test_a_wrong_variable_is_refused_before_a_round(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        os.environ["UNISONO_WARN_AFTER_S"] = "30s"
        join(tmp_path, rank, 2)
        for _ in range(2):
            with pytest.raises(EnvironmentDetectionError, match="UNISONO_WARN_AFTER_S='30s'"):
                unisono.barrier()
        os.environ["UNISONO_WARN_AFTER_S"] = "30"
        found = unisono.all_gather(rank)
        leave()
        return found

    assert by_hand(fn) == [[0, 1]] * 2


def listening() -> list[Any]:
    return [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]


def test_hosts_of_different_size_meet_in_a_tree_over_tcp(tmp_path: Path) -> None:
    hosts = ["a", "b", "b", "c", "a", "d", "c"]

    def fn(rank: int) -> Any:
        os.environ.update(UNISONO_FAN_OUT="2", UNISONO_SOCKET_IFNAME="lo")
        join(tmp_path, rank, 7)
        control: Any = communicator().control
        before = len(listening())
        hub = rendezvous.connect_group(control, None, plane.INLINE_BYTES, hosts[rank])
        assert hub is not None
        control.hubs[EVERYBODY] = hub
        found = [unisono.all_gather(rank), unisono.all_reduce({"a": rank, "b": torch.ones(2)})["a"]]
        found.append(unisono.all_gather("é" * 100_000 * rank)[6] == "é" * 600_000)
        with pytest.raises(CollectiveMismatchError, match="rank 5: barrier"):
            unisono.barrier() if rank == 5 else unisono.all_gather(1)
        after = len(listening())
        unisono.barrier()
        leave()
        return *found, after - before

    assert by_hand(fn, 7) == [([*range(7)], 21, True, 0)] * 7


def test_strangers_are_dropped_and_nothing_listens_afterwards(tmp_path: Path) -> None:
    """While the ranks meet, others connect: silent, with garbage, without the secret."""

    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        control: Any = communicator().control
        bind = addresses.listen_locally
        names: list[str] = []

        def bind_and_be_visited(stack: Any) -> Any:
            made = bind(stack)
            names.append(made[1])
            greeting = rendezvous._HELLO.pack(1, 0, b"x" * 16)
            without_the_secret = greeting + bytes(rendezvous._PROOF_BYTES)
            for data in (b"", b"\xff" * 500, greeting, without_the_secret):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(made[1].replace("@", "\0", 1))
                stranger.sendall(data)
            return made

        vars(rendezvous)["listen_locally"] = bind_and_be_visited
        found = unisono.all_gather(rank)
        assert control.hubs[EVERYBODY] is not None
        table = Path("/proc/net/unix").read_text().splitlines()
        heard = "".join(line for line in table if line.split()[3] == ACCEPTS)
        unisono.barrier()
        leave()
        return found, [name in heard for name in names]

    assert by_hand(fn) == [([0, 1], [False])] * 2


def test_where_sockets_cannot_be_had_the_models_own_collectives_serve(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        if rank == 1:

            def refuse(stack: Any) -> Any:
                raise OSError("no sockets here")

            vars(rendezvous)["listen_locally"] = refuse
        join(tmp_path, rank, 3)
        found = [unisono.all_gather("é" * rank), unisono.all_reduce(rank)]
        with pytest.raises(CollectiveMismatchError):
            unisono.all_reduce(1) if rank == 2 else unisono.broadcast(1)
        unisono.barrier()
        assert vars(communicator().control)["hubs"][EVERYBODY] is None
        leave()
        return found

    assert by_hand(fn, 3) == [[["", "é", "éé"], 3]] * 3


def test_a_context_that_is_made_again_meets_again(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        found = []
        descriptors = []
        for turn in range(4):
            join(tmp_path, rank, 2, f"store{turn}")
            found.append(unisono.all_gather(turn))
            unisono.all_reduce(1, group=[0, 1])
            leave()
            unisono.get_rank()
            descriptors.append(psutil.Process().num_fds())
        end = time.monotonic() + 10  # threads that end close some of them
        while psutil.Process().num_fds() > descriptors[1] and time.monotonic() < end:
            time.sleep(0.01)
        return found, psutil.Process().num_fds() <= descriptors[1]

    assert by_hand(fn) == [([[0, 0], [1, 1], [2, 2], [3, 3]], True)] * 2


def test_after_a_failure_every_call_says_so_again(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        unisono.barrier()
        if rank == 1:
            os._exit(3)
        for _ in range(3):
            with pytest.raises(PeerFailedError, match="rank 1"):
                unisono.all_gather("x")
        dist.destroy_process_group()
        return unisono.all_gather("alone")

    assert by_hand(fn, killed=1)[0] == ["alone"]


def test_collective_errors_have_one_root() -> None:
    assert issubclass(PeerFailedError, CollectiveError)


def test_a_rank_that_looks_again_alone_keeps_what_all_made_together(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        group = unisono.new_group([0, 1])
        found = [unisono.all_gather(rank), unisono.all_reduce(1, group=[1, 0])]
        if rank == 0:
            unisono.sync()
            unisono.set_local_rank(0)
        found += [unisono.all_gather(rank, group=group), unisono.all_reduce(2, group=[1, 0])]
        unisono.barrier()
        leave()
        return found

    assert by_hand(fn) == [[[0, 1], 2, [0, 1], 4]] * 2
