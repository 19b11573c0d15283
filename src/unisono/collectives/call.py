"""What collectives have in common: how they end, and the round in which calls are compared."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

from torch import Tensor

from unisono.context import ContextState, left_half_way
from unisono.control.signatures import pack, unpack
from unisono.errors import CollectiveMismatchError, UnisonoError
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.payload.memory import from_bytes, to_bytes
from unisono.topology import Group, name_of
from unisono.tracebacks import hides

__all__ = ("check", "collective", "compares", "fold", "introduce", "refuse", "signature", "swap")

__tracebackhide__ = hides

_LONGEST_CALL = 500


def swap(context: ContextState, call: str, blob: bytes, group: Group | None) -> list[bytes]:
    """Give every rank the blob of every rank, if all made the same call.

    Collective over `group`.

    Args:
        context: carries the blobs.
        call: the operation and all that must agree: ``"broadcast from 0"``.
        blob: any bytes.
        group: the ranks that take part.

    Returns:
        The blobs in the order of ranks.

    Raises:
        CollectiveMismatchError: the calls differ (on every rank, naming each rank's).
        CollectiveError: a peer failed or didn't come in time.
    """
    if context.must_introduce and group is None:
        introduce(context, call)
    frames = context.model.exchange(pack(call, blob), group)
    history = None
    if context.is_checked is not False:
        history = context.control.steps.histories[name_of(group)]
    return unpack(frames, partial(context.model.topology.members, group), history)


def introduce(context: ContextState, call: str) -> None:
    """Let the ranks of a context that somebody else made tell each other their hosts.

    Collective over all ranks, once in a context; nothing where that is done, or needless.

    Args:
        context: of the context.
        call: the collective that comes first.

    Raises:
        CollectiveMismatchError: ranks call different things (on every rank).
        CollectiveError: a peer failed or didn't come in time.
    """
    if context.must_introduce:
        frames = context.model.exchange(pack(call, socket.gethostname().encode()), None)
        hosts = unpack(frames, partial(context.model.topology.members, None))
        context.hosts = tuple(bytes(host) for host in hosts)
        context.must_introduce = False


def signature(call: str, tensor: Tensor) -> str:
    """Name a call with the dtype and shape that must agree. Local."""
    return f"{call} of {str(tensor.dtype)[6:]}{list(tensor.shape)}"


def compares(context: ContextState, group: Group | None) -> bool:
    """Tell whether ranks compare their calls before each operation of the data plane.

    Local, or collective at creation of what they compare them over.
    """
    return (
        context.control.compares_calls(group) if context.is_checked is None else context.is_checked
    )


def check(context: ContextState, call: str, tensor: Tensor, group: Group | None) -> None:
    """Compare what the ranks are about to call on the data plane, where they do that.

    Collective over `group` there, else local.

    Raises:
        CollectiveMismatchError: as in `swap`.
    """
    if compares(context, group):
        swap(context, signature(call, tensor), b"", group)


def refuse(
    context: ContextState, call: str, tensor: object, group: Group | None, error: UnisonoError
) -> NoReturn:
    """Raise what is wrong with this rank's `tensor` alone, so that the others don't wait for it.

    Collective over `group` where the ranks would have compared this call, else local.
    """
    context.settle()
    is_small = isinstance(tensor, Tensor) and context.control.prefers_exchange(tensor, group)
    if is_small or compares(context, group):
        with suppress(CollectiveMismatchError):
            swap(context, f"{call}, which it refuses: {error}"[:_LONGEST_CALL], b"", group)
    raise error


def fold(context: ContextState, tensor: Tensor, op: ReduceOp, group: Group | None) -> Tensor:
    """Reduce a small CPU tensor [*shape] from everybody's bytes, in the order of ranks.

    Collective over `group`.
    """
    call = signature(f"all_reduce {op.name}", tensor)
    parts = swap(context, call, to_bytes(tensor), group)
    shape = tuple(tensor.shape)
    return fold_tensors(op, [from_bytes(part, tensor.dtype, shape) for part in parts])


F = TypeVar("F", bound=Callable[..., Any])


def collective(fn: F) -> F:
    """Decorate a collective of the facade: one that is left half-way ends the context.

    Local. Ctrl-C leaves it so, and what an alarm's handler raises. The other ranks have called it,
    or will; whatever this rank called next would meet that. The errors of the collective itself
    leave all ranks in step, or are known to the model.
    """
    note, own = left_half_way, UnisonoError

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except own:
            raise
        except BaseException as error:
            trace = error.__traceback__
            has_begun = trace is None or trace.tb_next is not None
            if has_begun or not isinstance(error, TypeError):  # as of an argument too many
                note(fn.__name__, error)
            raise

    # doctest passes over functions whose globals are another module's
    made = FunctionType(
        call.__code__, fn.__globals__, fn.__name__, call.__defaults__, call.__closure__
    )
    return cast("F", functools.update_wrapper(made, fn))
