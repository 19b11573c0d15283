"""Choice of the plane that carries a tensor; no other module decides it.

The planes: the control plane, memory that ranks of one host share, or the model's own library.
"""

from __future__ import annotations

from torch import Tensor

from unisono.context import ContextState
from unisono.host.collectives import HostCollectives, folds
from unisono.host.hierarchical import MemoryCollectives
from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp, is_order_of_floats
from unisono.recording.records import plane_is
from unisono.topology import Group
from unisono.tracebacks import hides

__tracebackhide__ = hides

Carrier = ComputationModel | HostCollectives
"""Collectives of tensors: the data plane, or memory that the ranks of a host share."""
Reducer = ComputationModel | MemoryCollectives
"""Implementations of `all_reduce`: one of those, or both in two levels."""


def fits_round(
    context: ContextState, tensor: Tensor, group: Group | None, *, folds: bool = False
) -> bool:
    """Return whether an exchange of the control plane carries a tensor."""
    # Local, and the same on every rank for tensors of the same dtype, shape and device.
    if not tensor.is_cpu:
        return False
    return tensor.numel() * tensor.itemsize <= context.control.inline_bytes(group, folds)


def memory_of(
    context: ContextState, tensor: Tensor, group: Group | None
) -> MemoryCollectives | None:
    """Return the memory that carries the sum of a tensor, None if there is none."""
    # Local, as `fits_round`; collective at creation of the memory that ranks of one host share.
    return context.control.memory(group) if tensor.is_cpu else None


def carry(context: ContextState, tensor: Tensor, group: Group | None) -> Carrier:
    """Return the plane that carries a tensor too large for an exchange."""
    memory = context.control.memory(group) if tensor.is_cpu else None
    if type(memory) is HostCollectives:  # memory in two levels only reduces
        plane_is("memory")
        return memory
    plane_is("data")
    return context.model


def route(context: ContextState, tensor: Tensor, group: Group | None) -> Reducer | None:
    """Return the plane that carries an `all_reduce`, None for an exchange."""
    if not tensor.is_cpu:
        plane_is("data")
        return context.model
    memory = context.control.memory(group)
    if type(memory) is HostCollectives:
        plane_is("memory")
        return memory
    # As `fits_round`, without its call.
    if tensor.numel() * tensor.itemsize <= context.control.inline_bytes(group, True):
        return None
    plane_is("data")
    return context.model if memory is None else memory


def is_direct(carrier: Reducer, tensor: Tensor, op: ReduceOp) -> bool:
    """Return whether `carrier` natively supports this operation on this dtype."""
    if tensor.dtype not in carrier.dtypes or is_order_of_floats(tensor, op):
        return False
    if isinstance(carrier, MemoryCollectives):
        return folds(tensor.dtype, op)
    return op is not ReduceOp.AVERAGE  # by the contract, models never get it
