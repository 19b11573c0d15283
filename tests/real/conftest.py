"""What all tests of real libraries share."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import MARK, marked

GONE_WITHIN_S = 10.0


@pytest.fixture
def nothing_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Path]:
    """Check that no process, file or signal handler stays behind; give the temporary folder."""
    mark, folder = uuid.uuid4().hex, tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield folder
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not marked(mark, getattr(request.module, "GONE_WITHIN_S", GONE_WITHIN_S))
    assert not list(folder.iterdir())
