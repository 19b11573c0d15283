"""Memory that is written once and read by many: blocks of bytes, which nobody can change any more.

    number of blocks, then the size of each, as <Q; then each block, at a multiple of 64 bytes

The kernel seals it. A process maps it privately: pages are those of all readers until the process
writes to one, which then is its own copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

_COUNT = struct.Struct("<Q")
_ALIGNED_BYTES = 64
_ADD_SEALS, _ALL_SEALS = 1033, 0xF  # fcntl has them from Python 3.8 on some builds alone
_MOVED_BYTES = 1 << 30  # at once; the kernel takes 2 GiB at most

Block = bytes | bytearray | memoryview
"""What can be written."""


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Give where each block begins and ends."""
    at = _aligned(_COUNT.size * (1 + len(sizes)))
    for size in sizes:
        yield at, at + size
        at = _aligned(at + size)


def size_of(blocks: Sequence[Block]) -> int:
    """Return the bytes that blocks take."""
    sizes = [len(block) for block in blocks]
    return max((end for _, end in _places(sizes)), default=_COUNT.size)


def _pieces(blocks: Sequence[Block]) -> Iterator[tuple[int, memoryview]]:
    """Give all that is to be written, and where."""
    sizes = [len(block) for block in blocks]
    yield 0, memoryview(b"".join(map(_COUNT.pack, [len(sizes), *sizes])))
    for (begin, _), block in zip(_places(sizes), blocks, strict=True):
        yield begin, memoryview(block)


def joined(blocks: Sequence[Block]) -> bytearray:
    """Write blocks to memory of this process alone."""
    memory = bytearray(size_of(blocks))
    for at, piece in _pieces(blocks):
        memory[at : at + len(piece)] = piece
    return memory


def seal(blocks: Sequence[Block]) -> int | None:
    """Write blocks to memory that other processes can open, and seal it."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = -1
    try:
        fd = os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_of(blocks))
        for at, piece in _pieces(blocks):
            _write(fd, piece, at)
        fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    except OSError:  # not allowed, or no room for it
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def _write(fd: int, piece: memoryview, at: int) -> None:
    while piece:
        written = os.pwrite(fd, piece[:_MOVED_BYTES], at)
        piece, at = piece[written:], at + written


def open_copy(fd: int) -> mmap.mmap:
    """Map sealed memory; what this process writes to it is its own."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)


def read(fd: int) -> bytearray:
    """Read sealed memory that can't be mapped."""
    memory = bytearray(os.fstat(fd).st_size)
    view, at = memoryview(memory), 0
    while at < len(view):
        at += os.preadv(fd, [view[at : at + _MOVED_BYTES]], at)
    return memory


def blocks_in(memory: mmap.mmap | bytearray) -> list[memoryview]:
    """Return the blocks that were written, in place."""
    view = memoryview(memory)
    (count,) = _COUNT.unpack_from(view)
    sizes = [_COUNT.unpack_from(view, _COUNT.size * (1 + at))[0] for at in range(count)]
    return [view[begin:end] for begin, end in _places(sizes)]
