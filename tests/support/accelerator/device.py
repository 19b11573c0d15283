"""The device as torch sees it: its module, its place in ``torch.accelerator``, its kernels.

Torch's hooks for devices written in Python know only index 0, so the functions of
``torch.accelerator`` that use an index are replaced.

Tensors of the device have a storage, strides and views. DLPack passes memory to torch together
with its device: if the memory of a CPU tensor is passed as that of an "external device", torch
makes a tensor of PrivateUse1 from it. The same works in the other direction.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "pretend"
VISIBLE = "PRETEND_VISIBLE_DEVICES"
UNPINNED = "PRETEND_UNPINNED"
_KEY = "PrivateUse1"
LIBRARIES: list[Any] = []  # kept, because a library's end unregisters its kernels
_c: Any = torch._C
new_library: Any = torch.library.Library
_to_elsewhere: Any = torch.UntypedStorage.to
_CPU, _EXTERNAL = 1, 12  # kDLCPU, kDLExtDev
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Module:
    """The module ``torch.pretend``. As with CUDA, forks can't use it after their parent has."""

    def __init__(self) -> None:
        self._current = 0
        self.initialised_by = 0
        self.events: list[str] = []
        self.n_touches = 0
        self.n_copies_in_background = 0
        self.pinned: list[Tensor] = []  # kept, so that no other memory has their addresses

    def initialise(self) -> None:
        """Initialise the device in this process, as the first use of a real one does."""
        if self._is_in_bad_fork():
            raise RuntimeError(f"Cannot re-initialize {NAME} in forked subprocess")
        self.initialised_by = os.getpid()

    def touch(self) -> None:
        """Count one use of the device: an allocation, a copy, a kernel or a collective."""
        self.initialise()
        self.n_touches += 1

    def is_initialized(self) -> bool:
        return self.initialised_by == os.getpid()

    def _is_in_bad_fork(self) -> bool:
        return self.initialised_by not in (0, os.getpid())

    def is_available(self) -> bool:
        """Initialise the device, as ``torch.cuda.is_available`` does by its call of the driver."""
        self.initialise()
        return self.device_count() > 0

    def device_count(self) -> int:
        """Count without initialising the device, as ``torch.cuda.device_count`` does."""
        return len(self._visible())

    def _visible(self) -> list[int]:
        return [int(each) for each in os.environ.get(VISIBLE, "0,1").split(",") if each]

    def physical(self, index: int) -> int:
        """Return the number of a device from its index among the visible ones."""
        return self._visible()[index]

    def current_device(self) -> int:
        self.initialise()
        return self._current

    def set_device(self, device: Any) -> None:
        self.initialise()
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
        self.events.append(f"set {index}")
        self._current = index

    def synchronize(self, device: Any = None) -> None:
        self.initialise()

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, because the CPU's generator draws the device's numbers."""

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        yield
        self.set_device(before)


MODULE = Module()


def load() -> None:
    """Register the device with torch, which calls this at the end of ``import torch``."""
    setup: Any = backend_registration._setup_privateuseone_for_python_backend
    setup(NAME, MODULE)
    for name, function in {
        "device_count": MODULE.device_count,
        "current_device_index": MODULE.current_device,
        "set_device_index": MODULE.set_device,
        "synchronize": MODULE.synchronize,
    }.items():
        setattr(torch.accelerator, name, function)
    torch.UntypedStorage.to = _storage_to  # type: ignore[method-assign, assignment]
    _register_kernels()
    from tests.support.accelerator import collectives

    collectives.register()


def _register_kernels() -> None:
    every = new_library("_", "IMPL")
    every.fallback(_run_on_host, _KEY)
    aten = new_library("aten", "IMPL")
    aten.impl("empty.memory_format", _maker(torch.empty), _KEY)
    aten.impl("empty_strided", _maker(torch.empty_strided), _KEY)
    aten.impl("copy_", _copy, _KEY)
    aten.impl("set_.source_Storage_storage_offset", _set_storage, _KEY)
    aten.impl("set_.source_Storage", _set_storage, _KEY)
    aten.impl("_pin_memory", _pin, "CPU")
    aten.impl("is_pinned", _is_pinned, "CPU")
    LIBRARIES.extend((every, aten))


def index_of(device: Any) -> int:
    index = None if device is None else torch.device(device).index
    return MODULE.current_device() if index is None else index


def is_ours(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


class _Head(ctypes.Structure):
    """The beginning of a DLTensor: address, kind of device, index of device."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32))


def to_device(host: Tensor, index: int) -> Tensor:
    """Return a tensor of the device with the memory of a CPU tensor."""
    return _moved(host.detach(), _CPU, _EXTERNAL, index)


