"""Atomic checkpoints: one file from one rank, or a shard from each."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from unisono.collectives.broadcasts import broadcast
from unisono.collectives.membership import check_rank
from unisono.collectives.outcomes import together
from unisono.context import ContextState, communicator, current, current_model
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PayloadError,
    PeerFailedError,
    UnisonoError,
    UnsupportedOperation,
)
from unisono.payload.codec import check_pickle_allowed
from unisono.sections import outcome_for_all, run_on_rank
from unisono.training.atomic_files import check_archive, write_whole
from unisono.training.equality import differing, digest
from unisono.training.loader import moved
from unisono.training.restoring import Plan
from unisono.training.states import (
    BY_RANK,
    ByRank,
    entries,
    has_shards,
    own_states,
    plain,
    refuse_lost_shards,
)

PathLike = str | os.PathLike[str]
T = TypeVar("T")
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
_SAVE = "save_checkpoint"
_SHARDS = "shards-"
_POINTER = "CURRENT"  # file of a sharded checkpoint with the name of the current shards' folder


def save_checkpoint(obj: Any, path: PathLike, rank: int = 0, sharded: bool | None = None) -> None:
    """Write a checkpoint atomically: at any time, the old or the new one is complete.

    Collective over all ranks. A file is written under another name in the same folder, synced to
    the disk, and renamed. Shards are written to a new folder within `path`; a file with the name of
    the current folder is replaced last. A killed process leaves files with ``.tmp`` in their names,
    which the next save to that folder removes. Symbolic links and file modes are preserved.

    Args:
        obj: a module, an optimizer or another object with a state dict, which is saved instead of
            the object; a dict, list or tuple of these; or any value that ``torch.save`` accepts.
            A module's keys lack the prefix of `auto_model`'s wrapper.
            Only the state of `rank` is written; shards are written by every rank. Every rank
            computes the states of all objects except optimizers.
        path: the file; for shards a folder that every rank can reach.
        rank: global rank that writes.
        sharded: whether each rank writes its shard, through ``torch.distributed.checkpoint``, which
            needs torch's process group or a single rank; None means True if `obj` has sharded
            tensors, such as FSDP's.

    Raises:
        ArgumentError: `rank` isn't a rank of the job (on every rank).
        CollectiveMismatchError: an object's state differs between ranks, and only one rank's would
            be saved; or some ranks lack a `ByRank` (on every rank).
        PayloadError: `obj` has a value that can't be pickled, or contains itself, or has sharded
            tensors with ``sharded=False``; or several ranks would save shards under
            ``UNISONO_NO_PICKLE=1``, as ranks exchange pickles; or `obj` has shards and is neither a
            dict nor a module (on every rank).
        PeerFailedError: a file couldn't be written, or a state dict couldn't be read (on every
            rank; on the rank that failed, the original error is the cause). The old checkpoint is
            untouched.

    Warns:
        UserWarning: `load_checkpoint` won't read a value without ``weights_only=False`` (on the
            rank that writes).

    Example:
        >>> import pathlib, tempfile, torch, unisono as idist
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.pt")
        >>> model = idist.auto_model(torch.nn.Linear(2, 1))
        >>> idist.save_checkpoint({"model": model, "epoch": 3}, path)
        >>> state = idist.load_checkpoint(path)
        >>> state["epoch"], list(state["model"])
        (3, ['weight', 'bias'])
    """
    target, context = Path(path), communicator()
    refusal = f"rank {context.model.topology.rank} can't save its checkpoint: "
    collect = partial(_states_and_digests, obj, sharded)
    (states, is_sharded), of_ranks = together(context, _SAVE, collect, refusal=refusal)
    _merge_ranks(context, obj, states, of_ranks)
    if is_sharded:
        _save_shards(context, obj, states, target, refusal)
        return
    _save_file(context, obj, states, target, rank)
    # The file may have kept the mode of an older one, which may forbid reading.
    is_writer = context.model.topology.rank == rank
    unread = _why_unread(target) if is_writer and os.access(target, os.R_OK) else ""
    if unread:
        warnings.warn(f"{target}: {unread}", UserWarning, stacklevel=2)


def _states_and_digests(obj: Any, sharded: bool | None) -> tuple[tuple[dict[int, Any], bool], Any]:
    """Return states and whether to shard; for the other ranks, digests and `ByRank` states."""
    states = own_states(obj)
    named = entries(obj, states)
    split = {name: item.state() for name, item in named.items() if isinstance(item, ByRank)}
    digests = {name: digest(states[id(named[name])]) for name in named.keys() - split.keys()}
    is_sharded = bool(sharded) or has_shards(obj, states)
    if is_sharded and sharded is False:
        raise PayloadError(
            "sharded=False would write one rank's part of each sharded tensor: leave sharded out "
            "to write a folder of shards, or pass full tensors, such as those of torch's "
            "get_model_state_dict with full_state_dict=True"
        )
    return (states, is_sharded), (digests, split)


def _merge_ranks(
    context: ContextState, obj: Any, states: dict[int, Any], of_ranks: list[Any]
) -> None:
    """Raise if states differ between ranks; add the states of all ranks for each `ByRank`."""
    named = entries(obj, states)
    values = {name: states[id(item)] for name, item in named.items()}
    found = differing(context, _SAVE, values, [digests for digests, _ in of_ranks])
    if found:
        raise CollectiveMismatchError(
            f"save_checkpoint would save the state of only one rank, but {found}. Wrap states that "
            "differ in ByRank(...), which saves those of all ranks, or make them equal on all ranks"
        )
    splits = [split for _, split in of_ranks]
    for name in dict.fromkeys(name for split in splits for name in split):
        without = [rank for rank, split in enumerate(splits) if name not in split]
        if without:
            raise CollectiveMismatchError(
                f"save_checkpoint has {name} in ByRank, but not on ranks {without}: wrap it in "
                "ByRank on every rank"
            )
        # In a tuple, which shards store as one value, with items of any type.
        states[id(named[name])] = {BY_RANK: tuple(split[name] for split in splits)}


def _save_file(
    context: ContextState, obj: Any, states: dict[int, Any], target: Path, rank: int
) -> None:
    """Write a file on one rank; if that fails, raise on all ranks. Collective over all ranks."""
    check_rank(context, None, rank, "rank")
    with outcome_for_all(context, None, rank, _SAVE, refusal=""):
        if context.model.topology.rank == rank:
            _write_state(target, plain(obj, states), rank)


def _write_state(target: Path, state: Any, rank: int) -> None:
    """Write a state with torch.save; raise a PayloadError if it can't be pickled."""
    try:
        write_whole(target, partial(torch.save, state))
    except OSError:  # the state isn't at fault: `_save_file` reports the error as it is
        raise
    except Exception as error:  # raised by the classes of saved values
        text = f"{type(error).__qualname__}: {error}"
        raise PayloadError(f"{target} can't be saved by rank {rank}: {text}") from error


