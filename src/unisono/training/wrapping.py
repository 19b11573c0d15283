"""Wrapping of models and optimizers for the active context."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unisono.arguments import check_names
from unisono.collectives.membership import resolve
from unisono.context import communicator, current_model
from unisono.control.signatures import level
from unisono.errors import (
    ArgumentError,
    GroupMembershipError,
    UnsupportedOperation,
)
from unisono.model.contract import ComputationModel
from unisono.model.training import hooks_of
from unisono.plugins import PluginRegistry, check_callable
from unisono.topology import Group
from unisono.training.averaging import broadcast_optimizer_state
from unisono.training.batchnorm import convert_sync_batchnorm
from unisono.training.data_parallel import Replicated, owners
from unisono.training.ddp_hook import average_gradients
from unisono.training.states import remember_wrapper
from unisono.training.step_averaging import average_in_step

Wrapper = Callable[..., nn.Module]
_DDP = nn.parallel.DistributedDataParallel
_CHOSEN_HERE = {"module", "device_ids", "output_device", "dim", "device_mesh"}
_DDP_OPTIONS = frozenset(inspect.signature(_DDP).parameters) - _CHOSEN_HERE
# Optimizers whose step averages, in order of creation, which is the same on every rank.
_averaging: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
_wrappers: PluginRegistry[Wrapper | None] = PluginRegistry(
    "wrapper",
    "unisono.wrappers",
    {"ddp": None, "fsdp": None},  # the model of the context creates these
    check_callable,
)


def auto_model(
    model: nn.Module, sync_bn: bool = False, wrapper: str | Wrapper = "ddp", **kwargs: Any
) -> nn.Module:
    """Prepare a model for the active context: on its device, and data-parallel.

    Collective over all ranks.

    Args:
        model: the module; moved to `device` in place. The same on every rank, except its values.
        sync_bn: whether batch norms take their statistics over all ranks.
        wrapper: ``"ddp"``: each rank has the whole model, and backward averages the gradients:
            ``DistributedDataParallel`` on native, else `Replicated` or the library's wrapper.
            ``"fsdp"``: ``fully_shard``, if the backend supports it; it takes each shard from the
            rank that keeps it, so first make the values equal, by a seed or `broadcast_params`.
            Or a name passed to `register_wrapper` or an entry point of the group
            ``unisono.wrappers``, or a callable that takes the module and returns one.
        kwargs: options of the wrapper; for ``"ddp"`` those of ``DistributedDataParallel``, whose
            ``process_group`` may be any group of this context, on native.

    Returns:
        The wrapped model; `model` itself with one replica.

    Raises:
        ArgumentError: `model` isn't a module, is wrapped already, or has parameters without a shape
            or without values; or the wrapper or an option is unknown.
        GroupMembershipError: this rank isn't a member of ``process_group``.
        UnsupportedOperation: the model of this context lacks the wrapper or one of its options.
        CollectiveMismatchError: the modules differ between ranks; the message shows the first
            difference (on every rank).

    Warns:
        UserWarning: the module has metrics of torchmetrics that would see this rank's samples alone
            (on rank 0).

    Example:
        >>> import torch, unisono as idist
        >>> idist.auto_model(torch.nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """
    _check_module(model)
    custom = _custom_wrapper(wrapper)
    if wrapper == "ddp":
        check_names('auto_model(wrapper="ddp")', kwargs, _DDP_OPTIONS)
    context = communicator()
    current = context.model
    if any(item.device != current.device for item in (*model.parameters(), *model.buffers())):
        model = model.to(current.device)
    if sync_bn:
        model = convert_sync_batchnorm(model)
    if current.topology.world_size == 1:
        return model
    _warn_of_lone_metrics(model, current)
    if custom is not None:
        made = custom(model, **kwargs)
        remember_wrapper(made, model)
        return made
    group = resolve(context, kwargs.get("process_group"))
    if kwargs.get("process_group") is not None:
        kwargs["process_group"] = _library_group(current, group)
    wrapped = hooks_of(current).wrap_module(model, str(wrapper), **kwargs)
    if isinstance(wrapped, _DDP):
        average_gradients(wrapped, context, group)
    if wrapped is not None:
        return wrapped
    if wrapper != "ddp":
        raise UnsupportedOperation(current.name, f"wrapper {wrapper!r}", 'use wrapper="ddp"')
    if kwargs.pop("process_group", None) is not None:
        raise UnsupportedOperation(
            current.name, 'wrapper "ddp" over a process_group', "train over all ranks"
        )
    return Replicated(model, **kwargs)


def _warn_of_lone_metrics(model: nn.Module, current: ComputationModel) -> None:
    """Warn of torchmetrics metrics in the model that do not synchronise across ranks."""
    # Without an import of torchmetrics, the model can have no metrics of it.
    kind = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if kind is None or current.topology.rank != 0:
        return
    lone = [name for name, part in model.named_modules() if _is_lone(part, kind)]
    if lone:
        warnings.warn(
            f"{', '.join(lone[:5])}: torchmetrics sees no other rank on {current.name}, so that "
            "each rank would compute these metrics from its samples only: create them with "
            "**unisono.compat.torchmetrics.OPTIONS",
            UserWarning,
            stacklevel=level(),
        )


def _is_lone(part: nn.Module, kind: type) -> bool:
    """Return whether a metric would synchronise, but finds no other ranks."""
    if not isinstance(part, kind) or getattr(part, "sync_on_compute", True) is False:
        return False
    finds_others: Any = getattr(part, "distributed_available_fn", None)
    return callable(finds_others) and not finds_others()


def _library_group(current: ComputationModel, group: Group | None) -> Any:
    """Return the backend's handle of a group; raise if this rank is not a member."""
    if group is not None and current.topology.rank not in group.ranks:
        raise GroupMembershipError(
            f"auto_model: rank {current.topology.rank} is not a member of process_group "
            f"{group.ranks}: call it only on members"
        )
    # A backend without handles of its own gets the Group.
    return None if group is None else group.handle or group


def _check_module(model: nn.Module) -> None:
    """Raise unless `auto_model` can wrap a model."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a torch.nn.Module is needed, not a {type(model).__qualname__}")
    is_sharded = hasattr(model, "set_requires_gradient_sync")  # fully_shard adds this method
    if is_sharded or isinstance(model, (_DDP, nn.DataParallel, Replicated)):
        raise ArgumentError(
            f"the model is wrapped already, in {type(model).__qualname__}: give auto_model the "
            "plain module"
        )
    if owners(model.parameters()):
        raise ArgumentError(
            "the model, or a part of it, was already passed to auto_model: use its return value"
        )
    for name, item in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(item):
            text = f"{name} has no shape yet: run a batch through the model before auto_model"
            raise ArgumentError(text)
        if item.is_meta:
            raise ArgumentError(
                f"{name} is on the meta device, without values: call "
                "model.to_empty(device=idist.device()) and set them before auto_model"
            )


def _custom_wrapper(wrapper: str | Wrapper) -> Wrapper | None:
    """Return the callable of a custom wrapper, None for built-in ones."""
    if callable(wrapper):
        return wrapper
    if wrapper in ("ddp", "fsdp"):
        return None
    custom = _wrappers.find(wrapper)
    if custom is None:
        raise ArgumentError(
            f"unknown wrapper {wrapper!r}.{_wrappers.known(wrapper)}; or give a callable"
        )
    return custom


def register_wrapper(name: str, wrap: Wrapper, override: bool = False) -> Wrapper:
    """Register a wrapper by name, for ``auto_model(wrapper=name)``.

    Args:
        name: the name that users write.
        wrap: called with the module and the options; returns a module.
        override: whether it may replace a registered name.

    Returns:
        `wrap`.

    Raises:
        RegistrationError: the name is taken.

    Example:
        >>> import unisono as idist
        >>> wrap = idist.register_wrapper("as it is", lambda module: module, override=True)
    """
    _wrappers.register([name], wrap, override=override)
    return wrap


def auto_optim(optimizer: Optimizer, **kwargs: Any) -> Optimizer:
    """Prepare an optimizer for the active context.

    Collective over all ranks.

    Args:
        optimizer: over parameters of a model from `auto_model`, the same on every rank.
        kwargs: options of the library's own optimizer, such as Horovod's ``compression`` and
            ``backward_passes_per_step``; the optimizer then averages gradients instead of backward.

    Returns:
        `optimizer` itself where backward averages the gradients. Under `Replicated` it gets the
        state of rank 0; under torch's own wrappers it is unchanged: call
        `broadcast_optimizer_state` yourself. Where backward doesn't average, an optimizer whose
        ``step`` does, if the library has such an optimizer (Horovod, XLA); with XLA in this context
        alone.

    Raises:
        ArgumentError: `optimizer` isn't an optimizer, or the context's model supports no options.

    Example:
        >>> import torch, unisono as idist
        >>> model = idist.auto_model(torch.nn.Linear(2, 1))
        >>> optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"an Optimizer is needed, not a {type(optimizer).__qualname__}")
    model = communicator().model
    members = [item for entry in optimizer.param_groups for item in entry["params"]]
    wrappers = owners(members)
    hooks = hooks_of(model)
    made = hooks.wrap_optimizer(optimizer, is_averaged=bool(wrappers), **kwargs)
    if made is None and kwargs:
        raise ArgumentError(
            f"auto_optim does not support options on {model.name}: {', '.join(sorted(kwargs))}"
        )
    if made is None and hooks.averages_in_step and not wrappers:
        made = average_in_step(optimizer)
    if wrappers or made is not None:
        broadcast_optimizer_state(optimizer)
    if made is None:
        return optimizer
    for each in wrappers:
        each.release()  # or backward would average, too
    _averaging[made] = None
    return made


