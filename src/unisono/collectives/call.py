"""Prologue of collectives, and comparison of calls between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame

from unisono.arguments import check_flag
from unisono.collectives.membership import check_rank, resolve_and_settle
from unisono.collectives.routing import Reducer, fits_exchange
from unisono.context import ContextState, communicator, left_half_way
from unisono.control.rendezvous import host_of_this_process
from unisono.control.signatures import CallHistory, call_head, line, purpose_or, site, unpack
from unisono.errors import CollectiveMismatchError, PayloadError, UnisonoError
from unisono.host.collectives import HostCollectives
from unisono.host.hierarchical import TwoLevels
from unisono.model.handle import Handle
from unisono.payload.codec import encode, header, reason
from unisono.payload.tensors import is_exact
from unisono.recording.records import Token, is_in_step, mark_in_step
from unisono.topology import EVERYBODY, Group
from unisono.tracebacks import is_interrupt, raised_here

_LONGEST_CALL = 500
T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=Tensor)


def encode_or_header(context: ContextState, value: object, group: Group | None) -> bytes:
    """Encode a value, or only its header if the data plane carries it."""
    if isinstance(value, Tensor) and is_exact(value) and not fits_exchange(context, value, group):
        return header(value)
    return encode(value)


def exchange_blobs(
    context: ContextState, call: str, blob: bytes, group: Group | None
) -> list[bytes]:
    """Return every rank's blob, if all ranks made the same call."""
    # Collective over `group`.
    if context.must_introduce and group is None:  # `introduce` needs all ranks
        introduce(context, call)
    control, name = context.control, EVERYBODY if group is None else group.name
    head = call_head(call, line.known or site())
    blobs = context.model.exchange(head + blob, group)
    histories = control.steps.histories
    if name not in histories:  # the user may switch comparisons off
        histories[name] = None if control.checks(group) is False else CallHistory()
    return unpack(blobs, head, partial(context.model.topology.members, group), histories[name])


def introduce(context: ContextState, call: str) -> None:
    """Exchange the ranks' hosts in a context that was created outside unisono."""
    # The first call in a context is collective over all ranks; later calls return at once.
    if context.must_introduce:
        head = call_head(call, site())
        blobs = context.model.exchange(head + host_of_this_process().encode(), None)
        hosts = unpack(blobs, head, partial(context.model.topology.members, None))
        context.hosts = tuple(bytes(host) for host in hosts)
        context.must_introduce = False  # last, so that the next call retries a failed one


def signature(call: str, tensor: Tensor) -> str:
    """Return a call's text with its tensor's dtype and shape, which the ranks compare."""
    return f"{purpose_or(call)} of {str(tensor.dtype)[6:]}{list(tensor.shape)}"


def compares(context: ContextState, group: Group | None, *, sums: bool = False) -> bool:
    """Return whether ranks compare their calls before each operation of the data plane."""
    # Local, or collective at creation of the channel for comparison. Ranks that share memory for
    # tensors always compare, because mismatched calls would read the memory of another call.
    # Memory in two levels carries sums only, so it counts only with `sums`.
    control = context.control
    checks = control.checks(group)
    if checks is None:  # the settings leave it open: compare where it costs little
        return control.compares_calls(group) or (sums and control.memory(group) is not None)
    return checks or control.host(group) is not None


def compare_calls(
    context: ContextState,
    call: str,
    tensor: Tensor,
    group: Group | None,
    plane: Reducer | None = None,
) -> None:
    """Compare the ranks' next calls, if comparison is enabled or they share memory."""
    # Collective over `group` if calls are compared, else local.
    is_shared = type(plane) is HostCollectives
    if is_shared or compares(context, group, sums=type(plane) is TwoLevels):
        exchange_blobs(context, signature(call, tensor), b"", group)


def refuse(
    context: ContextState, call: str, tensor: object, group: Group | None, error: Exception
) -> NoReturn:
    """Raise an error in this rank's `tensor`, so that the other ranks don't wait for this one."""
    # Collective over `group` if the ranks would have compared this call, else local.
    # No rank gets out of step: all ranks end the pending calls first, and then this one.
    # `tensor` is None unless the call is an all_reduce, which alone reduces a tensor in an exchange
    # or in memory in two levels.
    mark_in_step(error)
    context.settle(group)
    is_inline = False
    if isinstance(tensor, Tensor):
        with suppress(Exception):  # a subclass's own code may raise
            is_inline = fits_exchange(context, tensor, group, folds=True)
    if is_inline or compares(context, group, sums=tensor is not None):
        refuse_compared(context, call, group, error)
    raise error


def refuse_compared(
    context: ContextState, call: str, group: Group | None, error: Exception
) -> NoReturn:
    """Raise as `refuse` does, in a call that is always compared. Collective over `group`."""
    # The other ranks raise the mismatch, and this one the error that caused it.
    with suppress(CollectiveMismatchError):
        text = f"{call}, which it refuses: {reason(error)}"[:_LONGEST_CALL]
        exchange_blobs(context, text, b"", group)
    raise error


F = TypeVar("F", bound=Callable[..., Any])


