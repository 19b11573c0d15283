"""Facts and devices: they are correct, and reading facts never communicates."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import unisono as idist
from unisono.accelerators import accelerator
from unisono.context import current_model
from unisono.control.rendezvous import host_of_this_process
from unisono.testing.cases._law import law, same, tensor_of
from unisono.testing.cases.values import Mine


@law()
def ranks_are_numbered_from_0_without_gaps(rank: int, size: int) -> None:
    same(idist.get_rank(), rank)
    same(idist.get_world_size(), size)
    same(idist.all_gather(idist.get_rank()), list(range(size)))
    same(idist.is_main_process(), rank == 0)


@law()
def nodes_and_local_ranks_agree_with_each_other(rank: int, size: int) -> None:
    local = (idist.get_local_rank(), idist.get_nproc_per_node())
    topologies = idist.all_gather((*local, idist.get_node_rank(), idist.get_nnodes()))
    assert len({(each[0], each[2]) for each in topologies}) == size, topologies
    for local_rank, nproc, node_rank, nnodes in topologies:
        on_node = [other for other in topologies if other[2] == node_rank]
        assert 0 <= local_rank < nproc == len(on_node), topologies
        assert 0 <= node_rank < nnodes, topologies


@law()
def facts_have_their_types(rank: int, size: int) -> None:
    assert isinstance(idist.device(), torch.device)
    assert isinstance(idist.hostname(), str)
    assert isinstance(idist.model_name(), str)
    assert idist.backend() is None or isinstance(idist.backend(), str)
    same(idist.is_distributed(), idist.backend() is not None)


@law()
def facts_never_communicate(rank: int, size: int) -> None:
    if rank == size - 1:  # only there, so that a collective in any of these calls would hang
        _ = idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.device()
        _ = idist.get_nnodes(), idist.get_node_rank(), idist.get_nproc_per_node()
        _ = idist.backend(), idist.model_name(), idist.is_main_process(), idist.is_distributed()
    idist.sync()  # on all ranks: in a context created elsewhere it finds the ranks of each host
    idist.barrier()


@law()
def a_replica_s_device_has_an_index_and_is_the_current_one(rank: int, size: int) -> None:
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
def ranks_of_a_node_have_a_device_each_where_tensors_travel_on_it(rank: int, size: int) -> None:
    model = current_model()
    assert model.transport_device in (torch.device("cpu"), idist.device())
    kind = accelerator()
    if kind is not None and model.transport_device.type == kind.type:
        devices = idist.all_gather((host_of_this_process(), str(idist.device())))
        visible = torch.accelerator.device_count()
        # A launcher may show each rank only its own device, which is number 0 on all.
        assert visible == 1 or len(set(devices)) == len(devices), devices


@law()
def results_are_on_the_device_of_the_input(rank: int, size: int) -> None:
    for device in dict.fromkeys((idist.device(), torch.device("cpu"))):
        for count in (3, 5000):  # within one frame, and longer
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
def what_is_on_a_device_arrives_on_the_receiver_s_own(rank: int, size: int) -> None:
    src = size - 1
    for device in dict.fromkeys((idist.device(), torch.device("cpu"))):
        value = tensor_of(src, (4,), torch.float32).to(device)
        same(idist.broadcast(value if rank == src else None, src=src), value, device)
        same(idist.broadcast({"x": [value]} if rank == src else None, src=src), {"x": [value]})
        same(idist.scatter([value] * size if rank == src else None, src=src), value, device)
        labelled = value.clone().as_subclass(Mine)
        got = idist.all_gather([value, labelled, torch.nn.Parameter(value.clone())])[src]
        assert [each.device for each in got] == [device] * 3, [each.device for each in got]
        # The tensor is in a field that only pickle finds.
        same(idist.all_gather(SimpleNamespace(tensor=value))[src].tensor, value, device)


@law("send_recv", ranks=2)
def messages_arrive_on_the_receiver_s_own_device(rank: int, size: int) -> None:
    for device in dict.fromkeys((idist.device(), torch.device("cpu"))):
        value = tensor_of(0, (4,), torch.float32).to(device)
        if rank == 0:
            idist.send(value, 1)
        elif rank == 1:
            same(idist.recv(0), value, device)


@law()
def the_user_s_default_device_changes_nothing(rank: int, size: int) -> None:
    """Tensors that the library creates for itself ignore the default device."""
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
    # Tensors on meta have no values, so the results show whether a call creates tensors there.
    expected = [call() for call in calls]
    with torch.device("meta"):
        for call, value in zip(calls, expected, strict=True):
            same(call(), value, call.func.__name__)
        if "groups" in current_model().capabilities:
            same(idist.all_reduce(1, group=idist.new_group(list(range(size)))), size)
        idist.barrier()
