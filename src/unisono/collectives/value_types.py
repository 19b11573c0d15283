"""Static types of the values that collectives take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=Tensor)


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class NumpyScalar(Protocol):
    """Real number of numpy; tensors have no ``tobytes``, arrays no ``is_integer``."""

    def __float__(self) -> float: ...

    def tobytes(self) -> bytes:
        """Return its bytes."""

    def is_integer(self) -> bool:
        """Return whether it has no fraction."""


Container: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...] | _Dataclass
"""Types reduced leaf by leaf. A TypedDict is a Mapping, and no dict, to a type checker."""
Reducible: TypeAlias = Tensor | complex | NumpyScalar | Container
Plain = TypeVar("Plain", bool, int, float, complex)
"""Types that all operations but means keep; a subclass, such as an IntEnum, gives its base."""
ContainerT = TypeVar("ContainerT", bound=Container)
Summed = TypeVar("Summed", Tensor, int, float, complex)
"""Types that a sum keeps where bools are counted."""
Inexact = TypeVar("Inexact", Tensor, float, complex)
"""Types that every operation keeps; an int is a float here."""
