"""The device of a replica and of its results."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono.accelerators import accelerator
from unisono.context import current_model
from unisono.control.rendezvous import host_of_this_process
from unisono.testing.cases._law import law, needs_ranks, same, tensor_of, worlds


class _Labelled(torch.Tensor):
    """A tensor subclass that only pickle can send."""


class _Holder:
    """An object with a tensor in a field, which only pickle can find."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@law()
def a_replica_s_device_has_an_index_and_is_the_current_one() -> None:
    device = idist.device()
    if device.type == "cpu":
        assert str(device) == "cpu"
        return
    assert device.index is not None
    kind = accelerator()
    if kind is None or kind.type != device.type:  # XLA's devices aren't torch's accelerators
        return
    assert device.index == torch.accelerator.current_device_index()
    same(torch.ones(2, device=device.type), torch.ones(2, device=device))


@law()
def ranks_of_a_node_have_a_device_each_where_tensors_travel_on_it() -> None:
    model = current_model()
    assert model.transport_device in (torch.device("cpu"), idist.device())
    kind = accelerator()
    if kind is not None and model.transport_device.type == kind.type:
        devices = idist.all_gather((host_of_this_process(), str(idist.device())))
        visible = torch.accelerator.device_count()
        assert visible == 1 or len(set(devices)) == len(devices), devices


@law()
def results_are_on_the_device_of_the_input() -> None:
    rank, size = worlds()
    for device in dict.fromkeys((idist.device(), torch.device("cpu"))):
        for count in (3, 5000):
            rows = [tensor_of(r, (count,), torch.float32).to(device) for r in range(size)]
            joined, total, mine = torch.cat(rows), torch.stack(rows).sum(0), rows[rank]
            same(idist.all_gather(mine), joined, device)
            same(idist.all_reduce(mine), total, device)
            same(idist.all_reduce(mine, async_op=True).wait(), total, device)
            same(idist.all_reduce({"a": mine, "n": 1}), {"a": total, "n": size}, device)
            same(idist.reduce(mine), total if rank == 0 else None, device)
            same(idist.all_to_all(mine.repeat(size)), joined, device)
            same(idist.reduce_scatter(mine.repeat(size)), total, device)
            changed = mine.clone()
            assert idist.all_reduce_(changed) is changed
            same(changed, total, device)
            same(mine, rows[rank], device)


@law()
def what_is_on_a_device_arrives_on_the_receiver_s_own() -> None:
    rank, size = worlds()
    src = size - 1
    for device in dict.fromkeys((idist.device(), torch.device("cpu"))):
        value = tensor_of(src, (4,), torch.float32).to(device)
        same(idist.broadcast(value if rank == src else None, src=src), value, device)
        same(idist.broadcast({"x": [value]} if rank == src else None, src=src), {"x": [value]})
        same(idist.scatter([value] * size if rank == src else None, src=src), value, device)
        labelled = value.clone().as_subclass(_Labelled)
        got = idist.all_gather([value, labelled, torch.nn.Parameter(value.clone())])[src]
        assert [each.device for each in got] == [device] * 3, [each.device for each in got]
        same(idist.all_gather(_Holder(value))[src].tensor, value, device)


@law("send_recv")
def messages_arrive_on_the_receiver_s_own_device() -> None:
    rank, _ = worlds()
    if not needs_ranks(2):
        return
    for device in dict.fromkeys((idist.device(), torch.device("cpu"))):
        value = tensor_of(0, (4,), torch.float32).to(device)
        if rank == 0:
            idist.send(value, 1)
        elif rank == 1:
            same(idist.recv(0), value, device)


@law()
def the_user_s_default_device_changes_nothing() -> None:
    """Tensors that the library creates for itself ignore the default device."""
    rank, size = worlds()
    mine = torch.full((3,), float(rank))
    empty = torch.ones(0)
    calls: list[Any] = [
        partial(idist.all_reduce, 2),
        partial(idist.all_gather, "é" * 500),
        partial(idist.all_gather, {"x": (mine, empty)}),
        partial(idist.all_reduce, mine),
        partial(idist.broadcast, mine, src=size - 1),
        partial(idist.all_reduce, mine.bool(), "XOR"),
        partial(idist.all_gather, mine.expand(2, 3)),
    ]
    expected = [call() for call in calls]
    with torch.device("meta"):
        for call, value in zip(calls, expected, strict=True):
            same(call(), value, call.func.__name__)
        if "groups" in current_model().capabilities:
            same(idist.all_reduce(1, group=idist.new_group(list(range(size)))), size)
        idist.barrier()
