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
    """Write this rank's shard. Collective over torch's default group."""
    save_shards(state, checkpoint_id=str(folder))


def seal(folder: Path) -> None:
    """Write the checksum of the metadata."""
    digest = hashlib.sha256((folder / _METADATA).read_bytes()).hexdigest().encode()
    write_whole(folder / _SEAL, lambda file: file.write(digest))


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the flat keys of shards."""
    made: dict[str, Any] = flatten_state_dict(state)[0]
    return made


def metadata_of(folder: Path) -> metadata.Metadata:
    """Read the metadata of the shards, and check its checksum."""
    data = (folder / _METADATA).read_bytes()
    sealed = folder / _SEAL
    if sealed.exists() and hashlib.sha256(data).hexdigest().encode() != sealed.read_bytes():
        raise PayloadError(f"checksum mismatch in {folder / _METADATA}")
    read = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(read, metadata.Metadata):
        kind = type(read).__qualname__
        raise PayloadError(f"{folder / _METADATA} contains a {kind} instead of metadata")
    return read


def blank(entry: Any) -> Any:
    """Return an empty tensor for a tensor's metadata, None for other values."""
    if isinstance(entry, metadata.TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def absent(state: dict[str, Any], shards: metadata.Metadata) -> list[tuple[Any, ...]]:
    """List the paths of a state dict that shards lack."""
    paths = flatten_state_dict(state)[1]
    return [path for key, path in paths.items() if key not in shards.state_dict_metadata]


def check(
    into: dict[str, Any],
    folder: Path,
    shards: metadata.Metadata,
    weights_only: bool,
    is_strict: bool,
) -> dict[str, Any]:
    """Return the non-tensor values; raise if a shard is missing or damaged."""
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
    """Fill a state dict with this rank's parts and the values that `check` returned."""
    # Each rank reads its parts, so that ranks exchange no pickles.
    planner = _Planner(values, is_strict)
    _load_state_dict(into, storage_reader=_Reader(folder, shards), planner=planner, no_dist=True)


class _MetadataUnpickler(_Unpickler):  # type: ignore[misc]
    """Unpickles only the classes of torch's metadata."""

    # Derived from the unpickler in Python, whose BUILD can be restricted.

    dispatch = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; raise for any other."""
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
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in shard metadata")

    def load_build(self) -> None:
        """Set the state of an object, unless it is a class."""
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("a class can't be changed")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class _Reader(FileSystemReader):
    """Reads shards by metadata read before."""

    def __init__(self, folder: Path, shards: metadata.Metadata) -> None:
        super().__init__(folder)
        self._shards = shards

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the given metadata."""
        if self._shards.storage_meta is None:
            self._shards.storage_meta = metadata.StorageMeta()
        self._shards.storage_meta.load_id = self.load_id
        return self._shards


class _Planner(DefaultLoadPlanner):
    """Loads tensors; other values have been read before."""

    def __init__(self, values: dict[str, Any], is_strict: bool) -> None:
        super().__init__(allow_partial_load=not is_strict)
        self._values = values

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Set a non-tensor value."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], self._values[name])
