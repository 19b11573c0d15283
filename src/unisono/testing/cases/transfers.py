"""broadcast, scatter, all_to_all, send and recv."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono.errors import ArgumentError, PayloadError
from unisono.testing.cases._law import law, raises, same, tensor_of, worlds
from unisono.testing.cases.reductions import DTYPES


@law()
def broadcast_takes_type_and_shape_from_the_source() -> None:
    rank, size = worlds()
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
def broadcast_in_place_overwrites_the_others() -> None:
    rank, size = worlds()
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
def scatter_gives_each_rank_its_own_value() -> None:
    rank, size = worlds()
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
def scatter_of_the_wrong_number_is_an_error_on_every_rank() -> None:
    rank, size = worlds()
    for wrong in (["x"] * (size + 1), "text", None, torch.ones(size + 1, 2)):
        values: Any = wrong if rank == size - 1 else None
        parts = [f"rank {size - 1}", str(size)]
        raises(PayloadError, partial(idist.scatter, values, src=size - 1), parts)


@law()
def all_to_all_sends_part_i_to_rank_i() -> None:
    rank, size = worlds()
    for dtype in DTYPES:
        parts = [tensor_of(r, (2 * size, 3), dtype) for r in range(size)]
        expected = torch.cat([part[2 * rank : 2 * rank + 2] for part in parts])
        same(idist.all_to_all(parts[rank]), expected, dtype)
    texts = idist.all_to_all([f"{rank} to {r}" * r for r in range(size)])
    same(texts, [f"{r} to {rank}" * rank for r in range(size)])
    tensors = idist.all_to_all([torch.full((rank + r, 1 + r), float(rank)) for r in range(size)])
    same(tensors, [torch.full((r + rank, 1 + rank), float(r)) for r in range(size)])
    raises(PayloadError, partial(idist.all_to_all, torch.ones(())), [str(size)])
    short: Any = ["x"] * (size + (rank == size - 1))
    raises(PayloadError, partial(idist.all_to_all, short), [f"rank {size - 1}"])


@law("send_recv")
def messages_between_two_ranks_arrive_exact_and_in_order() -> None:
    rank, size = worlds()
    if size == 1:
        return
    values = [
        *(rank, 2**60, "é" * 300, None, {"t": torch.arange(500)}),
        *(tensor_of(rank, (3,), torch.int16), tensor_of(rank, (300,), torch.bool)),
        *(torch.empty(0, 4), torch.tensor(1.5), tensor_of(rank, (400,), torch.float32)),
    ]
    right, left = (rank + 1) % size, (rank - 1) % size
    got = []
    for index in range(len(values)):
        if rank % 2 == 0 and not (rank == size - 1 and size % 2):
            idist.send(values[index], dst=right)
            got.append(idist.recv(src=left))
        else:
            got.append(idist.recv(src=left))
            idist.send(values[index], dst=right)
    assert got[0] == left
    same(got[1:5], values[1:5])
    same(got[5], tensor_of(left, (3,), torch.int16))
    same(got[6], tensor_of(left, (300,), torch.bool))
    same(got[7], torch.empty(0, 4))
    same(got[8], torch.tensor(1.5))
    same(got[9], tensor_of(left, (400,), torch.float32))


@law("send_recv")
def messages_to_oneself_are_refused() -> None:
    rank, _ = worlds()
    raises(ArgumentError, partial(idist.send, 1, dst=rank), ["itself"])
    raises(ArgumentError, partial(idist.recv, src=rank), ["itself"])
