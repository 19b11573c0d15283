"""Collectives that reduce the values of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, overload

from torch import Tensor

from unisono.collectives import _dtype_emulation as emulation
from unisono.collectives._scalars import reduce_values, sum_values
from unisono.collectives.call import TensorT, collective
from unisono.collectives.membership import GroupLike
from unisono.collectives.routing import reducer_for, reduces_natively
from unisono.errors import ArgumentError, PayloadError
from unisono.model.reduction import FoldLike, OpLike, ReduceOp, parse_op
from unisono.payload.tensors import plain


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class NumpyScalar(Protocol):
    """A real NumPy scalar. ``tobytes`` excludes tensors, ``is_integer`` arrays."""

    def __float__(self) -> float: ...

    def tobytes(self) -> bytes:
        """Return its bytes."""

    def is_integer(self) -> bool:
        """Return whether it has no fraction."""


Container: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...] | _Dataclass
"""Types reduced leaf by leaf. To a type checker, a TypedDict is a Mapping but not a dict."""
Reducible: TypeAlias = Tensor | complex | NumpyScalar | Container
Plain = TypeVar("Plain", bool, int, float, complex)
"""Types that every operation except a mean returns unchanged; a subclass, such as an IntEnum, comes
back as its base type."""
ContainerT = TypeVar("ContainerT", bound=Container)
Summed = TypeVar("Summed", Tensor, int, float, complex)
"""Types that a sum returns unchanged if it counts bools, so that a sum of bools is an int."""
Inexact = TypeVar("Inexact", Tensor, float, complex)
"""Types that every operation returns unchanged; an int comes back as a float."""


@overload
def all_reduce(
    tensor: Tensor, op: OpLike = "SUM", group: GroupLike = None, *, exact: bool = False
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Plain, op: FoldLike = "SUM", group: GroupLike = None, *, exact: bool = False
) -> Plain: ...


@overload
def all_reduce(
    tensor: ContainerT, op: FoldLike = "SUM", group: GroupLike = None, *, exact: bool = False
) -> ContainerT: ...


@overload
def all_reduce(
    tensor: Reducible,
    op: OpLike = "SUM",
    group: GroupLike = None,
    *,
    exact: bool = False,
    async_op: bool = False,
) -> Any: ...


@collective(folds=True)
def all_reduce(
    tensor: Any,
    op: OpLike = "SUM",
    group: GroupLike = None,
    *,
    exact: bool = False,
    async_op: bool = False,
) -> Any:
    """Reduce a value of every rank to one value on every rank.

    Collective over `group`.

    Args:
        tensor: any payload that can be reduced (the parameter is called `tensor` as in
            ignite.distributed): a tensor [*shape] of any dense dtype and device, the same shape and
            dtype on every rank; or a number; or a dict, list, tuple or dataclass of these, sent as
            one message for all numbers and one for each dtype of tensors.
        op: ``SUM AVERAGE MEAN AVG PRODUCT MIN MAX AND OR XOR``, in upper, lower or mixed case; or
            an operation of torch, such as ``torch.distributed.ReduceOp.SUM``.
        group: a Group, a list of ranks, or None for all ranks.
        exact: whether the sum is exact and then rounded once, to the nearest number, ties to even:
            its bits then don't depend on the number and order of ranks, the backend or the
            container. For SUM of float16, bfloat16, float32, float64, complex64, complex128 and
            numbers; integers and bools are always exact.
            NaN, or infinities of both signs, give NaN; a sum beyond the largest number gives
            infinity; all -0 give -0.
        async_op: whether to return a handle at once; don't change `tensor` until ``wait``.

    Returns:
        A new value of the same shape, dtype, device and container type; int stays an exact int,
        bool stays bool, AVERAGE of ints is a float. `tensor` itself if this rank isn't a member.

    Raises:
        ArgumentError: unknown operation, or `exact` with an operation other than SUM.
        PayloadError: a value isn't a number or tensor, or the operation isn't defined on its
            dtype, such as an exact sum of float8.
        CollectiveMismatchError: containers of different structure (raised on every rank); or, if
            calls are compared, another rank rejected its tensor.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.all_reduce({"loss": 0.5, "seen": 3})
        {'loss': 0.5, 'seen': 3}
    """
    context, members = group
    operation = parse_op(op)
    if exact:
        _check_sum(operation)
        return partial(sum_values, context, "all_reduce SUM exact", tensor, members)
    if not isinstance(tensor, Tensor):
        call = f"all_reduce {operation.name}"
        return partial(reduce_values, context, call, tensor, operation, members)
    emulation.check_reducible(tensor, operation)
    if async_op:
        copy = emulation.private_copy(context, tensor)
        context.settle(members)  # queued calls must finish before the library starts this one
        started = emulation.start_all_reduce(context, copy, operation, members)
        return started.then(lambda total: total.to(tensor.device))
    return partial(emulation.all_reduce, context, tensor, operation, members)


def _check_sum(op: ReduceOp) -> None:
    """Raise if `exact` is set for another operation than SUM."""
    if op is ReduceOp.SUM:
        return
    if op is ReduceOp.AVERAGE:
        advice = "divide the exact sum by the number of ranks"
    elif op is ReduceOp.PRODUCT:
        advice = "there is no exact product"
    else:
        advice = f"{op.name} never rounds, so call it without `exact`"
    raise ArgumentError(f"exact=True is for SUM, not for {op.name}: {advice}")


@overload
def exact_sum(terms: Tensor, group: GroupLike = None) -> Tensor: ...


@overload
def exact_sum(terms: ContainerT, group: GroupLike = None) -> ContainerT: ...


@overload
def exact_sum(
    terms: Tensor | Container, group: GroupLike = None, *, async_op: bool = False
) -> Any: ...


@collective()
def exact_sum(terms: Any, group: GroupLike = None, *, async_op: bool = False) -> Any:
    """Sum the terms of all ranks exactly, independent of their distribution over the ranks.

    Collective over `group`.

    Args:
        terms: a tensor [k, *shape] of k terms, or a dict, list, tuple or dataclass of these, with
            the same k for all its tensors. k may differ between ranks and may be 0; `shape` and
            dtype may not. Dtypes are those of `all_reduce` with `exact`.
        group: as in `all_reduce`.
        async_op: whether to return a handle at once; don't change `terms` until ``wait``.

    Returns:
        A new tensor [*shape] of the same dtype and device, the same on every rank, or a container
        of these: the sum as `all_reduce` with `exact` rounds it, +0 if there are no terms.
        `terms` itself if this rank isn't a member.

    Raises:
        PayloadError: a value isn't a tensor, has no dim 0, has a k that differs from this rank's
            other tensors, or has a dtype without an exact sum (on every rank, naming the rank).
        CollectiveMismatchError: shapes, dtypes or containers differ (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.exact_sum(torch.tensor([[1e20], [1.0], [-1e20]]))
        tensor([1.])
    """
    context, members = group
    return partial(sum_values, context, "exact_sum", terms, members, are_terms=True)


@overload
def all_reduce_(tensor: TensorT, op: OpLike = "SUM", group: GroupLike = None) -> TensorT: ...


@overload
def all_reduce_(
    tensor: Tensor, op: OpLike = "SUM", group: GroupLike = None, *, async_op: bool = False
) -> Any: ...


@collective(folds=True)
def all_reduce_(
    tensor: Tensor, op: OpLike = "SUM", group: GroupLike = None, *, async_op: bool = False
) -> Any:
    """Reduce a tensor of every rank in place.

    Collective over `group`.

    Args:
        tensor: [*shape], any dense dtype and device, the same shape and dtype on every rank. If it
            requires grad, it is changed without autograd.
        op: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: whether to return a handle at once.

    Returns:
        `tensor` itself, or a handle of it.

    Raises:
        ArgumentError: unknown operation.
        PayloadError: `tensor` isn't a dense tensor, or the operation isn't defined on its dtype.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.all_reduce_(torch.ones(2))
        tensor([1., 1.])
    """
    context, members = group
    operation = parse_op(op)
    if not isinstance(tensor, Tensor):
        raise PayloadError(f"all_reduce_ works in place on a tensor, not on {_kind(tensor)}")
    emulation.check_reducible(tensor, operation)
    if async_op:
        context.settle(members)  # before the library starts this call
    # Before the first call over a group, `reducer_for` would wait for its other ranks.
    knows_plane = not async_op or context.control.is_connected(members)
    plane = reducer_for(context, tensor, members)[0] if knows_plane else None
    is_direct = (  # whether the plane can reduce the user's own memory
        plane is not None
        and reduces_natively(plane, tensor, operation)
        and tensor.device == context.model.transport_device
        and tensor.is_contiguous()
        # A tensor of 0 or 1 elements counts as contiguous whatever its strides, but viewing it as
        # bytes needs stride 1.
        and (tensor.numel() > 1 or tensor.stride()[-1:] in ((), (1,)))
        and not (tensor.is_neg() or tensor.is_conj())
    )
    if not is_direct:  # else it is contiguous, so it can be overwritten
        emulation.check_writable(tensor, "all_reduce_")
    if async_op:
        # Other planes run in the background, on a copy.
        is_direct = is_direct and plane is context.model
        values = plain(tensor) if is_direct else emulation.private_copy(context, tensor)
        started = emulation.start_all_reduce(context, values, operation, members)
        return started.then(partial(_written_back, tensor, values if is_direct else None))

    def call() -> Tensor:
        values = plain(tensor) if is_direct else tensor
        total = emulation.all_reduce(context, values, operation, members, is_ours=is_direct)
        return _written_back(tensor, values, total)

    return call


def _written_back(tensor: Tensor, view: Tensor | None, total: Tensor) -> Tensor:
    """Return `tensor` with the values of `total`, which may be its own `view` already."""
    return tensor if total is view else emulation.overwrite(tensor, total)


@overload
def reduce(
    value: Tensor, dst: int = 0, op: OpLike = "SUM", group: GroupLike = None
) -> Tensor | None: ...


@overload
def reduce(
    value: Plain, dst: int = 0, op: FoldLike = "SUM", group: GroupLike = None
) -> Plain | None: ...


@overload
def reduce(
    value: ContainerT, dst: int = 0, op: FoldLike = "SUM", group: GroupLike = None
) -> ContainerT | None: ...


@overload
def reduce(
    value: Reducible,
    dst: int = 0,
    op: OpLike = "SUM",
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any: ...


@collective(root="dst")
def reduce(
    value: Any, dst: int = 0, op: OpLike = "SUM", group: GroupLike = None, *, async_op: bool = False
) -> Any:
    """Reduce a value of every rank to one value on one rank.

    Collective over `group`.

    Args:
        value: what `all_reduce` takes.
        dst: global rank that receives the result.
        op: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: whether to return a handle at once.

    Returns:
        As `all_reduce` on `dst`, None on the other members, `value` itself on a rank that isn't a
        member.

    Raises:
        ArgumentError: unknown operation, or `dst` is not a rank of this job.
        GroupMembershipError: `dst` isn't a member of the group (on every rank).
        PayloadError: as in `all_reduce`.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.reduce(2, dst=0, op="MAX")
        2
    """
    context, members = group
    operation = parse_op(op)
    if isinstance(value, Tensor):
        emulation.check_reducible(value, operation)
        return partial(emulation.reduce, context, value, dst, operation, members)

    def call() -> Any:
        # The exchange that compares the numbers brings them to all ranks anyway.
        name = f"reduce {operation.name} to {dst}"
        total = reduce_values(context, name, value, operation, members)
        return total if context.model.topology.rank == dst else None

    return call


@overload
def reduce_scatter(tensor: Tensor, op: OpLike = "SUM", group: GroupLike = None) -> Tensor: ...


@overload
def reduce_scatter(
    tensor: Tensor, op: OpLike = "SUM", group: GroupLike = None, *, async_op: bool = False
) -> Any: ...


@collective()
def reduce_scatter(
    tensor: Tensor, op: OpLike = "SUM", group: GroupLike = None, *, async_op: bool = False
) -> Any:
    """Reduce a tensor of every rank and return this rank's part.

    Collective over `group`.

    Args:
        tensor: [n*k, ...] with n the number of members, the same shape and dtype on every rank.
        op: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: whether to return a handle at once.

    Returns:
        [k, ...], the part of the result at this rank's position in the group, same dtype and
        device, new memory; `tensor` itself if this rank isn't a member.

    Raises:
        ArgumentError: unknown operation.
        PayloadError: `tensor` isn't a dense tensor, or its dim 0 isn't a multiple of n.
        CollectiveMismatchError: another rank rejected its tensor, if calls are compared.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.reduce_scatter(torch.ones(2))
        tensor([1., 1.])
    """
    context, members = group
    operation, size = parse_op(op), context.model.topology.size(members)
    if isinstance(tensor, Tensor):
        emulation.check_reducible(tensor, operation)
    if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.shape[0] % size:
        raise PayloadError(
            f"reduce_scatter takes a tensor whose dim 0 is a multiple of {size}, not "
            f"{_kind(tensor)}"
        )
    return partial(emulation.reduce_scatter, context, tensor, operation, members)


def _kind(value: object) -> str:
    """Return a value's type for messages, or a tensor's shape."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__qualname__}"
