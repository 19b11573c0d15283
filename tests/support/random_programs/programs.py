"""Random programs of collectives, what runs one on a rank, and an oracle that needs no ranks."""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import unisono

__all__ = (
    "FAULTS",
    "Fault",
    "Point",
    "Step",
    "alike",
    "call",
    "expected",
    "programs",
    "run",
    "run_until",
    "steps",
)


@dataclass(frozen=True)
class Point:
    """A container of numbers and tensors."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Step:
    """One collective: what each rank of the job passes, and whom it is over."""

    call: str
    values: tuple[Any, ...]
    root: int = 0
    op: str = "SUM"
    group: tuple[int, ...] | None = None


class Lost(Exception):
    """What a rank raises in the middle of a program."""


def _raise() -> None:
    raise Lost("in the middle of a program")


@dataclass(frozen=True)
class Fault:
    """What ends a rank, and what the error must say of it."""

    do: Callable[[], Any]
    says: str


FAULTS = {
    "raise": Fault(_raise, f"raised {__name__}.Lost"),
    "exit": Fault(lambda: os._exit(3), "ended with exit code 3"),
    "kill": Fault(lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
}


# What runs a program


def run(local_rank: int, program: Sequence[Step]) -> list[Any]:
    """Run a program; give what each step returned. Collective over all ranks."""
    rank, found = unisono.get_rank(), []
    for step in program:
        value = step.values[rank]
        before = copy.deepcopy(value)
        found.append(call(step, value))
        if not step.call.endswith("_") and not alike(value, before):
            raise AssertionError(f"{step.call} changed its input {before!r} to {value!r}")
    return found


def run_until(local_rank: int, program: Sequence[Step], at: int, victim: int, fault: str) -> None:
    """Run a program; at step `at` the rank `victim` fails. Collective over all ranks."""
    for i, step in enumerate(program):
        if i == at and unisono.get_rank() == victim:
            FAULTS[fault].do()
        call(step, step.values[unisono.get_rank()])
    if at >= len(program) and unisono.get_rank() == victim:
        FAULTS[fault].do()
    unisono.barrier()


def call(step: Step, value: Any, group: Any = None, **how: Any) -> Any:
    """Make the call of a step with a value, in a group of the step's ranks if one is given."""
    function = getattr(unisono, step.call)
    if group is None and step.group is not None:
        group = list(step.group)
    if step.call == "barrier":
        return function(group=group, **how)
    if step.call in ("all_reduce", "all_reduce_", "reduce_scatter"):
        return function(value, step.op, group=group, **how)
    if step.call == "reduce":
        return function(value, step.root, step.op, group=group, **how)
    if step.call in ("gather", "broadcast", "broadcast_", "scatter"):
        return function(value, step.root, group=group, **how)
    return function(value, group=group, **how)


# What it must give


def expected(step: Step, rank: int) -> Any:
    """Say what a step gives on a rank, by plain python. Local."""
    members = range(len(step.values)) if step.group is None else sorted(step.group)
    own = step.values[rank]
    if rank not in members:
        return None if step.call == "barrier" else own
    given = [step.values[member] for member in members]
    place = list(members).index(rank)
    answers: dict[str, Callable[[], Any]] = {
        "barrier": lambda: None,
        "all_reduce": lambda: _fold(step.op, given),
        "all_reduce_": lambda: _fold(step.op, given),
        "reduce": lambda: _fold(step.op, given) if rank == step.root else None,
        "reduce_scatter": lambda: _part(_fold(step.op, given), place, len(given)),
        "all_gather": lambda: _joined(given),
        "gather": lambda: _joined(given) if rank == step.root else None,
        "broadcast": lambda: step.values[step.root],
        "broadcast_": lambda: step.values[step.root],
        "scatter": lambda: step.values[step.root][place],
        "all_to_all": lambda: _swapped(given, place),
    }
    return answers[step.call]()


