"""Averaging and broadcasting in training: exact, equal on all ranks, or refused.

Lists may have the same memory several times, and threads don't share buffers.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as idist
from tests.support.worlds import alone_and_several, several
from unisono.compat import mmengine
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.training.same_tensors import OVERLAPS, aliases


def tensors_of(rank: int) -> list[Tensor]:
    """Make tensors of many kinds, one larger than a flat buffer's threshold."""
    made = [
        torch.full((3, 5), float(rank)),
        torch.full((), 2.0**rank, dtype=torch.float64),
        torch.arange(600_000, dtype=torch.float32) + rank,
        torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last),
        torch.full((4, 6), float(rank)).t(),
        torch.full((7,), float(rank), dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor([5, 2**53 + 1]),
        torch.full((300, 3, 24, 24), float(rank)).to(memory_format=torch.channels_last),
        torch.full((5,), 1j * rank, dtype=torch.complex64),
    ]
    made[0].requires_grad_()
    return made


@alone_and_several
@pytest.mark.parametrize(("coalesce", "bucket_mb"), [(True, -1), (True, 0.01), (False, -1)])
def test_params_have_the_mean_of_all_ranks(coalesce: bool, bucket_mb: float) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    for _ in range(2):  # the second time with the buffers of the first
        tensors = tensors_of(rank)
        strides = [tensor.stride() for tensor in tensors]
        idist.all_reduce_params(iter(tensors), coalesce, bucket_mb)
        everyone = [tensors_of(other) for other in range(size)]
        for i, tensor in enumerate(tensors):
            column = [row[i].detach() for row in everyone]
            if tensor.dtype is torch.int64:
                assert tensor.tolist() == column[0].tolist()
                continue
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            mean = torch.stack(column).to(wide).mean(0)
            torch.testing.assert_close(tensor.detach().to(wide), mean, rtol=1e-6, atol=0)
            assert tensor.stride() == strides[i]
    assert tensors[0].requires_grad


@several
def test_other_operations() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    op: Any
    for op, expected in (("sum", sum(range(size))), ("MAX", size - 1), ("min", 0)):
        tensors = [torch.full((4,), rank), torch.full((300_000,), float(rank))]
        idist.all_reduce_params(tensors, op=op)
        assert [set(tensor.tolist()) for tensor in tensors] == [{expected}, {expected}]
    with pytest.raises(PayloadError, match="isn.t whole"):
        idist.all_reduce_params([torch.tensor([int(rank == 0)])])


@alone_and_several
def test_gradients_are_averaged_and_skipped_alike() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    used, unused, sometimes, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    frozen.requires_grad_(False)
    for parameter in (used, frozen, sometimes)[: 3 if rank == 0 else 2]:
        parameter.grad = torch.full((2,), rank + 1.0)  # a frozen parameter gets a stale one
    idist.all_reduce_grads(iter([used, unused, sometimes, frozen]))
    mean = sum(range(1, size + 1)) / size
    torch.testing.assert_close(used.grad, torch.full((2,), mean))
    assert unused.grad is None
    torch.testing.assert_close(sometimes.grad, torch.full((2,), 1 / size))
    assert frozen.grad is not None
    assert frozen.grad.tolist() == [rank + 1.0] * 2


