"""Tensors and trees in memory that ranks of one host share: nothing is copied, nothing is left."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unisono
from tests.support.by_hand import by_hand, join, leave
from tests.support.shared_memory import host_of, mappings, shared_bytes
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PeerFailedError,
)
from unisono.host import memory
from unisono.host.shared import MIN_BYTES
from unisono.testing.pytest_plugin.body import World

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

COUNT = 300_007  # not a multiple of anything
_SPACE = resource.RLIMIT_AS


def touches_no_slot(call: Callable[[], Any]) -> bool:
    """Tell whether a call leaves what tensors otherwise go through as it was."""
    arena = host_of()._arena
    heads = [slot[:4096] for parity in (0, 1) for slot in arena.slots[parity]]
    unisono.barrier()
    if unisono.get_rank() == 0:
        for head in heads:
            head.fill_(0xA5)
    unisono.barrier()
    call()
    unisono.barrier()
    return all(bool((head == 0xA5).all()) for head in heads)


def filled(like: Tensor, rank: int) -> Tensor:
    return torch.arange(like.numel()).remainder(97).add(rank + 1).to(like.dtype).view(like.shape)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.int64], ids=str
)
@pytest.mark.ranks(3, on="gloo")
def test_collectives_copy_nothing_and_give_the_same_bits(dtype: torch.dtype, world: World) -> None:
    rank = world.rank
    mine = unisono.shared_empty(world.size, COUNT, dtype=dtype)
    ops: list[Any] = ["sum", "mean"] if dtype.is_floating_point else ["sum"]
    ops += [] if dtype.is_complex or dtype.is_floating_point else ["max", "xor", "product"]
    for op in ops:
        values = filled(mine, rank) / 3 if "mean" in ops else filled(mine, rank)
        mine.copy_(values)
        assert torch.equal(unisono.reduce_scatter(mine, op), unisono.reduce_scatter(values, op))
        assert torch.equal(mine, values)
        assert touches_no_slot(partial(unisono.all_reduce_, mine, op))
        assert torch.equal(mine, unisono.all_reduce(values, op))
    mine.copy_(filled(mine, rank))
    rows = unisono.all_gather(filled(mine, rank))
    assert torch.equal(unisono.all_gather(mine), rows)
    assert touches_no_slot(partial(unisono.all_gather, mine))
    assert touches_no_slot(partial(unisono.reduce_scatter, mine))
    assert not touches_no_slot(partial(unisono.reduce_scatter, mine.clone()))
    assert touches_no_slot(partial(unisono.broadcast_, mine, src=1))
    assert torch.equal(mine, filled(mine, 1))
    part = mine[1]  # the same on all ranks
    part.fill_(rank)
    assert touches_no_slot(partial(unisono.all_reduce_, part))
    assert torch.equal(part, torch.full_like(part, sum(range(world.size))))
    assert torch.equal(mine[0], filled(mine, 1)[0])


@pytest.mark.ranks(2, on="gloo")
def test_all_ranks_go_the_same_way(world: World) -> None:
    rank = world.rank
    first, second = unisono.shared_empty(2, COUNT), unisono.shared_empty((2, COUNT))
    plain, transposed = torch.empty(2, COUNT), unisono.shared_empty(COUNT, 2).T
    flags = unisono.shared_empty(COUNT, dtype=torch.bool)
    for turn, pair in enumerate(
        [(first, second), (first, plain), (first, transposed), (transposed, transposed)]
    ):
        mine = pair[rank].fill_(turn + rank)
        unisono.all_reduce_(mine)
        assert torch.equal(mine, torch.full_like(mine, 2 * turn + 1))
        mine.fill_(rank)
        assert torch.equal(unisono.broadcast_(mine, src=1), torch.ones_like(mine))
    assert float(unisono.all_reduce_(first[rank].fill_(rank + 1))[-1]) == 3
    assert float(unisono.all_reduce_(first[0].fill_(1), async_op=True).wait()[-1]) == 2
    assert bool(unisono.all_reduce_(flags.fill_(rank == 1), "or").all())
    assert bool(unisono.all_gather(flags).all())
    assert float(unisono.all_reduce_(first.fill_(rank), "min").max()) == 0
    with torch.inference_mode():
        assert float(unisono.all_reduce_(first.fill_(1))[0, 0]) == 2
    short = first.view(-1)[: MIN_BYTES // 4 - 1].fill_(1)
    assert float(unisono.all_reduce_(short)[-1]) == 2


def grad_of(mine: Tensor, collective: Callable[[Tensor], Tensor]) -> Tensor | None:
    weight = torch.ones(COUNT, requires_grad=True)
    loss = (weight * mine).sum()  # which keeps the tensor for its gradient
    collective(mine)
    loss.backward()  # type: ignore[no-untyped-call]
    return weight.grad


@pytest.mark.ranks(2, on="gloo")
def test_they_are_tensors_as_any_others_are(world: World) -> None:
    """What autograd, conjugates, inference mode and a default device know of them."""
    for mine in (unisono.shared_empty(COUNT).fill_(1), torch.ones(COUNT)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad_of(mine, unisono.all_reduce_)
        if world.rank == 0:
            assert grad_of(mine, partial(unisono.broadcast_, src=0)) is not None
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                grad_of(mine, partial(unisono.broadcast_, src=0))
        assert grad_of(mine, unisono.all_gather) is not None
    pairs = unisono.shared_empty(COUNT, dtype=torch.complex64).fill_(1 + 1j)
    total = unisono.all_reduce_(pairs.conj() if world.rank == 0 else pairs).resolve_conj()
    assert torch.equal(total, torch.full_like(total, 2))
    with torch.inference_mode():
        apart = torch.ones(3)
    several = [torch.ones(2), apart]
    host_of().all_reduce_packed(several, unisono.ReduceOp.SUM)
    assert all(bool((each == 2).all()) for each in several)
    torch.set_default_device("meta")
    assert unisono.shared_empty(0).is_cpu
    assert unisono.shared_empty(COUNT).is_cpu
    torch.set_default_device(None)


@pytest.mark.ranks(2, on="gloo")
def test_wrong_arguments_of_one_rank_are_told_and_numbers_may_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[tuple[Any, Any]] = [("3", None), (-1, None), (1 << 70, None), (3, "float")]
    for size, dtype in wrong:
        if world.rank == 0:
            with pytest.raises(ArgumentError, match="shared_empty: (size|dtype) should"):
                unisono.shared_empty(size, dtype=dtype)
        else:
            with pytest.raises(CollectiveMismatchError, match="which it refuses"):
                unisono.shared_empty(3)
    gc.collect()
    shared = host_of().shared
    before = len(shared._entries)
    monkeypatch.setattr(shared, "count", (1 << 24) - 2)
    last, none = unisono.shared_empty(COUNT), unisono.shared_empty(COUNT)
    assert len(shared._entries) == before + 1
    for mine in (last, none):
        assert float(unisono.all_reduce_(mine.fill_(1))[-1]) == 2


def refuse(address: bytes, *, writes: bool) -> int:
    raise PermissionError("not to be seen from here")


@pytest.mark.ranks(2, on="gloo")
def test_a_rank_that_cant_open_it_leaves_all_with_ordinary_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unisono.barrier()
    if world.rank == 1:  # as in a container of its own
        monkeypatch.setattr(memory, "address_of", lambda fd: b"")
        monkeypatch.setattr(memory, "open_at", refuse)
    before = mappings()
    mine = unisono.shared_empty(COUNT).fill_(world.rank + 1)
    assert mappings() == before
    assert torch.equal(unisono.all_reduce_(mine), torch.full_like(mine, 3))
    number, ones = unisono.shared(lambda: (world.rank, torch.ones(COUNT)))
    assert number == world.rank  # each has built its own
    assert torch.equal(ones, torch.ones(COUNT))


def test_it_is_given_back_with_the_last_tensor_and_outlives_the_context(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        unisono.barrier()
        before = mappings()
        tensors = [unisono.shared_empty(COUNT) for _ in range(3)]
        part = tensors[0][5:]
        assert mappings() == before + 3
        del tensors
        assert mappings() == before + 1
        assert len(host_of().shared._entries) == 1
        if rank == 1:
            del part
            gc.collect()
            part = torch.empty(COUNT - 5)
        assert float(unisono.all_reduce_(part.fill_(1))[-1]) == 2
        last = unisono.shared_empty(COUNT).fill_(rank)
        del part
        leave()
        unisono.finalize()
        gc.collect()
        assert mappings() == 1  # of this tensor alone
        assert torch.equal(last, torch.full_like(last, rank))
        del last
        assert mappings() == 0

    by_hand(fn)


# Trees that one rank builds


def is_shared(address: int) -> bool:
    """Tell whether memory at an address is a private map of memory without a name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(text, 16) for text in line.split()[0].split("-"))
        if begin <= address < end:
            return "memfd:unisono" in line and line.split()[1].endswith("p")
    return False


