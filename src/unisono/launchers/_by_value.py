"""Pickles of what a worker shall run: by value where the worker couldn't import it."""

from __future__ import annotations

import io
import sys
import threading
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ("pickle_for_worker",)

_lock = threading.Lock()


def pickle_for_worker(value: object) -> bytes:
    """Pickle a value for a process that has this one's ``sys.path``, but not its modules.

    Local. Functions and classes of modules that such a process can import go by reference.

    Args:
        value: anything that cloudpickle knows.

    Returns:
        The pickle.

    Raises:
        Exception: whatever an object's own ``__reduce__`` raises.
    """
    out = io.BytesIO()
    pickler = _Pickler(out)
    with _lock:
        try:
            pickler.dump(value)
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
    return out.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out)
        self.registered: list[ModuleType] = []
        self._seen = {"__main__", *cloudpickle.list_registry_pickle_by_value()}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            self._look_at(obj.__module__)
        return super().reducer_override(obj)

    def _look_at(self, name: Any) -> None:
        if not isinstance(name, str) or name in self._seen:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        if module is not None and not _is_importable(name, module):
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def _is_importable(name: str, module: ModuleType) -> bool:
    """Tell whether an import of `name` elsewhere would find the same file. Local."""
    parent = name.rpartition(".")[0]
    file = getattr(module, "__file__", None)
    if file is None and parent:
        return True  # its package makes it, as torch makes torch._C._distributed_c10d
    path = getattr(sys.modules.get(parent), "__path__", None)
    if parent and path is None:
        return False
    # importlib.util.find_spec would look no further than sys.modules.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return file is None or spec.origin == file
    return False
