"""Collectives of tensors between the ranks of one host, through an arena.

A reduction adds in the order of ranks. In a long tensor each element is summed only by the rank
that owns its slice; a short tensor is summed whole by every rank. So all ranks get the same bits,
on every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from unisono.errors import CollectiveError, ContextError, UnisonoError
from unisono.host import memory
from unisono.host.arena import Arena, Check
from unisono.host.shared import MIN_BYTES, SharedTensors
from unisono.model.contract import COMMON_DTYPES
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.payload.tensors import as_bytes_tensor, from_bytes
from unisono.topology import Group

DTYPES: frozenset[torch.dtype] = COMMON_DTYPES | {torch.int16, torch.complex64, torch.complex128}
"""Dtypes that at least some operations reduce without conversion."""
_COPIED_BYTES = 1 << 16
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_SAME_MODE = nullcontext()
Copy = Callable[[int, int], None]
"""Copies a block, by its index, to or from the slots of a parity (even or odd interval)."""


@lru_cache
def folds(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether `fold_tensors` supports an operation on a dtype."""
    if dtype not in DTYPES:
        return False
    if op is ReduceOp.AVERAGE:
        # A mean multiplies by 1/n, which rounds subnormal values; in float16 those are below 6e-5.
        return dtype.is_floating_point and dtype is not torch.float16
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_complex
    return not (op.is_bitwise and (dtype.is_floating_point or dtype.is_complex))


class Monitor(Protocol):
    """An observer of operations, such as the control plane."""

    def begin(self, group: Group | None, call: str) -> Check:
        """Record an operation that begins; return what the arena calls while it waits."""

    def interrupt(self, how: str) -> None:
        """Report to the other ranks that this one was interrupted in an operation."""


class Turn:
    """A lock that raises if its holder would wait for itself."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # which knows its owner at any moment
        self.call: str = ""
        """The holder's call."""

    def of(self, call: str) -> Any:
        """Return the lock for a ``with`` block; raise if this thread holds it."""
        if self._lock._is_owned():
            raise CollectiveError(
                f"{call} was called within {self.call}: signal handlers and finalizers must not "
                "call collectives"
            )
        return self._lock

    def is_free(self) -> bool:
        """Return whether no thread holds it, this one included."""
        # An RLock lets its owner in again, so `acquire` alone would succeed.
        is_free = not self._lock._is_owned() and self._lock.acquire(blocking=False)
        if is_free:
            self._lock.release()
        return is_free


class Turns:
    """The operations of one group, run in turn."""

    def __init__(self, monitor: Monitor, group: Group | None = None) -> None:
        self._monitor, self._group = monitor, group
        self._turn = Turn()  # threads of one group must agree on their order anyway
        self._ended: UnisonoError | None = None  # raised by all later calls, once set

    def belong_to(self, monitor: Any) -> None:
        """Use the monitor of the context that takes over this memory."""
        self._monitor = monitor

    def close(self) -> None:
        """Release the memory; later calls raise."""
        self._ended = ContextError(
            "the context that used this shared memory has ended: finalize() was called, or its "
            "process group was destroyed"
        )

    def _run(self, call: str, work: Callable[[Check], None], target: Tensor | None = None) -> None:
        """Run an operation that overwrites `target`; once one was interrupted, later ones raise."""
        # A tensor made in inference mode can be written to only in that mode.
        is_inference = target is not None and target.is_inference()
        with self._turn.of(call), torch.inference_mode() if is_inference else _SAME_MODE:
            self._turn.call = call
            if self._ended is not None:
                raise type(self._ended)(f"{call}: {self._ended}")
            try:
                work(self._monitor.begin(self._group, call))
            except BaseException as error:  # Ctrl-C too: the ranks' barriers no longer match
                self._ended = CollectiveError(
                    "an earlier call failed or was interrupted while it used the ranks' shared "
                    "memory, so the ranks are out of step: end the job, or finalize() and "
                    "initialize again"
                )
                # Errors of ours come from the monitor's check, which has reported them.
                if not isinstance(error, UnisonoError):
                    self._monitor.interrupt(f"{type(error).__name__} interrupted {call}")
                raise


