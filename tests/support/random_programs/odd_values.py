"""Constructors of odd values, which aren't simply a number or a piece of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import unisono
from unisono.testing.cases._law import quietly


class Mine(Tensor):
    """A subclass with memory, as users define one to give a tensor a name."""


@cache
def _mesh(world: Any) -> Any:
    return init_device_mesh("cpu", (unisono.get_world_size(),))


def _dtensor(plain: Tensor) -> Tensor:
    # Its first use is collective, so every rank makes one, even if it then passes another value.
    mesh = _mesh(torch.distributed.group.WORLD)
    return DTensor.from_local(plain.clone(), mesh, [Shard(0)], run_check=False)


def _fake(plain: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.ones(plain.shape, dtype=plain.dtype)


def _inference(plain: Tensor) -> Tensor:
    with torch.inference_mode():
        return plain.clone()


def _nested(plain: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([plain[:1], plain[1:]], layout=layout)


WITHOUT_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "dtensor": _dtensor,
    "wrapper": lambda plain: TwoTensor(plain.clone(), plain.clone()),  # type: ignore[no-untyped-call]
    "masked": lambda plain: masked_tensor(plain.clone(), plain > plain.min()),
    "fake": _fake,
    "functional": lambda plain: torch._to_functional_tensor(plain.clone()),
    "meta": lambda plain: plain.to("meta"),
    "sparse": lambda plain: plain.to_sparse(),
    "csr": lambda plain: plain.reshape(1, -1).to_sparse_csr(),
    "mkldnn": lambda plain: plain.to_mkldnn(),
    "nested": _nested,
    "jagged": lambda plain: _nested(plain, torch.jagged),
}
"""Kinds that are refused on every rank, or sent as objects."""

WITH_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda plain: nn.Parameter(plain.clone()),
    "subclass": lambda plain: plain.clone().as_subclass(Mine),
    "needs grad": lambda plain: plain.clone().requires_grad_() * 1,
    "inference": _inference,
    "expanded": lambda plain: plain[:1].expand(plain.shape),
    # Two columns of overlapping memory: the second is the first, shifted by one element.
    "windows": lambda plain: torch.cat([plain, plain[:1]]).as_strided((len(plain), 2), (1, 1)),
    "stepped": lambda plain: torch.stack([plain, plain], -1)[..., 1],
    "transposed": lambda plain: plain.reshape(2, -1).t(),
    "negative": lambda plain: torch.complex(plain, -plain).conj().imag,
    "shifted": lambda plain: torch.cat([plain[:1], plain])[1:],
}
"""Kinds that are treated as the plain tensor with their values."""

IN_PLACE_REFUSED = ("expanded", "windows")
"""Kinds with memory that can't be written to, because elements share memory."""
ODD = {**WITHOUT_MEMORY, **WITH_MEMORY}


def tensor(kind: str, numel: int, start: int, is_odd: bool) -> Tensor:
    """Make a tensor of an odd kind, or the plain one that stands for it on another rank.

    Collective for some kinds.
    """
    plain = (torch.arange(numel) % 5 + 1 + start).to(torch.float32)
    made: Tensor = quietly(ODD[kind], plain)
    if is_odd:
        return made
    return plain if kind in WITHOUT_MEMORY else torch.tensor(made.tolist())


OVERLAPS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "twice": lambda base: [base, base],
    "three times": lambda base: [base, base, base],
    "an alias": lambda base: [base, base.view_as(base)],
    "another shape": lambda base: [base, base.view(2, -1)],
    "a transpose": lambda base: [base.view(2, -1), base.view(2, -1).t()],
    "a part": lambda base: [base, base[: base.numel() // 2]],
    "a part first": lambda base: [base[base.numel() // 2 :], base],
    "two halves and a bit": lambda base: [base[: base.numel() // 2 + 1], base[base.numel() // 2 :]],
    "every other": lambda base: [base, base[::2]],
    "one element": lambda base: [base, base[0]],
    "two halves": lambda base: [base[: base.numel() // 2], base[base.numel() // 2 :]],
    "evens and odds": lambda base: [base[::2], base[1::2]],
}
"""Functions that make lists of tensors from one piece of memory of even length."""
APART = ("two halves",)
"""Lists of tensors that don't overlap."""


def overlapping(
    how: str, numel: int, dtype: str, start: int, are_copies: bool, torn: int, is_dict: bool
) -> Any:
    """Make tensors that share memory, or copies of them, which may differ."""
    # Multiples of 6, so that means over two and three ranks are whole and exact.
    base = ((torch.arange(numel) % 3 + start) * 6).to(getattr(torch, dtype))
    tensors = OVERLAPS[how](base)
    if are_copies:
        tensors = [tensor.clone() + torn * i for i, tensor in enumerate(tensors)]
    return {f"p{i}": tensor for i, tensor in enumerate(tensors)} if is_dict else tensors


def _boom(*_: object, **__: object) -> Any:
    raise ArithmeticError("from within a value")


def _boom_on(rank: int) -> str:
    return str(_boom()) if unisono.get_rank() == rank else "read"


def _raising(base: type, *names: str) -> Any:
    """Make a subclass in which some methods raise."""
    return type("Raising", (base,), dict.fromkeys(names, _boom))


def _written(as_call: Callable[[Any], tuple[Any, tuple[Any, ...]]]) -> Any:
    """Make an object that pickle writes as a call."""
    return type("Written", (), {"__reduce__": as_call})()


_TORCH: dict[str, Any] = {"__torch_function__": classmethod(_boom)}
_NOTHING: list[Any] = []
RAISING: dict[str, Callable[[int], Any]] = {
    "reduce": lambda _: _raising(object, "__reduce_ex__")(),
    "recursion": lambda _: _written(lambda self: (list, ([type(self)()],))),
    "depth": lambda _: reduce(lambda inner, _: [inner], range(100_000), _NOTHING),
    "opens badly": lambda _: _written(lambda _: (_boom, ())),
    "opens badly elsewhere": lambda rank: _written(lambda _: (_boom_on, (rank,))),
    "float": lambda _: _raising(float, "__float__", "__reduce_ex__")(1.0),
    "int": lambda _: _raising(int, "__int__", "__index__", "__reduce_ex__")(1),
    "list": lambda _: _raising(list, "__iter__", "__len__")([1]),
    "dict": lambda _: _raising(dict, "items", "keys", "__iter__")(a=1),
    "torch": lambda _: torch.ones(3).as_subclass(type("Raising", (Tensor,), _TORCH)),
}
"""Values that raise while they are written or read, made for the rank that has them."""


def raising(kind: str, rank: int) -> Any:
    """Make a value of ``RAISING``."""
    return RAISING[kind](rank)
