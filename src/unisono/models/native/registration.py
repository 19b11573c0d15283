"""Makes the backend ``"unisono"`` known to torch, and our frames to Dynamo, without importing them.

Where a compiled function calls a collective, Dynamo would trace what that does, too, and break the
graph at each thing that it can't trace. It skips our frames instead, at one break for each call.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

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
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast("Any", _Then(spec.loader, self._act))
        return spec


class _Then:
    """The loader of that module, after which something is done."""

    def __init__(self, loader: Any, act: Callable[[], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load it as its own loader does, which it keeps, and act."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act()
