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

from unisono._context import communicator, current_model
from unisono._frames import refuse_pickle
from unisono._tree import flatten
from unisono.collectives._rounds import swap
from unisono.collectives.transfers import broadcast
from unisono.errors import (
    ArgumentError,
    PayloadError,
    PeerFailedError,
    UnisonoError,
    UnsupportedOperation,
)
from unisono.model import ComputationModel
from unisono.payload import decode, encode
from unisono.sections import run_on_rank
from unisono.training._states import has_shown_wrapper, plain, restore
from unisono.training._whole_files import check_archive, write_whole

__all__ = ("load_checkpoint", "save_checkpoint")

PathLike = str | os.PathLike[str]
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
_SHARDS = "shards-"
_POINTER = "CURRENT"  # of a sharded checkpoint: names the folder of the shards that count


def save_checkpoint(obj: Any, path: PathLike, rank: int = 0, sharded: bool | None = None) -> None:
    """Write a checkpoint, so that whatever happens the old one or the new one is there, whole.

    Collective over all ranks. One file is written under another name in the same folder, brought to
    the disk, and renamed. Shards go into a folder of their own within `path`, and a file that is
    renamed last says which counts. What a killed process leaves has ``.tmp`` in its name, and is
    removed by the next save there. A symbolic link stays one, and a file keeps its mode.

    Args:
        obj: a module, an optimizer or whatever else has a state dict, which is saved in its place;
            a dict, list or tuple of them; or what ``torch.save`` takes. The keys of a module are
            those of the one within what `auto_model` returned, with any number of replicas. Only
            `rank`'s is written; shards are, on every rank.
        path: the file; for shards a folder that every rank can reach.
        rank: global rank that writes.
        sharded: whether each rank writes its shard, through ``torch.distributed.checkpoint``, which
            needs a process group of torch or a rank alone; None for whether `obj` has tensors
            that are sharded, as FSDP's are.

    Raises:
        ArgumentError: `rank` isn't there (on every rank).
        PayloadError: `obj` has something that can't be pickled; or shards are to be saved by
            several ranks under ``UNISONO_NO_PICKLE=1``, for they exchange pickles (on every rank).
        PeerFailedError: it couldn't be written (on every rank; the original is the cause on the
            rank that failed). The old one is untouched.

    Warns:
        UserWarning: all keys of a state dict begin with ``module.``, as those of a wrapped module
            do, so that it doesn't fit the module alone (on the rank that writes).

    Example:
        >>> import pathlib, tempfile, torch, unisono as idist
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.pt")
        >>> model = idist.auto_model(torch.nn.Linear(2, 1))
        >>> idist.save_checkpoint({"model": model, "epoch": 3}, path)
        >>> state = idist.load_checkpoint(path)
        >>> state["epoch"], list(state["model"])
        (3, ['weight', 'bias'])
    """
    target = Path(path)
    state = plain(obj)
    if _has_shards(state) if sharded is None else sharded:
        _save_shards(state, target)
    else:
        _save_file(state, target, rank)
        prefix = has_shown_wrapper(state) if current_model().topology.rank == rank else None
        if prefix:
            warnings.warn(
                f"{target}: all keys of a state dict begin with {prefix!r}, as those of a wrapped "
                "module do: it won't load with another number of replicas. Give save_checkpoint "
                "the model itself, or unwrap_model(model).state_dict()",
                UserWarning,
                stacklevel=2,
            )


