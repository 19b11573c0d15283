"""all_gather and gather, broadcast, scatter, all_to_all, send and recv."""

from __future__ import annotations

from typing import Any

import torch

import unisono as idist
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.testing.cases._law import law, raises, same, tensor_of
from unisono.testing.cases.reductions import DTYPES


@law()
def all_gather_joins_tensors_of_every_dtype(rank: int, size: int) -> None:
    for dtype in DTYPES:
        for count in (2, 200):  # within the first frame of an exchange, and longer
            parts = [tensor_of(r, (count, 2), dtype) for r in range(size)]
            same(idist.all_gather(parts[rank]), torch.cat(parts), (dtype, count))


@law()
def all_gather_joins_every_shape_and_layout(rank: int, size: int) -> None:
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
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()  # a view: its memory isn't conjugated
    same(idist.all_gather(turned), torch.tensor([1 - 2j, 3 + 1j] * size))


@law()
def all_gather_joins_tensors_of_uneven_length(rank: int, size: int) -> None:
    for scale in (1, 100):  # within one frame, and longer
        parts = [torch.full((r * scale, 2), float(r)) for r in range(size)]
        same(idist.all_gather(parts[rank]), torch.cat(parts))
        same(idist.all_gather(parts[rank], uneven=True), parts)
        mixed = [torch.full((1 + r,) * (1 + r % 2), float(r)) for r in range(size)]
        same(idist.all_gather(mixed[rank], uneven=True), mixed)
    for length in (3, 300_000):  # each item's memory holds no other items, so it can be saved alone
        part = torch.full((length,), float(rank))
        shapes = [part.shape] * size
        of_shapes = idist.all_gather_tensors_with_shapes(part, shapes)
        for items in (idist.all_gather(part, uneven=True), of_shapes):
            assert [item.untyped_storage().nbytes() for item in items] == [part.nbytes] * size
            items[0].mul_(torch.ones(1, requires_grad=True))


@law(ranks=2)
def tensors_that_dont_fit_together_are_named_on_every_rank(rank: int, size: int) -> None:
    for scale in (1, 100):
        wrong = torch.ones(2, 3 * scale) if rank == 0 else torch.ones(2, 4 * scale)
        parts = [f"rank 0: float32[2, {3 * scale}]", f"rank 1: float32[2, {4 * scale}]"]
        raises(CollectiveMismatchError, parts, idist.all_gather, wrong)
        kinds = torch.ones(4 * scale) if rank == 0 else torch.ones(4 * scale, dtype=torch.int32)
        parts = [f"rank 0: float32[{4 * scale}]", f"rank 1: int32[{4 * scale}]"]
        raises(CollectiveMismatchError, parts, idist.all_gather, kinds)


@law()
def all_gather_with_known_shapes_takes_one_round(rank: int, size: int) -> None:
    gather = idist.all_gather_tensors_with_shapes
    for dtype in (torch.float32, torch.int16, torch.bool):
        parts = [tensor_of(r, (r + 1, 3 - r % 2), dtype) for r in range(size)]
        same(gather(parts[rank], [list(part.shape) for part in parts]), parts, dtype)
        for length in (0, 1):  # a column of 0 or 1 rows is contiguous with any stride
            column = torch.zeros(length, 2, dtype=dtype)[:, 0]
            same(gather(column, [[length]] * size), [column.clone()] * size, (dtype, length))
    one, two, ones = torch.ones(1), torch.ones(2), [[1]] * size
    counted: list[Any] = [[torch.tensor(1)]] * size
    same(gather(one, counted), [one] * size)
    raises(ArgumentError, [str(size + 1)], gather, one, [*ones, [1]])
    raises(ArgumentError, ["[2]", "[1]"], gather, two, ones)
    raises(ArgumentError, ["`shapes`", "float"], gather, one, [[1.0]] * size)
    raises(PayloadError, ["list"], gather, [1.0], ones)
    sparse = torch.ones(1, device="cpu").to_sparse()  # not every device has sparse tensors
    raises(PayloadError, ["dense"], gather, sparse, ones)


@law()
def gather_gives_the_result_to_its_root_alone(rank: int, size: int) -> None:
    for dst in range(size):
        for dtype in (torch.float32, torch.int16, torch.bool):
            parts = [tensor_of(r, (60, 2), dtype) for r in range(size)]
            got = idist.gather(parts[rank], dst=dst)
            same(got, torch.cat(parts) if rank == dst else None, (dst, dtype))
        texts = idist.gather("é" * rank, dst=dst)
        same(texts, ["é" * r for r in range(size)] if rank == dst else None)
        uneven = [torch.arange(r) for r in range(size)]
        same(idist.gather(uneven[rank], dst=dst), torch.cat(uneven) if rank == dst else None)