def guarded(fn: F) -> F:
    """Decorate a caller of collectives: an interruption makes the context unusable."""
    # Ctrl-C or an exception of a signal handler interrupts a call that the other ranks still make:
    # it would be matched with this rank's next call. Errors of ours leave all ranks in step, or
    # the model has recorded them.

    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo = set_eval_frame(None)  # else dynamo compiles all that a call runs
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            _record_failure(fn.__name__, None, error)  # `fn` ends its own token
            raise
        finally:
            set_eval_frame(dynamo)

    return cast("F", functools.update_wrapper(call, fn))


def _record_failure(name: str, token: Token | None, error: BaseException) -> None:
    """Record a call's failure; an error of ours keeps only the user's frames."""
    if token is not None:
        token.end(error)
    if isinstance(error, UnisonoError):
        raised_here(error)  # on Python 3.10, `raise` restores all frames
    elif not (_is_of_signature(error) or is_in_step(error)):  # neither interrupts a collective
        left_half_way(name, error)


def _is_of_signature(error: BaseException) -> bool:
    """Return whether the error is Python's refusal of wrong arguments."""
    trace = error.__traceback__  # of the wrapper alone if it called nothing
    return isinstance(error, TypeError) and trace is not None and trace.tb_next is None


def collective(
    *,
    root: str = "",
    folds: bool = False,
    refuses: tuple[type[UnisonoError], ...] = (PayloadError,),
    outside: Callable[[Any], Any] | None = None,
) -> Callable[[F], F]:
    """Decorate a collective of the facade with the common prologue."""
    # The prologue resolves the context and the group, checks whether root and this rank are
    # members, and passes ``(context, group)`` as `group`, whose annotation is that of the caller's
    # argument. The function checks its arguments and returns the call to run, here or in the
    # background, or the handle of a started one.
    # Its errors of a class in `refuses` are raised by `refuse`, others as `guarded` does. `outside`
    # computes the result of a rank that isn't a member from the first argument.
    return lambda fn: _with_prologue(fn, root, folds, refuses, outside)


def _with_prologue(
    fn: F,
    root: str,
    folds: bool,
    refuses: tuple[type[UnisonoError], ...],
    outside: Callable[[Any], Any] | None,
) -> F:
    """Return `fn` behind the prologue that `collective` describes."""
    # Only in `barrier` `group` is the first parameter: then no value is recorded. `communicator`
    # settles calls over all ranks, and `resolve_and_settle` those over any other group.
    first_name, group_at, root_at = _places(fn.__code__.co_varnames, root)

    def call(*args: Any, **kwargs: Any) -> Any:
        token, dynamo = None, set_eval_frame(None)  # else dynamo compiles all that a call runs
        try:
            async_op = kwargs.get("async_op", False)
            if type(async_op) is not bool:
                async_op = kwargs["async_op"] = check_flag("async_op", async_op)
            group = args[group_at] if len(args) > group_at else kwargs.get("group")
            context = communicator(None, settles=not async_op and group is None)
            if group is not None:
                group = resolve_and_settle(context, group, async_op=async_op)
            if root:
                check_rank(context, group, _argument(args, kwargs, root_at, root), root)
            first = (args[0] if args else kwargs.get(first_name)) if group_at else None
            if group is not None and context.model.topology.rank not in group.ranks:
                return _of_outsider(first if outside is None else outside(first), async_op)
            token = context.calls.begin(fn.__name__, group, first, async_op)
            if len(args) > group_at:
                args = (*args[:group_at], (context, group), *args[group_at + 1 :])
            else:
                kwargs["group"] = context, group
            try:
                run = fn(*args, **kwargs)
            except Exception as error:
                if isinstance(error, refuses) or _is_of_users_class(error):
                    refuse(context, fn.__name__, first if folds else None, group, error)
                raise  # all ranks raise it alike, or it interrupts this one
            if async_op:
                return _started(context, token, run, group)
            value = run()
            token.end()
            return value
        except BaseException as error:
            _record_failure(fn.__name__, token, error)
            raise
        finally:
            set_eval_frame(dynamo)

    return cast("F", functools.update_wrapper(call, fn))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """Return an argument by its position or name; 0, the default of a root, if it isn't given."""
    return args[index] if len(args) > index else kwargs.get(name, 0)


def _places(names: tuple[str, ...], root: str) -> tuple[str, int, int]:
    """Return the first argument's name, and the positions of `group` and of the root."""
    return names[0], names.index("group"), names.index(root) if root else 0


def _is_of_users_class(error: Exception) -> bool:
    """Return whether a user's class raised the error while a call was checked."""
    return not (isinstance(error, UnisonoError) or _is_of_signature(error) or is_interrupt(error))


def _of_outsider(value: T, async_op: bool) -> T | Handle[T]:
    """Return the result of a call on a rank that isn't a member, or a finished handle of it."""
    return Handle(lambda: value, lambda: True) if async_op else value


def _started(
    context: ContextState, token: Token, run: Handle[T] | Callable[[], T], group: Group | None
) -> Handle[T]:
    """Start a call that the model hasn't started itself, and record it until it is done."""
    if isinstance(run, Handle):
        return token.started(run)
    return token.started(context.start(partial(token.carry_out, run), group), is_started=False)
