"""Reduction and broadcast of parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.broadcasts import broadcast, device_for
from unisono.collectives.membership import GroupLike, check_rank, context_and_group
from unisono.collectives.outcomes import together
from unisono.collectives.reductions import all_reduce
from unisono.context import ContextState
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.model.reduction import OpLike, ReduceOp, parse_op
from unisono.payload.pytree import flatten, unflatten
from unisono.payload.tensors import TensorHeader, head_of, is_dense
from unisono.topology import Group
from unisono.training import buckets
from unisono.training.same_tensors import agree, is_integer, is_sharded

Params = nn.Module | Tensor | Iterable[Tensor] | MutableMapping[str, Any]


def all_reduce_params(
    params: Params,
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: OpLike = "mean",
    group: GroupLike = None,
) -> None:
    """Reduce parameters, buffers or any tensors of all ranks, in place.

    Collective over `group`.

    Args:
        params: a module (its parameters), a tensor, a dict or an iterable of dense tensors; the
            same shapes and dtypes in the same order on every rank; changed without autograd.
        coalesce: whether small tensors are reduced together, in a flat buffer for each dtype and
            device, which the context keeps.
        bucket_size_mb: largest size of that buffer in MiB; -1 for the fastest size, at most 16.
        op: as in `all_reduce`. A mean of integers must be a whole number, as the mean of equal
            integers is.
        group: a Group, a list of ranks, or None for all ranks.

    Raises:
        ArgumentError: the operation is unknown, or an item isn't a tensor.
        CollectiveMismatchError: the lists differ between ranks; the message shows the first
            difference (on every rank).
        PayloadError: a tensor is sparse, a mean of integers isn't a whole number, or `op` is the
            mean and a tensor has the dtype uint64 (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.all_reduce_params(torch.nn.Linear(2, 2), op="mean")
    """
    reduce_params(params, coalesce, bucket_size_mb, op, group)


def reduce_params(
    params: Params,
    coalesce: bool,
    bucket_size_mb: float,
    op: OpLike | str,
    group: GroupLike,
    *,
    of_grads: bool = False,
    cuts_means: bool = False,
) -> None:
    """Reduce tensors or their gradients; if `cuts_means`, round means of integers towards 0."""
    # Collective over `group`.
    limit_bytes = _bucket_bytes(coalesce, bucket_size_mb)
    operation = parse_op(op)
    context, group, is_member = context_and_group(group)
    if not is_member:
        return
    name = "all_reduce_grads" if of_grads else "all_reduce_params"
    with context.calls.begin(name, group):
        # Ranks compare this text; it has the bucket size, as other sizes mean other collectives.
        call = f"{name} {operation.name} in buckets of {limit_bytes} bytes"
        works = agree(context, call, params, group, of_grads=of_grads)
        with torch.no_grad():
            if operation is ReduceOp.AVERAGE:
                # Integers are averaged separately, as buckets are multiplied by a fraction.
                integers = [tensor for tensor, _ in works if is_integer(tensor)]
                if integers:
                    _average_integers(context, integers, group, cuts_means)
                works = [work for work in works if not is_integer(work[0])]
            buckets.reduce_all(context, works, operation, limit_bytes, group)


def all_reduce_grads(
    params: Params,
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: OpLike = "mean",
    group: GroupLike = None,
) -> None:
    """Reduce the gradients of parameters over all ranks, in place.

    Collective over `group`.

    Args:
        params: a module (its parameters), a dict or an iterable of parameters; the same on every
            rank. Parameters that are frozen, or have no gradient on any rank, are skipped on all
            ranks. If only some ranks have a gradient of a parameter, it counts as zero on the other
            ranks, where the parameter then gets a gradient.
        coalesce: as in `all_reduce_params`.
        bucket_size_mb: as in `all_reduce_params`.
        op: as in `all_reduce`.
        group: a Group, a list of ranks, or None for all ranks.

    Raises:
        ArgumentError: the operation is unknown, or an item isn't a tensor.
        CollectiveMismatchError: the lists differ between ranks; the message shows the first
            difference (on every rank).
        PayloadError: a gradient is sparse on some rank (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> model = torch.nn.Linear(2, 2)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> idist.all_reduce_grads(model.parameters())
    """
    reduce_params(params, coalesce, bucket_size_mb, op, group, of_grads=True)


def _bucket_bytes(coalesce: bool, bucket_size_mb: float) -> int:
    """Return the size limit of a bucket of several tensors; 0 allows no such bucket."""
    if not coalesce:
        return 0
    if bucket_size_mb == -1:
        return buckets.BUCKET_BYTES
    is_number = isinstance(bucket_size_mb, (int, float)) and not isinstance(bucket_size_mb, bool)
    if not is_number or bucket_size_mb <= 0:
        raise ArgumentError(
            f"bucket_size_mb={bucket_size_mb!r} must be positive, or -1 for the default"
        )
    return int(bucket_size_mb * buckets.MEGABYTE)


def _average_integers(
    context: ContextState, tensors: Sequence[Tensor], group: Group | None, cuts_means: bool
) -> None:
    """Average integers in place; if a mean isn't whole, round it towards 0 or raise."""
    size = context.model.topology.size(group)
    if any(tensor.dtype is torch.uint64 for tensor in tensors):
        raise PayloadError("there is no mean of uint64: convert it to int64, or to a float")
    # Quotients and remainders are summed separately, as the full sum may not fit into 64 bits.
    wide = [tensor.to(torch.int64) for tensor in tensors]
    quotients = [torch.div(item, size, rounding_mode="floor") for item in wide]
    remainders = [item - part * size for item, part in zip(wide, quotients, strict=True)]
    totals = all_reduce([*quotients, *remainders], "SUM", group)
    means = []
    rows = zip(tensors, totals[: len(tensors)], totals[len(tensors) :], strict=True)
    for i, (tensor, total, rest) in enumerate(rows):
        mean, is_whole = total + torch.div(rest, size, rounding_mode="floor"), rest % size == 0
        if not cuts_means and not bool(is_whole.all()):
            raise PayloadError(
                f"the mean over {size} ranks of integer tensor {i} ({tensor.dtype}"
                f"{list(tensor.shape)}) isn't whole: leave the tensor out, or use MAX or SUM"
            )
        # The mean was rounded down; cutting towards 0 rounds a negative mean up.
        means.append(mean + ((mean < 0) & ~is_whole))
    # Copied only now, so that the error above leaves all tensors unchanged.
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.detach().copy_(mean)


def broadcast_params(params: Params, src: int = 0, group: GroupLike = None) -> None:
    """Overwrite a module's parameters and buffers, or any tensors, with those of one rank.

    Collective over `group`.

    Args:
        params: a module (its parameters and buffers), a state dict, a tensor, or an iterable of
            dense tensors; the same shapes and dtypes in the same order on every rank. A dict's
            values besides tensors are replaced by those of `src`, too.
        src: global rank whose values are sent.
        group: a Group, a list of ranks, or None for all ranks.

    Raises:
        ArgumentError: `src` isn't a rank of the group, or a value isn't a tensor.
        CollectiveMismatchError: the lists differ between ranks; the message shows the first
            difference (on every rank).
        PayloadError: a tensor is sparse (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.broadcast_params(torch.nn.BatchNorm1d(2), src=0)
    """
    context, group, is_member = context_and_group(group)
    check_rank(context, group, src, "src")
    if not is_member:
        return
    tensors: object = params
    others: dict[Any, Any] = {}
    if isinstance(params, nn.Module):
        tensors = [*params.parameters(), *params.buffers()]
    elif isinstance(params, MutableMapping):
        tensors = [item for item in params.values() if isinstance(item, Tensor)]
        others = {key: item for key, item in params.items() if not isinstance(item, Tensor)}
    # Ranks compare this text; it tells whether a second collective sends other values.
    call = f"broadcast_params from {src}{' with values besides tensors' if others else ''}"
    works = agree(context, call, tensors, group)
    with torch.no_grad():
        buckets.broadcast_all(context, works, src, group)
    if isinstance(params, MutableMapping) and others:
        # Last, because a value that can't be decoded raises only on the ranks that receive it.
        params.update(broadcast(others, src, group))


def broadcast_optimizer_state(optimizer: Optimizer, src: int = 0, group: GroupLike = None) -> None:
    """Send the state and settings of an optimizer on `src` to every rank.

    Collective over `group`.

    Args:
        optimizer: an optimizer over parameters of the same shapes in the same groups on every
            rank. Only `src` needs a state, for example after it has loaded a checkpoint.
        src: global rank whose state is sent.
        group: a Group, a list of ranks, or None for all ranks.

    Raises:
        ArgumentError: `src` isn't a rank of the group.
        PayloadError: the state has a value that can't be sent (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> model = torch.nn.Linear(2, 2)
        >>> idist.broadcast_optimizer_state(torch.optim.Adam(model.parameters()))
    """
    context, group, is_member = context_and_group(group)
    check_rank(context, group, src, "src")
    if not is_member:
        return
    rank, members = context.model.topology.rank, context.model.topology.members(group)
    call, state = f"broadcast_optimizer_state from {src}", optimizer.state_dict()
    describe = partial(_described, state, rank == src)
    _, facts = together(context, call, describe, group, refusal=f"rank {rank}, {call}: ")
    # A fact is what `_described` returns on a rank; only that of `src` has more than sizes.
    expected, plain, heads = facts[members.index(src)]
    for other, (sizes, *_) in zip(members, facts, strict=True):
        if sizes != expected:
            raise CollectiveMismatchError(
                f"broadcast_optimizer_state: rank {other} has groups of {sizes} parameters, but "
                f"rank {src} has groups of {expected}: create the same optimizer on every rank"
            )
    if rank != src:
        state = _blank_state(context, plain, heads)
    tensors = [leaf for leaf in flatten(state)[0] if isinstance(leaf, Tensor)]
    # Strides aren't sent: the other ranks have created contiguous tensors, and `src` sends copies
    # of those that aren't.
    works = [(tensor.contiguous(), True) for tensor in tensors]
    with torch.no_grad():
        buckets.broadcast_all(context, works, src, group)
    if rank != src:  # last, as a class of the user may reject the state on this rank alone
        optimizer.load_state_dict(state)
        _keep_dtypes(optimizer, state)


def _keep_dtypes(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore values that ``load_state_dict`` cast to a parameter's dtype, such as a momentum."""
    parameters = [each for entry in optimizer.param_groups for each in entry["params"]]
    keys = [key for entry in state["param_groups"] for key in entry["params"]]
    parameter_of = dict(zip(keys, parameters, strict=True))
    # Not all parameters: indexing `optimizer.state` would create a state for those without one.
    for key, values in state["state"].items():
        loaded = optimizer.state[parameter_of[key]]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype != loaded[name].dtype:
                loaded[name] = value


def _described(state: dict[str, Any], is_src: bool) -> tuple[None, Any]:
    """Return an optimizer's group sizes, and on `src` its plain state and tensor headers."""
    # `together` returns None, this rank's value, and the second item of every rank.
    leaves, _ = flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(map(is_sharded, tensors)):
        raise PayloadError(
            "the optimizer state has DTensors, which cannot be broadcast: use save_checkpoint and "
            "load_checkpoint"
        )
    if not all(map(is_dense, tensors)):
        raise PayloadError("the optimizer state has non-dense tensors")
    sizes = [len(item["params"]) for item in state["param_groups"]]
    if not is_src:
        return None, (sizes, None, None)
    heads = {i: head_of(leaf).pack() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    plain = unflatten(state, [None if i in heads else leaf for i, leaf in enumerate(leaves)])
    return None, (sizes, plain, heads)


def _blank_state(
    context: ContextState, plain: dict[str, Any], heads: dict[int, bytes]
) -> dict[str, Any]:
    """Build an optimizer state with uninitialised tensors."""
    # `plain` is the state of `src` with None in place of tensors; `heads` has the packed header of
    # each tensor by its index among the leaves.
    leaves, _ = flatten(plain)
    for i, packed in heads.items():
        head, _ = TensorHeader.unpack(packed)
        leaves[i] = torch.empty(head.shape, dtype=head.dtype, device=device_for(context, head))
    state: dict[str, Any] = unflatten(plain, leaves)
    return state