@several
def test_lists_that_differ_are_named() -> None:
    rank = idist.get_rank()
    with pytest.raises(CollectiveMismatchError) as caught:
        idist.all_reduce_params([torch.ones(1), torch.ones(2 + rank)])
    for words in ("from tensor 1 on", "rank 0 has torch.float32[2]", "rank 1 has torch.float32[3]"):
        assert words in str(caught.value)
    for call in (idist.broadcast_params, idist.all_reduce_params):
        with pytest.raises(CollectiveMismatchError, match=r"the lists differ .*nothing there"):
            call([torch.ones(1)] * (1 + rank))  # no rank waits for tensors that another lacks
    with pytest.raises(CollectiveMismatchError, match=r"torch\.float64"):
        kind = torch.float64 if rank else torch.float32
        idist.all_reduce_grads([torch.ones(1, dtype=kind)])
    net = nn.Linear(3, 2, bias=rank == 0)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has groups of"):
        idist.broadcast_optimizer_state(torch.optim.SGD(net.parameters(), lr=0.1))
    table = nn.Embedding(4, 2, sparse=rank == 1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(PayloadError, match=r"tensor 0 of 1 .* is sparse on ranks \[1\]"):
        idist.all_reduce_grads(table)
    assert idist.all_reduce(1) == idist.get_world_size()  # the ranks are still in step


@alone_and_several
def test_means_neither_wrap_nor_overflow() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    equal = [
        torch.tensor([2**60 + 8, -(2**61), 2**61 - 1, 1_760_000_000_000_000_000]),
        torch.tensor([200, 255], dtype=torch.uint8),
        torch.tensor([True, False]),
    ]
    equal.append(torch.tensor([2**62 + 8, 2**63 - 1, -(2**63), -(2**63) + 1]))
    middle = torch.tensor([2**60 - size, size - 1 - 2**60])
    for _ in range(2):
        mine = torch.tensor([2**60 - 1 - 2 * rank, -(2**60) + 2 * rank])
        tensors = [mine, *(tensor.clone() for tensor in equal)]
        idist.all_reduce_params(tensors)
        for tensor, expected in zip(tensors, [middle, *equal], strict=True):
            assert torch.equal(tensor, expected), (tensor, expected)
    with pytest.raises(PayloadError, match="no mean of uint64"):
        idist.all_reduce_params([torch.tensor([5], dtype=torch.uint64)])
    largest = {torch.float16: 40000.0, torch.bfloat16: 2e38, torch.float32: 2e38}
    for dtype, value in {**largest, torch.float64: 1.5e308}.items():
        for length in (3, 600_000):
            tensor = torch.full((length,), value, dtype=dtype)
            parameter = nn.Parameter(torch.zeros(length, dtype=dtype))
            parameter.grad = tensor.clone()
            idist.all_reduce_params([tensor])
            idist.all_reduce_grads([parameter])
            wide = torch.full((length,), value, dtype=dtype).double()
            torch.testing.assert_close(tensor.double(), wide, rtol=1e-2, atol=0)
            torch.testing.assert_close(parameter.grad.double(), wide, rtol=1e-2, atol=0)


@several
def test_another_call_is_told_on_every_rank_and_the_ranks_stay_in_step() -> None:
    rank = idist.get_rank()
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pairs: list[tuple[Any, Any]] = [
        (lambda: idist.all_reduce_params(net), idist.barrier),
        (lambda: idist.all_reduce_grads(net), lambda: idist.all_reduce_params(net)),
        (lambda: idist.all_reduce_params(net, op="max"), lambda: idist.all_reduce_params(net)),
        (lambda: idist.all_reduce_params(net, False), lambda: idist.all_reduce_params(net)),
        (lambda: idist.broadcast_params(net, src=1), lambda: idist.broadcast_params(net)),
        (lambda: idist.broadcast_optimizer_state(optimizer), lambda: idist.all_gather(1)),
        (lambda: idist.broadcast_params({"epoch": 1}), lambda: idist.broadcast_params({})),
    ]
    for first, second in pairs:
        with pytest.raises(CollectiveMismatchError) as caught:
            (first if rank == 0 else second)()
        assert caught.value.is_in_step
        assert idist.all_gather(rank) == list(range(idist.get_world_size()))
    with pytest.raises(ArgumentError if rank == 0 else PayloadError, match="item 0 is a str"):
        idist.all_reduce_params(["x"] if rank == 0 else [torch.ones(1)])  # type: ignore[list-item]
    assert idist.all_gather(rank) == list(range(idist.get_world_size()))


@pytest.mark.ranks(2, on="gloo")
def test_sharded_tensors_are_refused_or_put_together() -> None:
    local_rank = idist.get_local_rank()
    torch.manual_seed(0)
    net = idist.auto_model(nn.Linear(64, 64), wrapper="fsdp")
    net(torch.ones(4, 64) * (local_rank + 1)).sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert hasattr(norm, "device_mesh")
    full_norm = float(norm.full_tensor())
    assert idist.reduce_dict({"loss": 0.5, "norm": norm}, "max") == {"loss": 0.5, "norm": full_norm}
    assert idist.reduce_dict({"norm": norm})["norm"] == full_norm
    assert float(idist.reduce_mean(norm)) == full_norm
    assert float(idist.reduce_sum(norm)) == 2 * full_norm
    with pytest.raises(CollectiveMismatchError):
        idist.reduce_dict({"norm": norm if local_rank else full_norm})
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.step()
    before = [item.to_local().clone() for item in net.parameters()]  # type: ignore[attr-defined]
    for call in (idist.all_reduce_grads, idist.all_reduce_params, idist.broadcast_params):
        with pytest.raises(PayloadError, match=r"tensor 0 .* is sharded, a DTensor on ranks \["):
            call(net)
    with pytest.raises(PayloadError, match="has DTensors"):
        idist.broadcast_optimizer_state(optimizer)
    after = [item.to_local() for item in net.parameters()]  # type: ignore[attr-defined]
    assert all(map(torch.equal, before, after))


@alone_and_several
def test_broadcast_of_a_module_and_of_a_state() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    src = size - 1
    net = nn.Sequential(nn.Linear(2, 600_000), nn.BatchNorm1d(3))
    with torch.no_grad():
        for item in (*net.parameters(), *net.buffers()):
            item.fill_(rank)
    idist.broadcast_params(net, src)
    for item in (*net.parameters(), *net.buffers()):
        assert bool((item == src).all())
    state: dict[str, Any] = {"w": torch.full((2,), rank, dtype=torch.int16), "epoch": f"e{rank}"}
    idist.broadcast_params(state, src)
    assert state["w"].tolist() == [src, src]
    assert state["epoch"] == f"e{src}"


@alone_and_several
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_broadcast_of_an_optimizer(kind: Any) -> None:
    rank = idist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    net = nn.Linear(3, 2)
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(net.parameters(), lr=0.1 * (rank + 1), **extra)
    if rank == 0:  # other ranks have no state yet
        net(torch.randn(2, 3, generator=generator)).sum().backward()
        optimizer.step()
    idist.broadcast_optimizer_state(optimizer, src=0)
    states = idist.all_gather([optimizer.state_dict()])
    assert optimizer.param_groups[0]["lr"] == 0.1
    for (other,) in states:
        torch.testing.assert_close(other, states[0][0], rtol=0, atol=0)
    assert len(optimizer.state) == 2


@several
def test_the_state_of_an_optimizer_keeps_its_dtype() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    unused = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([unused, parameter], lr=0.1, momentum=0.9)
    if idist.get_rank() == 0:
        optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 1.001)
    idist.broadcast_optimizer_state(optimizer)
    found = optimizer.state[parameter]["momentum_buffer"]
    assert torch.equal(found, torch.full((2,), 1.001))
    assert unused not in optimizer.state