def _save_shards(
    context: ContextState, obj: Any, states: dict[int, Any], target: Path, refusal: str
) -> None:
    """Write shards to a new folder, then make it the current one. Collective over all ranks."""
    library = _shard_library()

    def state_to_save() -> tuple[Any, None]:
        if context.model.topology.world_size > 1:
            check_pickle_allowed("to save shards, which ranks agree on,")
        state = plain(obj, states)
        refuse_lost_shards(obj, state)
        return state, None

    state, _ = together(context, _SAVE, state_to_save, refusal=refusal)
    # The old shards stay current until those in the new folder are complete.
    name = broadcast(f"{_SHARDS}{uuid.uuid4().hex[:12]}")
    folder = target / name
    run_on_rank(partial(folder.mkdir, parents=True))
    try:
        with warnings.catch_warnings():  # torch warns about a single process
            warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
            library.save(state, checkpoint_id=str(folder))
    except library.CheckpointException as error:  # torch raises it on every rank
        shutil.rmtree(folder, ignore_errors=True)
        kinds = [failure for failure, _ in error.failures.values()]
        if any(isinstance(kind, _UNPICKLABLE) for kind in kinds):
            raise PayloadError(f"shards for {target} can't be pickled: {error}") from error
        raise PeerFailedError(f"shards for {target} couldn't be written: {error}") from error

    def replace_old_shards() -> None:
        library.seal(folder)
        write_whole(target / _POINTER, lambda file: file.write(name.encode()))
        # Removed after the pointer is written, so that an interruption leaves a complete folder.
        for other in target.glob(f"{_SHARDS}*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    run_on_rank(replace_old_shards)


def is_whole(target: Path) -> bool:
    """Return whether a complete checkpoint exists: a file, or a folder with current shards."""
    return target.is_file() or (target / _POINTER).is_file()


def remove(target: Path) -> None:
    """Remove a checkpoint, complete or not; it is incomplete if removal is interrupted."""
    if not target.is_dir():
        target.unlink(missing_ok=True)
        return
    # Removed first, so that the folder counts as incomplete even if the rest stays.
    (target / _POINTER).unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)


