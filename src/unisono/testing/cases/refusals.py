"""Bad input is rejected at any number of replicas, and later calls work."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import unisono as idist
from unisono.context import communicator, current_model
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PayloadError,
    UnsupportedOperation,
)
from unisono.testing.cases._law import law, quietly, raises, same, worlds


class Spread(torch.Tensor):
    """A tensor without memory that is sharded over ranks, like DTensor."""

    @staticmethod
    def __new__(cls: type[Spread]) -> Spread:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Spread = make(cls, (4,), dtype=torch.float32)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return "Spread()"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(func)

    def to_local(self) -> torch.Tensor:
        """Return this rank's part."""
        return torch.ones(2)

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor."""
        return torch.ones(4)


@law()
def unknown_operations_are_refused_and_known_ones_taken_in_any_case() -> None:
    _, size = worlds()
    for wrong in ("NOPE", "", "summ", 3, None):
        bad: Any = wrong
        raises(ArgumentError, partial(idist.all_reduce, 1, bad), ["SUM AVERAGE"])
        raises(ArgumentError, partial(idist.all_reduce, torch.ones(1), bad), ["SUM AVERAGE"])
        raises(ArgumentError, partial(idist.all_reduce_, torch.ones(1), bad), ["SUM"])
        raises(ArgumentError, partial(idist.reduce, 1, 0, bad), ["SUM"])
    good: Any
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
        integers = torch.ones(2, dtype=dtype)
        raises(PayloadError, partial(idist.all_reduce, integers, "mean"), ["fraction"])
        raises(PayloadError, partial(idist.all_reduce_, integers, "mean"), ["fraction"])
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


class Pair(tuple[float, float]):
    """A container that cannot be rebuilt from its items."""

    def __new__(cls, one: float, other: float) -> Pair:
        return super().__new__(cls, (one, other))


@dataclass
class Scaled:
    """A dataclass that cannot be rebuilt from its fields."""

    value: float
    by: InitVar[int]

    def __post_init__(self, by: int) -> None:
        self.value *= by


class Rude:
    """A class whose name cannot be printed."""

    def __repr__(self) -> str:
        raise ValueError("no name")


@law()
def what_a_users_class_raises_leaves_the_ranks_in_step() -> None:
    """Errors during the checks of a call and after its exchange keep the ranks in step."""
    _, size = worlds()
    wrong: Any = torch.ones(2), Rude()
    for value in (Pair(1.0, 2.0), Scaled(1.0, 2)):
        raises(PayloadError, partial(idist.all_reduce, value), ["can't be put together again"])
        same(idist.all_reduce(1), size)
    raises(ArgumentError, partial(idist.all_reduce, 1, async_op=wrong[0]), ["async_op"])
    same(idist.all_reduce(1), size)
    raises(ValueError, partial(idist.all_reduce, 1, wrong[1]), ["no name"])
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


def _takers() -> list[Any]:
    return [
        *(idist.all_reduce, idist.all_reduce_, idist.all_gather, idist.gather, idist.reduce),
        *(idist.all_to_all, idist.reduce_scatter, idist.broadcast_),
    ]


@law()
def tensors_without_memory_of_their_own_are_refused_by_name() -> None:
    rank, size = worlds()
    with FakeTensorMode():
        fake = torch.ones(4)
    masked = quietly(masked_tensor, torch.ones(4), torch.ones(4, dtype=torch.bool))
    for tensor, parts in ((fake, ["FakeTensor"]), (masked, ["MaskedTensor", "as an object"])):
        for call in _takers():
            raises(PayloadError, partial(call, tensor), parts)
        raises(PayloadError, partial(idist.all_reduce, {"a": tensor}), parts)
    spread: Any = Spread()
    for call in [*_takers(), idist.broadcast]:
        raises(PayloadError, partial(call, spread), ["Spread", "to_local()", "full_tensor()"])
    for inside in ([spread], {"norm": spread}, {"deep": [{1, 2}, spread]}):
        raises(PayloadError, partial(idist.all_gather, inside), ["rank 0", "full_tensor()"])
    raises(PayloadError, partial(idist.broadcast, fake), ["rank 0", "FakeTensor"])
    raises(PayloadError, partial(idist.all_reduce, {"norm": spread}), ["rank 0", "full_tensor()"])
    same(idist.all_gather(rank), list(range(size)))


@law()
def a_tensor_that_one_rank_refuses_is_an_error_on_every_rank() -> None:
    """Holds if calls are compared, which some models do only with UNISONO_DEBUG=1."""
    control = communicator().control
    control.checks = lambda group: True  # type: ignore[method-assign]
    try:
        _refuse_on_one_rank()
    finally:
        del control.checks


def _refuse_on_one_rank() -> None:
    rank, size = worlds()
    errors = (PayloadError, CollectiveMismatchError)
    is_wrong = rank == size - 1
    for count in (size, 100_000 * size):
        good = torch.ones(count)
        bad = good.to_sparse()
        for call in _takers():
            raises(errors, partial(call, bad if is_wrong else good))
        for other in (1.0, {"a": 1}):
            value: Any = bad if is_wrong else other
            raises(errors, partial(idist.all_reduce, value))
        expanded, tied = torch.ones(1).expand(count * 2), torch.ones(3).as_strided((2, 2), (1, 1))
        for call in (idist.all_reduce_, idist.broadcast_):
            raises(errors, partial(call, expanded if is_wrong else torch.ones(count * 2)))
            raises(errors, partial(call, tied if is_wrong else torch.ones(2, 2)))
        wide = good.int() if is_wrong and size > 1 else good
        if size > 1:
            for call in _takers():
                raises(errors, partial(call, wide))
    same(idist.all_gather(rank), list(range(size)))


@law()
def what_is_several_times_in_memory_isnt_overwritten() -> None:
    _, size = worlds()
    base = torch.zeros(8)
    for view in (
        base[:1].expand(4),
        base.as_strided((4, 4), (1, 1)),
        base.as_strided((2, 2), (2, 2)),  # spans no more than its elements
    ):
        raises(PayloadError, partial(idist.all_reduce_, view), ["all_reduce_", "contiguous()"])
        raises(PayloadError, partial(idist.broadcast_, view), ["broadcast_", "contiguous()"])
    same(base, torch.zeros(8))
    for view in (base.as_strided((3, 2), (2, 3)), base.view(2, 4).t(), base[::2]):
        view.fill_(1)
        same(idist.all_reduce_(view).clone(), torch.full(view.shape, float(size)))
    with torch.inference_mode():
        made = torch.ones(3)[None].t()[::2]
    same(idist.all_reduce_(made).clone(), torch.full((2, 1), float(size)))
