"""Memory for tensors that all ranks of one host map, and the barrier between its intervals.

Time is cut into intervals by barriers. In interval `n` a rank writes only slots of parity ``n & 1``
and reads only slots of parity ``(n - 1) & 1``, so no slot is overwritten while it is read, and no
barrier is needed at the end of a call.

The memory: a header with one line of 64 bytes for each rank and one for all, then for both parities
one slot for each rank. A slot has two halves: the rank's input, and its reduced slice for the
others. The words of a rank's line:

    0  stamp   number of barriers that the rank has entered; only grows, written last
    1  nap     a futex: 1 while the rank sleeps in a barrier
    2  token   a word that the ranks compare

and of the last line: ranks, bytes of a block, longest tensor that isn't cut in slices, whether
ranks share cores.

Data written before a stamp is visible before it: x86 guarantees that stores become visible in
program order, and that loads aren't reordered with loads (Intel's manual, volume 3, 9.2). It
doesn't guarantee that a store precedes a later load of another word, so a nap may be missed: a
rank that falls asleep sleeps 200 us the first time, and looks again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.host import memory

_LINE_BYTES = 64
_WORD_BYTES = 8
_LINE_WORDS = _LINE_BYTES // _WORD_BYTES
_NAP, _TOKEN = 1, 2
_PAGE_BYTES = 4096
_MIB = 1 << 20
_SPIN_S = 300e-6  # a barrier of ranks that are all awake takes a tenth of that
_LOOKS = 20  # before the first system call of a wait
_FIRST_NAP_NS = 200_000
_NAP_NS = 20_000_000  # between two checks for dead ranks
_MAX_VIEWS = 256
_SYS_FUTEX = 202  # on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the private ones: the memory is shared
T = TypeVar("T")
Check = Callable[[int], None]
"""Called with the position of a rank that hasn't arrived; it may raise to end the wait."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of an arena, and of the longest tensor that isn't cut in slices."""

    size: int
    block_bytes: int
    whole_bytes: int
    is_crowded: bool

    @property
    def head_bytes(self) -> int:
        """Bytes before the first slot."""
        used = (self.size + 1) * _LINE_BYTES
        return -(-used // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole arena; pages that no tensor has reached take no memory."""
        return self.head_bytes + 4 * self.size * self.block_bytes


