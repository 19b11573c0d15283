"""Random delays before the collectives of a test, which make races show themselves."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

from unisono.model.contract import ComputationModel

_SHARE = 0.3  # of the collectives that are delayed
_MEAN_S = 0.005
_MOST_S = 0.03
_COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all", "broadcast", "exchange", "recv", "reduce"),
    *("reduce_scatter", "scatter", "send", "start_all_reduce"),
)


class Delays:
    """Delays of one rank: the same seed, test and rank give the same delays."""

    def __init__(self, model: ComputationModel, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank
        self._random = random.Random()
        for name in _COLLECTIVES:
            setattr(model, name, self._delayed(getattr(model, name)))

    def begin(self, test: str) -> None:
        """Begin with the delays of a test."""
        self._random.seed(f"{self._seed} {test} {self._rank}")

    def seconds(self) -> float:
        """Draw the next delay, mostly 0 s."""
        if self._random.random() >= _SHARE:
            return 0.0
        return min(_MOST_S, self._random.expovariate(1 / _MEAN_S))

    def _delayed(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def call(*args: Any, **options: Any) -> Any:
            time.sleep(self.seconds())
            return operation(*args, **options)

        return call
