"""Clipping of averaged gradients by their norm."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.reductions import all_reduce
from unisono.context import communicator
from unisono.errors import ArgumentError, UnsupportedOperation
from unisono.model.contract import ComputationModel
from unisono.model.training import hooks_of
from unisono.training.same_tensors import as_tensors, is_sharded
from unisono.training.wrapping import averaging_optimizers

# Optimizers whose gradients `_settle` averaged; each with the function that lets its step average.
_settled: weakref.WeakKeyDictionary[Optimizer, Callable[[], None] | None]
_settled = weakref.WeakKeyDictionary()


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    optimizer: Optimizer | None = None,
    scaler: Any = None,
) -> Tensor:
    """Scale the averaged gradients down until their norm is at most `max_norm`.

    Collective over all ranks. Call it between backward and step. Where backward averages, this is
    ``torch.nn.utils.clip_grad_norm_``. Where the optimizer's step averages (Horovod's with options,
    XLA's), the gradients are averaged here first, and the step doesn't average again.

    Args:
        parameters: a module, wrapped or not, a tensor, or an iterable of parameters.
        max_norm: ``math.inf`` to clip nothing.
        norm_type: such as 2.0 or ``math.inf``.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error.
        optimizer: the result of `auto_optim`. Needed with `scaler`, and with a
            ``DistributedOptimizer`` that you created yourself.
        scaler: a ``GradScaler``; it unscales the averaged gradients first.

    Returns:
        The norm of all gradients before clipping, 0-dim, the same on every rank.

    Raises:
        ArgumentError: a scaler is given without an optimizer, or `parameters` has other values.
        UnsupportedOperation: a scaler is given, and the gradients are sharded.

    Example:
        >>> import torch, unisono as idist
        >>> model = idist.auto_model(torch.nn.Linear(2, 1, bias=False))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> norm = idist.clip_grad_norm_(model, 0.5)
        >>> round(norm.item(), 3), round(model.weight.grad.norm().item(), 3)
        (1.414, 0.5)
    """
    tensors = as_tensors(parameters)
    if scaler is not None and optimizer is None:
        raise ArgumentError(
            "scaler= requires optimizer=: pass the optimizer whose gradients are scaled"
        )
    context = communicator()
    if scaler is not None and any(map(is_sharded, tensors)):
        raise UnsupportedOperation(
            context.model.name,
            "GradScaler over sharded gradients",
            "train in bfloat16, which needs no scaler",
        )
    settled = [optimizer] if optimizer is not None else averaging_optimizers(tensors)
    for each in settled:
        _settle(context.model, each)
    if scaler is not None:
        # After averaging, so that all ranks find the same infinities and skip the same steps.
        scaler.unscale_(optimizer)
    # torch's own maximum fails if a rank's part of a gradient is empty.
    if norm_type == math.inf and any(map(is_sharded, tensors)):
        norm = nn.utils.get_total_norm([_largest(tensors)], norm_type, error_if_nonfinite)
        nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
        return norm
    norm = nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite)
    shards: Any = norm
    # The norm of DTensors is a DTensor, of which each rank has a part.
    whole: Tensor = shards.full_tensor() if is_sharded(norm) else norm
    return whole


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest absolute gradient of all ranks, whose shards may be empty."""
    grads: list[Any] = [item.grad.detach() for item in tensors if item.grad is not None]
    parts = [grad.to_local() if is_sharded(grad) else grad for grad in grads]
    largest = [part.abs().amax() for part in parts if part.numel()]
    # A rank without a part contributes 0, which no absolute value is below.
    mine = torch.stack(largest).amax() if largest else tensors[0].new_zeros(())
    return all_reduce(mine, "max")


def _settle(model: ComputationModel, optimizer: Optimizer) -> None:
    """Average gradients now; the next step averages again only if new gradients arrive."""
    _unsettle(optimizer)  # undo an earlier call that no step has followed
    undo = hooks_of(model).settle_gradients(optimizer)
    if undo is None:  # the optimizer's step doesn't average
        return
    if optimizer not in _settled:  # hooks are registered once, and stay
        optimizer.register_step_post_hook(lambda each, *_: _unsettle(each))
        reference = weakref.ref(optimizer)  # parameters must not keep the optimizer alive
        for item in [item for entry in optimizer.param_groups for item in entry["params"]]:
            if item.requires_grad:  # a scaler may skip the step, and its hook
                item.register_post_accumulate_grad_hook(lambda _: _unsettle(reference()))
    _settled[optimizer] = undo


def _unsettle(optimizer: Optimizer | None) -> None:
    """Restore the averaging in the optimizer's step if `_settle` stopped it."""
    # None if the optimizer was deleted; its parameters, whose hooks call this, may live longer.
    undo = None if optimizer is None else _settled.get(optimizer)
    if undo is not None and optimizer is not None:
        _settled[optimizer] = None  # its hooks stay registered, with nothing to undo
        undo()
