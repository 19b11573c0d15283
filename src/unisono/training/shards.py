"""Sharded checkpoints, read without running their pickles and without communication."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict_saver import save as save

from unisono.errors import PayloadError
from unisono.training.atomic_files import check_archive, write_whole
from unisono.training.restoring import refuse_lost_states
from unisono.training.same_tensors import is_sharded
from unisono.training.states import refuse_lost_shards

KeyPath = tuple[Any, ...]  # the keys that lead from a state to a value in it
_Unpickler: Any = vars(pickle)["_Unpickler"]
_METADATA = ".metadata"
_SEAL = "metadata.sha256"
_CLASSES: dict[tuple[str, str], Any] = {
    (item.__module__, item.__qualname__): item
    for item in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
    )
}


def seal(folder: Path) -> None:
    """Write the checksum of the metadata."""
    digest = hashlib.sha256((folder / _METADATA).read_bytes()).hexdigest().encode()
    write_whole(folder / _SEAL, lambda file: file.write(digest))


def _metadata_of(folder: Path) -> metadata.Metadata:
    """Read the metadata of the shards, and check its checksum."""
    data = (folder / _METADATA).read_bytes()
    # Shards that torch itself wrote have no checksum.
    sealed = folder / _SEAL
    if sealed.exists() and hashlib.sha256(data).hexdigest().encode() != sealed.read_bytes():
        raise PayloadError(f"checksum mismatch in {folder / _METADATA}")
    read = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(read, metadata.Metadata):
        kind = type(read).__qualname__
        raise PayloadError(f"{folder / _METADATA} contains a {kind} instead of metadata")
    return read


def _blank(obj: Any, path: KeyPath, states: Mapping[int, Any], shards: metadata.Metadata) -> Any:
    """Return the state of an object, with new memory for the tensors that were saved."""
    if isinstance(obj, torch.optim.Optimizer):
        return _state_of_optimizer(obj, path, shards)
    obj = states.get(id(obj), obj)
    if isinstance(obj, Tensor):
        is_saved = ".".join(map(str, path)) in shards.state_dict_metadata
        return torch.empty_like(obj) if is_saved else obj
    if isinstance(obj, (Mapping, list)):
        made: Any = copy(obj)
        for key, item in obj.items() if isinstance(obj, Mapping) else enumerate(obj):
            made[key] = _blank(item, (*path, key), states, shards)
        return made
    return obj


def _state_of_optimizer(
    optimizer: torch.optim.Optimizer, path: KeyPath, shards: metadata.Metadata
) -> dict[str, Any]:
    """Return an optimizer's state with all saved entries, which a new optimizer lacks."""
    own = optimizer.state_dict()
    params = [item for group in optimizer.param_groups for item in group["params"]]
    names = [name for group in own["param_groups"] for name in group["params"]]
    param_of = dict(zip(map(str, names), params, strict=True))
    made: dict[str, Any] = {}
    # The paths of saved values, in which torch has strings for keys of any type.
    for key, place in shards.planner_data.items():
        if [*map(str, place[: len(path)])] == [*map(str, path)]:
            part = place[len(path) :]
            if part in ((), ("state",)):
                raise PayloadError(f"{key} was saved as a value, not as the state of an optimizer")
            param = param_of.get(part[1]) if part[0] == "state" else None
            set_element(made, part, _memory_for(shards.state_dict_metadata[key], param))
    if not made:
        return own
    # The optimizer moves states to the device of their parameters, but not options, such as lr.
    for group, current in zip(made.get("param_groups", ()), own["param_groups"], strict=False):
        for name, item in group.items():
            if isinstance(item, Tensor) and isinstance(current.get(name), Tensor):
                group[name] = item.to(current[name].device)
    name_of = {str(name): name for name in names}  # the keys of shards are strings
    state = {name_of.get(name, name): item for name, item in made.get("state", {}).items()}
    return {**own, **made, "state": state}


def _memory_for(entry: Any, param: Any) -> Tensor | None:
    """Return memory for a saved tensor, or this rank's part of it; None for other values."""
    if not isinstance(entry, metadata.TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    # A single number, such as Adam's step, has another shape and isn't sharded.
    if is_sharded(param) and param.shape == entry.size:
        return torch.empty_like(param, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def read(
    folder: Path, into: Any, states: Mapping[int, Any], weights_only: bool, is_strict: bool
) -> tuple[dict[str, Any], list[KeyPath]]:
    """Return this rank's parts of the saved state of `into`, and the paths that weren't saved."""
    # Each rank reads its parts itself, so that ranks exchange no pickles.
    shards = _metadata_of(folder)
    saved = shards.state_dict_metadata
    state = _blank(into, (), states, shards)
    refuse_lost_shards(into, state)
    refuse_lost_states(into, flatten_state_dict(state)[0], saved)
    planner = DefaultLoadPlanner(allow_partial_load=not is_strict)
    planner.set_up_planner(state, shards)
    for item in planner.create_local_plan().items:
        info = shards.storage_data[item.storage_index]
        name = str(info.relative_path)
        if os.path.basename(name) != name:
            raise PayloadError(f"a shard can't be in another folder: {name!r}")
        with open(folder / name, "rb") as file:
            file.seek(info.offset)
            # A negative length would read the rest of the file.
            data = io.BytesIO(file.read(max(info.length, 0)))
        check_archive(data, f"shard {name}")
        value = torch.load(data, weights_only=weights_only)
        if item.type is LoadItemType.BYTE_IO:
            _set_at(state, planner.mappings[item.dest_index.fqn], value)
        else:
            part = narrow_tensor_by_index(value, item.storage_offsets, item.lengths)
            planner.resolve_tensor(item).detach().copy_(part)
    return state, [path for key, path in planner.mappings.items() if key not in saved]


def _set_at(state: Any, path: KeyPath, value: Any) -> None:
    """Set a value by torch's path, which has strings for keys of any type."""
    for depth, key in enumerate(path, 1):
        if isinstance(state, Mapping) and key not in state:
            key = next(name for name in state if str(name) == key)  # torch converted it to str
        if depth == len(path):
            state[key] = value
        else:
            state = state[key]


class _MetadataUnpickler(_Unpickler):  # type: ignore[misc]
    """Unpickles only the classes of torch's metadata."""

    # Derived from the unpickler that is written in Python, whose BUILD can be restricted.

    dispatch = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; raise for any other."""
        allowed = _CLASSES.get((module, name))
        if allowed is not None:
            return allowed
        # Python 3.13 pickles these classes as those of pathlib._local.
        if module.partition(".")[0] == "pathlib" and name in ("Path", "PosixPath"):
            return Path
        allowed = getattr(torch, name, None) if module == "torch" else None
        if isinstance(allowed, torch.dtype) or allowed is torch.Size:
            return allowed
        if (module, name) == ("torch.serialization", "_get_layout"):
            # The pickle calls it with a layout's name.
            return {str(each): each for each in (torch.strided, torch.sparse_coo)}.get
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in shard metadata")

    def load_build(self) -> None:
        """Set the state of an object, unless it is a class."""
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("a class can't be changed")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