class HostCollectives(Turns):
    """The collectives of a model, for the ranks of one group that share a host."""

    # They accept contiguous CPU tensors without gradient. They overwrite a tensor only if they
    # return it; other results are new tensors. Those that only move data accept any dtype. All
    # raise the errors of `monitor`. `group` is there only for the models' interface and is ignored:
    # this memory belongs to one group.

    dtypes: frozenset[torch.dtype] = DTYPES
    large_bytes: int = 1 << 16
    """Tensors from this size on are reduced faster by themselves than packed."""

    def __init__(
        self, arena: Arena, ranks: Sequence[int], monitor: Monitor, group: Group | None = None
    ) -> None:
        super().__init__(monitor, group)
        self.shared: SharedTensors = SharedTensors(arena)
        """The tensors that lie in memory shared by all ranks."""
        self.size: int = arena.size
        self.position: int = arena.position
        self.block_bytes: int = arena.layout.block_bytes
        """Number of bytes up to which tensors are packed together."""
        self._arena = arena
        self._ranks = ranks  # global, by position

    def close(self) -> None:
        """Release the memory; later calls raise."""
        super().close()
        self.shared.close()
        if self._turn.is_free():  # else a thread is still in it
            self._arena.close()

    def _on_shared(
        self,
        call: str,
        tensor: Tensor,
        run: Callable[[list[Tensor]], None],
        *,
        writes: bool = False,
    ) -> bool:
        """If all passed the same shared tensor, `run` on all copies; return whether they did."""
        if tensor.numel() * tensor.itemsize < MIN_BYTES:
            return False
        parts: list[Tensor] | None = None

        def work(check: Check) -> None:
            nonlocal parts
            try:
                parts = self.shared.agree(tensor.view(-1), check)
                if parts is not None:
                    run(parts)
                    self._arena.barrier(check)  # until no rank needs this one's tensor any more
            finally:  # after Ctrl-C too: others may have written to `tensor`, unseen by autograd
                if writes and not tensor.is_inference():
                    increment_version(tensor)

        self._run(call, work, tensor)
        return parts is not None

    # Reductions

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        group: Group | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Reduce [*shape] of all ranks to one [*shape] on every rank. Collective over the group."""
        result = tensor if into is None else into
        # `shared.count` is the same on all ranks: they all compare their tensors, or none does.
        flat, call, shared = result.view(-1), f"all_reduce {op.name}", self.shared
        # Only a shared result takes this path; a shared tensor that is only an input is copied
        # through slots.
        work = partial(shared.all_reduce, op=op)
        if shared.count and self._on_shared(call, flat, work, writes=True):
            return result
        self._run(call, partial(self._reduce_blocks, tensor.view(-1), flat, op), flat)
        return result

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp, group: Group | None = None
    ) -> Tensor | None:
        """Reduce [*shape] to global rank `dst`, in place; the others get None."""
        # Collective over the group.
        flat, is_dst = tensor.view(-1), self._ranks[self._arena.position] == dst
        target = flat if is_dst else None
        work = partial(self._reduce_blocks, flat, target, op)
        self._run(f"reduce {op.name} to {dst}", work, target)
        return tensor if is_dst else None

    def _reduce_blocks(
        self, source: Tensor, target: Tensor | None, op: ReduceOp, check: Check
    ) -> None:
        """Reduce [n] of all ranks into `target` on the ranks that have one."""
        arena, count = self._arena, source.numel()
        # Each rank reduces the whole of a short tensor, which saves the second barrier.
        if count * source.itemsize <= arena.layout.whole_bytes:
            inputs = arena.given(source.dtype, count)[arena.interval & 1]  # the slots to write now
            inputs[arena.position].copy_(source)
            arena.barrier(check)
            if target is not None:
                fold_tensors(op, inputs, target)
            return
        room = arena.layout.block_bytes // source.itemsize
        for begin in range(0, count, room):
            result = None if target is None else target[begin : begin + room]
            self._reduce_block(source[begin : begin + room], result, op, check)

    def _reduce_block(
        self, source: Tensor, target: Tensor | None, op: ReduceOp, check: Check
    ) -> None:
        """Reduce one block, a slice in each rank; then copy the others' slices into `target`."""
        arena = self._arena
        both = arena.slices(source.dtype, source.numel())
        now = both[arena.interval & 1]
        before, own, after = source.split_with_sizes(now.sizes)
        now.before.copy_(before)
        now.after.copy_(after)
        arena.barrier(check)
        parts = list(now.parts)
        parts[arena.position] = own  # not copied, as no other rank needs it
        # The result goes into slots of the new interval: others still read inputs of the last one.
        views = both[arena.interval & 1]
        fold_tensors(op, parts, views.reduced)
        if target is not None:
            target.split_with_sizes(now.sizes)[1].copy_(views.reduced)
        arena.barrier(check)
        if target is not None:
            for where, result in views.results:
                target[where].copy_(result)

    def all_reduce_packed(self, tensors: Sequence[Tensor], op: ReduceOp) -> None:
        """Reduce several short tensors in place, in one step. Collective over the group."""
        total = torch.cat(list(tensors))
        self.all_reduce(total, op)
        parts = total.split_with_sizes([tensor.numel() for tensor in tensors])
        # Tensors made in inference mode can be written to only in that mode.
        is_inference = any(map(Tensor.is_inference, tensors))
        with torch.inference_mode() if is_inference else _SAME_MODE:
            torch._foreach_copy_(list(tensors), list(parts))

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        """Reduce [n, *shape] of all ranks; each gets its row, [*shape]."""
        # Collective over the group.
        arena, shared, call = self._arena, self.shared, f"reduce_scatter {op.name}"
        target = memory.new(rows, rows.shape[1:])
        work = partial(shared.reduce_scatter, op=op, target=target.view(-1))
        if shared.count and self._on_shared(call, rows, work):
            return target
        # A slot has room for two blocks, and is divided into one cell for each rank.
        room = 2 * arena.layout.block_bytes // arena.size // rows.itemsize
        cells = arena.cells(rows.dtype, room)
        sources = [_blocks(row, room) for row in rows.view(arena.size, -1)]
        results, me = _blocks(target.view(-1), room), arena.position

        def take(block: int, parity: int) -> None:
            count = results[block].numel()
            parts = [cells[parity][p][me][:count] for p in range(arena.size)]
            parts[me] = sources[me][block]
            fold_tensors(op, parts, results[block])

        self._move(call, len(results), self._give_cells(sources, cells), take)
        return target

    # A reduction in two halves, between which the slices may be reduced further

    def reduce_slice(self, flat: Tensor, op: ReduceOp) -> Tensor:
        """Reduce [n] of all ranks, n > 0; each gets one slice of the result, in place."""
        # Collective over the group.
        arena, slices = self._arena, self._slices(flat)
        me, room = arena.position, 2 * arena.layout.block_bytes // arena.size // flat.itemsize
        cells = arena.cells(flat.dtype, room)

        def give(block: int, parity: int) -> None:
            for p in arena.others:
                part = slices[p][block * room : (block + 1) * room]
                cells[parity][me][p][: part.numel()].copy_(part)

        def take(block: int, parity: int) -> None:
            own = slices[me][block * room : (block + 1) * room]
            parts = [cells[parity][p][me][: own.numel()] for p in range(arena.size)]
            total, parts[me] = parts[me], own  # the result's place: a cell that no other rank reads
            fold_tensors(op, parts, total)
            own.copy_(total)

        blocks = -(-slices[0].numel() // room)  # the first slice is the longest
        self._move(f"all_reduce {op.name}", blocks, give, take, flat)
        return slices[me]

    def gather_slices(self, flat: Tensor) -> None:
        """Fill [n] with the slice of every rank, in place. Collective over the group."""
        rows = [_bytes_of(each) for each in self._slices(flat)]
        self._gather("all_reduce", rows[self._arena.position], rows)

    def _slices(self, flat: Tensor) -> list[Tensor]:
        size = self._arena.size
        width = -(-flat.numel() // size)
        return [flat[p * width : (p + 1) * width] for p in range(size)]

    # Movement, of tensors viewed as bytes

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        """Gather [*shape] to [n, *shape] in the order of ranks. Collective over the group."""
        arena = self._arena
        rows = memory.new(tensor, (arena.size, *tensor.shape))
        source, into = _bytes_of(tensor), list(_bytes_of(rows).view(arena.size, -1))
        work = partial(self.shared.all_gather, rows=into)
        if not (self.shared.count and self._on_shared("all_gather", source, work)):
            self._gather("all_gather", source, into)
        rows[arena.position].copy_(tensor)  # the calls above fill only the other rows
        return rows

    def exchange(self, blob: bytes, sizes: Sequence[int]) -> list[Any]:
        """Return the bytes of every rank. Collective over the group."""
        me = self._arena.position
        blobs: list[Any] = [b"" if p == me else bytearray(size) for p, size in enumerate(sizes)]
        # `frombuffer` rejects an empty buffer.
        rows = [
            torch.frombuffer(buffer, dtype=torch.uint8) if buffer else _NOTHING for buffer in blobs
        ]
        # This row isn't filled, but its length counts in `_gather`.
        rows[me] = source = from_bytes(blob, torch.uint8, (len(blob),))
        self._gather("exchange", source, rows)
        blobs[me] = blob
        # A view saves the copy of a long blob; a short one is copied, as plain bytes.
        return [memoryview(b) if len(b) > _COPIED_BYTES else bytes(b) for b in blobs]

    def _gather(self, call: str, source: Tensor, rows: Sequence[Tensor]) -> None:
        """Receive each other rank's `source` into its row here; rows may differ in length."""
        arena, room = self._arena, 2 * self._arena.layout.block_bytes

        def give(block: int, parity: int) -> None:
            part = source[block * room : (block + 1) * room]
            arena.slots[parity][arena.position][: part.numel()].copy_(part)

        def take(block: int, parity: int) -> None:
            for p in arena.others:
                part = rows[p][block * room : (block + 1) * room]
                part.copy_(arena.slots[parity][p][: part.numel()])

        # All ranks need equally many barriers, so the longest row counts; shorter ones end empty.
        self._move(call, -(-max(row.numel() for row in rows) // room), give, take)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        """Overwrite [*shape] of every rank with that of global rank `src`."""
        # Collective over the group.
        arena, root = self._arena, self._ranks.index(src)
        call, shared = f"broadcast from {src}", self.shared
        work, writes = partial(shared.broadcast, root=root), arena.position != root
        if shared.count and self._on_shared(call, tensor, work, writes=writes):
            return tensor
        parts = _blocks(_bytes_of(tensor), 2 * arena.layout.block_bytes)

        def give(block: int, parity: int) -> None:
            if arena.position == root:
                part = parts[block]
                arena.slots[parity][root][: part.numel()].copy_(part)

        def take(block: int, parity: int) -> None:
            if arena.position != root:
                part = parts[block]
                part.copy_(arena.slots[parity][root][: part.numel()])

        self._move(call, len(parts), give, take, tensor)
        return tensor

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        """Send row i of [n, *shape] to the i-th rank; return the rows received."""
        # Collective over the group.
        arena, into = self._arena, memory.new(rows, rows.shape)
        me, room = arena.position, 2 * arena.layout.block_bytes // arena.size
        cells = arena.cells(torch.uint8, room)
        sources, results = self._row_blocks(rows, room), self._row_blocks(into, room)

        def take(block: int, parity: int) -> None:
            for p in arena.others:
                part = results[p][block]
                part.copy_(cells[parity][p][me][: part.numel()])

        into[me].copy_(rows[me])
        self._move("all_to_all", len(results[0]), self._give_cells(sources, cells), take)
        return into

    def scatter(
        self, rows: Tensor | None, into: Tensor, src: int, group: Group | None = None
    ) -> Tensor:
        """Send each rank its row of `rows`, [n, *shape], which only `src` has."""
        # Collective over the group.
        arena, root = self._arena, self._ranks.index(src)
        me, room = arena.position, 2 * arena.layout.block_bytes // arena.size
        cells = arena.cells(torch.uint8, room)
        sources = [] if rows is None else self._row_blocks(rows, room)
        results = _blocks(_bytes_of(into), room)

        def take(block: int, parity: int) -> None:
            part = results[block]
            source = sources[me][block] if me == root else cells[parity][root][me][: part.numel()]
            part.copy_(source)

        give = self._give_cells(sources, cells) if me == root else lambda block, parity: None
        self._move(f"scatter from {src}", len(results), give, take, into)
        return into

    def _give_cells(
        self, sources: Sequence[Sequence[Tensor]], cells: Sequence[Sequence[Sequence[Tensor]]]
    ) -> Copy:
        """Return a function that copies each receiver's block to its cell of this rank's slot."""
        others, me = self._arena.others, self._arena.position

        def give(block: int, parity: int) -> None:
            for p in others:
                part = sources[p][block]
                cells[parity][me][p][: part.numel()].copy_(part)

        return give

    def _row_blocks(self, rows: Tensor, room: int) -> list[Sequence[Tensor]]:
        """Return each row of [n, *shape] as blocks of bytes."""
        return [_blocks(row, room) for row in _bytes_of(rows).view(self._arena.size, -1)]

    def _move(
        self, call: str, blocks: int, give: Copy, take: Copy, target: Tensor | None = None
    ) -> None:
        """Run `give` for each block, and `take` one interval later."""
        arena = self._arena

        def work(check: Check) -> None:
            for block in range(blocks):
                give(block, arena.interval & 1)
                if block:
                    # The others wrote that block before the last barrier.
                    take(block - 1, 1 - (arena.interval & 1))
                arena.barrier(check)
            # Without blocks all tensors are empty, and so is the last part of each.
            take(blocks - 1, 1 - (arena.interval & 1))

        self._run(call, work, target)


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as [nbytes] of uint8."""
    # A tensor of 0 or 1 elements counts as contiguous whatever its strides are; viewing
    # it as uint8 keeps them, `view(-1)` doesn't.
    return as_bytes_tensor(tensor).view(-1)


def _blocks(flat: Tensor, room: int) -> Sequence[Tensor]:
    """Split [n] into one or more blocks of at most `room` elements."""
    return (flat,) if flat.numel() <= room else torch.split(flat, room)  # slow, even for one block
