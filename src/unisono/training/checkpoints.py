"""Checkpoints that are whole or not there: one file from one rank, or a shard from each."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono._context import current_model
from unisono._tree import flatten
from unisono.collectives.transfers import broadcast
from unisono.errors import ArgumentError, PayloadError, PeerFailedError, UnsupportedOperation
from unisono.sections import run_on_rank

__all__ = ("load_checkpoint", "save_checkpoint", "write_whole")

PathLike = str | os.PathLike[str]
_POINTER = "CURRENT"  # of a sharded checkpoint: names the folder of the shards that count


def save_checkpoint(obj: Any, path: PathLike, rank: int = 0, sharded: bool | None = None) -> None:
    """Write a checkpoint, so that whatever happens the old one or the new one is there, whole.

    Collective over all ranks. One file is written under another name in the same folder, brought to
    the disk, and renamed. Shards go into a folder of their own within `path`, and a file that is
    renamed last says which counts. What a killed process leaves has ``.tmp`` in its name.

    Args:
        obj: what ``torch.save`` takes; only `rank`'s is written. For shards a state dict, on every
            rank.
        path: the file; for shards a folder that every rank can reach.
        rank: global rank that writes.
        sharded: whether each rank writes its shard, through ``torch.distributed.checkpoint``, which
            needs a process group of torch or a rank alone; None for whether `obj` has tensors
            that are sharded, as FSDP's are.

    Raises:
        ArgumentError: `rank` isn't there (on every rank).
        PeerFailedError: it couldn't be written (on every rank; the original is the cause on the
            rank that failed). The old one is untouched.

    Example:
        >>> import pathlib, tempfile, torch, unisono as idist
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.pt")
        >>> idist.save_checkpoint({"w": torch.ones(2), "epoch": 3}, path)
        >>> idist.load_checkpoint(path)["epoch"]
        3
    """
    target = Path(path)
    if _has_shards(obj) if sharded is None else sharded:
        _save_shards(obj, target)
    else:
        run_on_rank(partial(_save, obj, target), rank)


def _has_shards(obj: Any) -> bool:
    leaves, _ = flatten(obj)
    return any(isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh") for leaf in leaves)


def _save(obj: Any, target: Path) -> None:
    write_whole(target, partial(torch.save, obj))


def write_whole(target: Path, write: Callable[[Any], object]) -> None:
    """Let `write` fill a file, bring it to the disk, and only then give it its name. Local.

    Raises:
        OSError: it couldn't be written; `target` is as it was.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with part.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:  # Ctrl-C too: no half of a file is left
        part.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # others can't open a folder
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _save_shards(obj: Any, target: Path) -> None:
    library = _shard_library()
    name = broadcast(f"shards-{uuid.uuid4().hex[:12]}")
    folder = target / name
    run_on_rank(partial(folder.mkdir, parents=True))
    try:
        with _without_warning():
            library.save(obj, checkpoint_id=str(folder))
    except library.CheckpointException as error:  # torch raises it on every rank
        shutil.rmtree(folder, ignore_errors=True)
        raise PeerFailedError(f"shards for {target} couldn't be written: {error}") from error
    run_on_rank(partial(_let_count, target, name))


def _let_count(target: Path, name: str) -> None:
    text = name.encode()
    write_whole(target / _POINTER, lambda file: file.write(text))
    for folder in target.glob("shards-*"):
        if folder.name != name:
            shutil.rmtree(folder, ignore_errors=True)


def _shard_library() -> Any:
    model = current_model()
    if model.topology.world_size > 1 and not torch.distributed.is_initialized():
        raise UnsupportedOperation(
            model.name, "sharded checkpoints", "save with sharded=False, or use a backend of torch"
        )
    return importlib.import_module("torch.distributed.checkpoint")


def load_checkpoint(
    path: PathLike,
    into: dict[str, Any] | None = None,
    weights_only: bool = True,
    map_location: Any = None,
) -> Any:
    """Read a checkpoint that `save_checkpoint` wrote, onto this rank's device.

    Local for a file, which each rank that calls reads itself; collective over all ranks for shards.

    Args:
        path: the file or folder.
        into: for shards the state dict that is filled in place, sharded as the model is now, which
            may be otherwise than at saving.
        weights_only: whether only tensors and plain values are read; False runs what the file says,
            so only for files that you trust.
        map_location: as in ``torch.load``; None for `device`.

    Returns:
        What was saved; `into` for shards.

    Raises:
        ArgumentError: it isn't there, or shards are without `into`.
        PayloadError: it can't be read: it is no checkpoint, or has more than weights.

    Example:
        >>> import unisono as idist
        >>> idist.load_checkpoint("nowhere.pt")
        Traceback (most recent call last):
        ...
        unisono.errors.ArgumentError: there is no checkpoint nowhere.pt ...
    """
    model, target = current_model(), Path(path)
    where = f"rank {model.topology.rank} of {model.topology.world_size}"
    if target.is_dir():
        return _load_shards(target, into, where)
    device = model.device if map_location is None else map_location
    try:
        return torch.load(target, map_location=device, weights_only=weights_only)
    except FileNotFoundError as error:
        raise ArgumentError(
            f"there is no checkpoint {target} ({where}): save one with save_checkpoint, on a disk "
            "that every rank can read"
        ) from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise PayloadError(f"checkpoint {target} can't be read ({where}): {error}") from error


def _load_shards(target: Path, into: dict[str, Any] | None, where: str) -> Any:
    try:
        name = (target / _POINTER).read_text()
    except OSError as error:
        raise ArgumentError(f"the folder {target} has no checkpoint ({where}): {error}") from error
    if into is None:
        raise ArgumentError(
            f"{target} has shards: give load_checkpoint the state dict to fill, into=..."
        )
    library = _shard_library()
    with _without_warning():
        library.load(into, checkpoint_id=str(target / name))
    return into


@contextmanager
def _without_warning() -> Iterator[None]:
    """Keep torch from saying that a process alone is alone. Local."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
