"""Tensors that the ranks of one host have in one memory: to work on, or to read."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.collectives.broadcasts import broadcast
from unisono.collectives.call import guarded, refuse_compared, swap
from unisono.collectives.membership import GroupLike, team
from unisono.collectives.outcomes import failure, report
from unisono.context import ContextState, communicator
from unisono.control.rendezvous import host_of_this_process
from unisono.errors import ArgumentError
from unisono.host import memory, sealed
from unisono.host.collectives import HostCollectives
from unisono.host.shared import room_bytes
from unisono.payload.codec import decode, encode, refuse_pickle
from unisono.payload.pickling import dump, load
from unisono.topology import Group
from unisono.tracebacks import hides

__all__ = ("shared", "shared_empty")

__tracebackhide__ = hides

T = TypeVar("T")
_HAS = b"+"
_PIECE_BYTES = 1 << 26  # of what must be sent, at once
_MOST = 1 << 47  # bytes that one process can address
_Memory = mmap.mmap | bytearray


@guarded
def shared_empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: GroupLike = None
) -> Tensor:
    """Make a CPU tensor in memory that all ranks of the group see, where they share a host.

    Collective over `group`. It is each rank's own, as any tensor, and its values are undefined at
    first. But `all_reduce_`, `broadcast_`, `all_gather` and `reduce_scatter` copy nothing where all
    ranks of `group` pass the same part of it, of at least 256 KiB and contiguous: each rank reduces
    its slice from the tensors of all, and writes it to all. Results are those of any other tensor.
    Outside of such a call nobody else touches it; after one that failed its values are undefined.

    Where the ranks share no memory (one rank, threads, MPI, XLA, several hosts, other processors
    than x86, ``UNISONO_SHARED_BYTES=0``) it is an ordinary tensor.

    Args:
        size: as for ``torch.empty``: ints, or one sequence of them; the same on every rank.
        dtype: likewise; None for torch's default.
        group: a Group, a list of ranks, or None for all ranks.

    Returns:
        [*size], `dtype`, contiguous, on the CPU. Its memory, that of all ranks, is given back with
        the last tensor in the last process; a fork of a process sees the tensor too. It can't be
        resized. Sent to another process as an object it is copied.

    Raises:
        ArgumentError: `size` or `dtype` isn't one.
        CollectiveMismatchError: size or dtype differ between ranks (on every rank), or another
            rank's isn't one.
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> gradients = idist.shared_empty(2, 3).zero_()
        >>> idist.all_reduce_(gradients).shape
        torch.Size([2, 3])
    """
    context, members, is_member = team(group)
    try:
        shape, kind = _shape_of(size), _dtype_of(dtype)
    except ArgumentError as error:
        if is_member:
            with context.calls.call("shared_empty", members):
                refuse_compared(context, "shared_empty", members, error)
        raise
    if not is_member:
        return torch.empty(shape, dtype=kind, device="cpu")
    with context.calls.call("shared_empty", members):
        return _shared_empty(context, shape, kind, members)


def _shared_empty(
    context: ContextState, shape: torch.Size, kind: torch.dtype, members: Group | None
) -> Tensor:
    host = context.control.host(members)
    size_bytes = shape.numel() * kind.itemsize
    call = f"shared_empty of {str(kind)[6:]}{list(shape)}"
    if host is None or size_bytes == 0:
        swap(context, call, b"", members)
        return torch.empty(shape, dtype=kind, device="cpu")
    mapped = _map_together(context, host, call, host.size * room_bytes(size_bytes), members)
    if mapped is None:
        return torch.empty(shape, dtype=kind, device="cpu")
    return host.shared.add(mapped, shape, kind)


def _shape_of(size: tuple[Any, ...]) -> torch.Size:
    try:
        shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    except TypeError as error:
        raise ArgumentError(f"shared_empty: size should be ints: {size!r}") from error
    if any(not 0 <= number <= _MOST for number in shape) or math.prod(shape) > _MOST:
        raise ArgumentError(f"shared_empty: size should be from 0 to {_MOST}: {list(shape)}")
    return shape


def _dtype_of(dtype: torch.dtype | None) -> torch.dtype:
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise ArgumentError(f"shared_empty: dtype should be one of torch's: {dtype!r}")
    return kind


def _map_together(
    context: ContextState, host: HostCollectives, call: str, size_bytes: int, group: Group | None
) -> mmap.mmap | None:
    """Map new memory of zeros on every rank; None on all where some rank can't."""
    with ExitStack() as stack:
        address, mapped = b"", None
        made = memory.make(size_bytes) if host.position == 0 else None
        if made is not None:
            fd, mapped = made
            stack.callback(os.close, fd)
            address = memory.address_of(fd)
        address = bytes(swap(context, call, address, group)[0])
        if address and mapped is None:
            with suppress(OSError):
                fd = memory.open_at(address, writes=True)
                stack.callback(os.close, fd)
                mapped = mmap.mmap(fd, size_bytes)
        votes = swap(context, call, b"" if mapped is None else _HAS, group)
    return mapped if all(votes) else None


