"""The ways in which tests start replicas, and the checks of a replica's failure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unisono
from tests.support.measures import Clock, says_little
from tests.support.requirements import require_backend
from unisono import Parallel, WorkerPool
from unisono.errors import WorkerFailedError

SIZE = 3
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")


@dataclass(frozen=True)
class Way:
    """A runner and its backend."""

    runner: str
    backend: str = "gloo"

    def __str__(self) -> str:
        return self.runner if self.backend == "gloo" else f"{self.runner} on {self.backend}"

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a function in replicas; skip the test if the backend's library is missing."""
        require_backend(self.backend)
        given = {"nproc_per_node": SIZE, "timeout": 60, **options}
        if self.runner == "spawn":
            return unisono.spawn(self.backend, fn, args, **given)
        if self.runner == "Parallel":
            with Parallel(self.backend, **given) as parallel:
                return parallel.run(fn, *args)
        with WorkerPool(self.backend, **given) as pool:
            pool.run(abs)
            try:
                return pool.run(fn, *args)
            except WorkerFailedError as error:
                vars(error)["seen"] = time.monotonic()
                assert pool.run(abs) == list(range(SIZE))  # the pool has new replicas
                raise


def told(error: WorkerFailedError, clock: Clock) -> float:
    """Return the seconds from the fault until its error was raised."""
    seen: float = vars(error).get("seen", time.monotonic())
    return seen - float(Path(clock.path).read_text())


def check_error(error: WorkerFailedError, victim: int, says: str, size: int = SIZE) -> str:
    """Fail if an error isn't the victim's, or is too long; return its first line."""
    text = str(error)
    assert text.startswith(f"rank {victim} of {size} "), text
    assert says in text, text
    says_little(text, error.traceback)
    return text.splitlines()[0]


def launcher_rank() -> int:
    """Return the rank of a replica without a context, from the launcher's variables."""
    return int(next(os.environ[name] for name in _RANKS if name in os.environ))
