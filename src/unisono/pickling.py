"""cloudpickle with code objects that keep their file names.

Since 3.1.3 its ``_code_reduce`` sends ``<dynamic-code>`` instead of every file, so that no
traceback, timeout or mismatch would name a line.
"""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

_reduce = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, args = _reduce(code)
    return _make_code, (make, args, code.co_filename)


def _make_code(make: Any, args: tuple[Any, ...], file: str) -> CodeType:
    code: CodeType = make(*args)
    return code.replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value objects that other processes can't import, with files and lines."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


Pickler: Any = _Pickler  # cloudpickle is untyped


def dumps(value: object) -> bytes:
    """Pickle a value, for plain ``pickle.loads`` where unisono is installed."""
    out = io.BytesIO()
    Pickler(out).dump(value)
    return out.getvalue()