def shared(build: Callable[[], T]) -> T:
    """Build something once on each host, for all ranks of that host to read in one memory.

    Collective over all ranks. One rank of each host calls `build`; the others wait, as long as a
    collective may take: `timeout=` of ``initialize`` or ``spawn`` must allow for it. The result is
    copied into memory that nobody can change, and dropped; while it is copied the host has it
    twice. Then all ranks of the host get it from there: tensors and numpy arrays lie in that
    memory, all else is an unpickled copy. The memory is given back with the last of them in the
    last process.

    Numpy arrays can't be written to. Torch has no such tensors: what a rank writes to one, it alone
    sees, and only the pages that it writes to become memory of its own.

    Where ranks of a host can't open each other's memory (processes in different containers,
    other systems than Linux), each gets a copy from the one that built it.

    Args:
        build: called without arguments; returns any tree of tensors, arrays and objects that can be
            pickled: a data set, a ``state_dict``, a module. Tensors of accelerators come to each
            rank's own device.

    Returns:
        What `build` returned, on every rank.

    Raises:
        PeerFailedError: `build` raised, its result can't be pickled, or some rank has no room for
            it (on every rank; the original is the cause there).
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import torch, unisono as idist
        >>> idist.shared(lambda: {"images": torch.ones(2), "names": ["a", "b"]})
        {'images': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    context = communicator()
    name = f"{getattr(build, '__qualname__', type(build).__qualname__)} (shared)"
    rank, device = context.model.topology.rank, context.model.device
    hosts = [bytes(host) for host in _tell(context, "shared", host_of_this_process().encode())]
    builder, error = hosts.index(hosts[rank]), None
    with closing(_Built(is_alone=hosts.count(hosts[rank]) == 1)) as built:
        try:
            refuse_pickle("what shared() gives")
            if rank == builder:
                built.fill(build())
                built.hold()
        except BaseException as raised:  # whatever it is, the others must not wait forever
            error = raised
        offers = _outcomes(context, name, error, built.address, built.size_bytes)
        whole = _hand_out(context, name, hosts, offers, built)
    result: T = load(sealed.blocks_in(whole), device)
    return result


class _Built:
    """What this rank has built, until the others have it."""

    def __init__(self, is_alone: bool) -> None:
        self.memory: _Memory | None = None
        """All of it as this process has it; None where another rank builds."""
        self.size_bytes: int = 0
        self._is_alone = is_alone
        self._fd: int | None = None

    def fill(self, tree: object) -> None:
        """Copy what was built, to memory that others can map if there is any."""
        blocks = dump(tree, is_lent=True)
        self.size_bytes = sealed.size_of(blocks)
        self._fd = None if self._is_alone else sealed.seal(blocks)
        if self._fd is None:
            self.memory = sealed.joined(blocks)

    def hold(self) -> None:
        """Get it into this process, too: mapped, or a copy where that can't be."""
        if self._fd is not None:
            try:
                self.memory = sealed.open_copy(self._fd)
            except OSError:  # no address space, or no descriptor left
                self.memory = sealed.read(self._fd)

    @property
    def address(self) -> bytes:
        """Where those of its host open it; empty where it built nothing, or they can't."""
        return b"" if self._fd is None else memory.address_of(self._fd)

    def close(self) -> None:
        """Let go of the descriptor; who maps the memory keeps it."""
        if self._fd is not None:
            os.close(self._fd)


def _outcomes(
    context: ContextState, name: str, error: BaseException | None, *facts: object
) -> list[list[Any]]:
    """Give every rank the facts of every rank; raise on every rank where one has an error."""
    own = (None if error is None else report(error), *facts)
    with context.calls.call("shared"):
        frames = _tell(context, name, encode(own))
    if error is not None and not isinstance(error, Exception):
        raise error
    outcomes = [decode(frame, context.model.device) for frame in frames]
    for rank, (failed, *_) in enumerate(outcomes):
        if failed is not None:
            raise failure(rank, name, failed) from error
    return [others for _, *others in outcomes]


@guarded
def _hand_out(
    context: ContextState, name: str, hosts: list[bytes], offers: list[list[Any]], built: _Built
) -> _Memory:
    """Give this rank what its host's builder has: mapped, or sent where some rank can't map it."""
    rank, error = context.model.topology.rank, None
    builder = hosts.index(hosts[rank])
    address, size_bytes = offers[builder]
    mapped = built.memory if rank == builder else _map(address)
    whole: _Memory = bytearray()
    try:
        whole = bytearray(size_bytes) if mapped is None else mapped
    except MemoryError as raised:
        error = raised
    votes = _outcomes(context, name, error, mapped is not None)
    lacking = {host for host, (has,) in zip(hosts, votes, strict=True) if not has}
    for src in sorted(map(hosts.index, lacking)):
        is_part = rank == src or (builder == src and mapped is None)
        _send(src, rank == src, offers[src][1], whole if is_part else None)
    return whole


def _map(address: bytes) -> _Memory | None:
    """Map what the builder of this host offers; None where that can't be."""
    try:
        fd = memory.open_at(address, writes=False)
    except OSError:
        return None
    try:
        return sealed.open_copy(fd)
    except OSError:
        return None
    finally:
        os.close(fd)


def _send(src: int, is_src: bool, size_bytes: int, whole: _Memory | None) -> None:
    """Send what `src` has to all ranks, piece by piece, into `whole` of those that have one."""
    for at in range(0, size_bytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, size_bytes - at)
        part = None
        if whole is not None:
            part = torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=at)
        piece = broadcast(part if is_src else None, src)
        if part is not None and not is_src:
            part.copy_(piece)


@guarded
def _tell(context: ContextState, call: str, blob: bytes) -> list[bytes]:
    return swap(context, call, blob, None)
