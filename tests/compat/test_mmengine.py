"""The names of ``ours.dist``, asked of it and of ours side by side."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.compared import Case, Compared
from tests.support.worlds import several
from unisono.compat import mmengine as ours
from unisono.context import current
from unisono.errors import ArgumentError, CollectiveMismatchError, NotInitializedError

pytest.importorskip("mmengine", reason="mmengine isn't installed")

PAIR = Compared("mmengine.dist", "unisono.compat.mmengine")


def in_place(call: Callable[[torch.Tensor], Any], data: torch.Tensor) -> Any:
    return [call(data), data]


def reduced_dict(d: Any, op: str, rank: int) -> Any:
    data = {"b": torch.tensor([rank, 3]), "a": torch.tensor([2 * rank, 1])}
    return [d.all_reduce_dict(data, op), data]


def logged(d: Any, rank: int, size: int) -> Any:
    data = {"loss": torch.tensor(0.5 * rank), "n": torch.tensor(3 * rank)}
    d.all_reduce_dict(data, "mean")
    return {key: value.item() for key, value in data.items()}


def listed(d: Any, rank: int, size: int) -> Any:
    data = ["foo", 12, {1: 2}] if rank == 0 else [None, None, None]
    return [d.broadcast_object_list(data), data]


def params(d: Any, rank: int, size: int) -> Any:
    data = [torch.full((2,), rank), torch.full((3,), float(rank))]
    d.all_reduce_params(iter(data), op="mean")
    return data


def local(d: Any, rank: int, size: int) -> Any:
    if not dist.is_initialized():
        return [d.get_local_group(), d.get_local_size(), d.get_local_rank()]
    d.init_local_group(0, size)
    group, data = d.get_local_group(), torch.ones(1)
    dist.all_reduce(data, group=group)
    return [data, isinstance(group, dist.ProcessGroup), d.get_local_size(), d.get_local_rank(),
            d.get_rank(group), d.get_world_size(group), d.get_backend(group),
            d.get_dist_info(group), d.is_main_process(group)]  # fmt: skip


def by_torch(d: Any, rank: int, size: int) -> Any:
    if not dist.is_initialized():
        return None
    group, data = d.get_default_group(), torch.ones(1)
    dist.all_reduce(data, group=group)
    d.all_reduce(data, "sum", group)
    d.barrier(group)
    return data


CASES: dict[str, Case] = {
    "is_distributed": lambda d, r, n: d.is_distributed(),
    "get_backend": lambda d, r, n: d.get_backend(),
    "get_world_size": lambda d, r, n: d.get_world_size(),
    "get_rank": lambda d, r, n: d.get_rank(),
    "get_dist_info": lambda d, r, n: d.get_dist_info(),
    "is_main_process": lambda d, r, n: d.is_main_process(),
    "master_only": lambda d, r, n: d.master_only(lambda: "ran")(),
    "get_comm_device": lambda d, r, n: d.get_comm_device(),
    "get_local_group": local,
    "get_default_group": by_torch,
    "all_gather": lambda d, r, n: d.all_gather(data=torch.tensor([r, 1])),
    "gather": lambda d, r, n: d.gather(torch.tensor([r]), 0),
    "broadcast": lambda d, r, n: in_place(partial(d.broadcast, src=n - 1), torch.tensor([r, 9])),
    "broadcast_object_list": listed,
    "broadcast_object_list of text": lambda d, r, n: d.broadcast_object_list("foo"),
    "all_reduce_dict of text": lambda d, r, n: d.all_reduce_dict("foo"),
    "all_reduce_dict for a log": logged,
    "all_gather_object": lambda d, r, n: d.all_gather_object({r: "é"}),
    "gather_object": lambda d, r, n: d.gather_object(["foo", r], dst=n - 1),
    "collect_results": lambda d, r, n: d.collect_results([f"{r}.{i}" for i in range(3)], 3 * n),
    "collect_results, repeated": lambda d, r, n: d.collect_results([r, "again"], n + 1, "gpu"),
    "collect_results, few": lambda d, r, n: d.collect_results([{"n": r}], 4 * n, device="gpu"),
    "collect_results, uneven": lambda d, r, n: d.collect_results_gpu(["x"] * r, 100),
    "collect_results on tpu": lambda d, r, n: d.collect_results([r], 1, "tpu"),
    "collect_results_gpu": lambda d, r, n: d.collect_results_gpu([r], n),
    "collect_results with tmpdir": lambda d, r, n: d.collect_results([r], 1, "gpu", "x"),
    "all_reduce_params": params,
    "all_reduce unknown": lambda d, r, n: d.all_reduce(torch.ones(1), "abc") if n > 1 else None,
    "cast_data_device": lambda d, r, n: d.cast_data_device([torch.ones(1)], torch.device("cpu")),
    "get_data_device of a number": lambda d, r, n: d.get_data_device(3),
    "get_data_device of nothing": lambda d, r, n: d.get_data_device([]),
    **{
        f"all_reduce {op}": partial(
            lambda d, r, n, op: in_place(
                partial(d.all_reduce, op=op), torch.tensor([r + 1, 2, -r])
            ),
            op=op,
        )
        for op in ("sum", "mean", "product", "min", "max", "band", "bor", "bxor", "SUM")
    },
    **{
        f"all_reduce_dict {op}": partial(lambda d, r, n, op: reduced_dict(d, op, r), op=op)
        for op in ("sum", "mean", "max")
    },
}  # fmt: skip


def unlike(_local_rank: int) -> dict[str, tuple[Any, Any]]:
    return PAIR.differences(CASES, unisono.get_rank(), unisono.get_world_size())


def test_alone() -> None:
    assert PAIR.differences(CASES, 0, 1) == {}
    assert ours.collect_results([1, 2, 3], 2) == [1, 2]
    with pytest.raises(ArgumentError, match="tmpdir"):
        ours.collect_results([1], 1, "gpu", "somewhere")
    with pytest.raises(ArgumentError, match="init_backend"):
        ours.init_dist("pytorch", init_backend="deepspeed")
    with pytest.raises(ArgumentError, match="unknown launcher 'mpy'"):
        ours.init_dist("mpy")


@pytest.mark.parametrize("size", [1, 4])
def test_over_gloo(size: int) -> None:
    assert unisono.spawn("gloo", unlike, nproc_per_node=size) == [{}] * size


def test_every_name_takes_the_same_arguments() -> None:
    names = importlib.import_module(PAIR.theirs).__all__
    assert set(ours.__all__) == set(names)
    PAIR.check_arguments(name for name in names if name != "master_only")


@several
def test_tensors_are_reduced_and_moved() -> None:
    rank, size = ours.get_dist_info()
    data = torch.arange(2) + rank
    assert ours.all_reduce(data) is None  # type: ignore[func-returns-value]
    assert data.tolist() == [sum(range(size)), sum(range(1, size + 1))]
    wide = torch.tensor([float(rank)])
    ours.all_reduce(wide, op="mean")
    assert wide.item() == (size - 1) / 2
    gathered = [part.item() for part in ours.gather(torch.tensor(rank), dst=1)]
    assert gathered == (list(range(size)) if rank == 1 else [])
    ours.broadcast(data.fill_(rank), src=1)
    assert data.tolist() == [1, 1]
    named = {"b": torch.tensor([2**24 + 1]), "a": torch.tensor([0.5])}
    ours.all_reduce_dict(named)
    assert named["b"].item() == size * (2**24 + 1)
    assert named["a"].item() == size / 2
    params = [torch.full((3,), rank), torch.full((2,), float(rank))]
    ours.all_reduce_params(iter(params))
    assert params[0].tolist() == [sum(range(size))] * 3
    assert ours.cast_data_device({"x": [data]}, torch.device("cpu"))["x"][0] is data
    out = [torch.zeros(2, dtype=torch.int64)]
    ours.cast_data_device([data], torch.device("cpu"), out=out)
    assert out[0].tolist() == [1, 1]
    assert ours.get_data_device([data, data]) == ours.get_comm_device() == torch.device("cpu")


@several
def test_means_of_integers_are_cut() -> None:
    """Cut towards 0, as there, but never rounded on the way; each memory is reduced once."""
    rank, size = ours.get_dist_info()
    half = (size - 1) // 2
    for reduce in (ours.all_reduce, lambda data, op: ours.all_reduce_params([data], op=op)):
        cut = torch.tensor([rank, -rank, 2**60 + rank, 7], dtype=torch.int64)
        reduce(cut, op="mean")
        assert cut.tolist() == [half, -half, 2**60 + half, 7]
    named = {"a": torch.tensor([rank], dtype=torch.uint8), "b": torch.tensor([-rank])}
    ours.all_reduce_dict(named, "mean")
    assert [value.item() for value in named.values()] == [half, -half]
    twice = torch.tensor([rank, 2 * rank])
    ours.all_reduce_params([twice, twice], op="mean")
    assert twice.tolist() == [half, size - 1]
    mine = torch.tensor([rank, 2 * rank])
    part = mine[:1] if rank == 0 else mine[:1].clone()
    with pytest.raises(CollectiveMismatchError, match="the memory of tensor 0"):
        ours.all_reduce_params([mine, part], op="mean")
    assert mine.tolist() == [rank, 2 * rank]


@several
def test_results_and_groups_of_a_node() -> None:
    rank, size = ours.get_dist_info()
    length = 4 * size + 1
    part = [None if i == 2 else i for i in range(rank, length, size)]
    gathered = [None if i == 2 else i for i in range(length)]
    for collect in (ours.collect_results, ours.collect_results_cpu, ours.collect_results_gpu):
        assert collect(part, length) == (gathered if rank == 0 else None)
    assert len(set(ours.all_gather_object(ours.sync_random_seed()))) == 1
    with pytest.raises(NotInitializedError, match="init_local_group"):
        ours.get_local_group()
    node = int(rank > 0)  # uneven: rank 0 alone, the others together
    ours.init_local_group(node, size - 1 if node else 1)
    assert ours.get_local_size() == (size - 1 if node else 1)
    assert ours.get_local_rank() == (rank - 1 if node else 0)
    total = torch.tensor([rank])
    ours.all_reduce(total, group=ours.get_local_group())
    assert total.item() == sum(range(1, size)) * node
    assert ours.get_rank([0]) == (0 if rank == 0 else -1)
    ours.barrier(ours.get_default_group())
    del current().groups[()]  # which these ranks would keep for the next test
