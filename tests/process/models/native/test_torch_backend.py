"""The backend "unisono" of torch: programs that call torch alone, and what they build on it."""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.metadata
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.checkpoint
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import unisono
from tests.support.by_hand import Check, by_hand, join, leave, outcomes, prepare
from tests.support.processes import in_fork, run_python
from tests.support.shared_memory import mappings
from unisono.control import rendezvous
from unisono.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    PeerFailedError,
)
from unisono.models.native.torch_backend import _UnisonoGroup
from unisono.recording.records import CollectiveRecord

NAME = "unisono"
functional: Any = torch.distributed._functional_collectives
dcp: Any = torch.distributed.checkpoint
COUNTS = (1, 1000, 300_001)  # in a round, in one piece, in slices
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Torch deprecates names and modules of its own, and warns of CPUs.
OF_TORCH = r".*(deprecated|FSDP|CPU|sharded|_get_pg_default_device|ShardedTensor|gradient_as).*"


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare(__name__, "torch._dynamo")  # what is here takes longer to import than to run


def world() -> _UnisonoGroup:
    group = dist.group.WORLD
    assert isinstance(group, _UnisonoGroup)
    return group


# The calls of torch.distributed

Fold = Callable[[Tensor], Tensor]
SUM: tuple[Any, Fold] = (dist.ReduceOp.SUM, lambda rows: rows.sum(0))
FOLDS: list[tuple[Any, Fold]] = [
    SUM,
    (dist.ReduceOp.AVG, lambda rows: rows.mean(0)),
    (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
]
Case = tuple[str, Callable[[Tensor], Any], Tensor, Tensor | None]


def ranks_rows(size: int, count: int) -> Tensor:
    """Give the tensors of all ranks, [size, count]."""
    return torch.arange(count, dtype=torch.float64) + torch.arange(size).view(-1, 1)


def functional_calls(into: Tensor, mine: Tensor, given: Tensor, op: Any) -> None:
    """Torch calls them from C++ with the interpreter's lock held, where gloo may deadlock."""
    group, how = dist.group.WORLD, str(op).rpartition(".")[2].lower()
    rows = functional.all_gather_tensor(mine, 0, group)
    _, again = functional.all_gather_into_tensor_coalesced([given, mine], group)
    into.copy_(torch.cat([rows, again, functional.reduce_scatter_tensor(given, how, 0, group)]))


def calls(rank: int, every: Tensor, root: int, op: Any, fold: Fold) -> list[Case]:
    """List every collective call of ranks that have a row of `every` each.

    Returns:
        The call's names in records, the call, and its tensor before and, where it's told, after it.
    """
    mine, is_root = every[rank], rank == root
    given = mine + 10 * torch.arange(len(every)).view(-1, 1)  # a row for each rank
    taken = every + 10 * rank  # what each gives to this one
    row, rows, parts = torch.zeros_like(mine), torch.zeros_like(every), list(given)
    sent, there = (parts, every) if is_root else (None, rows)
    return [
        ("all_reduce", lambda x: dist.all_reduce(x, op, async_op=True), mine, fold(every)),
        ("reduce", lambda x: dist.reduce(x, root, op), mine, fold(every) if is_root else None),
        ("reduce_scatter", lambda x: reduce_scatter(x, given.view(-1), op), row, fold(taken)),
        ("reduce_scatter", lambda x: dist.reduce_scatter(x, parts, op), row, fold(taken)),
        ("broadcast", lambda x: dist.broadcast(x, root), mine, every[root]),
        ("all_gather", lambda x: all_gather(x.view(-1), mine), rows, every),
        ("all_gather", lambda x: dist.all_gather(list(x), mine), rows, every),
        ("gather", lambda x: dist.gather(mine, list(x) if is_root else None, root), rows, there),
        ("scatter", lambda x: dist.scatter(x, sent, root), row, taken[root]),
        ("all_to_all", lambda x: dist.all_to_all_single(x, given), rows, taken),
        ("barrier", lambda _: dist.barrier(), row, row),
        (
            "all_gather all_gather all_gather reduce_scatter",
            lambda x: functional_calls(x, mine, given.view(-1), op),
            torch.zeros(2 * every.numel() + len(mine), dtype=mine.dtype),
            torch.cat([*every, *every, fold(taken)]),
        ),
    ]


def every_call(rank: int, size: int, folder: Path) -> None:
    for count, root, (op, fold) in itertools.product(COUNTS, range(size), FOLDS):
        every = ranks_rows(size, count)
        rtol = 0.0 if op == dist.ReduceOp.SUM else 1e-12
        for name, call, before, after in calls(rank, every, root, op, fold):
            into = before.clone()
            work = call(into)
            if name == "all_reduce":
                assert work.wait()
                assert work.is_completed()
            if after is not None:
                torch.testing.assert_close(into, after, rtol=rtol, atol=0.0, msg=f"{name} {op}")
    counts = [rank + other + 1 for other in range(size)]
    into = torch.empty(sum(counts))
    dist.all_to_all_single(into, torch.full_like(into, rank), counts, counts)  # gloo's
    assert torch.equal(into, torch.arange(float(size)).repeat_interleave(torch.tensor(counts)))


def dtypes(rank: int, size: int, folder: Path) -> None:
    totals = (dist.ReduceOp.SUM, size * (size + 1) // 2), (dist.ReduceOp.AVG, (size + 1) / 2)
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
        for count in COUNTS:
            for op, total in totals[: 1 + dtype.is_floating_point]:
                mine = torch.full((count,), rank + 1).to(dtype)
                dist.all_reduce(mine, op)
                assert torch.equal(mine, torch.full_like(mine, total))
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits == (1 << size) - 1
    flags = torch.tensor([rank == 0])
    dist.broadcast(flags, 0)
    assert flags
    sparse = torch.eye(3).to_sparse() * (rank + 1)
    dist.all_reduce(sparse)  # gloo's
    assert torch.equal(sparse.to_dense(), torch.eye(3) * size * (size + 1) / 2)


def odd_tensors(rank: int, size: int, folder: Path) -> None:
    square = torch.arange(90_000.0).view(300, 300) + rank
    total = square.t()
    dist.all_reduce(total)  # not contiguous, and written in place
    assert torch.equal(square, size * torch.arange(90_000.0).view(300, 300) + sum(range(size)))
    parameter = nn.Parameter(torch.ones(300, 300))
    with torch.no_grad():
        dist.all_reduce(parameter)
    assert parameter[0, 0] == size
    empty, scalar = torch.empty(0), torch.tensor(1.0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty(0) for _ in range(size)], empty)
    dist.all_reduce(scalar)
    assert scalar == size
    with torch.inference_mode():
        apart = torch.ones(300_001)
        dist.all_reduce(apart)
        assert apart[-1] == size
    assert not scalar.is_inference()


class Named(Tensor):
    """A tensor of a class of the user's, as libraries of images have."""


def other_classes(rank: int, size: int, folder: Path) -> None:
    """Ranks may differ in the class of what they pass; as with gloo, autograd sees nothing."""
    for count in COUNTS:
        plain = torch.full((count,), float(rank + 1))
        tensor = plain.as_subclass(Named) if rank == 0 else plain
        dist.broadcast(tensor, 0)
        assert plain[-1] == 1
        dist.all_reduce(tensor)
        assert plain[-1] == size
        result = torch.ones(count, requires_grad=True).exp()
        dist.all_reduce(result)
        dist.broadcast(result, 0)
        assert result._version == 0
        result.sum().backward()  # type: ignore[no-untyped-call]


def other_forms(rank: int, size: int, folder: Path) -> None:
    """Several tensors at once; tensors in place of lists, and options by their names."""
    flats = [torch.full((3,), float(value)) for value in range(3)]
    with distributed_c10d._coalescing_manager():
        for flat in flats:
            dist.all_reduce(flat)
    assert [flat[0].item() for flat in flats] == [value * size for value in range(3)]
    group, tensor = world(), torch.full((3,), float(rank))
    group.allreduce(tensor, op=dist.ReduceOp.MAX).wait()
    assert tensor[0] == size - 1
    tensor.fill_(rank)
    group.broadcast(tensor, root=1).wait()
    assert tensor[0] == 1
    tensor.fill_(rank)
    group.reduce(tensor, 0, dist.ReduceOp.MAX).wait()
    assert rank > 0 or tensor[0] == size - 1


def what_gloo_refuses(rank: int, size: int, folder: Path) -> None:
    one, complex_one = torch.ones(1), torch.ones(3, dtype=torch.complex64)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(torch.zeros(4 * size), one)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(torch.zeros(size, dtype=torch.float64), one)
    with pytest.raises((RuntimeError, ValueError)):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(2 * size))
    with pytest.raises(RuntimeError, match="complex"):
        dist.reduce(complex_one, 0, dist.ReduceOp.MIN)
    dist.barrier()


