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
    3  core    1 + the core that the rank was on when it looked last, 0 if it never has

and of the last line: ranks, bytes of a block, longest tensor that isn't cut in slices, whether
ranks share cores.

Data written before a stamp is visible before it: x86 guarantees that stores become visible in
program order, and that loads aren't reordered with loads (Intel's manual, volume 3, 9.2). It
doesn't guarantee that a store precedes a later load of another word, so a nap may be missed: a
rank that falls asleep sleeps 200 us the first time, and looks again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from unisono.host import memory

_LINE_BYTES = 64
_WORD_BYTES = 8
_LINE_WORDS = _LINE_BYTES // _WORD_BYTES
_NAP, _TOKEN, _CORE = 1, 2, 3
_PAGE_BYTES = 4096
_MIB = 1 << 20
_SPIN_S, _CROWDED_SPIN_S = 300e-6, 2e-3  # ten times as long as ranks that are awake need
_LOOKS, _TURNS = 50, 3  # before a rank that waits gives way; from one look at cores to the next
_CROWDED_LOOKS, _CROWDED_TURNS = 0, 64  # with more ranks than cores, each of which gives way often
_FIRST_NAP_NS = 200_000
_NAP_NS = 20_000_000  # between two checks for dead ranks
_MAX_VIEWS = 256
_SYS_FUTEX = 202  # on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the private ones: the memory is shared
Slots = list[list[Tensor]]
"""Bytes of each rank's slot, by parity and position."""
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
        self.slots: Slots = [
            [self._slot(shared, parity, p) for p in range(size)] for parity in (0, 1)
        ]
        # They don't keep the arena, so that its memory is freed with its last reference.
        self.given: Callable[[torch.dtype, int], list[list[Tensor]]]
        self.given = lru_cache(_MAX_VIEWS)(partial(_given, self.slots))
        """Returns the first elements of each rank's input, by parity and position."""
        self.slices: Callable[[torch.dtype, int], list[Slices]]
        self.slices = lru_cache(_MAX_VIEWS)(partial(_slices, self.slots, position))
        """Returns the views for reducing a block of so many elements, by parity."""
        self.cells: Callable[[torch.dtype, int], list[list[tuple[Tensor, ...]]]]
        self.cells = lru_cache(_MAX_VIEWS)(partial(_cells, self.slots))
        """Returns each slot split into one cell of so many elements for each position."""
        libc = ctypes.CDLL(None)
        self._futex, self._core = libc.syscall, libc.sched_getcpu
        self.looks: int = _CROWDED_LOOKS if plan.is_crowded else _LOOKS
        """How often a rank that waits looks before it gives way."""
        self._turns, self._turn = _CROWDED_TURNS if plan.is_crowded else _TURNS, 0
        # Filled by each `_sleep`: only one thread of a rank is in a barrier at a time.
        self._nap_time = _Timespec(0, _NAP_NS)

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
        words = self._words
        for _ in range(self.looks):
            if words[line] >= interval:
                return
        end = time.monotonic() + (_CROWDED_SPIN_S if self.layout.is_crowded else _SPIN_S)
        while time.monotonic() < end:
            self.give_way()
            if words[line] >= interval:
                return
        self._sleep(line, interval, check)

    def give_way(self) -> None:
        """Yield this core to other threads; leave it if too many of these ranks are on it."""
        # Threads that wake each other, or yield to each other every few microseconds, can stay on
        # one core for seconds beside an idle one: the scheduler doesn't move hot threads.
        self._turn += 1
        if self._turns and self._turn % self._turns == 0:  # not once it is closed
            words = self._words
            words[self._mine + _CORE] = here = 1 + self._core()
            cores = [words[p * _LINE_WORDS + _CORE] for p in range(self.size)]
            if cores.count(here) > 1 and here not in cores[self.position + 1 :]:  # only the last
                self._leave(here, cores)
        os.sched_yield()

    def _leave(self, here: int, cores: list[int]) -> None:
        """Move to a core with at least two ranks less, if there is one."""
        allowed = os.sched_getaffinity(0)  # of this thread
        better = {core for core in allowed if cores.count(1 + core) < cores.count(here) - 1}
        if better:
            for cores_now in (better, allowed):
                with contextlib.suppress(OSError):  # a sandbox may forbid it
                    os.sched_setaffinity(0, cores_now)

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
        self._turns = 0
        for views in ("given", "slices", "cells"):  # with the tensors that they keep
            self.__dict__.pop(views, None)


# Views of the slots. Tensors created in inference mode can't be written to outside of it.


@torch.inference_mode(False)
def _given(slots: Slots, dtype: torch.dtype, count: int) -> list[list[Tensor]]:
    return [[slot.view(2, -1).view(dtype)[0, :count] for slot in each] for each in slots]


@torch.inference_mode(False)
def _cells(slots: Slots, dtype: torch.dtype, room: int) -> list[list[tuple[Tensor, ...]]]:
    used = len(slots[0]) * room * dtype.itemsize
    return [[torch.split(slot[:used].view(dtype), room) for slot in each] for each in slots]


@torch.inference_mode(False)
def _slices(slots: Slots, position: int, dtype: torch.dtype, count: int) -> list[Slices]:
    size = len(slots[0])
    width = -(-count // size)
    ends = [(min(p * width, count), min((p + 1) * width, count)) for p in range(size)]
    begin, end = ends[position]
    # Of each slot the input and the slice; in a short block the last ranks have no slice.
    halves = [[slot.view(2, -1).view(dtype) for slot in each] for each in slots]
    return [
        Slices(
            sizes=[begin, end - begin, count - end],
            before=each[position][0, :begin],
            after=each[position][0, end:count],
            parts=[half[0, begin:end] for half in each],
            reduced=each[position][1, : end - begin],
            results=[
                (slice(first, last), half[1, : last - first])
                for p, (half, (first, last)) in enumerate(zip(each, ends, strict=True))
                if p != position and last > first
            ],
        )
        for each in halves
    ]
