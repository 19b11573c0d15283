"""all_gather and gather, for every dtype and shape."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.testing.cases._law import law, needs_ranks, raises, same, tensor_of, worlds
from unisono.testing.cases.reductions import DTYPES


@law()
def all_gather_joins_tensors_of_every_dtype() -> None:
    rank, size = worlds()
    for dtype in DTYPES:
        for count in (2, 200):  # within the first frame of an exchange, and more
            parts = [tensor_of(r, (count, 2), dtype) for r in range(size)]
            same(idist.all_gather(parts[rank]), torch.cat(parts), (dtype, count))


@law()
def all_gather_joins_every_shape_and_layout() -> None:
    rank, size = worlds()
    same(idist.all_gather(torch.tensor(rank)), torch.arange(size))
    same(idist.all_gather(torch.empty(0)), torch.empty(0))
    same(idist.all_gather(torch.empty(0, 3)), torch.empty(0, 3))
    same(idist.all_gather(torch.empty(2, 0)), torch.empty(2 * size, 0))
    images = [tensor_of(r, (2, 3, 8, 5), torch.float32) for r in range(size)]
    mine = images[rank].to(memory_format=torch.channels_last)
    same(idist.all_gather(mine), torch.cat(images))
    same(idist.all_gather(mine[:, 1:]), torch.cat(images)[:, 1:])
    same(idist.all_gather(torch.ones(1).expand(70)), torch.ones(70 * size))
    weight = torch.full((2,), float(rank), requires_grad=True)
    got = idist.all_gather(weight)
    assert not got.requires_grad
    same(got, torch.arange(size, dtype=torch.float32).repeat_interleave(2))
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    same(idist.all_gather(turned), torch.tensor([1 - 2j, 3 + 1j] * size))


@law()
def all_gather_joins_tensors_of_uneven_length() -> None:
    rank, size = worlds()
    for scale in (1, 100):
        parts = [torch.full((r * scale, 2), float(r)) for r in range(size)]
        same(idist.all_gather(parts[rank]), torch.cat(parts))
        same(idist.all_gather(parts[rank], uneven=True), parts)
        mixed = [torch.full((1 + r,) * (1 + r % 2), float(r)) for r in range(size)]
        same(idist.all_gather(mixed[rank], uneven=True), mixed)
    for length in (3, 300_000):  # items that are kept or saved own exactly their memory
        part = torch.full((length,), float(rank))
        shapes = [part.shape] * size
        for items in (
            idist.all_gather(part, uneven=True),
            idist.all_gather_tensors_with_shapes(part, shapes),
        ):
            assert [item.untyped_storage().nbytes() for item in items] == [part.nbytes] * size
            items[0].mul_(torch.ones(1, requires_grad=True))


@law()
def tensors_that_dont_fit_together_are_named_on_every_rank() -> None:
    rank, size = worlds()
    if not needs_ranks(2):
        return
    for scale in (1, 100):
        wrong = torch.ones(2, 3 * scale) if rank == 0 else torch.ones(2, 4 * scale)
        parts = [f"rank 0: float32[2, {3 * scale}]", f"rank 1: float32[2, {4 * scale}]"]
        raises(CollectiveMismatchError, partial(idist.all_gather, wrong), parts)
        kinds = torch.ones(4 * scale) if rank == 0 else torch.ones(4 * scale, dtype=torch.int32)
        parts = [f"rank 0: float32[{4 * scale}]", f"rank 1: int32[{4 * scale}]"]
        raises(CollectiveMismatchError, partial(idist.all_gather, kinds), parts)
    same(idist.all_gather(rank), list(range(size)))


@law()
def all_gather_with_known_shapes_takes_one_round() -> None:
    rank, size = worlds()
    gather = idist.all_gather_tensors_with_shapes
    for dtype in (torch.float32, torch.int16, torch.bool):
        parts = [tensor_of(r, (r + 1, 3 - r % 2), dtype) for r in range(size)]
        same(gather(parts[rank], [list(part.shape) for part in parts]), parts, dtype)
        for length in (0, 1):  # such a column is contiguous, although its stride is 2
            column = torch.zeros(length, 2, dtype=dtype)[:, 0]
            same(gather(column, [[length]] * size), [column.clone()] * size, (dtype, length))
    one, two, ones = torch.ones(1), torch.ones(2), [[1]] * size
    counted: list[Any] = [[torch.tensor(1)]] * size
    same(gather(one, counted), [one] * size)
    raises(ArgumentError, partial(gather, one, [*ones, [1]]), [str(size + 1)])
    raises(ArgumentError, partial(gather, two, ones), ["[2]", "[1]"])
    raises(ArgumentError, partial(gather, one, [[1.0]] * size), ["`shapes`", "float"])
    raises(PayloadError, partial(gather, [1.0], ones), ["list"])
    raises(PayloadError, partial(gather, one.to_sparse(), ones), ["dense"])


@law()
def gather_gives_the_result_to_its_root_alone() -> None:
    rank, size = worlds()
    for dst in range(size):
        for dtype in (torch.float32, torch.int16, torch.bool):
            parts = [tensor_of(r, (60, 2), dtype) for r in range(size)]
            got = idist.gather(parts[rank], dst=dst)
            same(got, torch.cat(parts) if rank == dst else None, (dst, dtype))
        same(
            idist.gather("é" * rank, dst=dst),
            ["é" * r for r in range(size)] if rank == dst else None,
        )
        uneven = [torch.arange(r) for r in range(size)]
        same(idist.gather(uneven[rank], dst=dst), torch.cat(uneven) if rank == dst else None)
