"""Tensors that lie in memory of all ranks of a group, so that collectives on them copy nothing.

The tensors of n ranks lie one behind the other in one memory. Each rank has its own, and uses the
others' only in collectives.

Once a group has such tensors, its ranks compare before each collective of a large tensor which one
they pass, and the offset in it, by a token in the arena and a barrier. So all take the same path,
and all have entered the call. Another barrier ends the call: a rank leaves when no other rank uses
its tensor any more. After an error, other ranks may still write to the tensor.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unisono.host.arena import Arena, Check
from unisono.model.reduction import ReduceOp, fold_tensors

MIN_BYTES = 1 << 18
"""Shorter tensors are faster through slots than with two barriers and a write for each rank."""

_BLOCK_BYTES = 1 << 19  # of each rank: those of two stay in the cache of a core
_PAGE_BYTES = 4096
_NUMBER_BITS, _OFFSET_BITS = 24, 40  # of a token


def room_bytes(size_bytes: int) -> int:
    """Return the bytes from one rank's tensor to the next rank's."""
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


class SharedTensors:
    """One group's shared tensors, and their collectives."""

    def __init__(self, arena: Arena) -> None:
        self.count: int = 0
        """Number of tensors created, the same on all ranks; 0 means that they needn't compare."""
        self._arena = arena
        # By the address of this rank's tensor: its number, and the tensors of all ranks.
        self._entries: dict[int, tuple[int, list[Tensor]]] = {}

    @torch.inference_mode(False)
    def add(self, shared: mmap.mmap, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return this rank's tensor in memory that all ranks map. Collective over the group."""
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        room, me = room_bytes(size_bytes), self._arena.position
        parts = [
            torch.frombuffer(shared, dtype=torch.uint8, count=size_bytes, offset=position * room)
            for position in range(self._arena.size)
        ]
        own = memoryview(shared)[me * room : me * room + size_bytes]  # kept alive by the tensor
        tensor = torch.frombuffer(own, dtype=dtype).view(*shape)
        self.count += 1  # even without an entry, as all ranks must count alike
        if self.count >> _NUMBER_BITS or size_bytes >> _OFFSET_BITS:  # they don't fit into a token
            return tensor
        self._entries[tensor.data_ptr()] = self.count, parts
        # `own` dies with the tensor's last view: then another tensor may get the address.
        weakref.finalize(own, self._entries.pop, tensor.data_ptr(), None).atexit = False
        return tensor

    def close(self) -> None:
        """Forget the tensors, which stay as ordinary ones."""
        self._entries.clear()

    def agree(self, flat: Tensor, check: Check) -> list[Tensor] | None:
        """Return all ranks' tensors if each passes the same part of a shared one, else None."""
        # Collective over the group, for a tensor of at least `MIN_BYTES`; the ranks' arguments
        # differ only in the memory.
        # A view of a shared tensor has that tensor's storage, which begins at its address.
        number, parts = self._entries.get(flat.untyped_storage().data_ptr(), (0, []))
        begin = int(flat.storage_offset()) * flat.itemsize
        token = number << _OFFSET_BITS | begin if number else 0  # 0: not a shared tensor
        if not self._arena.agree(token, check):
            return None
        end = begin + flat.numel() * flat.itemsize
        return [part[begin:end].view(flat.dtype) for part in parts]

    # Collectives, between `agree` and a barrier

    def all_reduce(self, parts: Sequence[Tensor], op: ReduceOp) -> None:
        """Reduce this rank's slice of all tensors into each of them. Collective over the group."""
        count, arena = parts[0].numel(), self._arena
        width = -(-count // arena.size)
        begin = min(arena.position * width, count)  # the last ranks may have nothing left
        for block in _blocks([part[begin : begin + width] for part in parts]):
            fold_tensors(op, block, block[0])  # only this rank uses this slice now
            for other in block[1:]:
                other.copy_(block[0])

    def reduce_scatter(self, parts: Sequence[Tensor], op: ReduceOp, target: Tensor) -> None:
        """Reduce this rank's row of all tensors, [n, *shape] each. Collective over the group."""
        rows = [part.view(self._arena.size, -1)[self._arena.position] for part in parts]
        for target_block, *block in _blocks([target, *rows]):
            fold_tensors(op, block, target_block)

    def all_gather(self, parts: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Copy the other ranks' tensors. Collective over the group."""
        for position in self._arena.others:
            rows[position].copy_(parts[position])

    def broadcast(self, parts: Sequence[Tensor], root: int) -> None:
        """Copy the root's tensor into this rank's. Collective over the group."""
        if self._arena.position != root:
            parts[self._arena.position].copy_(parts[root])


def _blocks(rows: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield the blocks of [n] tensors, all split alike."""
    room = _BLOCK_BYTES // rows[0].itemsize
    return zip(*(torch.split(row, room) for row in rows), strict=True)
