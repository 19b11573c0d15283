"""What random programs are made of beside single calls, and what each must give: an oracle.

A scene is played on every rank and judged by what all of them found. What must be refused is
refused on every rank at once, with an error of ours after which the ranks are in step; a wrong
value is right nowhere.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import unisono
import unisono.compat.mmengine as mm
from tests.support.odd_tensors import IN_PLACE_REFUSED, WITHOUT_MEMORY, content, make_odd
from tests.support.random_programs.programs import Step, alike, call, expected
from unisono.errors import UnisonoError

__all__ = (
    "ASYNC_MOVES",
    "CHILD_CALLS",
    "IN_STEP",
    "OVERLAPS",
    "RAISING",
    "AtOnce",
    "Fork",
    "Handles",
    "Mean",
    "Odd",
    "OneMore",
    "Plain",
    "Raising",
    "Refused",
    "Scene",
    "Tied",
    "Told",
    "attempt",
    "is_mean",
    "play",
)

IN_STEP = ("PayloadError", "CollectiveMismatchError")
"""How what one rank alone can't send is refused on every rank."""
_CHILD_S = 5.0  # for a fork to be told; it needs no other process


@dataclass(frozen=True)
class Told:
    """The error that a rank got."""

    kind: str
    text: str
    is_ours: bool


class Scene(Protocol):
    """Something that all ranks do together."""

    def play(self, rank: int) -> Any:
        """Do it; give what was found. Collective over all ranks."""

    def fault(self, found: list[Any]) -> str | None:
        """Say what is wrong with what the ranks found, None if nothing is. Local."""


def play(local_rank: int, program: Sequence[Scene]) -> list[Any]:
    """Play scenes one after the other; give what each found. Collective over all ranks."""
    rank = unisono.get_rank()
    return [attempt(lambda scene=scene: scene.play(rank)) for scene in program]  # type: ignore[misc]


def attempt(work: Callable[[], Any]) -> Any:
    """Give what a call gives, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        is_ours = isinstance(error, UnisonoError)
        text = str(error) if is_ours else "".join(traceback.format_exception(error)[-3:])
        return Told(type(error).__name__, text[:600], is_ours)


def _is_refused(found: Any) -> bool:
    return isinstance(found, Told) and found.is_ours and found.kind in IN_STEP


def _differs(found: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not alike(one, other):
            return f"rank {rank} got {one!r} instead of {other!r}"
    return None


def _refused_by(found: Sequence[Any], ranks: Sequence[int]) -> str | None:
    left = [rank for rank in ranks if not _is_refused(found[rank])]
    if left:
        return f"not refused on ranks {left}: {[found[rank] for rank in ranks]!r}"
    return None


@dataclass(frozen=True)
class Plain:
    """One call that is right on every rank."""

    step: Step

    def play(self, rank: int) -> Any:
        return _checked_call(self.step, rank, None)

    def fault(self, found: list[Any]) -> str | None:
        return _differs(found, [expected(self.step, rank) for rank in range(len(found))])


def _checked_call(step: Step, rank: int, group: Any) -> Any:
    value = _copy(step.values[rank])
    got = call(step, value, group)
    if not step.call.endswith("_") and not alike(value, step.values[rank]):
        raise AssertionError(f"{step.call} changed its input to {value!r}")
    return got


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Refused:
    """One call that some rank's value forbids, so every member refuses it."""

    step: Step

    def play(self, rank: int) -> Any:
        return call(self.step, _copy(self.step.values[rank]))

    def fault(self, found: list[Any]) -> str | None:
        members = range(len(found)) if self.step.group is None else self.step.group
        return _refused_by(found, members)


# Groups


