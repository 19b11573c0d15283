"""A launcher whose files can't be written says so, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from unisono.errors import LaunchError
from unisono.launchers.horovod import functions as horovod
from unisono.launchers.mpi import functions as mpi
from unisono.launchers.script import function_job
from unisono.launchers.script.script import Script
from unisono.topology import LaunchPlan


def files_of_a_folder() -> Any:
    return function_job.run_function(repr, Script(()), never, {})


def never(*_: object) -> NoReturn:
    raise AssertionError("it was started")


LAUNCHERS: dict[str, Callable[[], Any]] = {
    "torchrun and Slurm": files_of_a_folder,
    "mpi": lambda: mpi.launch(repr, LaunchPlan(2), command=["true"]),
    "horovod": lambda: horovod._listen(True, 2, contextlib.ExitStack()),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC])
def test_where_no_folder_can_be_made_the_error_says_what_to_do(
    launcher: str, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(reason, os.strerror(reason), "/tmp/x")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(LaunchError, match=r"nothing was started.*/tmp/x.*TMPDIR") as caught:
        LAUNCHERS[launcher]()
    assert os.strerror(reason) in str(caught.value)


def test_a_disk_that_is_full_by_then_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(LaunchError, match="No space left on device.*make room"):
        files_of_a_folder()
