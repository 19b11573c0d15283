"""Bad input is rejected at any number of replicas, and later calls work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass
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
from unisono.testing.cases._law import law, quietly, raises, same
from unisono.testing.cases.values import NoRepr


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
def unknown_operations_are_refused_and_known_ones_taken_in_any_case(rank: int, size: int) -> None:
    for bad in ("NOPE", "", "summ", 3, None):
        raises(ArgumentError, ["SUM AVERAGE"], idist.all_reduce, 1, bad)
        raises(ArgumentError, ["SUM AVERAGE"], idist.all_reduce, torch.ones(1), bad)
        raises(ArgumentError, ["SUM"], idist.all_reduce_, torch.ones(1), bad)
        raises(ArgumentError, ["SUM"], idist.reduce, 1, 0, bad)
    good: Any
    for good in ("SUM", "sum", "Sum"):
        same(idist.all_reduce(1, good), size)
    for good in ("AVERAGE", "average", "MEAN", "mean", "Mean"):
        same(idist.all_reduce(torch.ones(1), good), torch.ones(1))


@law()
def roots_that_arent_there_are_refused(rank: int, size: int) -> None:
    for bad in (size, -1, True, 0.0, "0", None):  # True == 1 and 0.0 == 0, but neither is a rank
        raises(ArgumentError, ["src"], idist.broadcast, 1, src=bad)
        raises(ArgumentError, ["src"], idist.broadcast_, torch.ones(1), src=bad)
        raises(ArgumentError, ["dst"], idist.gather, 1, dst=bad)
        raises(ArgumentError, ["dst"], idist.reduce, 1, dst=bad)
        raises(ArgumentError, ["src"], idist.scatter, [1] * size, src=bad)


@law()
def operations_without_a_meaning_for_the_dtype_are_refused(rank: int, size: int) -> None:
    for op in ("AND", "OR", "XOR"):
        raises(PayloadError, [op, "float32"], idist.all_reduce, torch.ones(2), op)
        raises(PayloadError, [op, "float32"], idist.all_reduce_, torch.ones(2), op)
        raises(PayloadError, [op, "float"], idist.all_reduce, 1.5, op)
    for op in ("MIN", "MAX"):
        value = torch.ones(2, dtype=torch.complex64)
        raises(PayloadError, [op], idist.all_reduce, value, op)
        raises(PayloadError, [op, "complex"], idist.all_reduce, 1j, op)
    for dtype in (torch.int64, torch.uint8, torch.bool):
        integers = torch.ones(2, dtype=dtype)
        raises(PayloadError, ["fraction"], idist.all_reduce, integers, "mean")
        raises(PayloadError, ["fraction"], idist.all_reduce_, integers, "mean")
    raises(PayloadError, ["bool"], idist.all_reduce, True, "mean")


@law()
def what_isnt_a_number_cant_be_reduced(rank: int, size: int) -> None:
    for value in ("abc", b"abc", None, object(), {"a": "text"}, [1, None]):
        raises(PayloadError, ["rank 0"], idist.all_reduce, value)
        raises(PayloadError, ["rank 0"], idist.reduce, value)
    for value in (1, "abc", [torch.ones(1)]):
        raises(PayloadError, ["tensor"], idist.all_reduce_, value)
        raises(PayloadError, ["tensor"], idist.broadcast_, value)
        raises(PayloadError, ["tensor"], idist.reduce_scatter, value)


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


class Equal(type):
    """A type of classes that can't be hashed."""

    def __eq__(cls, other: object) -> bool:
        return cls is other


class NoHash(metaclass=Equal):
    """An object whose class can't be hashed."""


@law()
def what_a_users_class_raises_leaves_the_ranks_in_step(rank: int, size: int) -> None:
    """The ranks stay in step if the class raises before or after the exchange of a call."""
    for value in (Pair(1.0, 2.0), Scaled(1.0, 2)):
        raises(PayloadError, ["can't be put together again"], idist.all_reduce, value)
        same(idist.all_reduce(1), size)
    raises(ArgumentError, ["async_op"], idist.all_reduce, 1, async_op=torch.ones(2))
    same(idist.all_reduce(1), size)
    for call in (idist.all_reduce, idist.all_gather):
        raises(PayloadError, [], call, NoHash())
        same(idist.all_reduce(1), size)
    raises(ValueError, ["no repr"], idist.all_reduce, 1, NoRepr())


