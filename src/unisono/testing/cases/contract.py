"""Agreement of a model's members with the derived ones, which are the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.context import communicator
from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.testing.cases._law import law, same, tensor_of


def _mine(model: ComputationModel, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Create this rank's input for a member of the model."""
    return tensor_of(model.topology.rank, shape, dtype).to(model.transport_device)


def _ops(dtype: torch.dtype) -> list[ReduceOp]:
    """List the operations that the library requests from a model for a dtype."""
    if dtype.is_floating_point:
        return [ReduceOp.SUM, ReduceOp.PRODUCT]  # models get MIN and MAX of floats as integers
    return [op for op in ReduceOp if op is not ReduceOp.AVERAGE]


def _agree(model: ComputationModel, got: Tensor, expected: Tensor, what: Any) -> None:
    """Check that a result has the expected bits, and is on the model's transport device."""
    wanted = torch.empty(0, device=model.transport_device).device  # a tensor's device has an index
    assert got.device == wanted, f"{what}: got a tensor of device {got.device}, wanted {wanted}"
    same(got.cpu(), expected.cpu(), what)


@law()
def all_gather_stacks_in_rank_order_for_every_declared_dtype(rank: int, size: int) -> None:
    model = communicator().model
    for dtype in sorted(model.dtypes, key=str):
        for shape in ((), (3,), (2, 3), (0, 2)):
            rows = model.all_gather(_mine(model, shape, dtype))
            expected = torch.stack([tensor_of(r, shape, dtype) for r in range(size)])
            _agree(model, rows, expected, (dtype, shape))


def _all_reduces_agree(
    model: ComputationModel, shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp
) -> None:
    expected = ComputationModel.all_reduce(model, _mine(model, shape, dtype), op)
    got = model.all_reduce(_mine(model, shape, dtype), op)
    _agree(model, got, expected, (dtype, op, shape))
    handle = model.start_all_reduce(_mine(model, shape, dtype), op)
    if handle is not None:
        _agree(model, handle.wait(), expected, (dtype, op, shape, "async"))


@law()
def reductions_agree_with_the_derived_ones(rank: int, size: int) -> None:
    model = communicator().model
    derived = ComputationModel.all_reduce
    for dtype in sorted(model.dtypes, key=str):
        for op in _ops(dtype):
            for shape in ((), (5,), (0,)):
                _all_reduces_agree(model, shape, dtype, op)
            part = model.reduce_scatter(_mine(model, (size, 3), dtype), op)
            expected = derived(model, _mine(model, (size, 3), dtype), op)[rank]
            _agree(model, part, expected, (dtype, op, "reduce_scatter"))
            total = model.reduce(_mine(model, (3,), dtype), size - 1, op)
            expected = derived(model, _mine(model, (3,), dtype), op)
            assert (total is None) is (rank != size - 1), f"{dtype} {op} reduce: {total}"
            if total is not None:
                _agree(model, total, expected, (dtype, op, "reduce"))
    for dtype in (torch.int8, torch.uint8, torch.int16):  # vectorised sums wrap around, too
        if dtype in model.dtypes:
            most = torch.full((40,), torch.iinfo(dtype).max, dtype=dtype)
            # A copy, as a model may overwrite its arguments.
            got = model.all_reduce(most.to(model.transport_device, copy=True), ReduceOp.SUM)
            _agree(model, got, fold_tensors(ReduceOp.SUM, [most] * size), dtype)


@law()
def movements_agree_with_the_derived_ones(rank: int, size: int) -> None:
    model = communicator().model
    for dtype in sorted(model.dtypes, key=str):
        for root in range(size):
            got = model.broadcast(_mine(model, (4,), dtype), root)
            _agree(model, got, tensor_of(root, (4,), dtype), (dtype, root, "broadcast"))
            rows = tensor_of(root, (size, 2), dtype).to(model.transport_device)
            into = torch.empty(2, dtype=dtype, device=model.transport_device)
            got = model.scatter(rows if rank == root else None, into, root)
            _agree(model, got, tensor_of(root, (size, 2), dtype)[rank], (dtype, root, "scatter"))
        expected = ComputationModel.all_to_all(model, _mine(model, (size, 2), dtype))
        _agree(model, model.all_to_all(_mine(model, (size, 2), dtype)), expected, dtype)


@law()
def exchange_carries_blobs_of_every_length(rank: int, size: int) -> None:
    model = communicator().model
    for length in (0, 1, 247, 248, 249, 5000):  # a frame has room for 248 bytes
        blobs = [bytes([r]) * length for r in range(size)]
        assert model.exchange(blobs[rank]) == blobs, length
        # Even if only the last rank needs a second round, all must take part in it.
        skewed = [bytes([r]) * (length if r == size - 1 else r) for r in range(size)]
        assert model.exchange(skewed[rank]) == skewed, length
        assert ComputationModel.exchange(model, skewed[rank]) == skewed, length


@law()
def a_context_keeps_its_identity(rank: int, size: int) -> None:
    model = communicator().model
    assert model.is_alive()
    assert communicator().model is model
    assert model.topology == model.topology
    # `backends` doesn't list combinations of them, such as cpu:gloo,cuda:nccl.
    assert model.name and model.backend in model.backends or ":" in model.backend
