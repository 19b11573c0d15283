"""Drop-in modules: every name of the original, and what it does there, without its bugs."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch

import unisono as idist
from tests.support.worlds import REAL, run, run_all
from unisono.compat import ignite, mmengine
from unisono.errors import ArgumentError, CollectiveMismatchError, NotInitializedError

# mmengine 0.10.7: `mmengine.dist.__all__`.
MMENGINE = (
    *("all_gather_object", "all_reduce", "all_gather", "all_reduce_dict", "collect_results"),
    *("collect_results_cpu", "collect_results_gpu", "gather", "broadcast", "gather_object"),
    *("sync_random_seed", "broadcast_object_list", "get_dist_info", "init_dist"),
    *("init_local_group", "get_backend", "get_world_size", "get_rank", "get_local_size"),
    *("get_local_group", "get_local_rank", "is_main_process", "master_only", "barrier"),
    *("is_distributed", "get_default_group", "all_reduce_params", "get_data_device"),
    *("get_comm_device", "cast_data_device", "infer_launcher"),
)
SUBMODULES = ("auto", "launcher", "utils", "comp_models")


@pytest.mark.skipif(importlib.util.find_spec("ignite") is None, reason="ignite isn't installed")
@pytest.mark.parametrize("name", ["", *SUBMODULES])
def test_every_name_of_ignite_is_there(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = importlib.import_module(
            ".".join(["ignite.distributed", *filter(None, [name])])
        )
    ours: Any = importlib.import_module(".".join(["unisono.compat.ignite", *filter(None, [name])]))
    names = getattr(theirs, "__all__", None)
    if names is None:
        names = [each for each in dir(theirs) if not each.startswith("_")]
        names = set(names) - {
            "annotations",
            "TYPE_CHECKING",
            "setup_available_computation_models",
        }
    missing = {each for each in names if not hasattr(ours, each)}
    assert not missing
    assert set(names) <= set(ours.__all__)


def test_every_name_of_mmengine_is_there() -> None:
    assert set(mmengine.__all__) == set(MMENGINE)
    assert all(callable(getattr(mmengine, name)) for name in MMENGINE)


def test_variables_of_ignite_are_answered_when_asked() -> None:
    assert ignite.has_native_dist_support is True
    assert ignite.comp_models.has_native_dist_support is True
    assert ignite.native.NCCL == "nccl"
    with pytest.raises(AttributeError, match="nothing"):
        ignite.nothing  # noqa: B018


def test_a_program_of_ignite_runs_unchanged() -> None:
    assert run("threads", 2, program) == [[3, "threads"], [3, "threads"]]


def program(local_rank: int) -> list[Any]:
    from unisono.compat.ignite import utils

    return [ignite.all_reduce(ignite.get_rank() + 1), utils.model_name()]


@pytest.mark.parametrize(("backend", "size"), [("threads", 3), ("gloo", 2), *REAL])
def test_mmengine_on(backend: str, size: int) -> None:
    run_all(backend, size, (tensors,), (means_of_integers,), (objects,))


def tensors(local_rank: int) -> None:
    dist = mmengine
    rank, size = dist.get_dist_info()
    data = torch.arange(2) + rank
    assert dist.all_reduce(data) is None  # type: ignore[func-returns-value]
    assert data.tolist() == [sum(range(size)), sum(range(1, size + 1))]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, op="bor")
    assert bits.item() == (1 << size) - 1
    wide = torch.tensor([float(rank)])
    dist.all_reduce(wide, op="mean")
    assert wide.item() == (size - 1) / 2
    assert [part.tolist() for part in dist.all_gather(torch.tensor([rank]))] == [
        [i] for i in range(size)
    ]
    gathered = [part.item() for part in dist.gather(torch.tensor(rank), dst=1)]
    assert gathered == (list(range(size)) if rank == 1 else [])
    dist.broadcast(data.fill_(rank), src=1)
    assert data.tolist() == [1, 1]
    named = {"b": torch.tensor([2**24 + 1]), "a": torch.tensor([0.5])}
    dist.all_reduce_dict(named)
    assert named["b"].item() == size * (2**24 + 1)
    assert named["a"].item() == size / 2
    params = [torch.full((3,), rank), torch.full((2,), float(rank))]
    dist.all_reduce_params(iter(params))
    assert params[0].tolist() == [sum(range(size))] * 3
    assert dist.cast_data_device({"x": [data]}, torch.device("cpu"))["x"][0] is data
    out = [torch.zeros(2, dtype=torch.int64)]
    dist.cast_data_device([data], torch.device("cpu"), out=out)
    assert out[0].tolist() == [1, 1]
    assert dist.get_data_device([data, data]) == dist.get_comm_device() == torch.device("cpu")


def means_of_integers(local_rank: int) -> None:
    """Cut towards 0, as there, but never rounded on the way; each memory is reduced once."""
    dist = mmengine
    rank, size = dist.get_dist_info()
    half = (size - 1) // 2
    large = 2**64 - size
    for reduce in (dist.all_reduce, lambda data, op: dist.all_reduce_params([data], op=op)):
        cut = torch.tensor([rank, -rank, 2**62 + rank, 7], dtype=torch.int64)
        reduce(cut, op="mean")
        assert cut.tolist() == [half, -half, 2**62 + half, 7]
        unsigned = torch.tensor([large + rank, rank], dtype=torch.uint64)
        reduce(unsigned, op="mean")
        assert unsigned.tolist() == [large + half, half]
    named = {"a": torch.tensor([large + rank], dtype=torch.uint64), "b": torch.tensor([-rank])}
    dist.all_reduce_dict(named, "mean")
    assert [value.item() for value in named.values()] == [large + half, -half]
    twice = torch.tensor([rank, 2 * rank])
    dist.all_reduce_params([twice, twice], op="mean")
    assert twice.tolist() == [half, size - 1]
    mine = torch.tensor([rank, 2 * rank])
    part = mine[:1] if rank == 0 else mine[:1].clone()
    with pytest.raises(CollectiveMismatchError, match="the memory of tensor 0"):
        dist.all_reduce_params([mine, part], op="mean")
    assert mine.tolist() == [rank, 2 * rank]


def objects(local_rank: int) -> None:
    dist = mmengine
    rank, size = dist.get_dist_info()
    assert dist.all_gather_object({"r": rank}) == [{"r": i} for i in range(size)]
    assert dist.gather_object(rank, dst=0) == (list(range(size)) if rank == 0 else None)
    items: list[Any] = ["é", {1: 2}] if rank == 0 else [None, None]
    dist.broadcast_object_list(items)
    assert items == ["é", {1: 2}]
    length = 4 * size + 1
    part = [None if i == 2 else i for i in range(rank, length, size)]
    gathered = [None if i == 2 else i for i in range(length)]
    for collect in (dist.collect_results, dist.collect_results_cpu, dist.collect_results_gpu):
        assert collect(part, length) == (gathered if rank == 0 else None)
    assert len(set(dist.all_gather_object(dist.sync_random_seed()))) == 1
    with pytest.raises(NotInitializedError, match="init_local_group"):
        dist.get_local_group()
    node = int(rank > 0)  # uneven: rank 0 alone, the others together
    dist.init_local_group(node, size - 1 if node else 1)
    assert dist.get_local_size() == (size - 1 if node else 1)
    assert dist.get_local_rank() == (rank - 1 if node else 0)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=dist.get_local_group())
    assert total.item() == sum(range(1, size)) * node
    assert dist.get_rank([0]) == (0 if rank == 0 else -1)
    dist.barrier(dist.get_default_group())


def test_mmengine_alone() -> None:
    dist = mmengine
    assert dist.get_dist_info() == (0, 1)
    assert dist.get_backend() is None
    assert dist.get_local_group() is None
    assert dist.collect_results([1, 2, 3], 2) == [1, 2]
    assert dist.all_gather_object(torch.ones(2))[0].tolist() == [1, 1]
    with pytest.raises(ArgumentError, match="tmpdir"):
        dist.collect_results([1], 1, "gpu", "somewhere")
    with pytest.raises(ArgumentError, match="init_backend"):
        dist.init_dist("pytorch", init_backend="deepspeed")
    with pytest.raises(ArgumentError, match="unknown launcher 'mpy'"):
        dist.init_dist("mpy")
    assert idist.is_distributed() is False
