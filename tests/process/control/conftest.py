"""The process that ranks made by hand are forks of."""

from __future__ import annotations

import pytest

import unisono
from tests.support.by_hand import prepare


@pytest.fixture(scope="package", autouse=True)
def forks() -> None:
    if not unisono.is_distributed():  # this is no rank
        prepare()