def averaging_optimizers(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """List the optimizers of these parameters whose step averages, oldest first."""
    keys = {id(parameter) for parameter in parameters}
    return [
        each
        for each in list(_averaging)
        if any(id(item) in keys for entry in each.param_groups for item in entry["params"])
    ]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on each rank, in any wrapper that averages in backward.

    The first backward outside averages the accumulated gradients. It does nothing where the
    optimizer's step averages gradients, or no context is active.

    Args:
        model: the result of `auto_model`, compiled or not. A custom wrapper needs its own
            ``no_sync``.

    Yields:
        None.

    Example:
        >>> import torch, unisono as idist
        >>> model = idist.auto_model(torch.nn.Linear(2, 1))
        >>> with idist.no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
    """
    method: Any = getattr(model, "no_sync", None)  # a compiled model has its inner module's method
    if method is not None:
        with method():
            yield
        return
    # A method of fully_shard's; without it backward doesn't average.
    switch = getattr(model, "set_requires_gradient_sync", lambda _: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)


@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Allow ranks different numbers of batches: a rank that has ended contributes zeros.

    Collective over all ranks, which enter and leave together.

    Args:
        model: the result of `auto_model`, compiled or not.

    Yields:
        None.

    Raises:
        UnsupportedOperation: the model's wrapper doesn't support it.

    Example:
        >>> import torch, unisono as idist
        >>> model = idist.auto_model(torch.nn.Linear(2, 1))
        >>> with idist.join(model):
        ...     model(torch.ones(1, 2)).sum().backward()
    """
    method: Any = getattr(model, "join", None)  # as in no_sync; a user's join may differ
    if isinstance(getattr(method, "__self__", None), (_DDP, Replicated)):
        with method():
            yield
    elif current_model().topology.world_size == 1:
        yield
    else:
        raise UnsupportedOperation(
            current_model().name,
            f"join of a {type(model).__qualname__}",
            "give every rank the same number of batches, as auto_dataloader does",
        )
