"""Averaging and broadcasting of what a training has: exact, alike on all ranks, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as idist
from tests.support.worlds import alone_and_several, several
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError


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
    for _ in range(2):  # again with the buffers of before
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
    if size > 1:
        with pytest.raises(PayloadError, match="isn.t whole"):
            idist.all_reduce_params([torch.tensor([int(rank == 0)])])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)
        self.sometimes = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        y: Tensor = self.used(x) + self.frozen(x)
        return y + self.sometimes(x) if rank == 0 else y


@alone_and_several
def test_gradients_are_averaged_and_skipped_alike() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    net = Net()
    net(torch.full((1, 3), float(rank + 1)), rank).sum().backward()
    net.frozen.weight.grad = torch.full((2, 3), float(rank))  # stale, and none of our business
    idist.all_reduce_grads(net.parameters())
    mean = sum(range(1, size + 1)) / size
    assert net.used.weight.grad is not None
    torch.testing.assert_close(net.used.weight.grad, torch.full((2, 3), mean))
    assert net.unused.weight.grad is None
    assert net.sometimes.bias.grad is not None
    torch.testing.assert_close(net.sometimes.bias.grad, torch.full((2,), 1 / size))
    assert net.frozen.weight.grad.tolist() == [[float(rank)] * 3] * 2


@several
def test_lists_that_differ_are_named() -> None:
    rank = idist.get_rank()
    with pytest.raises(CollectiveMismatchError) as caught:
        idist.all_reduce_params([torch.ones(1), torch.ones(2 + rank)])
    for words in ("from tensor 1 on", "rank 0 has torch.float32[2]", "rank 1 has torch.float32[3]"):
        assert words in str(caught.value)
    for call in (idist.broadcast_params, idist.all_reduce_params):
        with pytest.raises(CollectiveMismatchError, match=r"the lists differ .*nothing there"):
            call([torch.ones(1)] * (1 + rank))  # none waits for what the others lack
    with pytest.raises(CollectiveMismatchError, match=r"torch\.float64"):
        kind = torch.float64 if rank else torch.float32
        idist.all_reduce_grads([torch.ones(1, dtype=kind)])
    assert idist.all_reduce(1) == idist.get_world_size()  # nothing is broken


@several
def test_sparse_gradients_are_refused_on_every_rank() -> None:
    table = nn.Embedding(4, 2, sparse=idist.get_rank() == 1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(PayloadError, match=r"tensor 0 of 1 .* is sparse on ranks \[1\]"):
        idist.all_reduce_grads(table)


@alone_and_several
def test_means_neither_wrap_nor_overflow() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    equal = [2**62 + 8, -(2**63), 2**63 - 1, 1_760_000_000_000_000_000 * 3]
    for _ in range(2):
        tensors = [
            torch.tensor(equal),
            torch.tensor([2**63 - 1 - 2 * rank, -(2**63) + 2 * rank]) if size == 2 else matrix(),
            torch.tensor([2**64 - 1, 5], dtype=torch.uint64),
            torch.tensor([200, 255], dtype=torch.uint8),
            torch.tensor([True, False]),
        ]
        expected = [tensor.clone() for tensor in tensors]
        if size == 2:
            expected[1] = torch.tensor([2**63 - 2, -(2**63) + 1])
        idist.all_reduce_params(tensors)
        for tensor, other in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, other), (tensor, other)
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


def matrix() -> Tensor:
    return torch.arange(6).view(2, 3)


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
    with pytest.raises(PayloadError, match="sharded"):
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
    if rank == 0:  # the others have no state yet
        net(torch.randn(2, 3, generator=generator)).sum().backward()
        optimizer.step()
    idist.broadcast_optimizer_state(optimizer, src=0)
    states = idist.all_gather([optimizer.state_dict()])
    assert optimizer.param_groups[0]["lr"] == 0.1
    for (other,) in states:
        torch.testing.assert_close(other, states[0][0], rtol=0, atol=0)
    assert len(optimizer.state) == 2


@several
def test_optimizers_over_other_groups_are_refused() -> None:
    net = nn.Linear(3, 2, bias=idist.get_rank() == 0)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has groups of"):
        idist.broadcast_optimizer_state(torch.optim.SGD(net.parameters(), lr=0.1))


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
