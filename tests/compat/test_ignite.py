"""The names of ``ignite.distributed``, asked of it and of ours side by side."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler, TensorDataset

import unisono
from tests.support.compared import Case, Compared
from unisono.compat import ignite

pytest.importorskip("ignite", reason="pytorch-ignite isn't installed")

PAIR = Compared("ignite.distributed", "unisono.compat.ignite")


def numbered(rank: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float64).reshape(2, 3) + rank


def in_group(idist: Any, call: Callable[[Any], Any]) -> Any:
    """Give what a call gives for a group that was made, and for the list of its ranks."""
    ranks = list(range(max(1, idist.get_world_size() - 1)))
    return [call(idist.new_group(ranks)), call(ranks)]


def summed_by_torch(idist: Any, rank: int, size: int) -> Any:
    group, mine = idist.new_group([0]), torch.ones(1) * (rank + 1)
    if rank == 0 and dist.is_initialized():
        dist.all_reduce(mine, group=group)
        return [mine, dist.get_rank(group), dist.get_world_size(group)]
    return group if not dist.is_initialized() else [group == dist.GroupMember.NON_GROUP_MEMBER]


def only(idist: Any, rank: int, size: int) -> Any:
    marked = idist.one_rank_only(rank=size - 1, with_barrier=True)(lambda: "ran")
    return [marked(), idist.one_rank_only()(lambda text: text)("named")]


def first(idist: Any, rank: int, size: int) -> Any:
    with idist.one_rank_first():
        seen = ["inside"]
    with idist.one_rank_first(local=True):
        return [*seen, "of this node"]


def loader(idist: Any, rank: int, size: int) -> Any:
    data = TensorDataset(torch.arange(32.0))
    made = idist.auto_dataloader(data, batch_size=8, num_workers=0, shuffle=False)
    return [made.batch_size, len(made), [batch[0] for batch in made]]


def proxy(idist: Any, rank: int, size: int) -> Any:
    sampler = SequentialSampler(range(10))
    return list(idist.DistributedProxySampler(sampler, num_replicas=size, rank=rank))


def model(idist: Any, rank: int, size: int) -> Any:
    torch.manual_seed(0)
    module = idist.auto_model(torch.nn.Linear(2, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.full((1, 2), float(rank))).sum().backward()
    optimizer.step()
    return [type(module).__name__, type(optimizer).__name__, *module.state_dict().items()]


CASES: dict[str, Case] = {
    **{
        name: partial(lambda d, r, n, name: getattr(d, name)(), name=name)
        for name in (
            *("backend", "model_name", "get_rank", "get_world_size", "get_local_rank"),
            *("get_nproc_per_node", "get_nnodes", "get_node_rank", "hostname", "device"),
            *("sync", "barrier"),
        )
    },
    "all_reduce tensor=": lambda d, r, n: d.all_reduce(tensor=numbered(r), op="MAX", group=None),
    "all_reduce int": lambda d, r, n: d.all_reduce(10),
    "all_reduce float": lambda d, r, n: d.all_reduce(1.5 + r),
    "all_reduce 0-dim": lambda d, r, n: d.all_reduce(torch.tensor(r + 1)),
    "all_reduce of text": lambda d, r, n: d.all_reduce("abc") if n > 1 else None,
    "all_reduce unknown": lambda d, r, n: d.all_reduce(10, "ABC") if n > 1 else None,
    "all_reduce in a group": lambda d, r, n: in_group(
        d, lambda group: d.all_reduce(numbered(r), "SUM", group)
    ),
    "all_gather tensor=": lambda d, r, n: d.all_gather(tensor=numbered(r), group=None),
    "all_gather 0-dim": lambda d, r, n: d.all_gather(torch.tensor(r)) if n > 1 else None,
    "all_gather int": lambda d, r, n: d.all_gather(r),
    "all_gather text": lambda d, r, n: d.all_gather("abc" * (r + 1)),
    "all_gather object": lambda d, r, n: d.all_gather({"rank": r}),
    "all_gather in a group": lambda d, r, n: in_group(d, lambda group: d.all_gather([r], group)),
    "all_gather_tensors_with_shapes": lambda d, r, n: d.all_gather_tensors_with_shapes(
        tensor=torch.full((r + 1, r + 2), r), shapes=[[i + 1, i + 2] for i in range(n)]
    ),
    "broadcast tensor=": lambda d, r, n: d.broadcast(tensor=numbered(r), src=n - 1),
    "broadcast in places": lambda d, r, n: d.broadcast("abc" if r == 0 else None, 0, True),
    "broadcast text": lambda d, r, n: d.broadcast("abc" * (r + 1), 0),
    "broadcast path": lambda d, r, n: d.broadcast(Path("a") if r == 0 else None, safe_mode=True),
    "broadcast other type": lambda d, r, n: d.broadcast(
        numbered(r) if r == 0 else "abc", src=0, safe_mode=True
    ),
    "new_group for torch": summed_by_torch,
    "new_group of nobody": lambda d, r, n: d.new_group([]) if d.backend() is None else None,
    "new_group of text": lambda d, r, n: d.new_group(["a", "b"]),
    "new_group of one int": lambda d, r, n: d.new_group(1),
    "one_rank_only": only,
    "one_rank_first": first,
    "auto_dataloader": loader,
    "DistributedProxySampler": proxy,
    "auto_model, auto_optim": model,
    "initialize twice": lambda d, r, n: d.initialize("gloo") if d.backend() else None,
    "initialize unknown": lambda d, r, n: d.initialize("abc"),
    "spawn unknown": lambda d, r, n: d.spawn("abc", print, args=(), nproc_per_node=1),
    "Parallel unknown": lambda d, r, n: d.Parallel("abc"),
    "Parallel of -1": lambda d, r, n: d.Parallel("gloo", nproc_per_node=-1),
    "Parallel of 0 nodes": lambda d, r, n: d.Parallel("gloo", nproc_per_node=1, nnodes=0),
    "Parallel.backend": lambda d, r, n: d.Parallel("gloo", nproc_per_node=1).backend,
    "Parallel nowhere": lambda d, r, n: d.Parallel(None, master_port=1),
    "spawn at two places": lambda d, r, n: d.spawn(
        "gloo", print, (), init_method="file:///nowhere", master_addr="here"
    ),
    "has_hvd_support": lambda d, r, n: d.has_hvd_support or d.spawn("horovod", print, ()),
    **{
        f"all_reduce {op}": partial(lambda d, r, n, op: d.all_reduce(numbered(r), op), op=op)
        for op in ("SUM", "PRODUCT", "MIN", "MAX")
    },
    **{
        f"all_reduce {op}": partial(
            lambda d, r, n, op: d.all_reduce(torch.tensor([r + 1]), op), op=op
        )
        for op in ("AND", "OR")
    },
}  # fmt: skip


def unlike(local_rank: int) -> dict[str, tuple[Any, Any]]:
    importlib.import_module(PAIR.theirs).set_local_rank(local_rank)
    return PAIR.differences(CASES, unisono.get_rank(), unisono.get_world_size())


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ignite know its own models alone, whatever was installed in this process before."""
    comp_models = importlib.import_module("ignite.distributed.comp_models")
    utils = importlib.import_module("ignite.distributed.utils")
    models = comp_models.registered_computation_models
    monkeypatch.setattr(utils, "registered_computation_models", models)
    monkeypatch.setattr(utils, "_model", comp_models._SerialModel())
    monkeypatch.setattr(utils, "_need_to_sync", True)