def tensors_without_memory(rank: int, size: int, folder: Path) -> None:
    """They go through torch's dispatcher to gloo."""
    later = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    flat = torch.empty(4 * size)
    all_gather(flat, later)
    assert torch.equal(flat, torch.full((4 * size,), float(size)))
    dist.all_reduce(later)
    assert torch.equal(later + 0, torch.full((4,), float(size * size)))
    with FakeTensorMode():
        dist.all_reduce(torch.ones(4))


def objects(rank: int, size: int, folder: Path) -> None:
    whole = [(other, bytes([other]) * 400_000) for other in range(size)]
    mine, every = whole[rank], [None] * size
    dist.all_gather_object(every, mine)
    assert every == whole
    items: list[Any] = [mine, "text"] if rank == 1 else [None, None]
    dist.broadcast_object_list(items, src=1)
    assert items == [whole[1], "text"]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, gathered)
    assert gathered == (whole if rank == 0 else None)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, whole if rank == 0 else None)
    assert scattered == [mine]


def messages(rank: int, size: int, folder: Path) -> None:
    right, left, mine = (rank + 1) % size, (rank - 1) % size, torch.full((1000,), float(rank))
    first, second = torch.empty(1000), torch.empty(1000)
    sending = dist.isend(mine, right)
    dist.recv(first, left)
    operations = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, second, left)]
    for work in (sending, *dist.batch_isend_irecv(operations)):
        assert work is not None
        work.wait()
    assert first[-1] == second[-1] == left


