"""Scripts in replicas of a launcher that only knows functions: a plug-in's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import ArgumentError, LaunchError
from unisono.launchers._front import Outcome
from unisono.launchers._script import Script, env_for
from unisono.topology import RankInfo

__all__ = ("run",)

_BASE = 128


@dataclass(frozen=True, slots=True)
class _Rank:
    """The script as a function of one replica."""

    words: tuple[str, ...]
    environ: Mapping[str, str]

    def __call__(self, info: RankInfo) -> None:
        environ = {**os.environ, **self.environ, **env_for(info)}
        code = subprocess.run(self.words, env=environ, stdin=subprocess.DEVNULL).returncode
        if code != 0:
            raise SystemExit(code if code > 0 else _BASE - code)


def run(script: Script, launch: Callable[..., Any]) -> Outcome:
    """Run a script in replicas of any launcher.

    Local.

    Args:
        script: what was asked for.
        launch: the launcher.

    Returns:
        How it went; failures of ranks are said by the launcher's own error.

    Raises:
        ArgumentError: an option that such a launcher takes in no way.
        LaunchError: the launcher's own.
    """
    for name in ("hosts", "max_restarts", "timeout_s"):
        if getattr(script, name):
            raise ArgumentError(f"this launcher takes no --{name.replace('_', '-')}")
    own = {name: os.environ[name] for name in ("UNISONO_BACKEND",) if name in os.environ}
    words = tuple(script.rank_argv())
    try:
        launch(_Rank(words, own), script.plan())
    except LaunchError as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        return Outcome(code or 1)
    return Outcome(0)
