"""Optimizers whose step averages the gradients, where backward can't."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from unisono.context import current
from unisono.errors import ContextError
from unisono.training.averaging import all_reduce_grads


def average_in_step(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer average the gradients before each step, and run the graph after it."""
    # The step is collective over all ranks. A class, as copies of an optimizer have its class, but
    # not its hooks.
    made_in = current().context_id
    kind: Any = type(optimizer)
    if hasattr(kind, "unisono_average"):  # it was made in an earlier context
        kind = kind.__base__

    class Averaging(kind):  # type: ignore[misc]
        is_settled = False  # whether the gradients are averaged already

        def unisono_average(self) -> Callable[[], None]:
            if current().context_id != made_in:
                raise ContextError(
                    "this optimizer was made in a context other than the active one "
                    f"({current().model.name}): call auto_optim again after initialize"
                )
            all_reduce_grads(each for entry in self.param_groups for each in entry["params"])
            self.is_settled = True
            return partial(setattr, self, "is_settled", False)

        def step(self, closure: Any = None) -> Any:
            if not self.is_settled:
                self.unisono_average()()  # for this step alone
            result = kind.step(self) if closure is None else kind.step(self, closure)
            # Without this, operations of all steps would be recorded in one growing graph.
            current().control.settle()
            return result

    # Else torch would call the step's hooks here, too: before the gradients are averaged.
    Averaging.step.hooked = True  # type: ignore[attr-defined]
    Averaging.__name__ = Averaging.__qualname__ = kind.__name__
    optimizer.__class__ = Averaging
    return optimizer
