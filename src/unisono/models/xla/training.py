"""Data-parallel training on XLA: the optimizer's step averages gradients, not backward.

Backward only records a graph there, and may run in a thread of autograd's that isn't a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp


def spread(model: ComputationModel, module: nn.Module) -> nn.Module:
    """Copy rank 0's parameters and buffers to every replica. Collective over all ranks."""
    with torch.no_grad():
        for item in (*module.parameters(), *module.buffers()):
            mine = item.detach().to(model.transport_device).contiguous()
            item.copy_(model.broadcast(mine, 0).to(item.device))
    return module


def wrap_optimizer(
    model: ComputationModel, optimizer: Optimizer, cut: Callable[[], object]
) -> Optimizer:
    """Wrap an optimizer: ``step`` first averages the gradients, and finally runs the graph."""
    # Local; the step is collective over all ranks. A gradient that only some ranks have counts as
    # zero on the others.
    kind = type(optimizer)

    class Averaging(kind):  # type: ignore[misc, valid-type]
        is_settled = False

        def settle(self) -> Callable[[], None]:
            _average(model, [p for entry in self.param_groups for p in entry["params"]])
            self.is_settled = True
            return self._unsettle

        def _unsettle(self) -> None:
            self.is_settled = False

        def step(self, closure: Any = None) -> Any:
            if not self.is_settled:
                _average(model, [p for entry in self.param_groups for p in entry["params"]])
            result = kind.step(self) if closure is None else kind.step(self, closure)
            cut()
            return result

    Averaging.__name__ = Averaging.__qualname__ = kind.__name__
    optimizer.__class__ = Averaging
    return optimizer


def _average(model: ComputationModel, parameters: list[Tensor]) -> None:
    """Average gradients, in one collective for each dtype. Collective over all ranks."""
    size = model.topology.world_size
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with torch.no_grad():
        for dtype in sorted({parameter.dtype for parameter in trained}, key=str):
            members = [parameter for parameter in trained if parameter.dtype == dtype]
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in members]
            has = torch.tensor([p.grad is not None for p in members])
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            parts = [grad.detach().reshape(-1).to(wide) for grad in grads]
            flat = torch.cat([*parts, has.to(wide).to(parts[0].device)])
            total = model.all_reduce(flat.to(model.transport_device), ReduceOp.SUM)
            sizes = [*(grad.numel() for grad in grads), len(members)]
            *sums, counts = torch.split(total, sizes)
            holders = counts.tolist()
            for parameter, part, count in zip(members, sums, holders, strict=True):
                if count:
                    mean = (part / size).to(dtype).view(parameter.shape)
                    parameter.grad = mean.to(parameter.device)