@dataclass(frozen=True)
class AtOnce:
    """Several groups of the same ranks, used in turns or each by a thread of its own.

    Args:
        ranks: of every group.
        turns: the calls of each group.
        order: which group is next, for the turns; the same on every rank.
        delays_ms: how long each thread of each rank waits at first; None for turns.
    """

    ranks: tuple[int, ...]
    turns: tuple[tuple[Step, ...], ...]
    order: tuple[int, ...] = ()
    delays_ms: tuple[tuple[int, ...], ...] | None = None

    def play(self, rank: int) -> Any:
        groups = [unisono.new_group(list(self.ranks)) for _ in self.turns]
        found: list[list[Any]] = [[] for _ in self.turns]

        def go(i: int) -> None:
            if self.delays_ms is not None:
                time.sleep(self.delays_ms[rank][i] / 1000)
            for step in self.turns[i]:
                found[i].append(attempt(lambda step=step: _checked_call(step, rank, groups[i])))  # type: ignore[misc]

        if self.delays_ms is not None:
            threads = [threading.Thread(target=go, args=(i,)) for i in range(len(self.turns))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return found
        lefts = [list(steps) for steps in self.turns]
        for i in self.order:
            step = lefts[i].pop(0)
            found[i].append(attempt(lambda: _checked_call(step, rank, groups[i])))  # noqa: B023
        return found

    def fault(self, found: list[Any]) -> str | None:
        wanted = [
            [[expected(step, rank) for step in steps] for steps in self.turns]
            for rank in range(len(found))
        ]
        return _differs(found, wanted)


# Forks


def _in_section() -> None:
    with unisono.one_rank_first():
        pass


def _large() -> Tensor:
    return torch.empty(200_000)  # not filled: that takes OpenMP's threads, which a fork hasn't


CHILD_CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda _: unisono.all_reduce(1),
    "all_reduce of a tensor": lambda _: unisono.all_reduce(torch.ones(3)),
    "all_reduce of a large tensor": lambda _: unisono.all_reduce(_large()),
    "all_reduce_": lambda _: unisono.all_reduce_(torch.ones(3)),
    "all_reduce_ of a large tensor": lambda _: unisono.all_reduce_(_large()),
    "all_gather": lambda _: unisono.all_gather("child"),
    "broadcast": lambda _: unisono.broadcast("child"),
    "barrier": lambda _: unisono.barrier(),
    "reduce_dict": lambda _: unisono.reduce_dict({"loss": 1.0}),
    "all_reduce_params": lambda _: unisono.all_reduce_params([torch.ones(2)]),
    "new_group": lambda _: unisono.new_group([0]),
    "a list as group": lambda _: unisono.all_reduce(1, group=[0, 1]),
    "send": lambda _: unisono.send(1, (unisono.get_rank() + 1) % unisono.get_world_size()),
    "recv": lambda _: unisono.recv((unisono.get_rank() + 1) % unisono.get_world_size()),
    "section": lambda _: _in_section(),
    "all_reduce, async": lambda _: unisono.all_reduce(1, async_op=True).wait(),
    "all_reduce of a large tensor, async": lambda _: unisono.all_reduce(
        _large(), async_op=True
    ).wait(),
    "all_reduce_, async": lambda _: unisono.all_reduce_(torch.ones(3), async_op=True).wait(),
    "broadcast, async": lambda _: unisono.broadcast("child", async_op=True).wait(),
    "all_gather in a group, async": lambda _: unisono.all_gather(
        "child", group=[0, 1], async_op=True
    ).wait(),
    "the parent's handle": lambda handle: handle.wait(),
}


@dataclass(frozen=True)
class Fork:
    """Some ranks fork, and the children call something: they are told that they are forks.

    Args:
        ranks: that fork.
        does: what the children call, a key of ``CHILD_CALLS``.
        under_way: whether an operation of the parent's is under way at the time.
    """

    ranks: tuple[int, ...]
    does: str
    under_way: bool = False

    def play(self, rank: int) -> Any:
        handle = unisono.all_gather(rank, async_op=True) if self._has_handle() else None
        said = self._child(handle) if rank in self.ranks else None
        return said, None if handle is None else handle.wait(), unisono.all_reduce(1)

    def _has_handle(self) -> bool:
        return self.under_way or self.does == "the parent's handle"

    def _child(self, handle: Any) -> str:
        ours, its = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads
            pid = os.fork()
        if pid == 0:
            try:
                result = attempt(lambda: CHILD_CALLS[self.does](handle))
                said = result.kind if isinstance(result, Told) else f"value {result!r}"
                os.write(its, said.encode()[:500])
            finally:
                os._exit(0)
        os.close(its)
        is_told, _, _ = select.select([ours], [], [], _CHILD_S)
        said = os.read(ours, 500).decode() if is_told else "nothing: it hangs"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)
        return said

    def fault(self, found: list[Any]) -> str | None:
        size = len(found)
        gathered = list(range(size)) if self._has_handle() else None
        wanted: list[Any] = [
            ("ContextError" if rank in self.ranks else None, gathered, size) for rank in range(size)
        ]
        if self.does == "the parent's handle":  # which may have been done before the fork
            value = f"value {gathered!r}"
            wanted = [
                (one[0] if isinstance(one, tuple) and one[0] == value else other[0], *other[1:])
                for one, other in zip(found, wanted, strict=True)
            ]
        return _differs(found, wanted)


# Tensors that are more, or less, than memory


