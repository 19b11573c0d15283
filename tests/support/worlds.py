"""The backends and numbers of ranks that training helpers are tested with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

import unisono as idist
from tests.support.requirements import is_required, require_backend

real = pytest.mark.real
SERIAL = pytest.param("serial", 1, id="serial")
REAL = [
    pytest.param("mpi4py", 2, id="mpi4py-2", marks=real),
    pytest.param("horovod", 2, id="horovod-2", marks=real),
]


F = TypeVar("F", bound=Callable[..., Any])


def with_marks(*marks: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator that gives a test several marks."""

    def decorate(test: F) -> F:
        for mark in reversed(marks):
            test = mark(test)
        return test

    return decorate


on_libraries = [
    pytest.mark.ranks(2, on=name, timeout=200)
    for name in ("mpi4py", "horovod")
    if is_required(name)
]
"""Marks for tests on a real library, which apply only in the session of this library."""
several_here = with_marks(pytest.mark.ranks(3, on="threads"), pytest.mark.ranks(2, on="gloo"))
several = with_marks(several_here, *on_libraries)
alone_and_several_here = with_marks(
    pytest.mark.ranks(1, on="serial"),
    pytest.mark.ranks(2, 3, on="threads"),
    pytest.mark.ranks(2, on="gloo"),
)
alone_and_several = with_marks(alone_and_several_here, *on_libraries)


def run(backend: str, size: int, fn: Callable[..., Any], *args: Any, timeout: float = 90) -> Any:
    """Run ``fn(local_rank, *args)`` on every rank; skip if the backend's library is missing."""
    require_backend(backend)
    options: dict[str, Any] = {} if backend == "serial" else {"timeout": timeout}
    return idist.spawn(backend, _quietly, (fn, *args), nproc_per_node=size, **options)


def _quietly(local_rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(1)
    return fn(local_rank, *args)


def run_all(backend: str, size: int, *calls: tuple[Any, ...]) -> None:
    """Run several ``(fn, *args)`` in one job, because a real launcher takes seconds to start."""
    run(backend, size, _one_by_one, calls, timeout=200)


def _one_by_one(local_rank: int, calls: tuple[tuple[Any, ...], ...]) -> None:
    for fn, *args in calls:
        _named(local_rank, fn, args)


def _named(local_rank: int, fn: Callable[..., Any], args: list[Any]) -> None:
    try:
        fn(local_rank, *args)
    except Exception as error:
        raise AssertionError(f"{fn.__name__}{tuple(args)} on rank {local_rank}") from error
