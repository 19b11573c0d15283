"""The debugger of ``--pdb`` within a rank: it talks to the session's own terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.debugging import post_mortem


def own_stdin() -> str:
    """Name this process's stdin for another one."""
    path = f"/proc/{os.getpid()}/fd/0"
    return path if Path(path).exists() else "/dev/tty"


def examine(
    config: pytest.Config, failure: pytest.ExceptionInfo[BaseException], stdin: str | None
) -> None:
    """Let the user look at a failure of this rank, which prints where the session does."""
    at = failure.value if sys.version_info >= (3, 13) else failure.tb
    if stdin is None:
        post_mortem(at)
        return
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend(in_=True)
    kept = os.dup(0)
    _redirect(os.open(stdin, os.O_RDONLY))
    try:
        post_mortem(at)
    finally:
        _redirect(kept)


def _redirect(fd: int) -> None:
    os.dup2(fd, 0)
    os.close(fd)