def _has_shards(obj: Any) -> bool:
    leaves, _ = flatten(obj)
    return any(isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh") for leaf in leaves)


def _save_file(obj: Any, target: Path, rank: int) -> None:
    kept: list[Exception] = []
    refused = run_on_rank(lambda: _write(obj, target, kept), rank)
    if refused is not None:
        cause = kept[0] if kept else None
        raise PayloadError(f"{target} can't be saved by rank {rank}: {refused}") from cause


def _write(obj: Any, target: Path, kept: list[Exception]) -> str | None:
    """Write a file; say what can't be pickled, and keep why. Local."""
    try:
        write_whole(target, partial(torch.save, obj))
    except OSError:
        raise
    except Exception as error:  # what the value's own classes raise
        kept.append(error)
        return f"{type(error).__qualname__}: {error}"
    return None


def _save_shards(obj: Any, target: Path) -> None:
    library = _shard_library()
    model = communicator()
    reason = None
    if model.topology.world_size > 1:
        reason = _refusal(lambda: refuse_pickle("to save shards, which ranks agree on,"))
    said = _told(model, "save_checkpoint of shards", reason)
    if any(said):
        raise PayloadError(next(text for text in said if text))
    name = broadcast(f"{_SHARDS}{uuid.uuid4().hex[:12]}")
    folder = target / name
    run_on_rank(partial(folder.mkdir, parents=True))
    try:
        with _without_warning():
            library.save(obj, folder)
    except library.CheckpointException as error:  # torch raises it on every rank
        shutil.rmtree(folder, ignore_errors=True)
        kinds = [failure for failure, _ in error.failures.values()]
        if any(isinstance(kind, _UNPICKLABLE) for kind in kinds):
            raise PayloadError(f"shards for {target} can't be pickled: {error}") from error
        raise PeerFailedError(f"shards for {target} couldn't be written: {error}") from error
    run_on_rank(partial(_let_count, target, name))


def _refusal(call: Callable[[], None]) -> str | None:
    try:
        call()
    except PayloadError as error:
        return str(error)
    return None


def _told(model: ComputationModel, call: str, text: str | None) -> list[str | None]:
    """Tell every rank what each has to say. Collective over all ranks."""
    return [decode(frame, model.device) for frame in swap(model, call, encode(text), None)]


def _let_count(target: Path, name: str) -> None:
    _shard_library().seal(target / name)
    text = name.encode()
    write_whole(target / _POINTER, lambda file: file.write(text))
    for folder in target.glob(f"{_SHARDS}*"):
        if folder.name != name:
            shutil.rmtree(folder, ignore_errors=True)


def _shard_library() -> Any:
    model = current_model()
    if model.topology.world_size > 1 and not torch.distributed.is_initialized():
        raise UnsupportedOperation(
            model.name, "sharded checkpoints", "save with sharded=False, or use a backend of torch"
        )
    return importlib.import_module("unisono.training._shards")


def load_checkpoint(
    path: PathLike,
    into: Any = None,
    weights_only: bool = True,
    map_location: Any = None,
) -> Any:
    """Read a checkpoint that `save_checkpoint` wrote, onto this rank's device.

    Local for a file, which each rank that calls reads itself; collective over all ranks for shards.

    Args:
        path: the file or folder.
        into: what is loaded in place: a module, wrapped as it may be, an optimizer, or a dict like
            the one that was saved: what has a state dict in it is loaded, its tensors are filled,
            its other values replaced. Shards need it; they may be cut otherwise than at saving.
        weights_only: whether only tensors and plain values are read, from shards too; False runs
            what the file says, so only for files that you trust, and not under
            ``UNISONO_NO_PICKLE=1``.
        map_location: as in ``torch.load``; None for `device`.

    Returns:
        `into`; what was saved where that is None.

    Raises:
        ArgumentError: it isn't there, or shards are without `into`.
        PayloadError: it can't be read: it is no checkpoint, is damaged, has more than weights, or
            doesn't fit `into` (of shards on every rank).

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
        return _load_shards(target, into, weights_only, where)
    device = model.device if map_location is None else map_location
    try:
        if not weights_only:
            refuse_pickle("load_checkpoint with weights_only=False")
        with target.open("rb") as file:
            check_archive(file, "it")
            found = torch.load(file, map_location=device, weights_only=weights_only)
        return found if into is None else restore(into, found)
    except FileNotFoundError as error:
        raise ArgumentError(
            f"there is no checkpoint {target} ({where}): save one with save_checkpoint, on a disk "
            "that every rank can read"
        ) from error
    except Exception as error:  # a damaged file makes torch's reader raise nearly everything
        raise _unreadable(target, where, error) from error


def _unreadable(target: Path, where: str, error: BaseException) -> PayloadError:
    kind = "" if isinstance(error, PayloadError) else f"{type(error).__qualname__}: "
    return PayloadError(f"checkpoint {target} can't be read ({where}): {kind}{error}")


def _load_shards(target: Path, into: Any, weights_only: bool, where: str) -> Any:
    library = _shard_library()
    failed: UnisonoError | None = None
    try:
        state = plain(into)
        _fill(library, target, state, weights_only)
        if state is not into:
            restore(into, state)
    except ArgumentError as error:
        failed = error
    except (Exception, library.CheckpointException) as error:
        failed = _unreadable(target, where, error)
        failed.__cause__ = error
    model = communicator()
    said = _told(model, "load_checkpoint of shards", None if failed is None else str(failed))
    if failed is not None:
        raise failed
    if any(said):
        raise PayloadError(next(text for text in said if text))
    return into


def _fill(library: Any, target: Path, into: dict[str, Any] | None, weights_only: bool) -> None:
    try:
        name = (target / _POINTER).read_text()
    except OSError as error:
        raise ArgumentError(f"the folder {target} has no checkpoint: {error}") from error
    if into is None:
        raise ArgumentError(
            f"{target} has shards: give load_checkpoint the state dict to fill, into=..."
        )
    if not name.startswith(_SHARDS) or os.path.basename(name) != name:
        raise PayloadError(f"{target / _POINTER} names no shards, but {name!r}")
    if not weights_only:
        refuse_pickle("load_checkpoint with weights_only=False")
    with _without_warning():
        library.load(into, target / name, weights_only)


@contextmanager
def _without_warning() -> Iterator[None]:
    """Keep torch from saying that a process alone is alone. Local."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
