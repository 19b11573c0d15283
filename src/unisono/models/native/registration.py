"""Makes the backend ``"unisono"`` known to torch, without importing torch for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

__all__ = ("NAME", "register", "register_with_torch")

NAME = "unisono"
"""What ``torch.distributed`` calls the backend."""
_REGISTRY = "torch.distributed.distributed_c10d"  # which ``import torch`` loads


def register_with_torch() -> None:
    """Register the backend now, or as soon as somebody imports torch. Local."""
    if _REGISTRY in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Registrar())


def register() -> None:
    """Register the backend with torch, which is loaded by then.

    Local, and cheap; registering it again does no harm. Torch 2.14 and later call it by the entry
    point ``torch.distributed.backends`` when the name is first asked for.
    """
    backends: Any = importlib.import_module(_REGISTRY).Backend
    backends.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(place: Any, _options: Any) -> Any:
    return importlib.import_module("unisono.models.native.torch_backend").create(place)


class _Registrar:
    """Finds torch's registry of backends once, and registers ours after it was loaded."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what others find, for that one module. Local."""
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast("Any", _Then(spec.loader))
        return spec


class _Then:
    """The loader of that module, which registers ours once it has loaded it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does. Local."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load it as its own loader does, which it keeps, and register ours. Local."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        register()
