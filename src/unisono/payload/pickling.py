"""Objects as pickles whose large buffers stay outside: loaded only when an object travels."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from unisono.errors import PayloadError
from unisono.payload.memory import from_bytes, view_bytes
from unisono.pickling import Pickler

_REBUILD: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor
_device: ContextVar[torch.device] = ContextVar("_device")


def _restore(data: Any, dtype: torch.dtype, shape: tuple[int, ...], on_accelerator: bool) -> Tensor:
    tensor = from_bytes(memoryview(data), dtype, shape)
    return tensor.to(_device.get()) if on_accelerator else tensor


@torch.inference_mode(False)
def _lay_over(
    data: Any, dtype: torch.dtype, shape: tuple[int, ...], on_accelerator: bool
) -> Tensor:
    """As `_restore`, over the memory itself."""
    if not len(data):
        return _restore(data, dtype, shape, on_accelerator)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape)
    return tensor.to(_device.get()) if on_accelerator else tensor


def _restore_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location=_device.get(), weights_only=False)


def _restorer() -> Any:
    return _restore_from_cpu


def _restore_from_cpu(data: Tensor, dtype: torch.dtype, _: Any, requires_grad: bool) -> Tensor:
    return data.to(_device.get(), dtype).requires_grad_(requires_grad)


def _restore_view(data: bytes, kind: str, shape: tuple[int, ...], is_readonly: bool) -> memoryview:
    memory = memoryview(data if is_readonly else bytearray(data))
    return memory if kind == "B" and len(shape) == 1 else memory.cast(kind, shape)  # type: ignore[call-overload]


def _is_strided(tensor: Tensor) -> bool:
    """Whether its memory, once it is contiguous, is all of it. Torch knows the others."""
    is_known = tensor.layout is torch.strided and not tensor.is_quantized
    return is_known and not tensor.is_nested and not tensor.is_meta


def _is_storage_of_accelerator(value: Any) -> bool:
    if isinstance(value, torch.TypedStorage):
        value = value._untyped_storage
    return isinstance(value, torch.UntypedStorage) and value.device.type != "cpu"


class _Pickler(Pickler):  # type: ignore[misc]
    """Pickles by value what other processes can't import, and tensors as raw memory."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.TextIOWrapper):  # cloudpickle would send a copy of its text
            raise pickle.PicklingError("an open file can't be sent: send its path or its content")
        if isinstance(obj, memoryview):  # cloudpickle would send bytes
            return _restore_view, (obj.tobytes(), obj.format, obj.shape, obj.readonly)
        if isinstance(obj, Tensor) and hasattr(obj, "to_local") and hasattr(obj, "full_tensor"):
            raise pickle.PicklingError(
                f"a {type(obj).__name__} is spread over the ranks: send to_local() or full_tensor()"
            )
        if type(obj) is Tensor and _is_strided(obj):
            data = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
            buffer = pickle.PickleBuffer(view_bytes(data))
            facts = (obj.dtype, tuple(obj.shape), obj.device.type != "cpu")
            return _restore, (buffer, *facts)
        if _is_storage_of_accelerator(obj):
            _, saved = obj.__reduce__()  # torch would load it onto the sender's own device
            return _restore_storage, saved
        if obj is _REBUILD:  # the same, of devices without storages, such as XLA's
            return _restorer, ()
        return super().reducer_override(obj)


def _is_array(value: Any) -> bool:
    """Whether it is one of numpy's arrays, and lies in memory as a whole."""
    numpy: Any = sys.modules.get("numpy")  # which nobody needs to have
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    return not value.dtype.hasobject


class _LentPickler(_Pickler):
    """Pickles what is read in place: tensors over its buffers, arrays that can't be written."""

    # What lies in memory in another way is copied first.

    def reducer_override(self, obj: Any) -> Any:
        if _is_array(obj):
            view = obj.view() if obj.flags.forc else obj.copy()
            view.flags.writeable = False
            return view.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and reduced[0] is _restore:
            return _lay_over, reduced[1]
        return reduced


def dump(value: object, *, is_lent: bool = False) -> list[bytes | memoryview]:
    """Pickle an object."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        kind = _LentPickler if is_lent else _Pickler
        kind(out, protocol=5, buffer_callback=buffers.append).dump(value)
        return [out.getvalue(), *(buffer.raw() for buffer in buffers)]
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise PayloadError(
            f"a {type(value).__qualname__} can't be pickled: {type(error).__name__}: {error}"
        ) from error


def load(blocks: Sequence[bytes | bytearray | memoryview], device: torch.device) -> Any:
    """Unpickle what `dump` gave."""
    token = _device.set(device)
    try:
        return pickle.loads(blocks[0], buffers=blocks[1:])
    except Exception as error:  # an object's own constructor may raise anything
        raise PayloadError(
            f"an object that came can't be unpickled here: {type(error).__name__}: {error}"
        ) from error
    finally:
        _device.reset(token)