def groups(rank: int, size: int, folder: Path) -> None:
    pair, everybody = dist.new_group([0, size - 1]), dist.new_group()
    assert isinstance(everybody, _UnisonoGroup)
    total = torch.ones(300_001)
    dist.all_reduce(total, group=everybody)
    assert total[-1] == size
    if rank in (0, size - 1):
        mine = torch.full((300_001,), float(rank))
        dist.broadcast(mine, size - 1, group=pair)
        assert mine[-1] == size - 1
        dist.barrier(pair)
        dist.destroy_process_group(pair)
    subgroup, _ = distributed_c10d.new_subgroups(size)  # type: ignore[no-untyped-call]
    dist.all_reduce(total, group=subgroup)
    assert total[-1] == size * size


def views_of_unisono(rank: int, size: int, folder: Path) -> None:
    """The facade finds the group, and works on it."""
    assert (unisono.backend(), unisono.model_name()) == (NAME, "native-dist")
    assert unisono.all_gather(f"rank {rank}") == [f"rank {r}" for r in range(size)]
    assert unisono.all_reduce(torch.ones(300_001))[-1] == size
    assert unisono.all_reduce(1 << rank, "OR") == (1 << size) - 1
    unisono.finalize()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == size


# What torch builds on them


def batch(rank: int) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))


def net(has_spare: bool = False) -> nn.Sequential:
    """Make a module of which one layer goes in slices, the others in one piece.

    Args:
        has_spare: give it a parameter that no call uses, too.
    """
    torch.manual_seed(0)
    last = nn.Linear(256, 1)
    if has_spare:
        last.register_parameter("spare", nn.Parameter(torch.ones(3)))
    layers = nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), last
    return nn.Sequential(*layers)


def backward(module: Any, rank: int) -> None:
    module(batch(rank)).sum().backward()


def assert_averaged(module: nn.Module, size: int, turns: int = 1) -> None:
    alone = net()
    for rank in range(size):
        (alone(batch(rank)).sum() * turns / size).backward()
    for parameter, expected in zip(module.parameters(), alone.parameters(), strict=False):
        grad: Any = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        torch.testing.assert_close(grad, expected.grad)


def ddp(rank: int, size: int, folder: Path) -> None:
    modes: list[dict[str, Any]] = [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.1},
        {"static_graph": True},
        {},
    ]
    for mode in modes:
        module = DistributedDataParallel(net(has_spare=bool(mode)), **mode)
        for _ in range(2):
            module.zero_grad()
            backward(module, rank)
            assert_averaged(module, size)
    with module.no_sync():
        backward(module, rank)
    backward(module, rank)
    assert_averaged(module, size, turns=3)


def ddp_join(rank: int, size: int, folder: Path) -> None:
    module = DistributedDataParallel(nn.Linear(32, 1))
    with Join([module], divide_by_initial_world_size=False):
        for _ in range(3 + rank):
            module.zero_grad()
            backward(module, rank)
    weights: list[Any] = [None] * size
    dist.all_gather_object(weights, module.module.weight.detach())
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def fsdp1(rank: int, size: int, folder: Path) -> None:
    module = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    backward(module, rank)
    with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
        assert_averaged(module, size)