@pytest.mark.ranks(2, on="gloo")
def test_a_tree_lies_in_one_memory_that_nobody_copies() -> None:
    size_bytes = 64 << 20
    unisono.barrier()
    gc.collect()
    before, shared, private = mappings(), shared_bytes(), private_bytes()
    tree: dict[str, Any] = unisono.shared(
        lambda: {
            "array": np.arange(COUNT),
            "tensor": torch.ones(size_bytes, dtype=torch.uint8),
            "model": torch.nn.Linear(3, 2),
            "every other": np.arange(20)[::2],
        }
    )
    array, tensor, weight = tree["array"], tree["tensor"], tree["model"].weight
    assert mappings() == before + 1
    assert int(tensor.sum()) == size_bytes
    unisono.barrier()  # the kernel calls a page private until a second process has looked at it
    assert shared_bytes() - shared >= size_bytes
    assert private_bytes() - private < size_bytes // 8
    unisono.barrier()
    assert list(tree["every other"]) == list(range(0, 20, 2))
    assert all(map(is_shared, (array.ctypes.data, tensor.data_ptr(), weight.data_ptr())))
    assert weight.requires_grad
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert (array == np.arange(COUNT)).all()
    del tree, tensor, weight
    gc.collect()
    assert mappings() == before + 1  # the array has it
    del array
    assert mappings() == before


