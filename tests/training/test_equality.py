"""What assert_equal looks into, and what it compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import unisono as idist
from unisono.errors import CollectiveMismatchError, PayloadError


@dataclass
class Counts:
    seen: int = field(init=False, default=0)
    unset: int = field(init=False)
    parts: list[Any] = field(default_factory=list)


def net(value: float) -> nn.Module:
    made = nn.Linear(1, 1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


@pytest.mark.ranks(2, on="threads")
def test_all_fields_of_dataclasses_are_compared_and_modules_within_them() -> None:
    rank = idist.get_rank()
    made: Callable[[float], Any] = lambda value: {"a": (Counts(parts=[net(value)]), 1)}  # noqa: E731
    idist.assert_equal(made(0.5))
    with pytest.raises(CollectiveMismatchError, match=r"2 of 4 .*'\.parts'\}\[0\]\{'weight'\}"):
        idist.assert_equal(made(rank))
    counts = Counts()
    counts.seen = rank
    with pytest.raises(CollectiveMismatchError, match=r"1 of .*\{'\.seen'\}"):
        idist.assert_equal(counts)
    counts.parts.append(counts)
    with pytest.raises(PayloadError, match="contains itself"):
        idist.assert_equal(counts)


@pytest.mark.ranks(2, on="threads")
def test_long_ints_and_views_of_what_they_show_are_compared() -> None:
    rank = idist.get_rank()
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    shown = [numbers.conj(), numbers.conj().imag]
    idist.assert_equal([2**70, *(shown if rank else [item.clone() for item in shown])])
    idist.assert_equal([item.resolve_conj().resolve_neg() if rank else item for item in shown])
    for unlike in (2**70 + rank, numbers.conj() if rank else numbers):
        with pytest.raises(CollectiveMismatchError):
            idist.assert_equal(unlike)