def test_bad_arguments_are_refused_at_size_1_too() -> None:
    with pytest.raises(ArgumentError, match="unknown reduction"):
        idist.all_reduce_params([torch.ones(1)], op="NOPE")  # type: ignore[arg-type]
    for size in (0, -2, "1", True):
        with pytest.raises(ArgumentError, match="bucket_size_mb"):
            idist.all_reduce_params([torch.ones(1)], bucket_size_mb=size)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="item 1 is a str"):
        idist.all_reduce_params([torch.ones(1), "x"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="src=1"):
        idist.broadcast_params([torch.ones(1)], src=1)
    with pytest.raises(PayloadError, match="sparse"):
        idist.all_reduce_params([torch.ones(2, 2).to_sparse()])


@pytest.mark.ranks(3, on="threads")
def test_groups_and_those_who_are_no_members() -> None:
    rank = idist.get_rank()
    tensor = torch.tensor([float(rank)])
    idist.all_reduce_params([tensor], group=[0, 2])
    assert tensor.item() == (1 if rank in (0, 2) else rank)


@pytest.mark.ranks(2, on="threads")
def test_extra_memory_is_one_bucket() -> None:
    from unisono.context import current

    tensors = [torch.ones(100_000) for _ in range(200)]  # 80 MB
    idist.all_reduce_params(tensors)
    kept = sum(buffer.nbytes for buffer in current().flat_buffers.values())
    assert 0 < kept <= 16 * 2**20


@pytest.mark.parametrize(
    ("make", "owners"),
    [
        (lambda w: [w, w], [0, 0]),
        (lambda w: [w, w.t()], [0, 0]),
        (lambda w: [w[1:3], torch.ones(1), w], [2, 1, 2]),
        (lambda w: [w[:2], w[2:]], [0, 1]),
        (lambda w: [w[:, :2], w[:, 2:]], [0, OVERLAPS]),
        (lambda w: [w[::2], w[1::2]], [0, OVERLAPS]),
        (lambda w: [w.diagonal(), w], [1, 1]),
        (lambda w: [w[:2], w[1:]], [0, OVERLAPS]),
        (lambda w: [w, w.view(torch.int32)], [0, OVERLAPS]),
        (lambda w: [w[0, :1].expand(3)], [OVERLAPS]),
        (lambda w: [w.view(-1).as_strided((2, 4), (2, 1))], [OVERLAPS]),
        (lambda w: [w[:0], w[:0]], [0, 1]),
        (lambda w: [w, torch.zeros(4, 6)], [0, 1]),
    ],
)
def test_what_belongs_to_what(make: Any, owners: list[int]) -> None:
    tensors = make(torch.zeros(4, 6))
    assert aliases(tensors, tensors) == owners


class Tied(nn.Module):
    """A language model whose embedding and head share a weight; a large one is sent alone."""

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
    for givers, expected in ((size, float(total)), (1, 1.0)):  # ranks with a gradient
        weight.grad = torch.full_like(weight, rank + 1.0) if rank < givers else None
        idist.all_reduce_grads(named, op="sum")
        assert weight.grad is not None
        assert torch.unique(weight.grad).tolist() == [expected]


@several
def test_memory_that_overlaps_in_part_is_refused_on_every_rank() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    matrix = torch.zeros(4, 6)
    parts = [matrix[:2], matrix[1:3] if rank == 1 else matrix[2:]]
    with pytest.raises(PayloadError, match=r"tensor \d of 2 .* overlaps another .* on ranks \[1\]"):
        idist.all_reduce_params(parts)
    text = "overlaps another tensor of the list in memory, or itself"
    with pytest.raises(PayloadError, match=text):
        idist.broadcast_params([torch.zeros(1).expand(3)])
    same = torch.zeros(3)
    with pytest.raises(CollectiveMismatchError, match="the memory of tensor 0"):
        idist.all_reduce_params([same, same if rank == 0 else torch.zeros(3)])
    columns = torch.full((3, 4), rank + 1.0)
    with pytest.raises(PayloadError, match="give .* the tensor that both are views of"):
        idist.all_reduce_params([columns[:, :1], columns[:, 1:]], op="sum")
    idist.all_reduce_params([columns[:, :1], columns], op="sum")
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
