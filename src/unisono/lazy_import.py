"""Lazy import of a package's names at first use."""

from __future__ import annotations

import difflib
import dis
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache, partial
from types import CodeType
from typing import Any


def attach(package: str, *variables: str, hidden: tuple[str, ...] = ()) -> None:
    """Import the names that a package has under ``if TYPE_CHECKING`` at first use."""
    # Each name is written once, in an import that type checkers read. The table is derived from the
    # module's code, which contains imports that don't run, and exists even without its source.
    module, origins = sys.modules[package], cache(partial(_imported, sys._getframe(1).f_code))

    def public() -> tuple[str, ...]:
        return tuple(sorted({*origins(), *variables} - {*hidden}))

    def find(name: str) -> Any:
        if name in variables:
            return VARIABLES[name]()  # not stored, because it may change
        if name in _START_WORKERS and "torch" not in sys.modules:
            importlib.import_module("unisono.launchers.local").start_early()
        if name == "__all__":
            value: Any = public()
        elif (origin := origins().get(name)) is None:
            similar = difflib.get_close_matches(name, public(), 1)
            hint = f". Did you mean: {similar[0]!r}?" if similar else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name)
        elif origin == package:  # a submodule
            value = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(origin), name)
        setattr(module, name, value)  # so that the next access doesn't come here
        return value

    def names() -> list[str]:
        version = {"__version__"} & vars(module).keys()  # subpackages have none
        return sorted({*module.__all__, *version})

    vars(module).update(__getattr__=find, __dir__=names)


def _imported(code: CodeType) -> dict[str, str]:
    """Return the public names that a module's code imports from unisono, with their modules."""
    # "from A import b as b, c as c" is compiled to IMPORT_NAME A, IMPORT_FROM b, STORE_NAME b,
    # IMPORT_FROM c, STORE_NAME c.
    found: dict[str, str] = {}
    source, is_name = "", False
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":  # a prefix of the next instruction
            continue
        if step.opname == "IMPORT_NAME":
            source = step.argval
        elif step.opname == "STORE_NAME" and is_name and not step.argval.startswith("_"):
            found[step.argval] = source
        elif "IMPORT_STAR" in step.opname + step.argrepr:
            found.update(dict.fromkeys(importlib.import_module(source).__all__, source))
        is_name = step.opname == "IMPORT_FROM" and source.partition(".")[0] == "unisono"
    return found


def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _registered_models() -> Any:
    return importlib.import_module("unisono.registry").registered_models()


# Names whose users start workers soon: the process that workers are copied from imports torch
# while this one does.
_START_WORKERS = ("WorkerPool", "spawn")
# Facts that are variables, as in idist, although they may change while a program runs.
VARIABLES: dict[str, Callable[[], Any]] = {
    "has_native_dist_support": partial(_is_installed, "torch.distributed"),
    "has_hvd_support": partial(_is_installed, "horovod"),
    "has_xla_support": partial(_is_installed, "torch_xla"),
    "has_mpi_support": partial(_is_installed, "mpi4py"),
    "registered_computation_models": _registered_models,
}
OF_IDIST = tuple(VARIABLES.keys() - {"has_mpi_support"})
