"""The control plane where ranks share memory and where they don't: the same values, no files."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.by_hand import by_hand, join, leave
from unisono.context import communicator
from unisono.errors import CollectiveMismatchError
from unisono.host import memory
from unisono.host.mailbox import MAILBOX_BYTES
from unisono.topology import EVERYBODY

SIZES = (
    0,
    300,
    16_000,
    65_535,
    70_000,
    1_000_000,
    MAILBOX_BYTES // 3,
    MAILBOX_BYTES,
    MAILBOX_BYTES + 1,
)
JOB = """
import unisono

def fn(local_rank):
    return unisono.all_gather("x" * 70_000 * local_rank), unisono.all_reduce(1)

if __name__ == "__main__":
    found = unisono.spawn("gloo", fn, nproc_per_node=2)
    assert found == [(["", "x" * 70_000], 2)] * 2
"""


def allow(times: int) -> None:
    """Let this process have shared memory so often and not again."""
    real, left = os.memfd_create, [None] * times

    def make(name: str) -> int:
        if name != "unisono":  # which is for ranks to share
            return real(name)
        if not left:
            raise OSError("no more of it here")
        left.pop()
        return real(name)

    os.memfd_create = make  # type: ignore[assignment]


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_values_of_all_lengths_are_whole(pairs: int, tmp_path: Path) -> None:
    """Rank 0 makes the memory of each pair: for none of them, for some, for all."""
    world_size = 3

    def fn(rank: int) -> Any:
        os.environ["UNISONO_SHARED_BYTES"] = "0"  # for tensors
        allow(pairs)
        join(tmp_path, rank, world_size)
        for size in SIZES:
            pieces = [random.Random(size + other).randbytes(size) for other in range(world_size)]
            assert unisono.all_gather(pieces[rank]) == pieces
            assert unisono.broadcast(pieces[rank], src=1) == pieces[1]
            tensor = torch.arange(size // 4, dtype=torch.float32) + rank
            expected = torch.stack([tensor + other - rank for other in range(world_size)]).sum(0)
            assert torch.equal(unisono.all_reduce(tensor), expected)
        hub = vars(communicator().control)["hubs"][EVERYBODY]
        leave()
        return all(each.mailbox for each in hub.peers.rounds.values()), hub.inline_bytes

    found = by_hand(fn, world_size)
    have = min(pairs, world_size - 1) if memory.is_supported() else 0
    assert sum(shares for shares, _ in found[1:]) == have
    is_everywhere = have == world_size - 1
    assert found[0][0] == is_everywhere
    limit = (4 if is_everywhere else 1) * (1 << 20) // world_size
    assert {limit - inline for _, inline in found} == {64 if is_everywhere else 0}


@pytest.mark.parametrize("plane", ["data", "memory"])
def test_a_short_sum_is_recorded_on_the_plane_that_carries_it(
    plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plane == "data":
        monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")

    def planes(rank: int) -> list[str]:
        seen: list[str] = []
        remove = unisono.add_hook(after=lambda record: seen.append(record.plane))
        unisono.all_reduce(torch.ones(4))
        unisono.all_reduce(torch.ones(1 << 20))
        remove()
        return seen

    assert unisono.spawn("gloo", planes, nproc_per_node=2) == [["control", plane]] * 2


KINDS: list[tuple[torch.dtype, str]] = [
    *itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64),
        ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX"),
    ),
    *itertools.product((torch.complex64,), ("SUM", "AVERAGE", "PRODUCT")),
    *itertools.product(
        (torch.bool, torch.int8, torch.uint16, torch.int64, torch.uint64),
        ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR"),
    ),
]


@pytest.mark.ranks(3, on="gloo")
def test_a_short_tensor_has_the_bits_of_a_long_one() -> None:
    """A round carries the short tensor; slots of memory carry the long one."""
    generator = torch.Generator().manual_seed(unisono.get_rank())
    for dtype, name in KINDS:
        op = unisono.ReduceOp[name]
        # 64 in all, as torch's kernels choose other bits of NaN at the end of a vector.
        numbers = torch.randn(58, generator=generator, dtype=torch.float64) * 100
        odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45])
        floats = torch.cat([numbers, odd.roll(unisono.get_rank())])
        is_inexact = dtype.is_floating_point or dtype.is_complex
        short = (floats if is_inexact else numbers.abs()).to(dtype)
        total = unisono.all_reduce(short.repeat(1000), op)[: len(short)]
        for got in (unisono.all_reduce(short, op), unisono.all_reduce_(short.clone(), op)):
            assert torch.equal(got.view(torch.uint8), total.view(torch.uint8)), (dtype, op)


def test_a_short_mean_is_not_taken_for_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")

    def reduce_differently(rank: int) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            unisono.all_reduce(torch.ones(2), "mean" if rank == 0 else "sum")
        return str(caught.value)

    [text, _] = unisono.spawn("gloo", reduce_differently, nproc_per_node=2)
    assert "AVERAGE" in text and "SUM" in text


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sockets have files")
def test_jobs_need_no_temporary_folder_and_those_of_two_users_do_not_meet() -> None:
    """They run at the same time. Of /proc even root can't make a file."""
    other = ["unshare", "--user", "--map-user=65534"]
    nowhere = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), "/proc")
    jobs = [
        subprocess.Popen(
            [*before, sys.executable, "-c", JOB],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for before, variables in (([], nowhere), (other, {}))[: 1 + is_there(other)]
    ]
    assert [ended(job) for job in jobs] == [(0, "")] * len(jobs)
    if len(jobs) == 1:
        pytest.skip("no other user can be had here")


def is_there(before: Sequence[str]) -> bool:
    try:
        return subprocess.run([*before, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def ended(job: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = job.communicate(timeout=100)
        return job.returncode, output
    finally:
        job.kill()
        job.communicate()


CONTAINED = """
import sys, unisono
from unisono.context import communicator
from unisono.topology import EVERYBODY

unisono.initialize("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
found = unisono.all_gather("x" * 70_000 * unisono.get_rank())
hub = vars(communicator().control)["hubs"][EVERYBODY]
print([len(text) for text in found], hub.peers.pidfds)
unisono.barrier()
unisono.finalize()
"""


def test_ranks_that_number_processes_differently_watch_no_strangers(tmp_path: Path) -> None:
    """As containers do that share the host's network alone: a peer's id is somebody else here."""
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    if not is_there(inside):
        pytest.skip("no ids of its own for a process here")
    words = [*inside, sys.executable, "-c", CONTAINED, f"file://{tmp_path}/store"]
    jobs = [
        subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in "01"
    ]
    assert [ended(job) for job in jobs] == [(0, "[0, 70000] {}\n")] * 2
