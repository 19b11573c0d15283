"""Loaders and samplers whose replicas share one dataset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import unisono as idist
from tests.support.worlds import several
from unisono.errors import ArgumentError


@several
def test_loaders_share_the_dataset() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    data: Any = list(range(6 * size + 1))
    loader = idist.auto_dataloader(data, batch_size=2 * size, shuffle=False)
    assert loader.batch_size == 2
    assert [i for rows in loader for i in rows.tolist()][:3] == [rank, rank + size, rank + 2 * size]
    everything = idist.all_gather([i for rows in loader for i in rows.tolist()])
    assert {i for part in everything for i in part} == set(data)
    with pytest.warns(UserWarning, match=f"each loads batches of 1, {size} together"):
        assert idist.auto_dataloader(data, batch_size=1).batch_size == 1
    with pytest.warns(UserWarning, match="each loads batches of 1"):
        idist.auto_dataloader(data, batch_size=size + 1)
    plain = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    with pytest.warns(UserWarning, match="each replica would load every batch"):
        idist.auto_dataloader(data, batch_sampler=plain)
    good = BatchSampler(idist.DistributedProxySampler(SequentialSampler(data)), 2, False)
    idist.auto_dataloader(data, batch_sampler=good)
    own: Any = DistributedSampler(data, size, rank)
    assert idist.auto_dataloader(data, batch_size=size, sampler=own).sampler is own
    wrong: Any = DistributedSampler(data, size + 1, rank)
    with pytest.warns(UserWarning, match=f"for rank {rank} of {size + 1}"):
        idist.auto_dataloader(data, batch_size=size, sampler=wrong)


def test_a_loader_alone_orders_as_several_replicas_do() -> None:
    data = list(range(20))
    alone = idist.auto_dataloader(data, batch_size=4)
    sampler: Any = alone.sampler
    orders: list[list[int]] = []
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        orders.append([i for rows in alone for i in rows.tolist()])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == data
    together = idist.spawn("threads", epochs, args=(data,), nproc_per_node=2)
    pairs = (zip(*parts, strict=True) for parts in zip(*together, strict=True))
    dealt = [[i for pair in epoch for i in pair] for epoch in pairs]
    assert dealt == [orders[0], orders[2]]
    assert isinstance(sampler, RandomSampler)
    in_order = idist.auto_dataloader(data, batch_size=4, shuffle=False)
    in_order.sampler.set_epoch(3)
    assert [i for rows in in_order for i in rows.tolist()] == data
    own = RandomSampler(data)
    assert idist.auto_dataloader(data, batch_size=4, sampler=own).sampler is own


def epochs(_local_rank: int, data: list[int]) -> list[list[int]]:
    loader = idist.auto_dataloader(data, batch_size=4)
    orders = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        orders.append([i for rows in loader for i in rows.tolist()])
    return orders


@several
def test_the_proxy_deals_out_any_sampler() -> None:
    data: Any = list(range(11))
    weighted = WeightedRandomSampler([1.0] * 9 + [0.0, 0.0], 20)
    for sampler in (RandomSampler(data), weighted):
        proxy = idist.DistributedProxySampler(sampler)
        epochs = []
        for epoch in (0, 1, 0):
            proxy.set_epoch(epoch)
            parts = idist.all_gather(list(proxy))
            assert len({len(part) for part in parts}) == 1
            epochs.append([i for row in zip(*parts, strict=True) for i in row][: len(sampler)])
        assert epochs[0] == epochs[2] != epochs[1]
        if isinstance(sampler, RandomSampler):
            assert sorted(epochs[0]) == data


def test_the_proxy_leaves_the_generator_alone() -> None:
    proxy = idist.DistributedProxySampler(RandomSampler(range(9)), 2, 0)
    state = torch.get_rng_state()
    first = list(proxy)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert list(proxy) == first


def test_bad_samplers_and_sizes_are_refused_alone_too() -> None:
    data: Any = [1, 2]
    samplers: list[Any] = [data, DistributedSampler(data, 1, 0)]
    for wrong in samplers:
        with pytest.raises(ArgumentError):
            idist.DistributedProxySampler(wrong)
    for size in (0, -1, "4", True):
        with pytest.raises(ArgumentError, match="batch_size"):
            idist.auto_dataloader(data, batch_size=size)