def _shard_library() -> Any:
    """Import `shards`; raise if ranks have no process group of torch."""
    context = current()
    # torch writes shards over its own process group.
    if context.model.topology.world_size > 1 and not torch.distributed.is_initialized():
        raise UnsupportedOperation(
            context.model.name,
            "sharded checkpoints",
            "use a backend of torch, such as gloo; to save an object without sharded tensors, pass "
            "sharded=False",
        )
    return importlib.import_module("unisono.training.shards")


def load_checkpoint(
    path: PathLike,
    into: Any = None,
    weights_only: bool = True,
    map_location: Any = None,
    *,
    strict: bool = True,
    src: int | None = None,
) -> Any:
    """Read a checkpoint that `save_checkpoint` wrote, onto this rank's device.

    Local for a file: each calling rank reads it. Collective over all ranks for shards, and with
    `src`. If loading fails on one of these ranks, `into` is unchanged on all.

    Args:
        path: the file or folder.
        into: the object to load in place: a module, wrapped or not, an optimizer, or a dict like
            the saved one. Objects with a state dict are loaded, tensors are filled and other values
            are replaced, also within lists that contain an object to load. A dict may name the
            submodules of a module instead of the module. Sharded tensors are filled with their
            parts of saved full tensors. Required for shards, whose split may have changed since.
        weights_only: whether only tensors and plain values are read, from shards too. False can
            run code from the file: use it only for files that you trust. It is rejected under
            ``UNISONO_NO_PICKLE=1``.
        map_location: as in ``torch.load``; None for `device`.
        strict: False keeps values that the checkpoint lacks or has in another shape, and logs a
            warning with their names; optimizers are always loaded whole, and shards must have the
            same shapes.
        src: global rank that reads a file and sends it to all ranks, for a disk that other ranks
            can't reach.

    Returns:
        `into`, or a new tuple in its place; the saved value if `into` is None.

    Raises:
        ArgumentError: the checkpoint doesn't exist, or it has shards and `into` is missing, or
            `src` isn't a rank.
        PayloadError: the file can't be read: it isn't a checkpoint, is damaged, has more than
            weights, or doesn't fit `into` (on every rank if the call is collective).

    Example:
        >>> import unisono as idist
        >>> idist.load_checkpoint("nowhere.pt")
        Traceback (most recent call last):
        ...
        unisono.errors.ArgumentError: there is no checkpoint nowhere.pt ...
    """
    topology, target = current().model.topology, Path(path)
    if not weights_only:
        check_pickle_allowed("load_checkpoint with weights_only=False")
    if src is not None:
        check_rank(current(), None, src, "src")
    sent = None if src is None else run_on_rank(partial(_content, target), src)
    is_folder = target.is_dir() if src is None else sent is True  # of `_content`
    where = f"checkpoint {target} can't be read (rank {topology.rank} of {topology.world_size})"
    step = partial(_step, where, is_folder or src is not None)
    with ExitStack() as undo:
        if is_folder:
            state, absent = _from_shards(target, into, weights_only, strict, step)
            plan = step(lambda: Plan(into, state, strict, undo, absent))
        else:
            file = _open_file(target, src, sent)
            read = partial(_read, file, weights_only, map_location)
            plan = step(lambda: Plan(into, read(), strict, undo))
        # From here on nothing is undone: no rank has failed, and filling can't fail.
        undo.pop_all()
    return plan.fill()


