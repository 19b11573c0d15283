"""Bad input is refused, at one replica as at many, and nothing is lost by it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono._context import current_model
from unisono.errors import ArgumentError, PayloadError, UnsupportedOperation
from unisono.testing.cases._law import law, raises, same, worlds

__all__ = ()


@law()
def unknown_operations_are_refused_and_known_ones_taken_in_any_case() -> None:
    _, size = worlds()
    for wrong in ("NOPE", "", "summ", 3, None):
        bad: Any = wrong
        raises(ArgumentError, partial(idist.all_reduce, 1, bad), ["SUM AVERAGE"])
        raises(ArgumentError, partial(idist.all_reduce, torch.ones(1), bad), ["SUM AVERAGE"])
        raises(ArgumentError, partial(idist.all_reduce_, torch.ones(1), bad), ["SUM"])
        raises(ArgumentError, partial(idist.reduce, 1, 0, bad), ["SUM"])
    for good in ("SUM", "sum", "Sum"):
        same(idist.all_reduce(1, good), size)
    for good in ("AVERAGE", "average", "MEAN", "mean", "Mean"):
        same(idist.all_reduce(torch.ones(1), good), torch.ones(1))


@law()
def roots_that_arent_there_are_refused() -> None:
    rank, size = worlds()
    for wrong in (size, -1, True, 0.0, "0", None):
        bad: Any = wrong
        raises(ArgumentError, partial(idist.broadcast, 1, src=bad), ["src"])
        raises(ArgumentError, partial(idist.broadcast_, torch.ones(1), src=bad), ["src"])
        raises(ArgumentError, partial(idist.gather, 1, dst=bad), ["dst"])
        raises(ArgumentError, partial(idist.reduce, 1, dst=bad), ["dst"])
        raises(ArgumentError, partial(idist.scatter, [1] * size, src=bad), ["src"])
    same(idist.all_gather(rank), list(range(size)))


@law()
def operations_without_a_meaning_for_the_dtype_are_refused() -> None:
    for op in ("AND", "OR", "XOR"):
        raises(PayloadError, partial(idist.all_reduce, torch.ones(2), op), [op, "float32"])
        raises(PayloadError, partial(idist.all_reduce_, torch.ones(2), op), [op, "float32"])
        raises(PayloadError, partial(idist.all_reduce, 1.5, op), [op, "float"])
    for op in ("MIN", "MAX"):
        value = torch.ones(2, dtype=torch.complex64)
        raises(PayloadError, partial(idist.all_reduce, value, op), [op])
        raises(PayloadError, partial(idist.all_reduce, 1j, op), [op, "complex"])
    for dtype in (torch.int64, torch.uint8, torch.bool):
        whole = torch.ones(2, dtype=dtype)
        raises(PayloadError, partial(idist.all_reduce, whole, "mean"), ["fraction"])
        raises(PayloadError, partial(idist.all_reduce_, whole, "mean"), ["fraction"])
    raises(PayloadError, partial(idist.all_reduce, True, "mean"), ["bool"])


@law()
def what_isnt_a_number_cant_be_reduced() -> None:
    _, size = worlds()
    values: list[Any] = ["abc", b"abc", None, object(), {"a": "text"}, [1, None]]
    for value in values:
        raises(PayloadError, partial(idist.all_reduce, value), ["rank 0"])
        raises(PayloadError, partial(idist.reduce, value), ["rank 0"])
    not_tensors: list[Any] = [1, "abc", [torch.ones(1)]]
    for value in not_tensors:
        raises(PayloadError, partial(idist.all_reduce_, value), ["tensor"])
        raises(PayloadError, partial(idist.broadcast_, value), ["tensor"])
        raises(PayloadError, partial(idist.reduce_scatter, value), ["tensor"])
    same(idist.all_reduce(1), size)


@law()
def sparse_tensors_are_refused_before_anything_is_sent() -> None:
    _, size = worlds()
    sparse = torch.eye(3).to_sparse()
    for call in (idist.all_reduce, idist.all_gather, idist.gather, idist.reduce, idist.all_to_all):
        raises(PayloadError, partial(call, sparse), ["dense"])
    same(idist.all_reduce(1), size)


@law()
def what_a_model_doesnt_declare_is_unsupported() -> None:
    model = current_model()
    rank, size = worlds()
    if "groups" not in model.capabilities:
        raises(UnsupportedOperation, partial(idist.new_group, [0]), [model.name])
        raises(UnsupportedOperation, partial(idist.all_reduce, 1, group=[0]), [model.name])
    if "send_recv" not in model.capabilities and size > 1:
        peer = (rank + 1) % size
        raises(UnsupportedOperation, partial(idist.send, 1, dst=peer), [model.name])
        raises(UnsupportedOperation, partial(idist.recv, src=peer), [model.name])
    same(idist.all_reduce(1), size)
