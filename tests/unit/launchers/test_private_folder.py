"""A launcher whose files can't be written says so, and what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import NoReturn

import pytest

from unisono.errors import LaunchError
from unisono.launchers.script import plugin
from unisono.launchers.script.script import Script


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC])
def test_where_no_folder_can_be_made_the_error_says_what_to_do(
    reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(reason, os.strerror(reason), "/tmp/x")

    def never(*_: object) -> NoReturn:
        raise AssertionError("it was started")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(LaunchError, match=r"nothing was started.*/tmp/x.*TMPDIR") as caught:
        plugin.run(Script(()), never)
    assert os.strerror(reason) in str(caught.value)