def _joined(given: list[Any]) -> Any:
    if not isinstance(given[0], Tensor):
        return given
    rows = [row for tensor in given for row in tensor.reshape(-1).tolist()]
    first = given[0]
    shape = (len(given) * first.shape[0], *first.shape[1:]) if first.dim() else (len(given),)
    return torch.tensor(rows, dtype=first.dtype).reshape(shape)


def _part(total: Tensor, place: int, count: int) -> Tensor:
    width = total.shape[0] // count
    return total[place * width : (place + 1) * width]


def _swapped(given: list[Any], place: int) -> Any:
    if isinstance(given[0], Tensor):
        return torch.cat([_part(tensor, place, len(given)) for tensor in given])
    return [values[place] for values in given]


def _fold(op: str, given: list[Any]) -> Any:
    first = given[0]
    if isinstance(first, Tensor) and all(map(_repeats, given)):
        whole = _fold(op, [tensor.reshape(-1)[:_PERIOD] for tensor in given])
        times = -(-first.numel() // _PERIOD)
        return whole.repeat(times)[: first.numel()].reshape(first.shape)
    if isinstance(first, Tensor):
        columns = zip(*(tensor.reshape(-1).tolist() for tensor in given), strict=True)
        flat = [_fold_numbers(op, list(column)) for column in columns]
        return torch.tensor(flat, dtype=first.dtype).reshape(first.shape)
    if isinstance(first, dict):
        return {key: _fold(op, [each[key] for each in given]) for key in first}
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return Point(**{name: _fold(op, [getattr(each, name) for each in given]) for name in names})
    if isinstance(first, (list, tuple)):
        return type(first)(_fold(op, list(column)) for column in zip(*given, strict=True))
    return _fold_numbers(op, given)


_PERIOD = 3  # of what the tensors below repeat


def _repeats(tensor: Tensor) -> bool:
    """Tell whether a long tensor repeats its first elements, so that these tell all of it."""
    if tensor.numel() < 100:
        return False
    flat = tensor.reshape(-1)
    return torch.equal(flat[_PERIOD:], flat[:-_PERIOD])


def _fold_numbers(op: str, given: list[Any]) -> Any:
    if isinstance(given[0], bool):
        if op == "XOR":
            return sum(given) % 2 == 1
        return any(given) if op in ("SUM", "MAX", "OR") else all(given)
    steps: dict[str, Callable[[Any, Any], Any]] = {
        "SUM": lambda a, b: a + b,
        "AVERAGE": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": lambda a, b: b if b < a else a,
        "MAX": lambda a, b: b if b > a else a,
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "XOR": lambda a, b: a ^ b,
    }
    total, *rest = given
    for value in rest:
        total = steps[op](total, value)
    return total / len(given) if op == "AVERAGE" else total


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values are equal in type and content, NaN and -0.0 included. Local."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    if isinstance(one, Point):
        return alike((one.x, one.y), (other.x, other.y))
    return bool(one == other)


# What programs are made of

# Sizes on both sides of what travels in a round of the control plane (16 KiB).
_SHAPES = ((), (0,), (1,), (2, 3), (3, 0, 2), (5000,))
_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16)
_OPS = ("SUM", "PRODUCT", "MIN", "MAX")
_BITS = ("AND", "OR", "XOR")

_plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.builds(Path, st.text(alphabet="aé/ ", min_size=1, max_size=6))
)
_large = st.sampled_from(["é" * 40_000, b"\0" * 200_000])
_objects = st.frozensets(st.integers(), max_size=3) | st.builds(Point, _plain, _plain)