@law()
def broadcast_takes_type_and_shape_from_the_source(rank: int, size: int) -> None:
    for src in range(size):
        for dtype in DTYPES:
            for shape in ((), (0,), (3, 2), (100, 2)):
                value = tensor_of(src, shape, dtype)
                mine: Any = value if rank == src else [None, torch.ones(9), "x"][rank % 3]
                same(idist.broadcast(mine, src=src), value, (src, dtype, shape))
    turned = tensor_of(0, (2, 30, 4, 5), torch.float32)
    layout = turned.to(memory_format=torch.channels_last)
    same(idist.broadcast(layout if rank == 0 else None), turned)


@law()
def broadcast_in_place_overwrites_the_others(rank: int, size: int) -> None:
    for src in range(size):
        for dtype in (torch.float32, torch.int16, torch.bool):
            value = tensor_of(rank, (4, 3), dtype)
            assert idist.broadcast_(value, src=src) is value
            same(value, tensor_of(src, (4, 3), dtype), (src, dtype))
    strided = torch.zeros(3, 2)
    strided[:, 0] = rank + 1
    idist.broadcast_(strided[:, 0], src=size - 1)
    same(strided, torch.tensor([[float(size), 0.0]] * 3))
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    idist.broadcast_(weight, async_op=True).wait()
    same(weight.detach(), torch.zeros(2))


@law()
def scatter_gives_each_rank_its_own_value(rank: int, size: int) -> None:
    for src in range(size):
        texts = ["é" * (40 * r) for r in range(size)]
        same(idist.scatter(texts if rank == src else None, src=src), texts[rank])
        for dtype in (torch.float32, torch.int16, torch.bool):
            for count in (1, 90):
                parts = [tensor_of(r, (count, 2), dtype) for r in range(size)]
                same(idist.scatter(parts if rank == src else None, src=src), parts[rank])
        rows = torch.stack([tensor_of(r, (90,), torch.float64) for r in range(size)])
        same(idist.scatter(rows if rank == src else None, src=src), rows[rank])
        shapes = [torch.ones(50 * r, 2) for r in range(size)]
        values: Any = shapes if rank == src else "ignored"
        same(idist.scatter(values, src=src), shapes[rank])


@law()
def scatter_of_the_wrong_number_is_an_error_on_every_rank(rank: int, size: int) -> None:
    src = size - 1
    for wrong in (["x"] * (size + 1), "text", None, torch.ones(size + 1, 2)):
        values = wrong if rank == src else None
        raises(PayloadError, [f"rank {src}", str(size)], idist.scatter, values, src=src)


@law()
def all_to_all_sends_part_i_to_rank_i(rank: int, size: int) -> None:
    for dtype in DTYPES:
        parts = [tensor_of(r, (2 * size, 3), dtype) for r in range(size)]
        expected = torch.cat([part[2 * rank : 2 * rank + 2] for part in parts])
        same(idist.all_to_all(parts[rank]), expected, dtype)
    texts = idist.all_to_all([f"{rank} to {r}" * r for r in range(size)])
    same(texts, [f"{r} to {rank}" * rank for r in range(size)])
    tensors = idist.all_to_all([torch.full((rank + r, 1 + r), float(rank)) for r in range(size)])
    same(tensors, [torch.full((r + rank, 1 + rank), float(r)) for r in range(size)])
    raises(PayloadError, [str(size)], idist.all_to_all, torch.ones(()))
    texts = ["x"] * (size + (rank == size - 1))
    raises(PayloadError, [f"rank {size - 1}"], idist.all_to_all, texts)


def _messages(rank: int) -> list[Any]:
    """List the values that a rank sends."""
    return [
        rank, 2**60, "é" * 300, None, {"t": torch.arange(500)},
        tensor_of(rank, (3,), torch.int16), tensor_of(rank, (300,), torch.bool),
        torch.empty(0, 4), torch.tensor(1.5), tensor_of(rank, (400,), torch.float32),
    ]  # fmt: skip


@law("send_recv", ranks=2)
def messages_between_two_ranks_arrive_exact_and_in_order(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    got = []
    for value in _messages(rank):
        # A send may wait for its receiver, so not all ranks of the ring may send first.
        if rank % 2 == 0 and not (rank == size - 1 and size % 2):
            idist.send(value, dst=right)
            got.append(idist.recv(src=left))
        else:
            got.append(idist.recv(src=left))
            idist.send(value, dst=right)
    same(got, _messages(left))


@law("send_recv")
def messages_to_oneself_are_refused(rank: int, size: int) -> None:
    raises(ArgumentError, ["itself"], idist.send, 1, dst=rank)
    raises(ArgumentError, ["itself"], idist.recv, src=rank)
