"""Files of trees whose tensors and arrays are memory-mapped."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.serialization import default_restore_location

from unisono.errors import PayloadError
from unisono.payload.pickling import ObjectPickler
from unisono.payload.tensors import device as home


class _TreePickler(ObjectPickler):  # type: ignore[misc]
    """Pickles numpy arrays as tensors, which `torch.save` stores outside of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")  # numpy is optional
        if numpy is None or type(obj) is not numpy.ndarray or obj.dtype.hasobject or not obj.nbytes:
            return super().reducer_override(obj)
        whole = obj if obj.flags.forc else obj.copy()
        memory: Any = (ctypes.c_char * whole.nbytes).from_address(whole.ctypes.data)
        memory.owner = whole
        try:  # its own dtype, or torch wouldn't save a tensor over the same memory
            dtype = torch.from_numpy(numpy.empty(0, obj.dtype)).dtype
        except (TypeError, ValueError):  # torch has no such dtype, or not in this byte order
            dtype = torch.uint8
        order = "C" if whole.flags.c_contiguous else "F"
        return _array, (torch.frombuffer(memory, dtype=dtype), obj.dtype, obj.shape, order)


def _array(memory: Tensor, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    array = memory.numpy().view(dtype).reshape(shape, order=order)
    array.flags.writeable = False
    return array


def save(tree: object, path: str) -> None:
    """Write a tree to a file."""
    module: Any = types.SimpleNamespace(Pickler=_TreePickler, __name__=__name__)
    try:
        torch.save(tree, path, pickle_module=module, pickle_protocol=5)
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise PayloadError(
            f"a {type(tree).__qualname__} can't be pickled, or there is no room for it: "
            f"{type(error).__name__}: {error}"
        ) from error


@torch.inference_mode(False)
def load(path: str, device: torch.device) -> Any:
    """Load a file of `save`, memory-mapped copy-on-write: changes stay in this process."""

    def place(storage: Any, location: str) -> Any:
        if location == "cpu":
            return storage
        return default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    token = home.set(device)
    try:
        return torch.load(path, map_location=place, mmap=True, weights_only=False)
    finally:
        home.reset(token)
