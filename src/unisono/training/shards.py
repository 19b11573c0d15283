"""Sharded checkpoints, read without running their pickles and without communication."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from unisono.errors import PayloadError
from unisono.training.atomic_files import check_archive, write_whole

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
_PATHS = frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})


def save(state: dict[str, Any], folder: Path) -> None:
    """Write this rank's shard. Collective over all ranks of torch's default group."""
    save_shards(state, checkpoint_id=str(folder))


def seal(folder: Path) -> None:
    """Write the checksum of the metadata."""
    digest = hashlib.sha256((folder / _METADATA).read_bytes()).hexdigest().encode()
    write_whole(folder / _SEAL, lambda file: file.write(digest))


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the keys that its shards have."""
    made: dict[str, Any] = flatten_state_dict(state)[0]
    return made


def metadata_of(folder: Path) -> metadata.Metadata:
    """Read the metadata, which says where the shards are."""
    data = (folder / _METADATA).read_bytes()
    sealed = folder / _SEAL
    if sealed.exists() and hashlib.sha256(data).hexdigest().encode() != sealed.read_bytes():
        raise PayloadError(f"{folder / _METADATA} is damaged: its checksum is another")
    read = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(read, metadata.Metadata):
        raise PayloadError(f"{folder / _METADATA} has a {type(read).__qualname__} and no metadata")
    return read


def blank(entry: Any) -> Any:
    """Return what an entry of the metadata fills."""
    if isinstance(entry, metadata.TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def absent(state: dict[str, Any], shards: metadata.Metadata) -> list[tuple[Any, ...]]:
    """Return the paths in a state dict of what shards lack."""
    paths = flatten_state_dict(state)[1]
    return [path for key, path in paths.items() if key not in shards.state_dict_metadata]


def check(
    into: dict[str, Any],
    folder: Path,
    shards: metadata.Metadata,
    weights_only: bool,
    is_strict: bool,
) -> dict[str, Any]:
    """Return the values that aren't tensors; raise where a shard isn't there, whole."""
    planner = DefaultLoadPlanner(allow_partial_load=not is_strict)
    planner.set_up_planner(into, shards)
    values: dict[str, Any] = {}
    for item in planner.create_local_plan().items:
        info = shards.storage_data[item.storage_index]
        name = str(info.relative_path)
        if os.path.basename(name) != name:
            raise PayloadError(f"a shard can't be in another folder: {name!r}")
        with open(folder / name, "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(max(info.length, 0)))
        check_archive(data, f"shard {name}")
        if item.type is LoadItemType.BYTE_IO:
            values[item.dest_index.fqn] = torch.load(data, weights_only=weights_only)
    return values


def load(
    into: dict[str, Any],
    folder: Path,
    shards: metadata.Metadata,
    values: dict[str, Any],
    is_strict: bool,
) -> None:
    """Fill a state dict with this rank's part of it, and with the values that `check` has read."""
    # Each rank reads what it needs, so that nothing needs to be pickled between them.
    planner = _Planner(values, is_strict)
    _load_state_dict(into, storage_reader=_Reader(folder, shards), planner=planner, no_dist=True)


class _MetadataUnpickler(_Unpickler):  # type: ignore[misc]
    """Unpickles only the classes that torch's metadata consist of."""

    # Python's own one in Python, where BUILD can be kept from changing classes.

    dispatch = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name, if it is one of the allowed ones."""
        allowed = _CLASSES.get((module, name))
        if allowed is not None:
            return allowed
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return lambda *parts: Path(*parts)
        allowed = getattr(torch, name, None) if module == "torch" else None
        if isinstance(allowed, torch.dtype) or allowed is torch.Size:
            return allowed
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {str(each): each for each in (torch.strided, torch.sparse_coo)}.get
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of shards")

    def load_build(self) -> None:
        """Set the state of an object, unless it is a class."""
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("a class can't be changed")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class _Reader(FileSystemReader):
    """Reads shards by metadata that were read already."""

    def __init__(self, folder: Path, shards: metadata.Metadata) -> None:
        super().__init__(folder)
        self._shards = shards

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the metadata."""
        if self._shards.storage_meta is None:
            self._shards.storage_meta = metadata.StorageMeta()
        self._shards.storage_meta.load_id = self.load_id
        return self._shards


class _Planner(DefaultLoadPlanner):
    """Loads tensors; the other values were read before, and only once."""

    def __init__(self, values: dict[str, Any], is_strict: bool) -> None:
        super().__init__(allow_partial_load=not is_strict)
        self._values = values

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Set a value that isn't a tensor."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], self._values[name])
