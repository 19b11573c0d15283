"""Sessions of pytest for all of these tests, in one interpreter, of which no process is left."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.processes import MARK, marked
from tests.support.sessions import Sessions

LEFT_S = 20.0  # for what is left of a session to end


@pytest.fixture(scope="package")
def sessions() -> Iterator[Sessions]:
    mark = uuid.uuid4().hex
    with Sessions({MARK: mark}) as warm:
        yield warm
    assert not marked(mark, LEFT_S)
