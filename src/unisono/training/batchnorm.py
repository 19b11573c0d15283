"""Synchronised batch norm over the facade's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.collectives.gathers import all_gather_tensors_with_shapes
from unisono.collectives.membership import GroupLike, context_and_group
from unisono.collectives.reductions import all_reduce_
from unisono.context import current_model
from unisono.errors import ArgumentError, UnsupportedOperation
from unisono.model.training import hooks_of
from unisono.plugins import PluginRegistry, check_callable

Converter = Callable[[nn.Module], nn.Module]


class _Normalize(torch.autograd.Function):
    """Normalization with the statistics of all ranks; backward is collective."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, invstd: Tensor, count: Tensor, group: Any
    ) -> Any:
        ctx.save_for_backward(x, mean, invstd, count)
        ctx.group = group
        return (x - _wide(mean, x)) * _wide(invstd, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, mean, invstd, count = ctx.saved_tensors
        grad = grads[0]
        normal = (x - _wide(mean, x)) * _wide(invstd, x)
        sums = torch.stack([_channel_sums(grad), _channel_sums(grad * normal)])
        mean_grad, mean_dot = all_reduce_(sums, "SUM", ctx.group) / count
        back = grad - _wide(mean_grad, grad) - normal * _wide(mean_dot, grad)
        # The gradient of x includes that of the statistics, since they depend on x.
        return back * _wide(invstd, grad), None, None, None, None


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """View [channels] as [1, channels, 1, ...]."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _channel_sums(x: Tensor) -> Tensor:
    """Sum [n, channels, ...] to [channels]."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _statistics(x: Tensor, group: GroupLike) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance [channels], and the count, of batches of any sizes."""
    channels = x.shape[1]
    count = x.new_tensor([x.numel() // channels if channels else 0])
    mean = _channel_sums(x) / count.clamp(min=1)  # a rank's batch may be empty
    squares = _channel_sums((x - _wide(mean, x)) ** 2)
    mine = torch.cat([mean, squares, count])
    size = len(group.ranks) if group is not None else current_model().topology.world_size
    # Every rank knows the shapes, so that one round suffices even if batches differ in size.
    rows = torch.stack(all_gather_tensors_with_shapes(mine, [mine.shape] * size, group))
    means, parts, counts = torch.split(rows, [channels, channels, 1], dim=1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    # A difference of sums of squares would lose precision if the mean is large.
    squares = (parts + counts * (means - mean) ** 2).sum(0)
    return mean, squares / total, total


class SyncBatchNorm(_BatchNorm):
    """Batch norm over any dimensions with statistics over all ranks, on every model.

    Collective over `group` in training, in forward and in backward. It is like
    ``torch.nn.SyncBatchNorm``, but works on any device, and ranks may have batches of different
    sizes. Double backward isn't supported.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: of the running statistics; None for a plain mean of all batches.
        affine: whether it has weight and bias.
        track_running_stats: whether it has running statistics.
        group: a Group, or None for all ranks.
        options: ``device``, ``dtype`` and further options of torch's batch norms.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: GroupLike = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(f"batch norm takes [n, channels, ...], not {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [n, channels, ...]. Collective over `group` in training."""
        self._check_input_dim(input)
        # A single rank needs no other's statistics. In evaluation without running statistics, the
        # batch of this rank alone counts, as in torch.
        if (
            not self.training
            or context_and_group(self.group)[0].model.topology.size(self.group) == 1
        ):
            return super().forward(input)
        # Sums in half precision would be too coarse.
        kind = torch.promote_types(input.dtype, torch.float32)
        x = input.to(kind)
        with torch.no_grad():
            mean, variance, count = _statistics(x.detach(), self.group)
            if self.track_running_stats:
                self._track(mean, variance, count)
        invstd = torch.rsqrt(variance + self.eps)
        normal: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, mean, invstd, count, self.group
        )
        for apply, parameter in ((torch.mul, self.weight), (torch.add, self.bias)):
            if parameter is not None:  # since torch 2.13 an affine batch norm may lack a bias
                normal = apply(normal, _wide(parameter.to(kind), x))
        return normal.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        # `track_running_stats` may be set after creation, which has then created no such buffers.
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))  # a single value gives 0, not NaN
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


def convert_sync_batchnorm(
    model: nn.Module, implementation: str | Converter | None = None
) -> nn.Module:
    """Convert a model's batch norms into ones with statistics over all ranks.

    Args:
        model: changed in place; its batch norms keep their parameters and buffers.
        implementation: ``"unisono"`` works on every model; ``"torch"`` is
            ``torch.nn.SyncBatchNorm``, which works on native with an accelerator; a name passed to
            `register_sync_batchnorm` or an entry point of the group ``unisono.batchnorms``; or a
            callable from module to module. None chooses ``"torch"`` where that works, else
            ``"unisono"``.

    Returns:
        `model`; a new module if it is itself a batch norm.

    Raises:
        ArgumentError: the implementation is unknown; the message lists the known ones.
        UnsupportedOperation: the implementation is ``"torch"``, which doesn't work here.

    Example:
        >>> import torch, unisono as idist
        >>> type(idist.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))).__name__
        'SyncBatchNorm'
    """
    current = current_model()
    hooks = hooks_of(current)
    if implementation is None:
        implementation = "torch" if hooks.has_torch_sync_batchnorm else "unisono"
    if callable(implementation):
        return implementation(model)
    if implementation == "torch" and not hooks.has_torch_sync_batchnorm:
        raise UnsupportedOperation(
            current.name, f"torch.nn.SyncBatchNorm on {current.device}", 'use "unisono"'
        )
    convert = _converters.find(implementation)
    if convert is None:
        raise ArgumentError(
            f"unknown implementation {implementation!r} of synchronised batch norm."
            f"{_converters.known(implementation)}; or give a callable"
        )
    return convert(model)


def _convert(
    module: nn.Module, converted: dict[nn.Module, nn.Module], convert_norm: Converter
) -> nn.Module:
    """Convert all batch norms in a module; one that is used twice is converted once."""
    if isinstance(module, _BatchNorm):
        converted[module] = converted.get(module) or convert_norm(module)
    elif module not in converted:
        converted[module] = module
        # Children may be replaced while the dict is iterated over, as its size stays the same.
        for name, child in module._modules.items():
            if child is not None:
                setattr(module, name, _convert(child, converted, convert_norm))
    return converted[module]


def _synchronised(module: nn.Module) -> nn.Module:
    """Return a `SyncBatchNorm` with the parameters and buffers of a batch norm."""
    if isinstance(module, SyncBatchNorm):
        return module
    assert isinstance(module, _BatchNorm)
    made = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    made._parameters = module._parameters  # the same objects, because an optimizer may hold them
    made._buffers = module._buffers
    made.training = module.training
    return made


_converters: PluginRegistry[Converter] = PluginRegistry(
    "implementation",
    "unisono.batchnorms",
    {
        "unisono": lambda module: _convert(module, {}, _synchronised),
        "torch": lambda module: _convert(module, {}, nn.SyncBatchNorm.convert_sync_batchnorm),
    },
    check_callable,
)


def register_sync_batchnorm(name: str, convert: Converter, override: bool = False) -> Converter:
    """Register a conversion of batch norms by name, for `convert_sync_batchnorm`.

    Args:
        name: the name that users write.
        convert: takes a module and returns one.
        override: whether it may replace a registered name.

    Returns:
        `convert`.

    Raises:
        RegistrationError: the name is taken.

    Example:
        >>> import unisono as idist
        >>> convert = idist.register_sync_batchnorm("none", lambda module: module, override=True)
    """
    _converters.register([name], convert, override=override)
    return convert
