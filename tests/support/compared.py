"""Outcomes of the same calls in two libraries, in a form that can be compared."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

Case = Callable[[Any, int, int], Any]
"""Makes calls of a library, given as argument, on a rank of a number of ranks."""

_BASES = (
    ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError, ImportError,
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """The names of a library and of the module of unisono that replaces it."""

    theirs: str
    ours: str

    def differences(
        self, cases: Mapping[str, Case], rank: int, size: int
    ) -> dict[str, tuple[Any, Any]]:
        """Return the outcomes that differ; an error of ours may have more bases than theirs."""
        theirs, ours = (
            {name: _outcome(partial(case, library, rank, size)) for name, case in cases.items()}
            for library in map(importlib.import_module, (self.theirs, self.ours))
        )
        return {
            name: (theirs[name], ours[name])
            for name in theirs
            if not _is_as_good(theirs[name], ours[name])
        }

    def check_arguments(self, names: Iterable[str]) -> None:
        """Fail if a function is missing in our module, or has other parameters."""
        theirs, ours = map(importlib.import_module, (self.theirs, self.ours))
        for name in names:
            call = getattr(theirs, name)
            if not inspect.isfunction(call):
                assert inspect.ismodule(call) or hasattr(ours, name), name
                continue
            parameters = [
                parameter.name
                for parameter in inspect.signature(call).parameters.values()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ]
            mine = list(inspect.signature(getattr(ours, name)).parameters)
            assert mine[: len(parameters)] == parameters, name


def _outcome(call: Callable[[], Any]) -> Any:
    """Return a call's result, or the built-in classes of the error that it raised."""
    try:
        return _plain(call())
    except _BASES as error:
        return {"raises": sorted(base.__name__ for base in _BASES if isinstance(error, base))}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.tolist()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_plain(item) for item in value)]
    if isinstance(value, (Path, torch.device)):
        return f"{type(value).__name__} {value}"
    return value


def _is_as_good(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, dict) and "raises" in theirs:
        return isinstance(ours, dict) and set(theirs["raises"]) <= set(ours.get("raises", ()))
    return bool(theirs == ours)
