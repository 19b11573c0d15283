"""The process that ranks made by hand are forks of."""

from __future__ import annotations

import pytest

from tests.support.by_hand import prepare


@pytest.fixture(scope="package", autouse=True)
def forks() -> None:
    prepare()