def to_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the memory of a tensor of the device, which it keeps alive.

    Its storage has the same length, and it has the same offset in it.
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
    """Return the view of `base` that corresponds to the view `shown` of `to_host(base)`."""
    return _as(shown, _whole(base).view(shown.dtype))


def _maker(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*layout: Any, device: Any = None, **options: Any) -> Tensor:
        options.pop("pin_memory", None)
        MODULE.touch()
        return to_device(make(*layout, device="cpu", **options), index_of(device))

    return run


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    MODULE.touch()
    MODULE.n_copies_in_background += non_blocking and _is_pinned(source)
    there, here = (to_host(each) if is_ours(each) else each for each in (into, source))
    there.copy_(here)
    return into


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    """Return a copy that counts as pinned; raise if the device has no pinned memory."""
    MODULE.initialise()
    if os.environ.get(UNPINNED):
        raise NotImplementedError(f"{NAME} has no pinned memory")
    MODULE.pinned.append(tensor.clone())
    return MODULE.pinned[-1]


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return any(tensor.data_ptr() == each.data_ptr() for each in MODULE.pinned)


def _set_storage(
    into: Tensor, storage: Any, offset: int = 0, size: Any = None, stride: Any = (1,)
) -> Tensor:
    """Make a tensor a view of a storage, as ``torch.load`` does."""
    MODULE.touch()
    host = _c._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    n_items = storage.nbytes() // into.itemsize
    flat = torch.empty(0, dtype=into.dtype, device="cpu").set_(host, 0, (n_items,), (1,))
    into.data = to_device(flat, storage.device.index).as_strided_(
        (n_items,) if size is None else size, stride, offset
    )
    into.memory = storage  # type: ignore[attr-defined]  # keeps the storage alive
    return into


def _storage_to(storage: Any, *, device: torch.device, non_blocking: bool = False) -> Any:
    if device.type != NAME:
        return _to_elsewhere(storage, device=device, non_blocking=non_blocking)
    MODULE.touch()
    bytes_of = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())
    return to_device(bytes_of.clone(), index_of(device)).untyped_storage()


def by_name(op: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _run_on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on CPU tensors of the same memory; return its results on the device."""
    MODULE.touch()
    given = by_name(op, args, kwargs)
    ours: list[tuple[Tensor, Tensor]] = []
    target: list[torch.device] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            target.append(value)
            return torch.device("cpu") if value.type == NAME else value
        if not is_ours(value):
            return value
        ours.append((value, to_host(value)))
        return ours[-1][1]

    changed = tree_map(on_host, given)
    index = _one_index([tensor for tensor, _ in ours], target)
    grown = _lend_room(op, given, changed, ours)
    result = _call(op, changed)
    for tensor, host in grown:
        tensor.data = to_device(host, tensor.device.index)
    if target and target[0].type != NAME:
        return result
    return tree_map(lambda value: _on_device(value, ours + grown, index), result)


def _call(op: Any, given: dict[str, Any]) -> Any:
    """Call an operation, or its overload for numbers if a number is passed for a tensor."""
    for argument in op._schema.arguments:
        is_number = isinstance(given.get(argument.name), (bool, int, float, complex))
        if is_number and isinstance(argument.type, torch.TensorType):
            return op.overloadpacket(**given)
    return op(**given)


def _one_index(ours: list[Tensor], target: list[torch.device]) -> int:
    """Return the index of an operation's device; raise if its tensors, except scalars, differ."""
    indices = {tensor.device.index for tensor in ours if tensor.dim()}
    if len(indices) > 1:
        raise RuntimeError(f"expected all tensors on one {NAME} device, not on {sorted(indices)}")
    if target and target[0].index is not None:
        return target[0].index
    indices = indices or {tensor.device.index for tensor in ours}
    return next(iter(indices)) if indices else MODULE.current_device()


def _lend_room(op: Any, given: Any, changed: Any, ours: Any) -> list[tuple[Tensor, Tensor]]:
    """Let an empty output of an operation grow, as ``out=`` does on other devices."""
    grown = []
    for argument in op._schema.arguments:
        value = given.get(argument.name)
        if argument.is_write and is_ours(value) and value.numel() == 0:
            host = torch.empty(value.shape, dtype=value.dtype)
            changed[argument.name] = host
            ours[:] = [pair for pair in ours if pair[0] is not value]
            grown.append((value, host))
    return grown


def _on_device(value: Any, ours: list[tuple[Tensor, Tensor]], index: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    for tensor, host in ours:
        if value is host:
            return tensor
    if value.layout is not torch.strided:  # many real devices lack these kernels, too
        raise NotImplementedError(f"{NAME}: tensors of {value.layout}")
    for tensor, host in ours:
        if (
            value.numel()
            and value.untyped_storage().data_ptr() == host.untyped_storage().data_ptr()
        ):
            return view_of(tensor, value)
    return to_device(value, index)
