"""Tensors that are more, or less, than a piece of memory: how each is made, and what is in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.masked import masked_tensor

import unisono
from tests.support.random_programs.values import Unusual, plain

_meshes: dict[int, Any] = {}


class Mine(Tensor):
    """A subclass that has memory, such as users write to give a tensor a name."""


class Wrapper(Tensor):
    """A subclass without memory: it holds another tensor, and says how operations work on that."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[Wrapper], held: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.held if isinstance(value, Wrapper) else value

        result = func(*map(bare, args), **(kwargs or {}))
        return Wrapper(result) if isinstance(result, Tensor) else result


def _dtensor(plain: Tensor) -> Tensor:
    mesh = _meshes.get(id(torch.distributed.group.WORLD))
    if mesh is None:  # collective, so every rank makes it, whether it passes the tensor or not
        mesh = init_device_mesh("cpu", (unisono.get_world_size(),))
        _meshes[id(torch.distributed.group.WORLD)] = mesh
    return DTensor.from_local(plain.clone(), mesh, [Shard(0)], run_check=False)


def _fake(plain: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.ones(plain.shape, dtype=plain.dtype)


def _inference(plain: Tensor) -> Tensor:
    with torch.inference_mode():
        return plain.clone()


def _windows(plain: Tensor) -> Tensor:
    """See memory of one element more as two columns, of which the second is the first, shifted."""
    flat = torch.cat([plain.reshape(-1), plain.reshape(-1)[:1]])
    return flat.as_strided((plain.numel(), 2), (1, 1))


def _nested(plain: Tensor) -> Tensor:
    return torch.nested.nested_tensor([plain[:1], plain[1:]])


def _jagged(plain: Tensor) -> Tensor:
    return torch.nested.nested_tensor([plain[:1], plain[1:]], layout=torch.jagged)


WITHOUT_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "dtensor": _dtensor,
    "wrapper": lambda plain: Wrapper(plain.clone()),
    "masked": lambda plain: masked_tensor(plain.clone(), plain > plain.min()),
    "fake": _fake,
    "functional": lambda plain: torch._to_functional_tensor(plain.clone()),
    "meta": lambda plain: plain.to("meta"),
    "sparse": lambda plain: plain.to_sparse(),
    "csr": lambda plain: plain.reshape(1, -1).to_sparse_csr(),
    "mkldnn": lambda plain: plain.to_mkldnn(),
    "nested": _nested,
    "jagged": _jagged,
}
"""Kinds that are refused on every rank, or carried whole."""

WITH_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda plain: nn.Parameter(plain.clone()),
    "subclass": lambda plain: plain.clone().as_subclass(Mine),
    "needs grad": lambda plain: plain.clone().requires_grad_() * 1,
    "inference": _inference,
    "expanded": lambda plain: plain[:1].expand(plain.shape),
    "windows": _windows,
    "stepped": lambda plain: torch.stack([plain, plain], -1)[..., 1],
    "transposed": lambda plain: plain.reshape(2, -1).t(),
    "negative": lambda plain: torch.complex(plain, -plain).conj().imag,
    "shifted": lambda plain: torch.cat([plain[:1], plain])[1:],
}
"""Kinds that count as the plain tensor that they show."""

IN_PLACE_REFUSED = ("expanded", "windows")
"""Kinds of the latter that can't be written to, for elements share memory."""

ODD = {**WITHOUT_MEMORY, **WITH_MEMORY}


with warnings.catch_warnings():  # torch warns once of this; ranks that are threads share filters
    warnings.simplefilter("ignore")
    torch.ones(1, 1).to_sparse_csr()


def make_odd(kind: str, plain: Tensor) -> Tensor:
    """Make a tensor of a kind from a plain one [n] of floats; of DTensors collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes in torch
        return ODD[kind](plain)


@dataclass(frozen=True)
class Odd(Unusual):
    """A tensor of an odd kind, or the plain one that stands for it on another rank."""

    kind: str
    numel: int  # of the plain tensor that it is made of; even
    start: int
    is_odd: bool

    def make(self) -> Tensor:
        plain = (torch.arange(self.numel) % 5 + 1 + self.start).to(torch.float32)
        made = make_odd(self.kind, plain)  # collective for some kinds
        if self.is_odd:
            return made
        return plain if self.kind in WITHOUT_MEMORY else torch.tensor(made.tolist())


def content_of_tensor(value: Any) -> Any:
    """Return a plain copy of what is in a tensor, with a name for what else it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _content(value)


def _content(value: Any) -> Any:
    if isinstance(value, DTensor):
        return "DTensor", plain(value.to_local())
    if isinstance(value, Wrapper):
        return "Wrapper", plain(value.held)
    if type(value).__name__ == "MaskedTensor":
        return "masked", plain(value.get_mask()), plain(value.to_tensor(0))
    if value.is_meta or type(value).__name__ == "FakeTensor":
        return "nothing", str(value.dtype), list(value.shape)
    if torch._is_functional_tensor(value):
        torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
        return plain(torch._from_functional_tensor(value))
    if value.is_nested:
        return "nested", [plain(part) for part in value.unbind()]
    if value.layout is torch._mkldnn or value.layout is not torch.strided:  # type: ignore[attr-defined]
        return str(value.layout), plain(value.to_dense())
    return plain(value)