@law()
def what_a_model_doesnt_declare_is_unsupported(rank: int, size: int) -> None:
    model = current_model()
    if "groups" not in model.capabilities:
        raises(UnsupportedOperation, [model.name], idist.new_group, [0])
        raises(UnsupportedOperation, [model.name], idist.all_reduce, 1, group=[0])
    if "send_recv" not in model.capabilities and size > 1:
        peer = (rank + 1) % size
        raises(UnsupportedOperation, [model.name], idist.send, 1, dst=peer)
        raises(UnsupportedOperation, [model.name], idist.recv, src=peer)


_TAKE_TENSORS: tuple[Any, ...] = (
    idist.all_reduce, idist.all_reduce_, idist.all_gather, idist.gather, idist.reduce,
    idist.all_to_all, idist.reduce_scatter, idist.broadcast_,
)  # fmt: skip


@law()
def tensors_without_memory_of_their_own_are_refused_by_name(rank: int, size: int) -> None:
    with FakeTensorMode():
        fake = torch.ones(4)
    masked = quietly(masked_tensor, torch.ones(4), torch.ones(4, dtype=torch.bool))
    for tensor, parts in ((fake, ["FakeTensor"]), (masked, ["MaskedTensor", "as an object"])):
        for call in _TAKE_TENSORS:
            raises(PayloadError, parts, call, tensor)
        raises(PayloadError, parts, idist.all_reduce, {"a": tensor})
    for call in _TAKE_TENSORS:
        raises(PayloadError, ["dense"], call, torch.eye(3, device="cpu").to_sparse())
    spread: Any = Spread()
    for call in [*_TAKE_TENSORS, idist.broadcast]:
        raises(PayloadError, ["Spread", "to_local()", "full_tensor()"], call, spread)
    for inside in ([spread], {"norm": spread}, {"deep": [{1, 2}, spread]}):
        raises(PayloadError, ["rank 0", "full_tensor()"], idist.all_gather, inside)
    raises(PayloadError, ["rank 0", "FakeTensor"], idist.broadcast, fake)
    raises(PayloadError, ["rank 0", "full_tensor()"], idist.all_reduce, {"norm": spread})


@law()
def a_tensor_that_one_rank_refuses_is_an_error_on_every_rank(rank: int, size: int) -> None:
    """Holds if calls are compared, which some models do only with UNISONO_DEBUG=1."""
    control = communicator().control
    control.checks = lambda group: True  # type: ignore[method-assign]  # so that every model compares
    try:
        for calls, bad, good in _refused_beside_good(size):
            for call in calls:
                value = bad if rank == size - 1 else good
                raises((PayloadError, CollectiveMismatchError), [], call, value)
    finally:
        del control.checks


def _refused_beside_good(size: int) -> Iterator[tuple[Sequence[Any], Any, Any]]:
    """Yield calls, a value that is refused on one rank, and the value that other ranks pass."""
    for count in (size, 100_000 * size):
        good = torch.ones(count)
        sparse = good.to_sparse()
        yield _TAKE_TENSORS, sparse, good
        yield [idist.all_reduce], sparse, 1.0
        yield [idist.all_reduce], sparse, {"a": 1}
        writers = (idist.all_reduce_, idist.broadcast_)
        yield writers, torch.ones(1).expand(count * 2), torch.ones(count * 2)
        yield writers, torch.ones(3).as_strided((2, 2), (1, 1)), torch.ones(2, 2)
        if size > 1:  # a single rank may pass integers
            yield _TAKE_TENSORS, good.int(), good


@law()
def what_is_several_times_in_memory_isnt_overwritten(rank: int, size: int) -> None:
    base = torch.zeros(8)
    for view in (
        base[:1].expand(4),
        base.as_strided((4, 4), (1, 1)),
        base.as_strided((2, 2), (2, 2)),  # its span has room for its elements, but two overlap
    ):
        raises(PayloadError, ["all_reduce_", "contiguous()"], idist.all_reduce_, view)
        raises(PayloadError, ["broadcast_", "contiguous()"], idist.broadcast_, view)
    same(base, torch.zeros(8))
    for view in (base.as_strided((3, 2), (2, 3)), base.view(2, 4).t(), base[::2]):
        view.fill_(1)
        same(idist.all_reduce_(view).clone(), torch.full(view.shape, float(size)))
    with torch.inference_mode():
        made = torch.ones(3)[None].t()[::2]
    same(idist.all_reduce_(made).clone(), torch.full((2, 1), float(size)))
