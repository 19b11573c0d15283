"""Tensors and trees in shared memory work like any others, over any transport."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import torch

import unisono as idist
from unisono.control.rendezvous import host_of_this_process
from unisono.errors import ArgumentError, CollectiveMismatchError, PeerFailedError
from unisono.testing.cases._law import law, raises, same

_LONG = 1 << 16  # float32 elements in 256 KiB, from which shared tensors aren't copied


@law()
def collectives_of_a_shared_tensor_are_those_of_any_other(rank: int, size: int) -> None:
    for dtype, count in ((torch.float32, _LONG), (torch.int64, _LONG), (torch.int64, 3)):
        # Small whole numbers, whose sums are exact in float32.
        values = torch.arange(size * count).remainder(89).add(rank).to(dtype).view(size, count)
        mine = idist.shared_empty(size, count, dtype=dtype)
        same((mine.shape, mine.dtype, mine.device.type), (values.shape, dtype, "cpu"))
        same(idist.all_reduce_(mine.copy_(values)) is mine, True)
        same(mine, idist.all_reduce(values), "all_reduce_")
        mine.copy_(values)
        same(idist.all_gather(mine), idist.all_gather(values), "all_gather")
        same(idist.reduce_scatter(mine), idist.reduce_scatter(values), "reduce_scatter")
        for op in ("SUM", "MEAN") if dtype.is_floating_point else ("SUM",):
            same(idist.all_reduce(mine, op), idist.all_reduce(values, op), op)
        same(mine, values, "it has changed")
        same(idist.broadcast_(mine, src=size - 1), idist.broadcast(values, src=size - 1))
        same(idist.all_reduce_(mine[:1].fill_(rank)), torch.full_like(mine[:1], sum(range(size))))


@law()
def shared_tensors_that_differ_are_refused_on_every_rank(rank: int, size: int) -> None:
    raises(ArgumentError, ["size"], idist.shared_empty, -1)
    raises(ArgumentError, ["size"], idist.shared_empty, "2")
    if size > 1:
        parts = ["shared_empty of float32[3]", "shared_empty of float32[2]"]
        raises(CollectiveMismatchError, parts, idist.shared_empty, 2 + (rank == 0))
    same(idist.shared_empty(0, 2).shape, torch.Size((0, 2)))


@law("groups")
def a_shared_tensor_of_a_group_is_reduced_in_it(rank: int, size: int) -> None:
    group = idist.new_group(list(range(size - 1)) or [0])
    mine = idist.shared_empty(_LONG, group=group).fill_(1)
    total = float(max(size - 1, 1)) if rank in group.ranks else 1.0
    same(idist.all_reduce_(mine, group=group), torch.full((_LONG,), total))


@law()
def what_is_shared_is_built_once_on_each_host(rank: int, size: int) -> None:
    built: list[int] = []

    def build() -> dict[str, Any]:
        built.append(rank)
        return {"tensor": torch.arange(_LONG), "facts": (None, "é", 2.5), "empty": torch.empty(0)}

    tree = idist.shared(build)
    counts = idist.all_gather(len(built))
    same(tree, build())
    hosts = idist.all_gather(host_of_this_process())
    # The first rank of each host builds.
    same(counts, [int(host not in hosts[:r]) for r, host in enumerate(hosts)])


@law()
def nobody_sees_what_another_rank_writes_to_what_is_shared(rank: int, size: int) -> None:
    has_arrays = importlib.util.find_spec("numpy") is not None

    source = torch.zeros(_LONG)

    def build() -> tuple[torch.Tensor, Any]:
        return source, torch.ones(3).numpy() if has_arrays else None

    tensor, array = idist.shared(build)
    source.fill_(-1)
    same(tensor, torch.zeros(_LONG), "it has changed with the tensor that build returned")
    tensor.fill_(rank)
    idist.barrier()
    same(tensor, torch.full((_LONG,), float(rank)))
    if has_arrays:
        same((array.tolist(), array.flags.writeable), ([1.0, 1.0, 1.0], False))


@law()
def a_failure_to_build_what_is_shared_reaches_every_rank(rank: int, size: int) -> None:

    def build() -> None:
        raise ValueError("no such data set")

    parts = ["rank 0", "ValueError: no such data set", "in build"]
    raises(PeerFailedError, parts, idist.shared, build)
    raises(PeerFailedError, ["rank 0", "pickled"], idist.shared, threading.Lock)
