"""Retention of a run's checkpoints: the newest and the best."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unisono.errors import ArgumentError
from unisono.sections import run_on_rank
from unisono.training.checkpoints import is_whole, remove, save_checkpoint

_NAME = re.compile(r"step=(\d+)(?:,score=(nan|-?(?:inf|[0-9][0-9.e+-]*)))?")


_Kept = tuple[int, float, Path]
"""Step, score and path of a complete checkpoint."""


class CheckpointManager:
    """Writes a run's checkpoints to one folder, and keeps the newest and the best.

    A checkpoint's name contains the step and the score, as in ``step=20,score=0.91``; all state is
    in the folder. Incomplete checkpoints of a killed job don't count; the next save removes them.

    Args:
        folder: a folder that rank 0 can write to, and every rank for sharded models. It is created
            if missing.
        keep: number of newest checkpoints to keep, at least 1.
        mode: ``"max"`` if the best score is the largest, ``"min"`` if it is the smallest.

    Raises:
        ArgumentError: invalid `keep` or `mode`.

    Example:
        >>> import tempfile, torch, unisono as idist
        >>> state = {"model": torch.nn.Linear(2, 1), "epoch": 0}
        >>> checkpoints = idist.CheckpointManager(tempfile.mkdtemp(), keep=2)
        >>> for epoch, accuracy in enumerate([0.5, 0.9, 0.8, 0.7]):
        ...     state["epoch"] = epoch
        ...     path = checkpoints.save(state, epoch, score=accuracy)
        >>> checkpoints.latest().name, checkpoints.best().name
        ('step=3,score=0.7', 'step=1,score=0.9')
        >>> idist.load_checkpoint(checkpoints.best(), into=state, src=0)["epoch"]
        1
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, mode: str = "max") -> None:
        if type(keep) is not int or keep < 1:
            raise ArgumentError(f"keep={keep!r} should be a number of checkpoints, at least 1")
        if mode not in ("max", "min"):
            raise ArgumentError(f"mode={mode!r} should be 'max' or 'min'")
        self._folder = Path(folder)
        self._keep = keep
        self._sign = 1.0 if mode == "max" else -1.0

    def save(
        self, obj: Any, step: int, score: float | None = None, sharded: bool | None = None
    ) -> Path:
        """Write a checkpoint with `save_checkpoint`, then remove outdated ones.

        Collective over all ranks.

        Args:
            obj: as in `save_checkpoint`.
            step: number of the epoch or batch, from 0. A checkpoint of the same step is replaced.
            score: the checkpoint's quality; None or NaN if unknown. Rank 0's score counts.
            sharded: as in `save_checkpoint`.

        Returns:
            The checkpoint's path: a file, or a folder of shards.

        Raises:
            ArgumentError: `step` isn't a number of at least 0.
            PeerFailedError: rank 0's `score` isn't a number, or the folder can't be created (on
                every rank).
            UnisonoError: as in `save_checkpoint`. The old checkpoints are untouched.
        """
        if type(step) is not int or step < 0:
            raise ArgumentError(f"step={step!r} should be a number, at least 0")
        path = self._folder / run_on_rank(partial(self._prepare, step, score))
        save_checkpoint(obj, path, sharded=sharded)
        run_on_rank(partial(self._remove_others, path, step))
        return path

    def latest(self) -> Path | None:
        """Find the complete checkpoint with the largest step; None if there is none.

        Collective over all ranks; rank 0 reads the folder.
        """
        return self._chosen(lambda found: found[-1:])

    def best(self) -> Path | None:
        """Find the complete checkpoint with the best score; None if no checkpoint has a score.

        Collective over all ranks; rank 0 reads the folder. Of equal scores the newest is the best.
        """
        return self._chosen(self._best)

    def _chosen(self, choose: Callable[[list[_Kept]], list[_Kept]]) -> Path | None:
        """Return the path of the checkpoint that rank 0 chooses. Collective over all ranks."""
        names = run_on_rank(lambda: [path.name for *_, path in choose(self._found())])
        return self._folder / names[0] if names else None

    def _prepare(self, step: int, score: float | None) -> str:
        """Create the folder, and return the new checkpoint's name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return f"step={step}" if score is None else f"step={step},score={float(score)!r}"

    def _found(self) -> list[_Kept]:
        """List the complete checkpoints, sorted by step."""
        named = [(path, _NAME.fullmatch(path.name)) for path in self._folder.glob("step=*")]
        found = [
            (int(match[1]), float(match[2] or "nan"), path)
            for path, match in named
            if match is not None and is_whole(path)
        ]
        return sorted(found, key=lambda each: each[0])

    def _best(self, found: list[_Kept]) -> list[_Kept]:
        """Return the checkpoint with the best score in a list; an empty list without scores."""
        # NaN stands for an unknown score, and can't be sorted.
        scored = [each for each in found if not math.isnan(each[1])]
        return sorted(scored, key=lambda each: (self._sign * each[1], each[0]))[-1:]

    def _remove_others(self, path: Path, step: int) -> None:
        """Remove all checkpoints but the newest and the best; of `step`, keep only `path`."""
        # An older checkpoint of this step may have another score in its name, and is removed.
        found = [each for each in self._found() if each[0] != step or each[2] == path]
        kept = {each[2] for each in (*found[-self._keep :], *self._best(found))}
        for other in self._folder.glob("step=*"):
            if _NAME.fullmatch(other.name) and other not in kept:
                remove(other)