def private_bytes() -> int:
    """Give what this process alone has of memory without a name."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = "memfd:unisono" in line
        elif is_ours and line.startswith("Private_Dirty:"):
            total += 1024 * int(line.split()[1])
    return total


ARRAYS = (
    np.arange(6).reshape(2, 3), np.asfortranarray(np.eye(3)), np.arange(20)[::2], np.array(3.5),
    np.array(["é", "x"]), np.array([(1, 2.5)], dtype="i4,f8"), np.zeros((0, 3)),
    np.array([1, "x", None], dtype=object), np.array(["2020-01-01"], dtype="M8[D]"),
)  # fmt: skip


@pytest.mark.ranks(2, on="gloo")
def test_arrays_of_every_kind_and_tensors_that_share_memory_arrive(world: World) -> None:
    locked = np.arange(3)
    locked.flags.writeable = False
    base = torch.arange(10.0)
    given = (*ARRAYS, locked)
    tree: Any = unisono.shared(lambda: (given, (base, base[3:]), lambda: world.rank))
    arrays, parts, fn = tree
    for got, array in zip(arrays, given, strict=True):
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tolist() == array.tolist()
    assert arrays[1].flags.f_contiguous
    whole, rest = parts
    whole.fill_(5)
    assert float(rest[-1]) == 5  # as they did before
    assert fn() == 0


@pytest.mark.ranks(2, on="gloo")
def test_an_array_and_a_tensor_over_the_same_memory_arrive() -> None:
    array = np.arange(6.0)
    with torch.inference_mode():
        tree: Any = unisono.shared(lambda: {"array": array, "tensor": torch.from_numpy(array)})
    tree["tensor"].add_(1)  # it is no inference tensor
    assert tree["array"].tolist() == [0, 1, 2, 3, 4, 5]
    assert tree["tensor"].tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(PeerFailedError, match="can't be pickled, or there is no room for it"):
        unisono.shared(lambda: (torch.from_numpy(array), torch.from_numpy(array.view("i8"))))


@pytest.mark.ranks(2, on="gloo")
def test_where_there_is_no_such_memory_each_rank_builds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert unisono.shared(lambda: world.rank) == world.rank


def test_a_rank_that_has_no_room_fails_with_all(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        space = resource.getrlimit(_SPACE)
        unisono.barrier()
        if rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(_SPACE, (used + (24 << 20), space[1]))
        with pytest.raises(PeerFailedError, match="rank 1 raised .*memory"):
            unisono.shared(lambda: torch.zeros(64 << 18))
        resource.setrlimit(_SPACE, space)
        assert unisono.shared(lambda: rank) == 0  # nothing is broken by it
        leave()

    by_hand(fn)


def test_who_dies_while_it_builds_is_named(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        join(tmp_path, rank, 2)
        unisono.barrier()
        with pytest.raises(PeerFailedError) as caught:
            unisono.shared(lambda: ctypes.string_at(0))
        assert caught.value.rank == 0

    by_hand(fn, killed=0)
