"""A script with a class of each kind that users' scripts have: its text is run as ``__main__``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from os import environ, makedirs
from os.path import join
from random import getrandbits
from typing import Any, Generic, Iterable, NamedTuple, Protocol, TypeVar  # noqa: UP035

from torch.utils.data import IterableDataset

T = TypeVar("T")


class Abstract(ABC):
    @abstractmethod
    def answer(self) -> int: ...


class Own(Abstract):
    def answer(self) -> int:
        return 42


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Config(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return len(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("one", "three"))

    def __len__(self) -> int:
        return 2


class Items(Iterable[T]):
    def __init__(self, *items: T) -> None:
        self.items = items

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class Speaks(Protocol):
    def speak(self) -> str: ...


class Dog(Speaks):
    def speak(self) -> str:
        return "bow"


class Color(Enum):
    RED = 1


class Point(NamedTuple):
    x: int


@dataclass(frozen=True)
class Record:
    x: int


class Held(contextlib.AbstractContextManager["Held"]):
    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def held() -> Iterator[int]:
    yield 1


def within() -> int:
    with Held(), held() as value:
        return value


MAKE: dict[str, Callable[[], Any]] = {
    "ABC": Own,
    "IterableDataset": Stream,
    "Mapping": Config,
    "Iterable": lambda: Items(1, 2),
    "Generic": lambda: Box[int](1),
    "Protocol": Dog,
    "Enum": lambda: Color.RED,
    "NamedTuple": lambda: Point(1),
    "dataclass": lambda: Record(1),
    "context manager": Held,
}

if importlib.util.find_spec("torchmetrics") is not None:
    import torch
    import torchmetrics

    class Sum(torchmetrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(1), dist_reduce_fx="sum")

        def update(self, value: int) -> None:
            self.total += value

        def compute(self) -> Any:
            return self.total

    MAKE["torchmetrics"] = Sum

if importlib.util.find_spec("ignite") is not None:
    from ignite.metrics import Metric

    class Count(Metric):  # type: ignore[misc]
        def reset(self) -> None:
            self.n = 0

        def update(self, output: Any) -> None:
            self.n += 1

        def compute(self) -> int:
            return self.n

    MAKE["ignite"] = Count


def work(local_rank: int, folder: str) -> tuple[dict[str, Any], list[Any]]:
    """Use each of them in a rank; return the instances, and what they did."""
    made = {name: make() for name, make in MAKE.items()}
    for name in ("Enum", "NamedTuple", "dataclass"):
        assert pickle.loads(pickle.dumps(made[name])) == made[name]  # plain pickle finds it, too
    makedirs(join(folder, str(local_rank)), exist_ok=True)
    random.seed(3)
    drawn = getrandbits(32)
    random.seed(3)
    assert (environ is os.environ, random.getrandbits(32) == drawn) == (True, True)
    known = (made["ABC"].answer(), [*made["IterableDataset"]], dict(made["Mapping"]))
    return made, [*known, [*made["Iterable"]], made["Protocol"].speak(), within()]


def check(results: list[tuple[dict[str, Any], list[Any]]]) -> None:
    """Demand that instances have come back as what they are here."""
    for made, known in results:
        assert known == [42, [0, 1, 2], {"one": 3, "three": 5}, [1, 2], "bow", 1]
        assert isinstance(made["Mapping"], Mapping)
        for name, make in MAKE.items():
            assert type(made[name]) is type(make()), name
