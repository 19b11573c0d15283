"""Definition of a law, and the assertions that laws use."""

from __future__ import annotations

import reprlib
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.context import current_model

T = TypeVar("T")
LAWS: dict[str, Law] = {}


@dataclass(frozen=True, slots=True)
class Law:
    """One law: a function that every replica calls, and that raises if the law is broken.

    Args:
        name: the function's name.
        check: called without arguments in every replica of a live context.
        needs: capabilities that the law uses; a model that lacks one must raise
            UnsupportedOperation.
    """

    name: str
    check: Callable[[], None]
    needs: frozenset[str] = frozenset()


def law(*needs: str, ranks: int = 1) -> Callable[[Callable[[int, int], None]], object]:
    """Register a function of rank and world size as a law on models that declare `needs`."""
    # With fewer than `ranks` replicas the law passes without a check.

    def register(check: Callable[[int, int], None]) -> object:
        @wraps(check)
        def checked() -> None:
            topology = current_model().topology
            if topology.world_size >= ranks:
                check(topology.rank, topology.world_size)

        LAWS[check.__name__] = Law(check.__name__, checked, frozenset(needs))
        return checked

    return register


def same(value: Any, expected: Any, what: object = "") -> None:
    """Check that two values have the same type, dtype, shape and bits."""
    found = difference(value, expected)
    assert not found, f"{what}: {found}"


def difference(value: Any, expected: Any, path: str = "") -> str:
    """Return one line that describes the first difference of two values, or an empty string."""
    place = f"at {path}: " if path else ""

    def wrong(got: object, wanted: object) -> str:
        return f"{place}got {got}, wanted {wanted}"

    if type(value) is not type(expected):  # values of two types may be equal, as True and 1 are
        return wrong(_short(value), _short(expected))
    if isinstance(expected, Tensor):
        different = _difference_of_tensors(value, expected)
        return different and place + different
    if isinstance(expected, dict) and list(value) != list(expected):
        return wrong(f"the keys {_short(list(value))}", _short(list(expected)))
    if isinstance(expected, (list, tuple)) and len(value) != len(expected):
        return wrong(f"{len(value)} items", len(expected))
    if isinstance(expected, (dict, list, tuple)):
        keys: Iterable[Any] = expected if isinstance(expected, dict) else range(len(expected))
        found = (difference(value[key], expected[key], f"{path}[{key!r}]") for key in keys)
        return next(filter(None, found), "")
    return "" if _is_same(value, expected) else wrong(_short(value), _short(expected))


def _difference_of_tensors(value: Tensor, expected: Tensor) -> str:
    for name in ("dtype", "shape", "device"):
        got, wanted = getattr(value, name), getattr(expected, name)
        if got != wanted:
            shown = [tuple(each) if name == "shape" else each for each in (got, wanted)]
            return f"got a tensor of {name} {shown[0]}, wanted {shown[1]}"
    if torch.equal(_bits(value), _bits(expected)):
        return ""
    differs = (_bits(value) != _bits(expected)).reshape(max(expected.numel(), 1), -1).any(dim=1)
    count, first = int(differs.sum()), int(differs.nonzero()[0])
    index = [int(each) for each in torch.unravel_index(torch.tensor(first), expected.shape)]
    values = [each.detach().cpu().reshape(-1)[first].item() for each in (value, expected)]
    further = f", and {count - 1} other elements differ" if count > 1 else ""
    return f"element {index} is {values[0]!r}, wanted {values[1]!r}{further}"


def _short(value: Any) -> str:
    """Describe a value's type, and its beginning or shape."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _is_same(value: Any, expected: Any) -> bool:
    """Return whether two values of one type, except tensors and containers, are the same."""
    if isinstance(expected, (float, complex)):
        return repr(value) == repr(expected)  # as text NaN equals NaN, and -0.0 differs from 0.0
    return bool(value == expected)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, by which NaN equals NaN, and -0.0 differs from 0.0."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).unsqueeze(-1).view(torch.uint8)


_quiet = threading.Lock()


def quietly(make: Callable[..., T], *args: Any) -> T:
    """Call a function, and ignore warnings, for example torch's warnings about prototypes."""
    with _quiet, warnings.catch_warnings():  # replicas that are threads share the warning filters
        warnings.simplefilter("ignore")
        return make(*args)


def raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    parts: Sequence[str],
    call: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> None:
    """Check that a call raises `error` with all `parts` in its text."""
    try:
        value = call(*args, **options)
    except error as raised:
        for part in parts:
            assert part in str(raised), f"{part!r} isn't in the message {str(raised)!r}"
        return
    raise AssertionError(f"expected {error}, but the call returned {value!r}")


def tensor_of(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Create a tensor whose values depend on the rank, and are exact in every dtype."""
    count = torch.Size(shape).numel()
    # Random, so that the results of any two reductions differ within the first few elements.
    values = torch.randint(4, (count,), generator=torch.Generator().manual_seed(rank + 4))
    if dtype is torch.bool:
        values = values % 2
    return values.reshape(tuple(shape)).to(dtype)