@dataclass(frozen=True)
class Odd:
    """A tensor of an odd kind on some ranks, plain ones on the others.

    Args:
        kind: of ``ODD``.
        call: which call.
        ranks: that have it.
        numel: of the plain tensor that it is made of; even.
        root: source or destination.
        async_op: whether the call is started and waited for.
    """

    kind: str
    call: str
    ranks: tuple[int, ...]
    numel: int = 4
    root: int = 0
    async_op: bool = False

    def _plain(self, rank: int) -> Tensor:
        return (torch.arange(self.numel) % 5 + 1 + rank).to(torch.float32)

    def play(self, rank: int) -> Any:
        mine = make_odd(self.kind, self._plain(rank))
        if rank not in self.ranks and self.kind in WITHOUT_MEMORY:
            mine = self._plain(rank)
        elif rank not in self.ranks:
            mine = torch.tensor(mine.tolist())
        before = content(mine)
        got = attempt(lambda: self._call(mine, rank))
        if isinstance(got, Told):
            return before, content(mine), got
        return before, content(mine), content(got)

    def _call(self, mine: Tensor, rank: int) -> Any:
        how: dict[str, Any] = {"async_op": True} if self.async_op else {}
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: unisono.all_reduce(mine, **how),
            "all_reduce_": lambda: unisono.all_reduce_(mine, **how),
            "reduce": lambda: unisono.reduce(mine, self.root, **how),
            "reduce_scatter": lambda: unisono.reduce_scatter(mine, **how),
            "broadcast_": lambda: unisono.broadcast_(mine, self.root, **how),
            "all_to_all": lambda: unisono.all_to_all(mine, **how),
            "all_gather": lambda: unisono.all_gather(mine, **how),
            "gather": lambda: unisono.gather(mine, self.root, **how),
            "broadcast": lambda: unisono.broadcast(mine, self.root, **how),
            "all_gather in a list": lambda: unisono.all_gather([mine], **how),
            "all_reduce in a dict": lambda: unisono.all_reduce({"a": mine}, **how),
            "scatter": lambda: unisono.scatter([mine] * unisono.get_world_size(), self.root, **how),
            "all_reduce_params": lambda: unisono.all_reduce_params([mine], op="sum"),
            "broadcast_params": lambda: unisono.broadcast_params([mine], self.root),
            "reduce_dict": lambda: unisono.reduce_dict({"a": mine}, "sum"),
        }
        got = calls[self.call]()
        if self.async_op:
            got = got.wait()
        return None if self.call.endswith("_params") else got

    @property
    def _is_in_place(self) -> bool:
        return self.call.endswith(("_", "_params"))

    def _is_looked_at(self) -> bool:
        return self.call not in ("broadcast", "scatter") or self.root in self.ranks

    def fault(self, found: list[Any]) -> str | None:
        told = [one for one in found if isinstance(one, Told)]
        if told:
            return f"it raised outside of the call: {told[0]!r}"
        befores, afters, got = (list(column) for column in zip(*found, strict=True))
        is_changed = [rank for rank, after in enumerate(afters) if after != befores[rank]]
        if all(map(_is_refused, got)):
            if is_changed:
                return f"refused, but the tensors of ranks {is_changed} are changed: {found!r}"
            if self.kind in WITHOUT_MEMORY and self._is_looked_at():
                return None
            if self._is_in_place and self.kind in (*IN_PLACE_REFUSED, "inference"):
                return None
            return f"refused though it has memory: {got!r}"
        if self.kind in WITHOUT_MEMORY and self._is_looked_at():
            return self._fault_of_carried(befores, got)
        if self._is_in_place and self.kind in IN_PLACE_REFUSED:
            return f"not refused on every rank: {got!r}"
        return self._fault_of_plain(got, afters, befores)

    def _fault_of_carried(self, befores: list[Any], got: list[Any]) -> str | None:
        """Say what is wrong where a tensor without memory wasn't refused everywhere."""
        size = len(got)
        wanted: dict[str, Callable[[int], Any]] = {
            "all_gather": lambda _: befores,
            "all_gather in a list": lambda _: [[one] for one in befores],
            "gather": lambda rank: befores if rank == self.root else None,
            "broadcast": lambda _: befores[self.root],
            "scatter": lambda _: befores[self.root],
        }
        if self.call in wanted and got == [wanted[self.call](rank) for rank in range(size)]:
            return None
        if self.call == "reduce_dict" and self.kind == "dtensor":
            parts = [torch.tensor(flat) for _, (_, _, flat) in befores]
            total = content({"a": torch.cat(parts) * size})  # a DTensor counts as its whole
            return None if got == [total] * size else f"not the sum of the wholes: {got!r}"
        return f"neither refused on every rank nor carried whole: {got!r}"

    def _fault_of_plain(self, got: list[Any], afters: list[Any], befores: list[Any]) -> str | None:
        size = len(got)
        # Where the root's value alone is looked at, the others may be anything.
        looked_at = befores if self._is_looked_at() else [befores[self.root]] * size
        values = [torch.tensor(flat).reshape(shape) for _, shape, flat in looked_at]
        total, joined = torch.stack(values).sum(0), torch.cat(values)
        wanted: dict[str, Callable[[int], Any]] = {
            "all_reduce": lambda _: total,
            "all_reduce_": lambda _: total,
            "reduce": lambda rank: total if rank == self.root else None,
            "broadcast_": lambda _: values[self.root],
            "all_gather": lambda _: joined,
            "gather": lambda rank: joined if rank == self.root else None,
            "broadcast": lambda _: values[self.root],
            "all_gather in a list": lambda _: [[one] for one in values],
            "all_reduce in a dict": lambda _: {"a": total},
            "reduce_dict": lambda _: {"a": total},
            "scatter": lambda _: values[self.root],
            "all_reduce_params": lambda _: None,
            "broadcast_params": lambda _: None,
            "reduce_scatter": lambda rank: total.chunk(size)[rank],
            "all_to_all": lambda rank: torch.cat([one.chunk(size)[rank] for one in values]),
        }
        for rank in range(size):
            answer = content(wanted[self.call](rank))
            if got[rank] != answer:
                return f"rank {rank} got {got[rank]!r} instead of {answer!r}"
            in_place = "broadcast_" if self.call.startswith("broadcast_") else "all_reduce_"
            after = content(wanted[in_place](rank)) if self._is_in_place else befores[rank]
            if afters[rank] != after:
                return f"the tensor of rank {rank} is {afters[rank]!r} afterwards, not {after!r}"
        return None


