"""What a law is, and the comparisons that laws are made of."""

from __future__ import annotations

import math
import reprlib
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.context import current_model

__all__ = ("LAWS", "Law", "law", "needs_ranks", "quietly", "raises", "same", "tensor_of", "worlds")

T = TypeVar("T")
LAWS: dict[str, Law] = {}


@dataclass(frozen=True, slots=True)
class Law:
    """One law: a function that every replica calls, and that raises where the law is broken.

    Args:
        name: the function's name.
        check: called without arguments in every replica of a live context.
        needs: capabilities of the model without which it must raise UnsupportedOperation.
    """

    name: str
    check: Callable[[], None]
    needs: frozenset[str] = frozenset()


def law(*needs: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function as a law that needs some capabilities. Local."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        LAWS[check.__name__] = Law(check.__name__, check, frozenset(needs))
        return check

    return register


def worlds() -> tuple[int, int]:
    """Give this replica's rank and the number of replicas. Local."""
    topology = current_model().topology
    return topology.rank, topology.world_size


def needs_ranks(count: int) -> bool:
    """Tell whether the job has as many replicas. Local."""
    return current_model().topology.world_size >= count


def same(found: Any, wanted: Any, what: object = "") -> None:
    """Demand the same value, type, dtype, shape and bits. Local."""
    assert _is_same(found, wanted), f"{what}: {_difference(found, wanted)}"


def _difference(found: Any, wanted: Any, path: str = "") -> str:
    """Say where two values differ first, in a line. Local."""
    at = f"at {path}: " if path else ""
    if type(found) is not type(wanted):
        return f"{at}got {_short(found)}, wanted {_short(wanted)}"
    if isinstance(wanted, Tensor):
        return at + _difference_of_tensors(found, wanted)
    if isinstance(wanted, dict) and list(found) != list(wanted):
        return f"{at}got the keys {_short(list(found))}, wanted {_short(list(wanted))}"
    if isinstance(wanted, (list, tuple)) and len(found) != len(wanted):
        return f"{at}got {len(found)} items, wanted {len(wanted)}"
    keys: Iterable[Any] = ()
    if isinstance(wanted, (dict, list, tuple)):
        keys = wanted if isinstance(wanted, dict) else range(len(wanted))
    for key in keys:
        if not _is_same(found[key], wanted[key]):
            return _difference(found[key], wanted[key], f"{path}[{key!r}]")
    return f"{at}got {_short(found)}, wanted {_short(wanted)}"


def _difference_of_tensors(found: Tensor, wanted: Tensor) -> str:
    for name in ("dtype", "shape", "device"):
        got, due = getattr(found, name), getattr(wanted, name)
        if got != due:
            shown = [tuple(each) if name == "shape" else each for each in (got, due)]
            return f"got a tensor of {name} {shown[0]}, wanted {shown[1]}"
    differs = (_bits(found) != _bits(wanted)).reshape(max(wanted.numel(), 1), -1).any(dim=1)
    count, first = int(differs.sum()), int(differs.nonzero()[0])
    index = [int(each) for each in torch.unravel_index(torch.tensor(first), wanted.shape)]
    values = [each.detach().cpu().reshape(-1)[first].item() for each in (found, wanted)]
    others = f", and {count - 1} other elements differ" if count > 1 else ""
    return f"element {index} is {values[0]!r}, wanted {values[1]!r}{others}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _is_same(found: Any, wanted: Any) -> bool:
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, Tensor):
        return (
            found.dtype is wanted.dtype
            and found.shape == wanted.shape
            and found.device == wanted.device
            and torch.equal(_bits(found), _bits(wanted))
        )
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(_is_same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(_is_same, found, wanted))
    if isinstance(wanted, complex):
        return _is_same(found.real, wanted.real) and _is_same(found.imag, wanted.imag)
    if isinstance(wanted, float):
        is_zero_alike = math.copysign(1, found) == math.copysign(1, wanted)
        return bool((found == wanted and is_zero_alike) or (found != found and wanted != wanted))
    return bool(found == wanted)


def _bits(tensor: Tensor) -> Tensor:
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).unsqueeze(-1).view(torch.uint8)


_quiet = threading.Lock()


def quietly(make: Callable[..., T], *args: Any) -> T:
    """Call something, without torch's warning about prototypes. Local."""
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


def raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    call: Callable[[], Any],
    parts: Sequence[str] = (),
) -> None:
    """Demand that `call` raises `error` with a text that has all `parts`. Local."""
    try:
        value = call()
    except error as raised:
        for part in parts:
            assert part in str(raised), f"{part!r} isn't in the message {str(raised)!r}"
        return
    raise AssertionError(f"{error} was due, but the call returned {value!r}")


def tensor_of(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor whose content depends on the rank, small enough to be exact in every dtype.

    Local.

    Returns:
        `shape`, with values 0 to 3 (bool: False and True), on the CPU.
    """
    count = torch.Size(shape).numel()
    # Mixed, so that within a few elements any two operations differ.
    values = torch.randint(4, (count,), generator=torch.Generator().manual_seed(rank + 4))
    if dtype is torch.bool:
        values = values % 2
    return values.reshape(tuple(shape)).to(dtype)