@pytest.mark.usefixtures("untouched")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_alone() -> None:
    assert PAIR.differences(CASES, 0, 1) == {}


@pytest.mark.parametrize("size", [1, 4])
def test_over_gloo(size: int) -> None:
    assert unisono.spawn("gloo", unlike, nproc_per_node=size) == [{}] * size


def test_every_name_takes_the_same_arguments() -> None:
    theirs = importlib.import_module(PAIR.theirs)
    names = getattr(theirs, "__all__", dir(theirs))
    PAIR.check_arguments(name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("name", ["", ".auto", ".launcher", ".utils", ".comp_models"])
def test_every_name_is_there(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = importlib.import_module(f"ignite.distributed{name}")
    ours: Any = importlib.import_module(f"unisono.compat.ignite{name}")
    names = {each for each in dir(theirs) if not each.startswith("_")}
    names -= {"annotations", "TYPE_CHECKING", "setup_available_computation_models"}
    names = set(getattr(theirs, "__all__", names))
    assert not {each for each in names if not hasattr(ours, each)}
    assert names <= set(ours.__all__)


UTILS = """
all_gather all_gather_tensors_with_shapes all_reduce available_backends backend barrier
broadcast device finalize get_local_rank get_nnodes get_node_rank get_nproc_per_node
get_rank get_world_size has_hvd_support has_native_dist_support has_xla_support hostname
initialize model_name new_group one_rank_first one_rank_only
registered_computation_models set_local_rank show_config spawn sync
"""


def test_utils_has_these_names_and_no_others() -> None:
    assert sorted(importlib.import_module("unisono.compat.ignite.utils").__all__) == UTILS.split()


def test_variables_are_answered_when_asked() -> None:
    assert ignite.has_native_dist_support is True
    assert ignite.comp_models.has_native_dist_support is True
    assert ignite.native.NCCL == "nccl"
    with pytest.raises(AttributeError, match="nothing"):
        ignite.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.ranks(2, on="threads")
def test_a_program_runs_unchanged() -> None:
    assert ignite.all_reduce(ignite.get_rank() + 1) == 3
    assert ignite.utils.model_name() == "threads"
