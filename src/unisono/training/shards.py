"""Sharded checkpoints, read without running their pickles and without communication."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
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


def metadata_of(folder: Path, weights_only: bool) -> metadata.Metadata:
    """Read the metadata, which says where the shards are."""
    data = (folder / _METADATA).read_bytes()
    sealed = folder / _SEAL
    if sealed.exists() and hashlib.sha256(data).hexdigest().encode() != sealed.read_bytes():
        raise PayloadError(f"{folder / _METADATA} is damaged: its checksum is another")
    kind: Any = _MetadataUnpickler if weights_only else pickle.Unpickler
    read = kind(io.BytesIO(data)).load()
    if not isinstance(read, metadata.Metadata):
        raise PayloadError(f"{folder / _METADATA} has a {type(read).__qualname__} and no metadata")
    return read


def blank(entry: Any) -> Any:
    """Return what an entry of the metadata fills."""
    if isinstance(entry, metadata.TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def load(
    into: dict[str, Any],
    folder: Path,
    shards: metadata.Metadata,
    weights_only: bool,
    agree: Callable[[], object],
) -> None:
    """Fill a state dict with this rank's part of it, once all ranks can."""
    # Local, but for what `agree` does.
    # Each rank reads what it needs, so that nothing needs to be pickled between them.
    planner = _WeightsPlanner() if weights_only else DefaultLoadPlanner()
    reader = _CheckingReader(folder, shards, agree)
    _load_state_dict(into, storage_reader=reader, planner=planner, no_dist=True)


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
            return _layout
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of shards")

    def load_build(self) -> None:
        """Set the state of an object, unless it is a class."""
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("a class can't be changed")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"{name} isn't a layout of a tensor")
    return layout


class _CheckingReader(FileSystemReader):
    """Reads shards whose checksums are right, as metadata that were read already say."""

    def __init__(
        self, folder: Path, shards: metadata.Metadata, agree: Callable[[], object]
    ) -> None:
        super().__init__(folder)
        self._metadata = shards
        self._agree = agree

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the metadata."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = metadata.StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what the plan says, once all of it has proved to be whole."""
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            name = str(info.relative_path)
            if os.path.basename(name) != name:
                raise PayloadError(f"a shard can't be in another folder: {name!r}")
            with open(Path(self.path) / name, "rb") as file:
                file.seek(info.offset)
                check_archive(io.BytesIO(file.read(max(info.length, 0))), f"shard {name}")
        self._agree()
        return super().read_data(plan, planner)


class _WeightsPlanner(DefaultLoadPlanner):
    """Loads only tensors and plain values."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Take a value that isn't a tensor."""
        again = io.BytesIO()  # torch unpickles it without restriction
        torch.save(torch.load(value, weights_only=True), again)
        again.seek(0)
        super().load_bytes(read_item, again)
