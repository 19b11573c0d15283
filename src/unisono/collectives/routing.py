"""Choice of the plane that carries a tensor; no other module decides it.

It is the control plane, memory that ranks of one host share, or the model's own library.
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

Plane = ComputationModel | HostCollectives
"""Collectives of tensors: the data plane, or memory that the ranks of a host share."""
Reducer = ComputationModel | MemoryCollectives
"""Implementations of `all_reduce`: a plane, or both planes in two levels."""


def fits_exchange(
    context: ContextState, tensor: Tensor, group: Group | None, *, folds: bool = False
) -> bool:
    """Return whether an exchange of the control plane carries a tensor."""
    # Local, and the same on every rank for tensors of the same dtype, shape and device.
    if not tensor.is_cpu:
        return False
    return tensor.numel() * tensor.itemsize <= context.control.inline_bytes(group, folds)


def plane_for(context: ContextState, group: Group | None) -> Plane:
    """Return the plane that carries tensors too large for an exchange."""
    # Local, or collective at creation of the memory that ranks of one host share. They share none
    # if the transport device is an accelerator, so the choice doesn't depend on the tensor.
    memory = context.control.memory(group)
    if type(memory) is HostCollectives:  # memory in two levels only reduces
        plane_is("memory")
        return memory
    plane_is("data")
    return context.model


def reducer_for(context: ContextState, tensor: Tensor, group: Group | None) -> Reducer | None:
    """Return the plane that carries an `all_reduce`, None for an exchange."""
    # Local or collective as `plane_for` is.
    if not tensor.is_cpu:
        plane_is("data")
        return context.model
    memory = context.control.memory(group)
    if type(memory) is HostCollectives:
        plane_is("memory")
        return memory
    # The test of `fits_exchange`, inline to save the call.
    if tensor.numel() * tensor.itemsize <= context.control.inline_bytes(group, True):
        return None
    plane_is("data")
    return context.model if memory is None else memory


def reduces_natively(plane: Reducer, tensor: Tensor, op: ReduceOp) -> bool:
    """Return whether `plane` itself supports this operation on this dtype."""
    # MIN and MAX of floats are emulated everywhere, because libraries treat NaN differently.
    if tensor.dtype not in plane.dtypes or is_order_of_floats(tensor, op):
        return False
    if isinstance(plane, MemoryCollectives):
        return folds(tensor.dtype, op)
    return op is not ReduceOp.AVERAGE  # by the contract, models never get AVERAGE
