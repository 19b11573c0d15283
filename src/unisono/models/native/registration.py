"""Makes the backend ``"unisono"`` known to torch, and our frames to Dynamo, without importing them.

Where a compiled function calls a collective, Dynamo would trace what that does, too, and break the
graph at each thing that it can't trace. It skips our frames instead, at one break for each call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "unisono"
"""What ``torch.distributed`` calls the backend."""
_REGISTRY = "torch.distributed.distributed_c10d"  # which ``import torch`` loads
_TRACE_RULES = "torch._dynamo.trace_rules"  # which the first use of ``torch.compile`` loads


def register_with_torch() -> None:
    """Register with what of torch is loaded, and with the rest as soon as it is."""
    for name, act in ((_REGISTRY, register), (_TRACE_RULES, _leave_untraced)):
        if name in sys.modules:
            act()
        else:
            sys.meta_path.insert(0, _Registrar(name, act))


def register() -> None:
    """Register the backend with torch, which is loaded by then."""
    # Local, and cheap; registering it again does no harm. Torch 2.14 and later call it by the entry
    # point ``torch.distributed.backends`` when the name is first asked for.
    backends: Any = importlib.import_module(_REGISTRY).Backend
    backends.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _leave_untraced() -> None:
    importlib.import_module(_TRACE_RULES).add(__name__.partition(".")[0])


def _create(place: Any, _options: Any) -> Any:
    return importlib.import_module("unisono.models.native.torch_backend").create(place)


class _Registrar:
    """Finds one module of torch's once, and acts after it was loaded."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what others find, for that one module."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # its class has the same
                load(module)
                self._act()

            with contextlib.suppress(AttributeError):  # a loader that takes no attributes
                loader.exec_module = exec_module
        return spec
