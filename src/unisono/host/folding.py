"""Reductions of several tensors in a given order, with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.model.contract import COMMON_DTYPES
from unisono.model.reduction import TENSOR_STEPS, ReduceOp, mean_factors

DTYPES: frozenset[torch.dtype] = COMMON_DTYPES | {
    *(torch.int16, torch.complex64, torch.complex128),
}
"""Dtypes that at least some operations reduce without conversion."""


def folds(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether `fold` supports an operation on a dtype."""
    if dtype not in DTYPES:
        return False
    if op is ReduceOp.AVERAGE:
        return dtype.is_floating_point and dtype is not torch.float16
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_complex
    return not (op.is_bitwise and (dtype.is_floating_point or dtype.is_complex))


def fold(op: ReduceOp, parts: Sequence[Tensor], out: Tensor) -> None:
    """Reduce in the order of `parts`, as `fold_tensors`, but into `out`."""
    if op is ReduceOp.AVERAGE:
        before, after = mean_factors(len(parts))
        torch.mul(parts[0], before, out=out)
        for part in parts[1:]:
            torch.add(out, part, alpha=before, out=out)
        if after != 1.0:
            out.div_(after)
        return
    step = TENSOR_STEPS[op]
    step(parts[0], parts[1], out=out)
    for part in parts[2:]:
        step(out, part, out=out)
