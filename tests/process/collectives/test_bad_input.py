"""Bad input to a collective raises the same clear error on every rank, and nothing is lost."""

from __future__ import annotations

import functools

import pytest

import unisono
from tests.support.mistakes import MISTAKES, make_all

WORLDS = [("serial", 1), ("threads", 2), ("gloo", 2)]


@functools.cache
def made_on(backend: str, size: int) -> list[dict[str, tuple[type | None, str]]]:
    results: list[dict[str, tuple[type | None, str]]]
    results = unisono.spawn(backend, make_all, nproc_per_node=size, timeout=60)
    return results


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_on_every_rank_of_every_model_alike(name: str) -> None:
    mistake = MISTAKES[name]
    for backend, size in WORLDS:
        if size < mistake.least_size:
            continue
        for rank, made in enumerate(made_on(backend, size)):
            error, message = made[name]
            assert error is mistake.error, (backend, message)
            for words in mistake.words:
                assert words.format(last=size - 1, rank=rank) in message, backend