def _step(where: str, is_together: bool, call: Callable[[], T]) -> T:
    """Run a step of loading; when ranks load together, an error is raised on all of them."""
    # Collective over all ranks that load together, else local.

    def read() -> tuple[T, None]:
        try:
            return call(), None
        except Exception as error:
            # Other errors of unisono don't mean that the file is damaged.
            if isinstance(error, UnisonoError) and not isinstance(error, PayloadError):
                raise
            kind = "" if isinstance(error, PayloadError) else f"{type(error).__qualname__}: "
            raise PayloadError(f"{where}: {kind}{error}") from error

    if not is_together:
        return read()[0]
    return together(communicator(), "load_checkpoint", read, refusal="")[0]


def _open_file(target: Path, src: int | None, sent: Any) -> IO[bytes]:
    """Open a file, or the bytes that `src` sent."""
    if src is not None:
        if sent is None:
            raise ArgumentError(
                f"rank {src} has no checkpoint {target}: save one with save_checkpoint"
            )
        return io.BytesIO(sent.cpu().numpy())
    try:
        return target.open("rb")
    except FileNotFoundError as error:
        topology = current_model().topology
        raise ArgumentError(
            f"there is no checkpoint {target} (rank {topology.rank} of {topology.world_size}): "
            "save one with save_checkpoint, on a disk that every rank can read, or give src=0"
        ) from error


def _content(target: Path) -> Any:
    """Return a file's bytes as a tensor, True for a folder, None if missing."""
    if target.is_dir() or not target.exists():
        return target.is_dir() or None
    data = bytearray(target.read_bytes())  # tensors are sent faster than bytes
    # frombuffer() rejects empty data.
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _read(file: IO[bytes], weights_only: bool, map_location: Any) -> Any:
    """Read a file onto a device; raise a PayloadError if `weights_only` forbids a value."""
    untyped: Any = torch
    device = map_location
    if map_location is None:
        device = current_model().device
        try:
            untyped.serialization.default_restore_location(untyped.UntypedStorage(0), str(device))
            map_location = device
        except RuntimeError:  # torch.load doesn't support XLA's devices
            map_location = "cpu"
    with file:
        check_archive(file, "it")  # the caller's `_step` puts the checkpoint's name in front
        try:
            state = torch.load(file, map_location=map_location, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            file.seek(0)
            raise PayloadError(_why_unread(file) or str(error)) from error
    # They differ only after the fallback for XLA above.
    return state if map_location is device else moved(state, device)


def _why_unread(file: Path | IO[bytes]) -> str:
    """Return an error text if a file has values that weights_only=True rejects, else ''."""
    names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if not names:
        return ""
    return (
        f"values made by {', '.join(names)} are read only with weights_only=False: save numbers, "
        "strings, lists, dicts and tensors instead"
    )


def _from_shards(
    target: Path,
    into: Any,
    weights_only: bool,
    is_strict: bool,
    step: Callable[[Callable[[], Any]], Any],
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return a state for `into` from shards, and the paths that the shards lack."""
    # Collective over all ranks.
    library = _shard_library()
    point = partial(_current_shards, target, into)
    name, refusals = together(communicator(), "load_checkpoint", point)
    # Errors are returned as texts: `together` would turn an ArgumentError into a PeerFailedError.
    if any(refusals):
        raise ArgumentError(next(filter(None, refusals)))

    def read() -> Any:
        states = own_states(into)  # first, as it may be collective
        # A path in place of a name could lead out of the checkpoint's folder.
        if not name.startswith(_SHARDS) or os.path.basename(name) != name:
            raise PayloadError(
                f"{target / _POINTER} contains an invalid shard folder name: {name!r}"
            )
        return library.read(target / name, into, states, weights_only, is_strict)

    made: tuple[Any, list[tuple[Any, ...]]] = step(read)
    return made


def _current_shards(target: Path, into: Any) -> tuple[str, str]:
    """Return the name of the current shards, or an error text."""
    topology = current_model().topology
    try:
        # Decoding mustn't fail, as `_from_shards` rejects a damaged name on all ranks.
        name = (target / _POINTER).read_text(errors="replace")
    except OSError as error:
        rank = f"rank {topology.rank} of {topology.world_size}"
        return "", f"the folder {target} has no checkpoint ({rank}): {error}"
    if into is None:
        return "", f"{target} has shards: give load_checkpoint the state dict to fill, into=..."
    return name, ""
