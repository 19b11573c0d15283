"""The control plane over sockets: who is missing, who is gone, who called something else."""

from __future__ import annotations

import itertools
import os
import random
import re
import select
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import unisono
from tests.process.control.contexts import in_ranks
from tests.support.by_hand import by_hand, join, leave
from tests.support.listeners import listeners, listening_unix_sockets
from tests.support.processes import until
from unisono.context import communicator
from unisono.control import addresses, rendezvous, tree
from unisono.errors import (
    ArgumentError,
    CollectiveError,
    CollectiveMismatchError,
    PayloadError,
    PeerFailedError,
)
from unisono.topology import EVERYBODY

BIG = 300_000  # elements: more than what travels in a round


WAITS: dict[str, Callable[[], Any]] = {
    "all_gather": lambda: unisono.all_gather("x"),
    "all_reduce": lambda: unisono.all_reduce(torch.ones(BIG)),
    "all_gather of tensors": lambda: unisono.all_gather(torch.ones(BIG)),
    "all_reduce on the data plane": lambda: unisono.all_reduce(torch.ones(BIG)),
    "group": lambda: unisono.barrier(group=[0, 1, 2, 3]),
}


@pytest.mark.parametrize(
    ("wait", "victim"), [*((wait, 2) for wait in WAITS), ("all_gather", 0), ("all_reduce", 0)]
)
def test_a_killed_rank_is_named_by_all_others(wait: str, victim: int, tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        if "data plane" in wait:
            os.environ.update(UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
        join(tmp_path, rank, 4)
        WAITS[wait]()
        ended = os.pidfd_open(unisono.all_gather(os.getpid())[victim])
        unisono.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([ended], [], [])
        with pytest.raises(PeerFailedError, match=f"rank {victim} .*has ended") as caught:
            WAITS[wait]()
        for _ in range(2):  # every call says so again
            with pytest.raises(PeerFailedError, match=f"rank {victim}"):
                unisono.all_gather("x")
        dist.destroy_process_group()
        return caught.value.rank, unisono.all_gather("alone")

    results = by_hand(fn, 4, killed=victim)
    del results[victim]
    assert results == [(victim, ["alone"])] * 3


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce MAX": lambda: unisono.all_reduce(1, "MAX"),
    "all_reduce SUM": lambda: unisono.all_reduce(1),
    "barrier": unisono.barrier,
    "all_gather": lambda: unisono.all_gather(1),
    "broadcast from 1": lambda: unisono.broadcast(1, src=1),
    "broadcast from 0": lambda: unisono.broadcast(1, src=0),
    "all_reduce SUM of float32[4]": lambda: unisono.all_reduce(torch.ones(4)),
    "all_reduce SUM of float32[3]": lambda: unisono.all_reduce(torch.ones(3)),
    "all_reduce SUM of int32[3]": lambda: unisono.all_reduce(torch.ones(3, dtype=torch.int32)),
}


@pytest.mark.ranks(3, on="threads")
@pytest.mark.ranks(3, on="gloo")
def test_ranks_that_call_different_things_learn_it_at_once() -> None:
    rank = unisono.get_rank()
    for first, second in itertools.pairwise(CALLS):
        if unisono.backend() == "threads" and "32[" in first + second:
            continue  # they compare tensors on their data plane, in other words
        unisono.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            CALLS[second if rank else first]()
        lines = str(caught.value).splitlines()
        assert first in lines[1]
        assert second in lines[2]
        assert "test_plane.py:" in lines[1]
        assert unisono.all_gather(rank) == [0, 1, 2]  # the ranks are in step again


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


@pytest.mark.ranks(2, on="gloo")
def test_large_tensors_are_compared_before_they_travel() -> None:
    rank = unisono.get_rank()
    for calls in itertools.combinations(LARGE, 2):
        mine, other = calls
        if mine.partition(" in ")[0] == other.partition(" later")[0].partition(" in ")[0]:
            continue  # the same call
        with pytest.raises(CollectiveMismatchError) as caught:
            LARGE[calls[rank]](torch.ones(BIG))
        for at, call in enumerate(calls):
            assert f"rank {at}: {' '.join(call.split()[:2])}" in str(caught.value), calls
    others = (torch.ones(BIG + 2), torch.ones(BIG, dtype=torch.int32), torch.ones(2, BIG // 2))
    for name in sorted(LARGE.keys() - {"barrier"}):
        for tensor in others:
            with pytest.raises(CollectiveMismatchError):
                LARGE[name](tensor if rank else torch.ones(BIG))
    assert unisono.all_gather(rank) == [0, 1]


REFUSED: list[Callable[[bool], Any]] = [
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


@pytest.mark.ranks(2, on="gloo")
def test_what_one_rank_refuses_the_others_do_not_wait_for() -> None:
    for call in REFUSED:
        with pytest.raises((CollectiveMismatchError, PayloadError, ArgumentError)) as caught:
            call(unisono.get_rank() == 1)
        first, second = unisono.all_gather(str(caught.value))
        assert "rank 1" in first
        assert second.partition(":")[0] in first  # the others learn what it refuses, and why


def _sparse(size: int) -> torch.Tensor:
    return torch.ones(size).to_sparse()


@pytest.mark.ranks(3, on="threads")
@pytest.mark.ranks(3, on="gloo")
def test_one_call_too_many_on_one_rank_is_noticed_in_the_next() -> None:
    unisono.all_gather("before")
    with pytest.raises(CollectiveMismatchError) as caught:
        for step in range(3):
            if step == 1 and unisono.get_rank() == 0:
                unisono.all_gather("forgotten")
            unisono.all_gather(step)
            unisono.all_gather(-step)
    unisono.barrier()  # in step again, by chance of where it was noticed
    said = str(caught.value)
    assert "rank 0 has made one call more than the others, probably at " in said
    lines = [int(line) for line in re.findall(r"test_plane\.py:(\d+)", said)]
    assert lines[0] == lines[1] == lines[2] - 1 == lines[3] - 1 == lines[4] - 2


@pytest.mark.ranks(2, on="gloo")
def test_the_same_call_on_other_lines_is_no_mistake() -> None:
    for step in range(4):
        if unisono.get_rank() == 0:
            assert unisono.broadcast(step) == step
        else:
            assert unisono.broadcast() == step
        expected = [step, None] if step % 2 == 0 else [None, step]
        if step % 2 == unisono.get_rank():  # they take turns
            assert unisono.all_gather(step) == expected
        else:
            assert unisono.all_gather(None) == expected


@in_ranks()
def test_after_an_interrupted_round_the_next_one_says_so(rank: int, folder: Path) -> None:
    def wake(*_: object) -> None:
        raise KeyboardInterrupt

    join(folder, rank, 2)
    unisono.barrier()
    if rank == 0:
        signal.signal(signal.SIGALRM, wake)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            unisono.all_gather("x")
        with pytest.raises(CollectiveError, match="KeyboardInterrupt interrupted all_gather"):
            unisono.all_gather("y")
    leave()


def meet_as_hosts(hosts: str, rank: int, fan_out: int) -> None:
    """Connect all ranks anew, each as if it were on the host of a letter."""
    vars(rendezvous)["links"] = partial(tree.links, fan_out=fan_out)
    vars(rendezvous)["host_of_this_process"] = lambda: hosts[rank]
    control: Any = communicator().control
    hub = rendezvous.connect_group(control, None)
    assert hub is not None
    control.hubs[EVERYBODY] = hub


@pytest.mark.parametrize("fan_out", [2, 3])
@in_ranks(7)
def test_hosts_of_different_size_meet_over_tcp(rank: int, folder: Path, fan_out: int) -> None:
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    join(folder, rank, 7)
    before = len(listeners())
    meet_as_hosts("abbcadc", rank, fan_out)  # with 3 the four leaders connect to each other
    assert unisono.all_gather(rank) == [*range(7)]
    assert unisono.all_reduce({"a": rank, "b": torch.ones(2)})["a"] == 21
    assert unisono.all_gather("é" * 100_000 * rank)[6] == "é" * 600_000
    with pytest.raises(CollectiveMismatchError, match="rank 5: barrier"):
        unisono.barrier() if rank == 5 else unisono.all_gather(1)
    assert len(listeners()) == before
    unisono.barrier()
    leave()


@in_ranks(5)
def test_hosts_that_are_connected_directly_go_at_their_own_pace(rank: int, folder: Path) -> None:
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    join(folder, rank, 5)
    meet_as_hosts("abcdd", rank, 3)
    pace = random.Random(rank)
    for step in range(200):
        sum(range(pace.choice((0, 0, 0, 20_000))))  # so that others are a round ahead
        assert unisono.all_gather((rank, step)) == [(other, step) for other in range(5)]
    leave()


@in_ranks()
def test_strangers_are_dropped_and_nothing_listens_afterwards(rank: int, folder: Path) -> None:
    """While the ranks meet, others connect: silent, with garbage, without the secret."""
    join(folder, rank, 2)
    bind = addresses.listen_locally
    names: list[str] = []

    def bind_and_be_visited(stack: Any) -> Any:
        made = bind(stack)
        names.append(made[1])
        greeting = rendezvous._HELLO.pack(1, 0)
        without_the_secret = greeting + bytes(48)  # a nonce and a proof
        for data in (b"", b"\xff" * 500, greeting, without_the_secret):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect(made[1].replace("@", "\0", 1))
            stranger.sendall(data)
        return made

    vars(rendezvous)["listen_locally"] = bind_and_be_visited
    assert unisono.all_gather(rank) == [0, 1]
    assert vars(communicator().control)["hubs"][EVERYBODY] is not None
    heard = " ".join(listening_unix_sockets())
    unisono.barrier()
    leave()
    (name,) = names
    assert name not in heard


@in_ranks(3)
def test_where_sockets_cannot_be_had_the_models_own_collectives_serve(
    rank: int, folder: Path
) -> None:
    def refuse(stack: Any) -> Any:
        raise OSError("no sockets here")

    if rank == 1:
        vars(rendezvous)["listen_locally"] = refuse
    join(folder, rank, 3)
    assert unisono.all_gather("é" * rank) == ["", "é", "éé"]
    assert unisono.all_reduce(rank) == 3
    with pytest.raises(CollectiveMismatchError):
        unisono.all_reduce(1) if rank == 2 else unisono.broadcast(1)
    unisono.barrier()
    assert vars(communicator().control)["hubs"][EVERYBODY] is None
    leave()


@in_ranks()
def test_a_context_that_is_made_again_meets_again(rank: int, folder: Path) -> None:
    """And a rank that looks again alone keeps what all made together."""
    descriptors = []
    for turn in range(4):
        join(folder, rank, 2, f"store{turn}")
        group = unisono.new_group([0, 1])
        for is_again in (False, True):
            assert unisono.all_gather(turn) == [turn, turn]
            assert unisono.all_reduce(1, group=[1, 0]) == 2
            assert unisono.all_gather(rank, group=group) == [0, 1]
            if rank == 0 and not is_again:
                unisono.sync()
                unisono.set_local_rank(0)
        leave()
        unisono.get_rank()
        descriptors.append(psutil.Process().num_fds())
    until(lambda: psutil.Process().num_fds() <= descriptors[1], 10)  # threads close some