def _tensors(shape: tuple[int, ...], dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    """Make tensors of small whole numbers, whose reductions are exact in every order."""
    return st.integers(1, 3).map(
        lambda seed: (torch.arange(math.prod(shape)) % 3 + seed).to(dtype).reshape(shape)
    )


def _values() -> st.SearchStrategy[Any]:
    leaf = _plain | _objects | st.sampled_from(_SHAPES).flatmap(lambda s: _tensors(s, torch.int64))
    nested = (
        st.lists(leaf, max_size=3)
        | st.dictionaries(st.text(max_size=3), leaf, max_size=3)
        | st.tuples(leaf, leaf)
    )
    return _plain | _objects | nested | _large


@st.composite
def _numeric(draw: st.DrawFn, size: int) -> tuple[tuple[Any, ...], str]:
    """Give for each rank a value of the same structure, and an operation that it has."""
    kind = draw(st.sampled_from(["int", "float", "bool", "tensor", "bits", "container"]))
    one: st.SearchStrategy[Any]
    ops: tuple[str, ...]
    if kind == "int":
        one, ops = st.integers(-1000, 1000), (*_OPS, *_BITS, "AVERAGE")
    elif kind == "float":
        one, ops = st.floats(-1e6, 1e6).filter(lambda x: x != 0), (*_OPS, "AVERAGE")
    elif kind == "bool":
        one, ops = st.booleans(), (*_OPS, *_BITS)
    elif kind == "container":
        tensor = _tensors(draw(st.sampled_from(_SHAPES)), draw(st.sampled_from(_DTYPES)))
        number = st.integers(-9, 9)
        one, ops = (
            st.builds(lambda a, b, t: {"a": [a, (b,)], "p": Point(t, a)}, number, number, tensor),
            ("SUM", "MIN", "MAX"),
        )
    else:
        is_bits = kind == "bits"
        dtype = draw(st.sampled_from(_DTYPES[:3] if is_bits else _DTYPES))
        one, ops = _tensors(draw(st.sampled_from(_SHAPES)), dtype), _BITS if is_bits else _OPS
    return tuple(draw(one) for _ in range(size)), draw(st.sampled_from(ops))


@st.composite
def _group(draw: st.DrawFn, size: int) -> tuple[int, ...] | None:
    if draw(st.booleans()):
        return None
    return tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)))


@st.composite
def steps(draw: st.DrawFn, size: int, group: tuple[int, ...] | None | str = "any") -> Step:
    """Make a call of `size` ranks, within a group of one's own choice if one is given."""
    if isinstance(group, str):
        group = draw(_group(size))
    count = size if group is None else len(group)
    root = draw(st.sampled_from(range(size) if group is None else group))
    name = draw(st.sampled_from(_CALLS))
    dtype, shape = draw(st.sampled_from(_DTYPES)), draw(st.sampled_from(_SHAPES))
    if name in ("all_reduce", "reduce"):
        values, op = draw(_numeric(size))
        return Step(name, values, root, op, group)
    if name == "barrier":
        return Step(name, (None,) * size, group=group)
    if name in ("all_reduce_", "broadcast_", "reduce_scatter"):
        width = count * draw(st.integers(1, 2))
        shape = (width, *shape) if name == "reduce_scatter" else shape
        rows = tuple(draw(_tensors(shape, dtype)) for _ in range(size))
        return Step(name, rows, root, draw(st.sampled_from(_OPS)), group)
    if name in ("scatter", "all_to_all"):
        if name == "all_to_all" and draw(st.booleans()):
            tensors = _tensors((count * 2, *shape), dtype)
            return Step(name, tuple(draw(tensors) for _ in range(size)), root, group=group)
        lists = st.lists(_values(), min_size=count, max_size=count)
        return Step(name, tuple(draw(lists) for _ in range(size)), root, group=group)
    one = _tensors(shape, dtype) if draw(st.booleans()) else _values()
    return Step(name, tuple(draw(one) for _ in range(size)), root, group=group)


_CALLS = (
    *("all_reduce", "reduce", "all_reduce_", "reduce_scatter", "barrier"),
    *("all_gather", "gather", "broadcast", "broadcast_", "scatter", "all_to_all"),
)


def programs(size: int, longest: int = 6) -> st.SearchStrategy[list[Step]]:
    """Make programs for `size` ranks. Local."""
    return st.lists(steps(size), min_size=1, max_size=longest)
