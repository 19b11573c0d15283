"""Gradients averaged while backward still runs, through nothing but the facade's all_reduce."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono._context import current_model
from unisono.collectives.reductions import all_reduce_
from unisono.errors import ContextError, PayloadError
from unisono.handle import Handle
from unisono.training._flat import buckets

__all__ = ("Averager",)


class _Bucket:
    """Gradients that travel together, and behind them how many ranks have each.

    The counts make it right, without another collective, that a parameter has a gradient on some
    ranks only: it counts as zero on the others; and that one which has none anywhere keeps none.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        first = parameters[0]
        self.parameters = parameters
        count = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(
            count + len(parameters), dtype=first.dtype, device=first.device, requires_grad=False
        )
        sizes = [*(p.numel() for p in parameters), len(parameters)]
        *parts, self.counts = torch.split(self.flat, sizes)
        self.parts = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.handle: Handle[Tensor] | None = None

    def start(self, touched: set[int], size: int) -> None:
        """Copy the gradients together and start their sum. Collective over all ranks."""
        has = [id(p) in touched and p.grad is not None for p in self.parameters]
        for parameter, part, is_there in zip(self.parameters, self.parts, has, strict=True):
            if is_there and parameter.grad is not None:
                torch.div(parameter.grad, size, out=part)
            else:
                part.zero_()
        self.counts.copy_(torch.tensor(has))
        self.handle = all_reduce_(self.flat, "SUM", async_op=True)

    def finish(self, touched: set[int], is_shadow: bool) -> None:
        """Wait for the sum and copy it back. Local, but for what `start` began."""
        assert self.handle is not None
        self.handle.wait()
        self.handle = None
        if is_shadow:
            return
        counts: list[Any] | None = None
        for i, (parameter, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if id(parameter) in touched and parameter.grad is not None:
                parameter.grad.copy_(part)
                continue
            counts = self.counts.tolist() if counts is None else counts
            if counts[i]:
                parameter.grad = torch.empty_like(parameter).copy_(part)


class Averager:
    """What averages the gradients of a module in one context.

    Collective at creation in that every rank makes one, with the same parameters.

    Args:
        module: whose parameters that require grad are averaged.
        bucket_bytes: size of a bucket.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int) -> None:
        model = current_model()
        self._context_id = model.context_id
        self._size = model.topology.world_size
        # Backward reaches the last ones first.
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        self.parameter_ids = {id(parameter) for parameter in parameters}
        runs = list(buckets(parameters, bucket_bytes))
        self._buckets = [_Bucket(run) for run in runs]
        self._place = {id(p): i for i, run in enumerate(runs) for p in run}
        self._sizes = [len(run) for run in runs]
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, id(parameter))
            )
            for parameter in parameters
        ]
        self.is_syncing = True
        self._touched: set[int] = set()  # since the last sum, also while not syncing
        self._fired: set[int] = set()  # in this backward
        self._is_running = False
        self._missing: list[int] = []
        self._next = 0

    def release(self) -> None:
        """Stop averaging: somebody else does. Local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def check_context(self) -> None:
        """Refuse to go on in another context than the one of the start. Local."""
        model = current_model()
        if model.context_id != self._context_id:
            raise ContextError(
                "this model was wrapped in another context than the active "
                f"{model.name} one: call auto_model again after initialize"
            )

    def reset(self) -> None:
        """Forget a backward that failed half way. Local."""
        self._is_running = False

    def _on_gradient(self, key: int, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise PayloadError(
                f"a gradient of shape {list(parameter.shape)} is sparse, and gradients are "
                "averaged dense: use sparse=False"
            )
        self._touched.add(key)
        if not self.is_syncing:
            return
        if not self._is_running:
            self._begin()
        if key not in self._fired:
            self._fired.add(key)
            self._missing[self._place[key]] -= 1
        with torch.no_grad():
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._start_next()

    def _begin(self) -> None:
        self.check_context()
        self._is_running = True
        self._next = 0
        self._fired.clear()
        self._missing = list(self._sizes)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _start_next(self) -> None:
        self._buckets[self._next].start(self._touched, self._size)
        self._next += 1

    def _end(self) -> None:
        if not self._is_running:
            return
        self._finish(is_shadow=False)

    def _finish(self, is_shadow: bool) -> None:
        with torch.no_grad():
            while self._next < len(self._buckets):
                self._start_next()
            for bucket in self._buckets:
                bucket.finish(self._touched, is_shadow)
        self._is_running = False
        self._touched.clear()

    def shadow(self) -> None:
        """Take part in the others' backward with no gradients. Collective over all ranks."""
        self._touched.clear()
        self._next = 0
        self._finish(is_shadow=True)
