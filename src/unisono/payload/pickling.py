"""Objects as pickles with large buffers outside; imported when the first object is sent."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import PayloadError
from unisono.payload.tensors import device as home, is_dense, reduce_tensor
from unisono.pickling import Pickler

_REBUILD: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor


def _restore_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location=home.get(), weights_only=False)


def _restorer() -> Any:
    return _restore_from_cpu


def _restore_from_cpu(data: Tensor, dtype: torch.dtype, _: Any, requires_grad: bool) -> Tensor:
    return data.to(home.get(), dtype).requires_grad_(requires_grad)


def _restore_view(data: bytes, kind: str, shape: tuple[int, ...], is_readonly: bool) -> memoryview:
    memory = memoryview(data if is_readonly else bytearray(data))
    return memory if kind == "B" and len(shape) == 1 else memory.cast(kind, shape)  # type: ignore[call-overload]


def _is_storage_of_accelerator(value: Any) -> bool:
    if isinstance(value, torch.TypedStorage):
        value = value._untyped_storage
    return isinstance(value, torch.UntypedStorage) and value.device.type != "cpu"


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


ObjectPickler: Any = _ObjectPickler  # cloudpickle is untyped


class _MessagePickler(_ObjectPickler):
    """Pickles tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and is_dense(obj):
            return reduce_tensor(obj)
        if _is_storage_of_accelerator(obj):
            _, saved = obj.__reduce__()  # torch would load it onto the sender's own device
            return _restore_storage, saved
        return super().reducer_override(obj)


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


def load(blocks: Sequence[bytes | bytearray | memoryview], device: torch.device) -> Any:
    """Unpickle the blocks of `dump`."""
    token = home.set(device)
    try:
        return pickle.loads(blocks[0], buffers=blocks[1:])
    except Exception as error:  # an object's own constructor may raise anything
        raise PayloadError(
            f"a received object cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error
    finally:
        home.reset(token)
