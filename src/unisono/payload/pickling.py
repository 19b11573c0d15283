"""Objects as pickles, for messages and for files; imported when the first object is sent.

A message has its large buffers outside of the pickle. A file is one of `torch.save`, whose tensors
and arrays are memory-mapped.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.serialization import default_restore_location

from unisono.errors import PayloadError
from unisono.payload.tensors import device as target, is_dense, onto_device, reduce_tensor
from unisono.pickling import Pickler

_REBUILD: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor


class _ObjectPickler(Pickler):  # type: ignore[misc]
    """Pickles by value objects that other processes can't import."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how pickle rebuilds an object."""
        if isinstance(obj, io.TextIOWrapper):  # cloudpickle would send a copy of its text
            raise pickle.PicklingError("an open file can't be sent: send its path or its content")
        if isinstance(obj, memoryview):  # cloudpickle would send bytes
            return _restore_view, (obj.tobytes(), obj.format, obj.shape, obj.readonly)
        if isinstance(obj, Tensor) and hasattr(obj, "to_local") and hasattr(obj, "full_tensor"):
            raise pickle.PicklingError(
                f"a {type(obj).__name__} is spread over the ranks: send to_local() or full_tensor()"
            )
        if obj is _REBUILD:  # tensors of devices without storages, such as XLA's
            return _restorer, ()
        return super().reducer_override(obj)


def _restore_view(data: bytes, kind: str, shape: tuple[int, ...], is_readonly: bool) -> memoryview:
    memory = memoryview(data if is_readonly else bytearray(data))
    return memory if kind == "B" and len(shape) == 1 else memory.cast(kind, shape)  # type: ignore[call-overload]


def _restorer() -> Any:
    return _restore_from_cpu


def _restore_from_cpu(data: Tensor, dtype: torch.dtype, _: Any, requires_grad: bool) -> Tensor:
    return data.to(target.get(), dtype).requires_grad_(requires_grad)


class _MessagePickler(_ObjectPickler):
    """Pickles tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and is_dense(obj):
            return reduce_tensor(obj)
        storage = obj._untyped_storage if isinstance(obj, torch.TypedStorage) else obj
        if isinstance(storage, torch.UntypedStorage) and storage.device.type != "cpu":
            _, saved = obj.__reduce__()  # torch would load it onto the sender's own device
            return _restore_storage, saved
        return super().reducer_override(obj)


def _restore_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location=target.get(), weights_only=False)


def dump(value: object) -> list[bytes | memoryview]:
    """Pickle an object."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        _MessagePickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
        return [out.getvalue(), *(buffer.raw() for buffer in buffers)]
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise PayloadError(
            f"a {type(value).__qualname__} can't be pickled: {type(error).__name__}: {error}"
        ) from error


@onto_device
def load(blocks: Sequence[bytes | bytearray | memoryview]) -> Any:
    """Unpickle blocks that `dump` has returned."""
    try:
        return pickle.loads(blocks[0], buffers=blocks[1:])
    except Exception as error:  # an object's own constructor may raise anything
        raise PayloadError(
            f"a received object cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error


class _FilePickler(_ObjectPickler):
    """Pickles numpy arrays as tensors, which `torch.save` stores outside of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")  # numpy is optional
        # Arrays of objects, and empty ones, have no memory that a tensor could view.
        if numpy is None or type(obj) is not numpy.ndarray or obj.dtype.hasobject or not obj.nbytes:
            return super().reducer_override(obj)
        whole = obj if obj.flags.forc else obj.copy()
        memory: Any = (ctypes.c_char * whole.nbytes).from_address(whole.ctypes.data)
        memory.owner = whole  # keeps the memory alive as long as the tensor
        try:  # the array's dtype: torch saves no two tensors of different dtypes over one memory
            dtype = torch.from_numpy(numpy.empty(0, obj.dtype)).dtype
        except (TypeError, ValueError):  # torch has no such dtype, or not in this byte order
            dtype = torch.uint8
        order = "C" if whole.flags.c_contiguous else "F"
        return _restore_array, (torch.frombuffer(memory, dtype=dtype), obj.dtype, obj.shape, order)


def _restore_array(memory: Tensor, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    array = memory.numpy().view(dtype).reshape(shape, order=order)
    array.flags.writeable = False  # an array of `shared` is read-only, as documented
    return array


def save_file(value: object, path: str) -> None:
    """Write an object to a file."""
    # `torch.save` takes the pickler from a module.
    module: Any = types.SimpleNamespace(Pickler=_FilePickler, __name__=__name__)
    try:
        torch.save(value, path, pickle_module=module, pickle_protocol=5)
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise PayloadError(
            f"a {type(value).__qualname__} can't be pickled, or there is no room for it: "
            f"{type(error).__name__}: {error}"
        ) from error


@torch.inference_mode(False)
@onto_device
def load_file(path: str) -> Any:
    """Load a file of `save_file`, memory-mapped copy-on-write: changes stay in this process."""

    def place(storage: Any, location: str) -> Any:
        if location == "cpu":
            return storage  # stays mapped
        return default_restore_location(storage, str(target.get()))  # type: ignore[no-untyped-call]

    return torch.load(path, map_location=place, mmap=True, weights_only=False)
