"""Registration of the backend ``"unisono"`` with torch, and of its frames with Dynamo, on import.

In a compiled function Dynamo would trace collectives, too, and break the graph at each operation
that it can't trace. It skips unisono's frames instead, with one break for each call.
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
"""Name of the backend in ``torch.distributed``."""
_REGISTRY = "torch.distributed.distributed_c10d"  # loaded by ``import torch``
_TRACE_RULES = "torch._dynamo.trace_rules"  # loaded by the first use of ``torch.compile``


def register_with_torch() -> None:
    """Register with the loaded modules of torch, and with the others once they load."""
    for name, act in ((_REGISTRY, register), (_TRACE_RULES, _leave_untraced)):
        if name in sys.modules:
            act()
        else:
            sys.meta_path.insert(0, _Registrar(name, act))


def register() -> None:
    """Register the backend with torch, which must be loaded."""
    # This is local and cheap, and can be repeated. Torch 2.14 and later call it by the entry
    # point ``torch.distributed.backends`` when the name is first used.
    backends: Any = importlib.import_module(_REGISTRY).Backend
    backends.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _leave_untraced() -> None:
    importlib.import_module(_TRACE_RULES).add(__name__.partition(".")[0])


def _create(place: Any, _options: Any) -> Any:
    return importlib.import_module("unisono.models.native.torch_backend").create(place)


class _Registrar:
    """Import hook that finds one module of torch once, and runs a function after its import."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec from the other finders."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # find_spec() below would call it again
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the loader's class has the same method
                load(module)
                self._act()

            with contextlib.suppress(AttributeError):  # the loader may take no attributes
                loader.exec_module = exec_module
        return spec
