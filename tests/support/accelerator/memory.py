"""Tensors of the device: real ones of torch, with a storage, strides and views.

DLPack hands memory to torch together with its device. The memory of a CPU tensor that is handed
over as that of an "external device" is a tensor of torch's PrivateUse1, and back again.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_CPU, _EXTERNAL = 1, 12  # kDLCPU, kDLExtDev
_c: Any = torch._C
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Head(ctypes.Structure):
    """How a DLTensor begins: address, kind of device, index of device."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32))


def to_device(host: Tensor, index: int) -> Tensor:
    """Give the memory of a CPU tensor as a tensor of the device."""
    return _moved(host.detach(), _CPU, _EXTERNAL, index)


def to_host(tensor: Tensor) -> Tensor:
    """Give the memory of a tensor of the device as a CPU tensor, which keeps it alive.

    It stands at the same place of a storage that is as long.
    """
    whole = _moved(_whole(tensor), _EXTERNAL, _CPU, 0)
    return _as(tensor, whole)


def _whole(tensor: Tensor) -> Tensor:
    n_items = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.detach()
    _c._set_conj(whole, False)
    _c._set_neg(whole, False)
    return whole.as_strided_((n_items,), (1,), 0)


def _as(shown: Tensor, whole: Tensor) -> Tensor:
    view = whole.as_strided_(shown.size(), shown.stride(), shown.storage_offset())
    _c._set_conj(view, shown.is_conj())
    _c._set_neg(view, shown.is_neg())
    return view


def _moved(tensor: Tensor, source: int, kind: int, index: int) -> Tensor:
    capsule = _c._to_dlpack(tensor)
    head = _Head.from_address(_pointer(capsule, b"dltensor"))
    assert head.kind == source, head.kind
    head.kind, head.index = kind, index
    moved: Tensor = _c._from_dlpack(capsule)
    return moved


def view_of(base: Tensor, shown: Tensor) -> Tensor:
    """Give the view of `base` that `shown` is of `to_host(base)`: the same storage."""
    return _as(shown, _whole(base).view(shown.dtype))