def fsdp2(rank: int, size: int, folder: Path) -> None:
    module = net()
    fully_shard(module[2])
    fully_shard(module)
    backward(module, rank)
    assert_averaged(module, size)


def zero(rank: int, size: int, folder: Path) -> None:
    module = DistributedDataParallel(net())
    optim: Any = importlib.import_module("torch.distributed.optim")  # warns of itself
    optimizer = optim.ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    backward(module, rank)
    optimizer.step()
    assert_averaged(module, size)
    for before, after in zip(net().parameters(), module.parameters(), strict=True):
        assert after.grad is not None
        torch.testing.assert_close(after, before - 0.1 * after.grad)
    optimizer.consolidate_state_dict(to=0)


def dtensor(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size * 6).view(4 * size, 6)
    rows: Any = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.to_local(), whole[4 * rank : 4 * rank + 4])
    assert torch.equal(rows.full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(
        (rows @ rows.t()).redistribute(mesh, [Replicate()]).to_local(), whole @ whole.t()
    )
    assert rows.sum().full_tensor() == whole.sum()


def compiled(rank: int, size: int, folder: Path) -> None:
    """Functional collectives, traced; the compiler of C++ isn't needed for that."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def fn(x: Tensor) -> Tensor:
        total = x * 2
        dist.all_reduce(total)
        flat = torch.empty(x.numel() * size)
        all_gather(flat, total)
        return flat

    assert torch.equal(fn(torch.ones(1000)), torch.full((1000 * size,), 2.0 * size))
    module = DistributedDataParallel(net())
    backward(torch.compile(module, backend="aot_eager"), rank)
    assert_averaged(module, size)


def checkpoints(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(40.0 * size)
    state = {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}
    dcp.save(state, checkpoint_id=folder / "at once")
    writers = dist.new_group()
    saving: Any = dcp.async_save(state, checkpoint_id=folder / "later", process_group=writers)
    module = DistributedDataParallel(net())
    backward(module, rank)  # while it's written
    assert_averaged(module, size)
    saving.result()
    for name in ("at once", "later"):
        loaded = {"weight": distribute_tensor(torch.zeros(40 * size), mesh, [Shard(0)]), "step": 0}
        dcp.load(loaded, checkpoint_id=folder / name)
        weight: Any = loaded["weight"]
        assert torch.equal(weight.full_tensor(), whole)
        assert loaded["step"] == 3


def loader_workers(local_rank: int) -> tuple[str, list[int]]:
    data: Any = list(range(8))
    loader: Any = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    totals: list[int] = []
    for _ in range(2):
        for items in loader:
            total = items + local_rank
            dist.all_reduce(total)
            totals += total.tolist()
    return str(unisono.backend()), totals


def test_spawn_makes_it_and_loaders_fork_workers_beside_it() -> None:
    """In ranks that may have children."""
    totals = 2 * [2 * item + 1 for item in range(8)]
    assert unisono.spawn(NAME, loader_workers, nproc_per_node=2) == [(NAME, totals)] * 2


# What goes wrong


def differing_calls(rank: int, size: int, folder: Path) -> None:
    five: Any = torch.ones(5)
    calls: list[tuple[Any, ...]] = [
        ((dist.all_reduce, five), (dist.barrier,), "barrier at "),
        ((dist.all_reduce, five), (dist.all_reduce, torch.ones(6)), "all_reduce SUM of float32[6]"),
        ((dist.broadcast, five, 0), (dist.broadcast, five, 1), "broadcast from 1"),
    ]
    for *pair, text in calls:
        call, *args = pair[min(rank, 1)]
        with pytest.raises(CollectiveMismatchError) as caught:
            call(*args)
        assert text in str(caught.value)
        assert "test_torch_backend.py" in str(caught.value)  # the user's line, not torch's
    dist.all_reduce(five)  # and nothing is broken by it
    assert five[0] == size


def what_is_not_there(rank: int, size: int, folder: Path) -> None:
    with pytest.raises(ValueError, match="GLOO"):
        dist.monitored_barrier()
    with pytest.raises(RuntimeError, match="cast"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG)
    dist.barrier()

    def call() -> None:
        one, other = torch.ones(1), 1 - rank
        forbidden: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(one),
            lambda: dist.all_reduce(torch.eye(3).to_sparse()),  # gloo's
            lambda: dist.barrier(),
            lambda: dist.isend(one, other),
            lambda: dist.irecv(one, other),
        ]
        for operation in forbidden:
            with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                operation()

    assert in_fork(call) == 0
    dist.barrier()


# Where ranks share no memory


def on_two_hosts(rank: int) -> None:
    """Pretend it: ranks that don't share a host by their names share nothing."""
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    vars(rendezvous)["host_of_this_process"] = lambda: f"host {rank % 2}"


def without_memory(rank: int) -> None:
    os.environ["UNISONO_SHARED_BYTES"] = "0"


def is_gloo_s(rank: int, size: int, folder: Path) -> None:
    assert world()._shared is None


@contextmanager
def seen() -> Iterator[list[tuple[str, str]]]:
    """Give the name and plane of each call that is over."""
    calls: list[tuple[str, str]] = []

    def note(record: CollectiveRecord) -> None:
        is_whole = record.duration_ns > 0 and not record.error
        calls.append((record.name, record.plane if is_whole else str(record)))

    remove = unisono.add_hook(after=note)
    yield calls
    remove()


def assert_recorded(plane: str, rank: int, size: int) -> None:
    cases = calls(rank, torch.ones(size, 1), 0, *SUM)
    with seen() as records:
        for _, call, into, _ in cases:
            work = call(into)
            assert work is None or work.wait()
    planes = {"barrier": "control"}
    called = " ".join(names for names, *_ in cases).split()
    assert records == [(name, planes.get(name, plane)) for name in called]


def recorded_in_memory(rank: int, size: int, folder: Path) -> None:
    assert_recorded("memory", rank, size)
    with seen() as calls:  # compared first, and then gloo's
        empty = torch.empty(0)
        dist.all_reduce(empty)
        dist.reduce(empty, 0)
        reduce_scatter(empty, empty.clone())
        dist.all_to_all_single(torch.empty(size), torch.ones(size), [1] * size, [1] * size)
    names = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
    assert calls == [(name, "data") for name in names]


def recorded_once(rank: int, size: int, folder: Path) -> None:
    """What the facade does to connect a group isn't a call of the user's."""
    group = unisono.new_group([0, size - 1])
    with seen() as records:
        unisono.all_reduce(1, group=group)
    assert [name for name, _ in records] == ["all_reduce"] * (rank in group.ranks)
    unisono.finalize()


def recorded_by_gloo(rank: int, size: int, folder: Path) -> None:
    assert_recorded("data", rank, size)
    tensor, side = torch.ones(1), "send" if rank == 0 else "recv"
    with seen() as calls:
        work: Any = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        getattr(dist, side)(tensor, 1 - rank)
        work = getattr(dist, f"i{side}")(tensor, 1 - rank)
        assert work.wait()
    assert calls == [("all_reduce", "data"), (side, "data"), (side, "data")]
    with seen() as calls:
        module = DistributedDataParallel(nn.Linear(2, 1))
        module(torch.ones(1, 2)).sum().backward()  # which waits in C++, for the future
    assert ("all_reduce", "data") in calls
    with seen() as calls:  # once, beside the facade
        unisono.all_reduce(torch.ones(100_000))
        if rank == 0:
            unisono.send(torch.ones(1), 1)
        else:
            unisono.recv(0)
    assert [name for name, _ in calls] == ["all_reduce", side], calls


# All of these


OTHERS: list[Check] = [every_call, objects, messages, groups, other_forms]
CALLS: list[Check] = [dtypes, odd_tensors, other_classes, tensors_without_memory, what_gloo_refuses]
OF_UNISONO: list[Check] = [views_of_unisono, differing_calls, what_is_not_there]
PARTS: dict[str, tuple[int, Callable[[int], None] | None, list[Check]]] = {
    "calls": (3, None, [*CALLS, *OTHERS, recorded_once]),
    "modules": (2, None, [ddp, ddp_join, fsdp1, fsdp2, zero, dtensor, compiled]),
    "others": (2, None, [recorded_in_memory, checkpoints, *OF_UNISONO]),
    "on two hosts": (3, on_two_hosts, [is_gloo_s, *OTHERS, ddp, dtensor]),
    "without memory": (2, without_memory, [is_gloo_s, recorded_by_gloo]),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Run each part in one job: a rank takes longer to start than any check."""
    return {
        part: outcomes(checks, size, tmp_path_factory.mktemp("job"), NAME, OF_TORCH, set_up)
        for part, (size, set_up, checks) in PARTS.items()
    }


@pytest.mark.parametrize(
    ("part", "name"),
    [(part, check.__name__) for part, (*_, checks) in PARTS.items() for check in checks],
)
def test_programs_of_torch_run_on_it(jobs: dict[str, dict[str, str]], part: str, name: str) -> None:
    assert not jobs[part][name], jobs[part][name]


# Its life


def start(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size, backend=NAME)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_rank_that_fails_in_a_backward_is_named(how: signal.Signals, tmp_path: Path) -> None:
    error = PeerFailedError if how is signal.SIGKILL else CollectiveTimeoutError

    def fn(rank: int) -> str:
        start(rank, 3, tmp_path)
        module = DistributedDataParallel(nn.Linear(1024, 1024))
        if rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), how)).start()
        with pytest.raises(error) as caught, unisono.deadline(3):
            while True:
                module(torch.ones(4, 1024)).sum().backward()
        ends = FileStore(str(tmp_path / "ends"), 2)
        ends.set(str(rank), "")
        ends.wait(["0", "2"])  # who ends before would be missed, too
        return str(caught.value)

    assert all("rank 1" in text for text in by_hand(fn, 3, killed=1)[::2])


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_timeout_of_a_group_names_who_did_not_come(hosts: int, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        if hosts == 2:
            on_two_hosts(rank)
        store = FileStore(str(tmp_path / "store"), 2)
        limit = timedelta(seconds=2)
        dist.init_process_group(NAME, store=store, rank=rank, world_size=2, timeout=limit)
        late = dist.new_group(timeout=timedelta(seconds=1))
        if rank == 1:
            store.wait(["done"])
            return
        for group in (late, None):
            with pytest.raises(CollectiveTimeoutError, match="rank 1") as caught:
                if hosts == 2:
                    dist.barrier(group)
                dist.all_reduce(torch.ones(5), group=group)
            call = "barrier" if hosts == 2 else "all_reduce SUM of float32[5]"
            assert call in str(caught.value)
        store.set("done", "")

    by_hand(fn)


def held() -> tuple[int, int, int]:
    """Count what this process has: descriptors, threads, memories without a name."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings()


def test_destroying_the_group_leaves_nothing(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        found = []
        for turn in range(3):
            join(tmp_path, rank, 2, name=f"store{turn}", backend=NAME)
            pair = dist.new_group([0, 1])
            for group in (pair, None):
                dist.all_reduce(torch.ones(300_001), group=group)
            if turn == 1:
                dist.destroy_process_group(pair)
            del pair, group
            leave()
            gc.collect()
            found.append(held())
        assert found == [found[0]] * 3
        assert found[0][2] == 0

    by_hand(fn)


def test_a_rank_that_ends_without_destroying_it_has_left(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        start(rank, 2, tmp_path)
        if rank == 1:
            atexit._run_exitfuncs()  # a process of multiprocessing doesn't
            return
        with pytest.raises(PeerFailedError, match="ended its program"):
            dist.barrier()

    by_hand(fn)


# How torch gets to know it


LOADER = """
import importlib.machinery, sys

class Loader:
    def __init__(self, inner): self.inner = inner
    def create_module(self, spec): return self.inner.create_module(spec)
    def exec_module(self, module): self.inner.exec_module(module)

class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if name == "torch.distributed.distributed_c10d":
            spec.loader = Loader(spec.loader)
        return spec

sys.meta_path.insert(0, Finder())
import unisono, torch.distributed
"""


@pytest.mark.parametrize(
    "imports",
    ["import torch, unisono", "import unisono, torch", LOADER],
    ids=["torch first", "unisono first", "by another loader"],
)
def test_importing_unisono_is_enough(imports: str) -> None:
    finders = "import sys; print(*(type(finder).__name__ for finder in sys.meta_path))"
    known = "import torch.distributed as dist; print(dist.is_backend_available('unisono'))"
    before, is_known = run_python("-c", f"{imports}\n{finders}\n{known}").splitlines()
    assert before.count("Registrar") == 1  # for Dynamo, which isn't loaded yet
    assert is_known == "True"


def test_torch_is_told_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 loads and calls it."""
    (point,) = importlib.metadata.entry_points(group="torch.distributed.backends", name=NAME)
    plugins: Any = dist.Backend._plugins
    monkeypatch.delitem(plugins, NAME.upper())
    point.load()()
    assert NAME.upper() in plugins
