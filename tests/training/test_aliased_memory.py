"""Memory that comes several times in a list, and buffers that threads don't share."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as idist
from tests.support.worlds import alone_and_several, several
from unisono.compat import mmengine
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.training.agreement import OVERLAPS, aliases


def matrix() -> Tensor:
    return torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("make", "owners"),
    [
        (lambda w: [w, w], [0, 0]),
        (lambda w: [w, w.t()], [0, 0]),
        (lambda w: [w[1:3], torch.ones(1), w], [2, 1, 2]),
        (lambda w: [w[:, :2], w[:, 2:]], [0, 1]),
        (lambda w: [w[::2], w[1::2]], [0, 1]),
        (lambda w: [w.diagonal(), w], [1, 1]),
        (lambda w: [w[:, :2], w[:, :1]], [0, 0]),
        (lambda w: [w[:, :3], w[:, 2:]], [OVERLAPS, 1]),
        (lambda w: [w[:2], w[1:]], [OVERLAPS, 1]),
        (lambda w: [w, w.view(torch.int32)], [0, OVERLAPS]),
        (lambda w: [w[0, :1].expand(3)], [OVERLAPS]),
        (lambda w: [w.view(-1).as_strided((2, 4), (2, 1))], [OVERLAPS]),
        (lambda w: [w[:0], w[:0]], [0, 1]),
        (lambda w: [w, torch.zeros(4, 6)], [0, 1]),
    ],
)
def test_what_belongs_to_what(make: Any, owners: list[int]) -> None:
    tensors = make(matrix())
    assert aliases(tensors, tensors) == owners


class Tied(nn.Module):
    """A language model's embedding and head, whose weight is one; large ones go alone."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 256)
        self.head = nn.Linear(256, words, bias=False)
        self.head.weight = self.embedding.weight


@alone_and_several
@pytest.mark.parametrize("words", [100, 4096])
def test_tied_weights_are_reduced_once(words: int) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    total = sum(range(1, size + 1))
    net = Tied(words)
    weight = net.embedding.weight
    op: Any
    for op, expected in (("mean", total / size), ("sum", float(total)), ("max", float(size))):
        nn.init.constant_(weight, rank + 1.0)
        idist.all_reduce_params(net.state_dict(), op=op)
        assert torch.unique(weight).tolist() == [expected], op
    nn.init.constant_(weight, rank + 1.0)
    mmengine.all_reduce_params(net.state_dict().values())
    assert torch.unique(weight).tolist() == [float(total)]
    nn.init.constant_(weight, rank + 1.0)
    idist.broadcast_params(net.state_dict(), src=size - 1)
    assert torch.unique(weight).tolist() == [float(size)]
    named = dict(net.named_parameters(remove_duplicate=False))
    assert len(named) == 2
    for givers, expected in ((size, float(total)), (1, 1.0)):  # who has a gradient at all
        weight.grad = torch.full_like(weight, rank + 1.0) if rank < givers else None
        idist.all_reduce_grads(named, op="sum")
        assert weight.grad is not None
        assert torch.unique(weight.grad).tolist() == [expected]


@several
def test_memory_that_overlaps_in_part_is_refused_on_every_rank() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    matrix = torch.zeros(4, 6)
    parts = [matrix[:2], matrix[1:3] if rank == 1 else matrix[2:]]
    with pytest.raises(PayloadError, match=r"tensor \d of 2 .* shares a part .* on ranks \[1\]"):
        idist.all_reduce_params(parts)
    with pytest.raises(PayloadError, match="shares a part of its memory"):
        idist.broadcast_params([torch.zeros(1).expand(3)])
    same = torch.zeros(3)
    with pytest.raises(CollectiveMismatchError, match="the memory of tensor 0"):
        idist.all_reduce_params([same, same if rank == 0 else torch.zeros(3)])
    columns = torch.full((3, 4), rank + 1.0)
    idist.all_reduce_params([columns[:, :1], columns[:, 1:]], op="sum")
    assert torch.unique(columns).tolist() == [size * (size + 1) / 2]
    assert idist.all_reduce(1) == size  # the ranks are in step


@pytest.mark.ranks(3, on="gloo")
def test_threads_with_groups_of_their_own_have_buffers_of_their_own() -> None:
    """Rank 0 has two threads, one with rank 1 and one with rank 2; each averages equal values."""
    groups = {1: idist.new_group([0, 1]), 2: idist.new_group([0, 2])}
    wrong: dict[int, Any] = {}

    def average(peer: int) -> None:
        value = float(10**peer)
        try:
            for _ in range(100):
                tensors = [torch.full((2000,), value) for _ in range(20)]
                idist.all_reduce_params(tensors, group=groups[peer])
                assert all(bool((tensor == value).all()) for tensor in tensors)
        except Exception as error:
            wrong[peer] = repr(error)

    if idist.get_rank() == 0:
        threads = [threading.Thread(target=average, args=(peer,)) for peer in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        average(idist.get_rank())
    assert not wrong