def layout(size: int, cores: int, max_bytes: int | None = None) -> Layout | None:
    """Return the layout for `size` ranks; None if `max_bytes` leaves no room for one."""
    # If each rank has a core, blocks that stay in its cache are fastest; else every barrier costs a
    # turn of the scheduler, so blocks are larger. Measured on 2 cores with 2 and 4 ranks.
    is_crowded = size > cores
    block, whole = (2 * _MIB, _MIB // 2) if is_crowded else (_MIB, _MIB // 8)
    # Each rank has two slots, of two blocks each. A block must hold a tensor that isn't cut.
    while max_bytes is not None and 4 * size * block > max_bytes:
        block //= 2
        if block < whole:
            return None
    return Layout(size, block, whole, is_crowded)


def make(size: int, cores: int, max_bytes: int) -> tuple[int, Arena] | None:
    """Create an arena for `size` ranks, of which this is the first; return its memory, too."""
    plan = layout(size, cores, max_bytes)
    made = None if plan is None else memory.make(plan.size_bytes)
    if plan is None or made is None:
        return None
    fd, shared = made
    words = memoryview(shared)[: plan.head_bytes].cast("Q")
    for index, value in enumerate(astuple(plan), size * _LINE_WORDS):  # the last line, for `read`
        words[index] = int(value)
    return fd, Arena(shared, 0, plan)


def read(shared: mmap.mmap, size: int, position: int) -> Arena:
    """Return this rank's end of an arena that another rank has created."""
    # At least the header, as large as `Layout.head_bytes`: the layout itself is read from it.
    if len(shared) < _PAGE_BYTES * (1 + size // (_PAGE_BYTES // _LINE_BYTES)):
        raise OSError("the memory for tensors that was sent is too small")
    words = memoryview(shared)[: (size + 1) * _LINE_BYTES].cast("Q")[size * _LINE_WORDS :]
    plan = Layout(words[0], words[1], words[2], bool(words[3]))
    if plan.size != size or plan.size_bytes != len(shared):
        raise OSError("the memory for tensors that was sent isn't laid out for these ranks")
    return Arena(shared, position, plan)


@dataclass(frozen=True, slots=True)
class Slices:
    """Views for reducing one block in slices, of which each rank owns one."""

    # `sizes`: elements before this rank's slice, in it, after it. `parts`: the slice in all inputs.
    # `reduced`: its result. `results`: the other ranks' slices, each with its place in the block.
    sizes: list[int]
    before: Tensor
    after: Tensor
    parts: list[Tensor]
    reduced: Tensor
    results: list[tuple[slice, Tensor]]


class Arena:
    """One rank's end of an arena."""

    def __init__(self, shared: mmap.mmap, position: int, plan: Layout) -> None:
        self.layout: Layout = plan
        self.position: int = position
        self.size: int = plan.size
        self.interval: int = 0
        """Number of barriers that this rank has passed; its last bit is the parity of the slots
        that may be written now, those of the other parity may be read."""
        size = plan.size
        self.others: list[int] = [p for p in range(size) if p != position]
        # For futex calls, which take bare addresses: valid while `_words` and `slots` keep `shared`
        # mapped, so until `close`.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        # The lines of all ranks, in words: this rank's begins at `_mine`, the others' at `_lines`.
        self._words = memoryview(shared)[: plan.head_bytes].cast("Q")
        self._mine = position * _LINE_WORDS
        self._lines = [p * _LINE_WORDS for p in self.others]
        self._naps = [line + _NAP for line in self._lines]
        self.slots: list[list[Tensor]] = [
            [self._slot(shared, parity, p) for p in range(size)] for parity in (0, 1)
        ]
        """The slot of each rank as bytes, by parity and position."""
        # What `given`, `slices` and `cells` return, by dtype, count and kind. Entries can't become
        # stale, as slots never move; `_cache_views` only limits their number.
        self._views: dict[object, object] = {}
        self._futex = ctypes.CDLL(None).syscall
        # Filled by each `_sleep`: only one thread of a rank is in a barrier at a time.
        self._nap_time = _Timespec(0, _NAP_NS)

    # Tensors created in inference mode can't be written to outside of it.
    @torch.inference_mode(False)
    def _slot(self, shared: mmap.mmap, parity: int, position: int) -> Tensor:
        slot_bytes = 2 * self.layout.block_bytes
        offset = self.layout.head_bytes + (parity * self.size + position) * slot_bytes
        return torch.frombuffer(shared, dtype=torch.uint8, count=slot_bytes, offset=offset)

    # Barriers

    def barrier(self, check: Check) -> None:
        """Wait for all ranks, and enter the next interval. Collective over the arena."""
        words = self._words
        self.interval = interval = self.interval + 1
        words[self._mine] = interval  # the stamp: what this rank wrote before is visible with it
        for nap in self._naps:
            if words[nap]:
                words[nap] = 0  # so that no other rank makes the system call, too
                self._wake(nap)
        for line in self._lines:
            if words[line] < interval:
                self._wait(line, interval, check)

    def agree(self, token: int, check: Check) -> bool:
        """Return whether all ranks passed the same token, other than 0."""
        # Collective over the arena. At least one barrier must separate two calls, or a fast rank's
        # next token would replace the one that others still have to read.
        words = self._words
        words[self._mine + _TOKEN] = token
        self.barrier(check)
        return token != 0 and all(words[line + _TOKEN] == token for line in self._lines)

    def _wait(self, line: int, interval: int, check: Check) -> None:
        """Wait until the rank of a line has entered an interval: spin first, then sleep."""
        words, give_way = self._words, os.sched_yield
        for _ in range(_LOOKS):
            if words[line] >= interval:
                return
        end = time.monotonic() + _SPIN_S
        while time.monotonic() < end:
            give_way()  # ranks may share a core, which the awaited rank needs
            if words[line] >= interval:
                return
        self._sleep(line, interval, check)

    def _sleep(self, line: int, interval: int, check: Check) -> None:
        """Sleep until the rank of a line has entered an interval, and look for dead ranks."""
        words, nap, duration = self._words, self._mine + _NAP, self._nap_time
        duration.nanoseconds = _FIRST_NAP_NS
        while words[line] < interval:
            # Look once more: the awaited rank may have arrived before it could see the nap.
            words[nap] = 1
            if words[line] < interval:
                # It returns at once unless the nap is still 1; the loop looks again in any case.
                where = ctypes.c_void_p(self._address + nap * _WORD_BYTES)
                self._futex(_SYS_FUTEX, where, _FUTEX_WAIT, 1, ctypes.byref(duration), None, 0)
            words[nap] = 0
            # Not after the first, short nap: the check is slow.
            if words[line] < interval and duration.nanoseconds == _NAP_NS:
                check(line // _LINE_WORDS)
            duration.nanoseconds = _NAP_NS

    def _wake(self, nap: int) -> None:
        where = ctypes.c_void_p(self._address + nap * _WORD_BYTES)
        self._futex(_SYS_FUTEX, where, _FUTEX_WAKE, 1, None, None, 0)

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self.slots.clear()
        self._views.clear()

    # Views of the slots, cached by shape

    def given(self, dtype: torch.dtype, count: int) -> list[list[Tensor]]:
        """Return `count` elements of each rank's input, by parity and position."""
        views: Any = self._views.get((dtype, count))
        return views or self._cache_views(
            (dtype, count),
            lambda: [[given[:count] for given, _ in slots] for slots in self._halves(dtype)],
        )

    def slices(self, dtype: torch.dtype, count: int) -> list[Slices]:
        """Return the views for reducing a block of `count` elements, by parity."""
        views: Any = self._views.get((dtype, count, "slices"))
        return views or self._cache_views(
            (dtype, count, "slices"),
            lambda: [self._slices_of_block(slots, count) for slots in self._halves(dtype)],
        )

    def cells(self, dtype: torch.dtype, room: int) -> list[list[tuple[Tensor, ...]]]:
        """Split each slot into one cell of `room` elements for each position."""
        views: Any = self._views.get((dtype, room, "cells"))
        used = self.size * room * dtype.itemsize
        return views or self._cache_views(
            (dtype, room, "cells"),
            lambda: [
                [torch.split(slot[:used].view(dtype), room) for slot in slots]
                for slots in self.slots
            ],
        )

    def _halves(self, dtype: torch.dtype) -> list[list[tuple[Tensor, Tensor]]]:
        """Return both halves of each slot, by parity and position, as [block] of `dtype`."""
        end = self.layout.block_bytes
        return [
            [(slot[:end].view(dtype), slot[end:].view(dtype)) for slot in slots]
            for slots in self.slots
        ]

    @torch.inference_mode(False)
    def _cache_views(self, key: object, make: Callable[[], T]) -> T:
        """Build views and cache them for the next call, which may be in another mode."""
        # Shapes may be ever new. A view that is dropped is built again when it is needed.
        if len(self._views) > _MAX_VIEWS:
            self._views.clear()
        self._views[key] = views = make()
        return views

    def _slices_of_block(self, slots: list[tuple[Tensor, Tensor]], count: int) -> Slices:
        """Return the views for a block of `count` elements in slots of one parity."""
        width = -(-count // self.size)
        ends = [(min(p * width, count), min((p + 1) * width, count)) for p in range(self.size)]
        begin, end = ends[self.position]
        given, reduced = slots[self.position]
        return Slices(
            sizes=[begin, end - begin, count - end],
            before=given[:begin],
            after=given[end:count],
            parts=[other[begin:end] for other, _ in slots],
            reduced=reduced[: end - begin],
            results=[
                (slice(*ends[p]), slots[p][1][: ends[p][1] - ends[p][0]])
                for p in self.others
                if ends[p][1] > ends[p][0]  # in a short block the last ranks have no slice
            ],
        )