# Memory that comes twice

OVERLAPS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "twice": lambda base: [base, base],
    "three times": lambda base: [base, base, base],
    "an alias": lambda base: [base, base.view_as(base)],
    "another shape": lambda base: [base, base.view(2, -1)],
    "a transpose": lambda base: [base.view(2, -1), base.view(2, -1).t()],
    "a part": lambda base: [base, base[: base.numel() // 2]],
    "a part first": lambda base: [base[base.numel() // 2 :], base],
    "two halves and a bit": lambda base: [base[: base.numel() // 2 + 1], base[base.numel() // 2 :]],
    "every other": lambda base: [base, base[::2]],
    "two halves": lambda base: [base[: base.numel() // 2], base[base.numel() // 2 :]],
    "evens and odds": lambda base: [base[::2], base[1::2]],
    "one element": lambda base: [base, base[0]],
}
"""Lists of tensors over one piece of memory [even]; in the last but one two nothing comes twice."""
_APART = ("two halves", "evens and odds")


@dataclass(frozen=True)
class Tied:
    """Tensors of a list share memory: each element is reduced once, or all ranks refuse.

    Args:
        how: of ``OVERLAPS``.
        call: what is called with the list.
        ranks: where memory is shared; on the others the tensors are copies.
        numel: of the memory; even.
        dtype: its name.
        op: of a reduction.
        options: of the call.
        is_torn: whether the copies differ, so that no rank can have one result for both.
    """

    how: str
    call: str
    ranks: tuple[int, ...]
    numel: int
    dtype: str = "float32"
    op: Any = "sum"
    options: tuple[tuple[str, Any], ...] = ()
    root: int = 0
    is_torn: bool = False

    def _base(self, rank: int) -> Tensor:
        # multiples of 6, so that means over two and three ranks are whole and exact
        return ((torch.arange(self.numel) % 3 + rank) * 6).to(getattr(torch, self.dtype))

    def _lists(self, rank: int) -> tuple[Tensor, list[Tensor]]:
        base = self._base(rank)
        tensors = OVERLAPS[self.how](base)
        if rank not in self.ranks:
            tensors = [tensor.clone() for tensor in tensors]
            if self.is_torn:
                for i, tensor in enumerate(tensors):
                    tensor += 6 * i
        return base, tensors

    def play(self, rank: int) -> Any:
        base, tensors = self._lists(rank)
        if self.call == "all_reduce_grads":
            params = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
            for param, tensor in zip(params, tensors, strict=True):
                param.grad = tensor
            told = attempt(lambda: self._call(params))
        else:
            told = attempt(lambda: self._call(tensors))
        return told, [_seen(tensor) for tensor in tensors], _seen(base)

    def _call(self, tensors: list[Any]) -> Any:
        options = dict(self.options)
        named = {f"p{i}": tensor for i, tensor in enumerate(tensors)}
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce_params": lambda: unisono.all_reduce_params(tensors, op=self.op, **options),
            "all_reduce_params of a state dict": lambda: unisono.all_reduce_params(
                named, op=self.op, **options
            ),
            "all_reduce_grads": lambda: unisono.all_reduce_grads(tensors, op=self.op, **options),
            "broadcast_params": lambda: unisono.broadcast_params(tensors, self.root),
            "mmengine's all_reduce_params": lambda: mm.all_reduce_params(
                tensors, op=self.op, **options
            ),
        }
        return calls[self.call]()

    def fault(self, found: list[Any]) -> str | None:
        told = [one if isinstance(one, Told) else one[0] for one in found]
        ranks = range(len(found))
        befores = [[_seen(t) for t in self._lists(rank)[1]] for rank in ranks]
        if all(map(_is_refused, told)):
            changed = [rank for rank in ranks if found[rank][1] != befores[rank]]
            if changed:
                return f"refused, but tensors of ranks {changed} are changed: {found!r}"
            if self.how in _APART:
                return f"refused though nothing comes twice: {told!r}"
            return None
        if any(told):
            return f"not refused on every rank: {told!r}"
        if self.is_torn and self.how not in _APART and 0 < len(self.ranks) < len(found):
            return "not refused, though one memory can't have two results"
        slots = list(zip(*befores, strict=True))
        wanted = [self._fold(list(slot)) for slot in slots]
        return _differs([one[1] for one in found], [wanted for _ in ranks])

    def _fold(self, given: list[Any]) -> Any:
        if isinstance(given[0], list):
            return [self._fold(list(column)) for column in zip(*given, strict=True)]
        if self.call == "broadcast_params":
            return given[self.root]
        total = max(given) if self.op == "max" else sum(given)
        return type(total)(total / len(given)) if self.op == "mean" else total


def _seen(tensor: Tensor) -> list[Any]:
    """Give the numbers of a tensor, of a long one the first if all others repeat them."""
    flat = tensor.reshape(-1)
    if flat.numel() <= _LONG:
        return list(flat.tolist())
    rows = flat[: flat.numel() // _PERIOD * _PERIOD].reshape(-1, _PERIOD)
    if torch.equal(rows, rows[:1].expand_as(rows)):
        return [*rows[0].tolist(), *flat[-1:].tolist()]
    return ["ragged", *flat.unique()[:_PERIOD].tolist()]  # type: ignore[no-untyped-call]


_LONG, _PERIOD = 1000, 6


# Means


@dataclass(frozen=True)
class Mean:
    """A mean of numbers or of tensors: near to the true one, or refused on every rank.

    Args:
        call: which call.
        values: by rank, a list of numbers.
        dtype: of the tensor that they are put into; None for the numbers themselves.
        repeats: how often they follow one another in it.
    """

    call: str
    values: tuple[tuple[Any, ...], ...]
    dtype: str | None = None
    repeats: int = 1

    def _value(self, rank: int) -> Any:
        if self.dtype is None:
            return self.values[rank][0]
        row = torch.tensor(self.values[rank], dtype=_by_name(self.dtype))
        return row.repeat(self.repeats)

    def play(self, rank: int) -> Any:
        value = self._value(rank)
        got = attempt(lambda: self._call(value))
        if isinstance(got, Told) or not isinstance(got, Tensor):
            return got, None
        rows = got.reshape(-1, len(self.values[rank]) if got.numel() else 1)
        if self.call == "reduce_scatter":
            rows = got.reshape(1, -1)
        data = rows.contiguous().view(torch.uint8)
        if torch.equal(data, data[:1].expand_as(data)):
            rows = rows[:1]
        # The order of a sum may depend on the place in a tensor, and its last bit on the order.
        return list(dict.fromkeys(map(tuple, rows.tolist()))), str(got.dtype)

    def _call(self, value: Any) -> Any:
        def of_params(reduce: Callable[..., Any]) -> Any:
            reduce([value], op="mean")
            return value

        def of_grads() -> Any:
            param = nn.Parameter(torch.zeros_like(value))
            param.grad = value
            unisono.all_reduce_grads([param])
            return param.grad

        def in_place(reduce: Callable[..., Any]) -> Any:
            reduce(value, "mean")
            return value

        def of_dict() -> Any:
            data = {"a": value}
            mm.all_reduce_dict(data, "mean")
            return data["a"]

        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: unisono.all_reduce(value, "AVERAGE"),
            "all_reduce, async": lambda: unisono.all_reduce(value, "MEAN", async_op=True).wait(),
            "all_reduce in a dict": lambda: unisono.all_reduce({"a": value}, "mean")["a"],
            "all_reduce_": lambda: unisono.all_reduce_(value, "MEAN"),
            "all_reduce_, async": lambda: unisono.all_reduce_(value, "MEAN", async_op=True).wait(),
            "reduce": lambda: unisono.broadcast(unisono.reduce(value, 0, "MEAN")),
            "reduce_scatter": lambda: unisono.reduce_scatter(
                value.repeat(unisono.get_world_size()), "MEAN"
            ),
            "reduce_mean": lambda: unisono.reduce_mean(value),
            "reduce_dict": lambda: unisono.reduce_dict({"a": value})["a"],
            "all_reduce_params": lambda: of_params(unisono.all_reduce_params),
            "all_reduce_grads": of_grads,
            "mmengine's all_reduce": lambda: in_place(mm.all_reduce),
            "mmengine's all_reduce_dict": of_dict,
            "mmengine's all_reduce_params": lambda: of_params(mm.all_reduce_params),
        }
        return calls[self.call]()

    def fault(self, found: list[Any]) -> str | None:
        told = [one if isinstance(one, Told) else one[0] for one in found]
        if all(map(_is_refused, told)):
            return None if self._may_be_refused() else f"refused: {told[0]!r}"
        if any(isinstance(one, Told) for one in told):
            return f"not refused on every rank: {told!r}"
        for rank, (got, dtype) in enumerate(found):
            if self.dtype is not None and dtype != self._dtype_wanted():
                return f"rank {rank} got a {dtype}"
            rows = got if isinstance(got, list) else [(got,)]
            faults = (self._fault_of_row(row, dtype) for row in rows)
            fault = next(filter(None, faults), None if rows else "nothing")
            if fault:
                return f"rank {rank}: {fault}"
        return None

    def _are_bools(self) -> bool:
        return any(isinstance(x, bool) for row in self.values for x in row)

    def _is_whole(self) -> bool:
        return not any(isinstance(x, (float, complex)) for row in self.values for x in row)

    def _may_be_refused(self) -> bool:
        """Tell whether a refusal is right: of integers in a place of theirs, and of bools."""
        if self._are_bools():
            return True
        if self.dtype is None or not self._is_whole():
            return False
        if self.call in ("reduce_mean", "reduce_dict"):
            return False
        sums = [sum(column) for column in zip(*self.values, strict=True)]
        is_even = all(total % len(self.values) == 0 for total in sums)
        return not (self.call == "all_reduce_params" and is_even)

    def _is_cut(self, number: Any, given: tuple[Any, ...]) -> bool:
        """Tell whether it is mmengine's mean of integers, which is cut towards 0."""
        is_theirs = self.call.startswith("mmengine") and self._is_whole()
        return is_theirs and bool(number == math.trunc(Fraction(sum(given), len(given))))

    def _dtype_wanted(self) -> str:
        is_float = self._is_whole() and self.call in ("reduce_mean", "reduce_dict")
        return "torch.float32" if is_float else f"torch.{self.dtype}"

    def _fault_of_row(self, got: tuple[Any, ...], dtype: str | None) -> str | None:
        columns = list(zip(*self.values, strict=True))
        if len(got) != len(columns):
            return f"got {got!r}: some are missing"
        for one, column in zip(got, columns, strict=True):
            parts = [(one, column)]
            if isinstance(one, complex):
                parts = [
                    (one.real, tuple(complex(x).real for x in column)),
                    (one.imag, tuple(complex(x).imag for x in column)),
                ]
            for number, given in parts:
                if not self._is_cut(number, given) and not is_mean(number, given, dtype):
                    return f"{number!r} is not the mean of {given!r}"
        return None


def _by_name(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def is_mean(number: Any, given: Sequence[Any], dtype: str | None) -> bool:
    """Tell whether a number is the mean of those given, but for the rounding of its dtype."""
    special = [x for x in given if isinstance(x, float) and not math.isfinite(x)]
    if special:
        total = sum(special)
        return bool(number == total) or (math.isnan(number) and math.isnan(total))
    if isinstance(number, float) and not math.isfinite(number):
        return False
    true = sum(map(Fraction, given)) / len(given)
    if isinstance(number, int):
        return Fraction(number) == true
    if dtype is None:
        eps, least = Fraction(2) ** -52, Fraction(5e-324)
        if all(isinstance(x, int) for x in given):
            return bool(number == float(true))
    else:
        kind = torch.finfo(_by_name(dtype.removeprefix("torch.")))
        eps, least = Fraction(kind.eps), Fraction(kind.smallest_normal) * Fraction(kind.eps)
    greatest: Any = max(abs(Fraction(x)) for x in given)
    bound = eps * greatest * len(given) + least * len(given)
    return bool(abs(Fraction(number) - true) <= bound)


# Handles


@dataclass(frozen=True)
class Handles:
    """Several operations at once, waited for in any order.

    Args:
        steps: which are started one after the other.
        order: in which they are waited for.
        sync_at: before which of them the rank calls ``sync``; None for never.
        blocking: a step that is called while they are under way; None for none.
    """

    steps: tuple[Step, ...]
    order: tuple[int, ...]
    sync_at: int | None = None
    blocking: Step | None = None

    def play(self, rank: int) -> Any:
        values = [_copy(step.values[rank]) for step in self.steps]
        handles = []
        for i, (step, value) in enumerate(zip(self.steps, values, strict=True)):
            if i == self.sync_at:
                unisono.sync()
            handles.append(call(step, value, async_op=True))
        between = None if self.blocking is None else _checked_call(self.blocking, rank, None)
        found: list[Any] = [None] * len(handles)
        for i in self.order:
            handles[i].is_completed()
            found[i] = attempt(handles[i].wait)
        for step, value in zip(self.steps, values, strict=True):
            if not step.call.endswith("_") and not alike(value, step.values[rank]):
                raise AssertionError(f"{step.call} changed its input to {value!r}")
        return found, between

    def fault(self, found: list[Any]) -> str | None:
        def wanted(rank: int) -> Any:
            between = None if self.blocking is None else expected(self.blocking, rank)
            return [expected(step, rank) for step in self.steps], between

        return _differs(found, [wanted(rank) for rank in range(len(found))])


# Values that raise


class Boom(Exception):
    """What a value of the user's raises."""


def _boom(*_: object) -> Any:
    raise Boom("from within a value")


def _boom_on(rank: int) -> str:
    if unisono.get_rank() == rank:
        raise Boom("while it is read")
    return "read"


class _Reduces:
    def __reduce_ex__(self, protocol: Any) -> Any:
        _boom()


class _Opens:
    def __reduce__(self) -> Any:
        return _boom, ()


class _OpensElsewhere:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return _boom_on, (self.rank,)


class _Key:
    __repr__ = _boom

    def __reduce__(self) -> Any:
        return _boom()


class _Float(float):
    __float__ = _boom
    __reduce_ex__ = _boom


class _Int(int):
    __int__ = _boom
    __index__ = _boom
    __reduce_ex__ = _boom


class _List(list[Any]):
    __iter__ = _boom
    __len__ = _boom


class _Dict(dict[Any, Any]):
    items = _boom
    keys = _boom
    __iter__ = _boom


class _Torch(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _boom()


@dataclass
class _Record:
    x: int
    __reduce_ex__ = _boom

    def __getattribute__(self, name: str) -> Any:
        if name == "x":
            _boom()
        return super().__getattribute__(name)


class _Recurses:
    def __reduce__(self) -> Any:
        return list, ([_Recurses()],)


class _Long(str):
    def encode(self, *_: Any) -> Any:
        _boom()


def _nested_deeply() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


RAISING: dict[str, Callable[[int], Any]] = {
    "reduce": lambda _: _Reduces(),
    "a list of reduce": lambda _: [1, (_Reduces(),)],
    "key": lambda _: {_Key(): 1.0},
    "float": lambda _: _Float(1.0),
    "a dict of float": lambda _: {"a": _Float(1.0)},
    "int": lambda _: _Int(1),
    "list": lambda _: _List([1]),
    "dict": lambda _: _Dict(a=1),
    "torch": lambda _: torch.ones(3).as_subclass(_Torch),
    "record": lambda _: object.__new__(_Record),
    "recursion": lambda _: _Recurses(),
    "depth": lambda _: _nested_deeply(),
    "opens badly": lambda _: _Opens(),
    "opens badly elsewhere": lambda rank: _OpensElsewhere(rank),
}
"""Values that raise while they are written or read, made for the rank that is to have them."""


@dataclass(frozen=True)
class Raising:
    """One rank has a value that raises; all are told, and stay in step.

    Args:
        kind: of ``RAISING``.
        call: which call.
        rank: that has it.
        async_op: whether the call is started and waited for.
    """

    kind: str
    call: str
    rank: int
    async_op: bool = False

    def play(self, rank: int) -> Any:
        plain = torch.ones(1) if self.call == "all_reduce_params" else 1
        value = RAISING[self.kind](rank) if rank == self.rank else plain
        got = attempt(lambda: self._call(value))
        return got if isinstance(got, Told) else "a value"

    def _call(self, value: Any) -> Any:
        how: dict[str, Any] = {"async_op": True} if self.async_op else {}
        size = unisono.get_world_size()
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: unisono.all_gather(value, **how),
            "gather": lambda: unisono.gather(value, self.rank, **how),
            "broadcast": lambda: unisono.broadcast(value, self.rank, **how),
            "scatter": lambda: unisono.scatter([value] * size, self.rank, **how),
            "all_to_all": lambda: unisono.all_to_all([value] * size, **how),
            "all_reduce": lambda: unisono.all_reduce(value, **how),
            "all_reduce of a dict": lambda: unisono.all_reduce({"a": value}, **how),
            "reduce": lambda: unisono.reduce(value, self.rank, **how),
            "reduce_dict": lambda: unisono.reduce_dict({"a": value}),
            "reduce_mean": lambda: unisono.reduce_mean(value),
            "broadcast_params": lambda: unisono.broadcast_params(
                {"a": value, "b": torch.ones(1)}, self.rank
            ),
            "all_reduce_params": lambda: unisono.all_reduce_params([torch.ones(1), value]),
        }
        got = calls[self.call]()
        return got.wait() if self.async_op and self.call in ASYNC_MOVES else got

    def fault(self, found: list[Any]) -> str | None:
        foreign = [one for one in found if isinstance(one, Told) and not one.is_ours]
        if foreign:
            return f"an error of another library's: {foreign[0]!r}"
        if self.kind == "opens badly elsewhere" and not self.call.startswith(("all_red", "red")):
            is_right = [isinstance(one, Told) or one == "a value" for one in found]
            return None if all(is_right) else f"{found!r}"
        if self.call == "all_reduce_params":  # its own argument is told to the rank itself
            found = list(found)
            if isinstance(found[self.rank], Told) and found[self.rank].kind == "ArgumentError":
                found[self.rank] = replace(found[self.rank], kind="PayloadError")
        return _refused_by(found, range(len(found)))


ASYNC_MOVES = (
    *("all_gather", "gather", "broadcast", "scatter", "all_to_all"),
    *("all_reduce", "all_reduce of a dict", "reduce"),
)


# A call too many


@dataclass(frozen=True)
class OneMore:
    """One rank makes one call too many, or another one: all are told, and none has a wrong value.

    Args:
        calls: what all ranks call, each on a line of its own; at least two after the extra one.
        at: before which of them the extra call is.
        extra: what the rank calls there.
        rank: which.
        kind: of values: "number", "tensor", "large", "dict".
        async_op: whether all calls are started first and waited for then.
    """

    calls: tuple[str, ...]
    at: int
    extra: str
    rank: int
    kind: str = "number"
    async_op: bool = False

    def play(self, rank: int) -> Any:
        calls = [(i, name) for i, name in enumerate(self.calls)]
        if rank == self.rank:
            calls.insert(self.at, (len(self.calls), self.extra))
        found: list[Any] = []
        works: list[Callable[[], Any]] = [partial(self._call, rank, i, name) for i, name in calls]
        if self.async_op:
            works = [start().wait for start in works]
        for (i, _), wait in zip(calls, works, strict=True):
            got = attempt(wait)
            found.append((i, got))
            if isinstance(got, Told):
                break
        return found

    def _call(self, rank: int, i: int, name: str) -> Any:
        where: dict[str, Any] = {"unisono": unisono, "value": self._value(rank, i)}
        how = ", async_op=True" if self.async_op else ""
        source = "\n" * i + f"unisono.{name}(value{how})"
        return eval(compile(source, "program.py", "eval"), where)

    def _value(self, rank: int, i: int) -> Any:
        number = float(10 ** (2 * i) * (rank + 1))
        values: dict[str, Callable[[], Any]] = {
            "number": lambda: number,
            "tensor": lambda: torch.full((3,), number, dtype=torch.float64),
            "large": lambda: torch.full((120_000,), number, dtype=torch.float64),
            "dict": lambda: {"a": number},
        }
        return values[self.kind]()

    def _is_right(self, i: int, got: Any, size: int) -> bool:
        given = [self._value(rank, i) for rank in range(size)]
        if i == len(self.calls):
            return False
        if self.calls[i].startswith("all_reduce"):
            return alike(got, _added(given))
        if self.calls[i] == "all_gather":
            return alike(got, torch.cat(given) if isinstance(given[0], Tensor) else given)
        return alike(got, given[0])

    def fault(self, found: list[Any]) -> str | None:
        is_same = self.extra == self.calls[self.at]
        for rank, outcomes in enumerate(found):
            if isinstance(outcomes, Told):
                return f"rank {rank} raised outside of its calls: {outcomes!r}"
            wrong = [
                (i, got)
                for i, got in outcomes
                if not isinstance(got, Told) and not self._is_right(i, got, len(found))
            ]
            # What came together is noticed one call later, as the docs say of calls of one kind.
            if len(wrong) > is_same:
                return f"rank {rank} got wrong values: {str(wrong)[:400]}"
            last = outcomes[-1][1] if outcomes else None
            if not isinstance(last, Told):
                return f"rank {rank} wasn't told: {str(outcomes)[:400]}"
            if not last.is_ours or last.kind not in ENDS:
                return f"rank {rank} got {last!r}"
        return None


ENDS = ("CollectiveMismatchError", "CollectiveTimeoutError", "PeerFailedError")


def _added(given: list[Any]) -> Any:
    if isinstance(given[0], dict):
        return {"a": sum(each["a"] for each in given)}
    total = given[0]
    for other in given[1:]:
        total = total + other
    return total
