"""Functions that tests spawn, in a module that is quick to import."""

from __future__ import annotations

from collections.abc import Callable

import unisono


def total(local_rank: int, base: int, *, factor: int = 1) -> int:
    reduced: int = unisono.all_reduce(factor * (base + local_rank))
    return reduced


class Adder:
    def __init__(self, base: int) -> None:
        self.base = base

    def add(self, local_rank: int) -> int:
        return total(local_rank, self.base)

    def __call__(self, local_rank: int) -> int:
        return total(local_rank, self.base)


def add_to(base: int) -> Callable[[int], int]:
    return lambda local_rank: total(local_rank, base)
