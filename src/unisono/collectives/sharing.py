"""Tensors in memory that the ranks of one host share, writable or read-only."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, cast

import torch
from torch import Tensor

from unisono.collectives.call import T, exchange_blobs, guarded, refuse_compared
from unisono.collectives.membership import GroupLike, context_and_group
from unisono.collectives.outcomes import agreed, exchange
from unisono.context import ContextState, communicator
from unisono.control.rendezvous import host_of_this_process
from unisono.errors import ArgumentError
from unisono.host import memory
from unisono.host.collectives import HostCollectives
from unisono.host.shared import room_bytes
from unisono.payload.codec import check_pickle_allowed
from unisono.payload.pickling import load_file, save_file
from unisono.topology import Group

_IS_MAPPED = b"+"  # a rank's vote
_MOST_BYTES = 1 << 47  # the address space of one process


@guarded
def shared_empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: GroupLike = None
) -> Tensor:
    """Create a CPU tensor in memory that all ranks of the group share, if they are on one host.

    Collective over `group`. Each rank has its own tensor, as usual, whose values are undefined at
    first. But `all_reduce_`, `broadcast_`, `all_gather` and `reduce_scatter` copy nothing if all
    ranks of `group` pass the same part of their tensors, contiguous and of at least 256 KiB: each
    rank reduces one slice of all ranks' tensors, and writes the result to all of them. The results
    are the same as for other tensors. Outside of such a call no rank touches another rank's tensor;
    after a failed call the values are undefined, and other ranks may still write to them.

    If the ranks share no memory (one rank, threads, MPI, XLA, several hosts, a processor other
    than x86, ``UNISONO_SHARED_BYTES=0``) it is an ordinary tensor.

    Args:
        size: as for ``torch.empty``: ints, or one sequence of them; the same on every rank.
        dtype: the same on every rank; None for torch's default.
        group: a Group, a list of ranks, or None for all ranks.

    Returns:
        [*size], `dtype`, contiguous, on the CPU. Its memory, shared by all ranks, is freed with the
        last tensor in the last process; a fork of a process shares the tensor too. The tensor can't
        be resized. If it is sent to another process as an object, it is copied.

    Raises:
        ArgumentError: `size` or `dtype` isn't valid.
        CollectiveMismatchError: size or dtype differ between ranks (on every rank), or aren't valid
            on another rank.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> gradients = idist.shared_empty(2, 3).zero_()
        >>> idist.all_reduce_(gradients).shape
        torch.Size([2, 3])
    """
    context, members, is_member = context_and_group(group)
    try:
        shape, kind = _shape_of(size), _dtype_of(dtype)
    except ArgumentError as error:
        if is_member:  # the other members raise a mismatch instead of waiting
            with context.calls.begin("shared_empty", members):
                refuse_compared(context, "shared_empty", members, error)
        raise
    if not is_member:
        return torch.empty(shape, dtype=kind, device="cpu")
    with context.calls.begin("shared_empty", members):
        return _shared_empty(context, shape, kind, members)


def _shared_empty(
    context: ContextState, shape: torch.Size, kind: torch.dtype, members: Group | None
) -> Tensor:
    """Create a tensor, in shared memory if possible. Collective over `members`."""
    host = context.control.host(members)
    size_bytes = shape.numel() * kind.itemsize
    call = f"shared_empty of {str(kind)[6:]}{list(shape)}"
    if host is None or size_bytes == 0:
        exchange_blobs(context, call, b"", members)  # sizes and dtypes must agree here, too
        return torch.empty(shape, dtype=kind, device="cpu")
    # One memory holds the tensors of all ranks, each beginning on a page.
    mapped = _map_together(context, host, call, host.size * room_bytes(size_bytes), members)
    if mapped is None:
        return torch.empty(shape, dtype=kind, device="cpu")
    return host.shared.add(mapped, shape, kind)


def _shape_of(size: tuple[Any, ...]) -> torch.Size:
    try:
        shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    except TypeError as error:
        raise ArgumentError(f"shared_empty: size should be ints: {size!r}") from error
    # Each size as well as their product, in which a size of 0 would hide the others.
    if any(not 0 <= number <= _MOST_BYTES for number in shape) or math.prod(shape) > _MOST_BYTES:
        raise ArgumentError(f"shared_empty: size should be from 0 to {_MOST_BYTES}: {list(shape)}")
    return shape


def _dtype_of(dtype: torch.dtype | None) -> torch.dtype:
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise ArgumentError(f"shared_empty: dtype should be one of torch's: {dtype!r}")
    return kind


def _map_together(
    context: ContextState, host: HostCollectives, call: str, size_bytes: int, group: Group | None
) -> mmap.mmap | None:
    """Map new zeroed memory on every rank; None on all ranks if one can't."""
    with ExitStack() as stack:
        address, mapped = b"", None
        made = memory.make(size_bytes) if host.position == 0 else None
        if made is not None:
            fd, mapped = made
            stack.callback(os.close, fd)  # the mapping stays
            address = memory.address_of(fd)
        address = bytes(exchange_blobs(context, call, address, group)[0])
        if address and mapped is None:
            with suppress(OSError):
                fd = memory.open_at(address, writes=True)
                stack.callback(os.close, fd)
                mapped = mmap.mmap(fd, size_bytes)
        # Position 0 keeps its descriptor open until every rank has opened the memory, or failed.
        votes = exchange_blobs(context, call, b"" if mapped is None else _IS_MAPPED, group)
    return mapped if all(votes) else None


def shared(build: Callable[[], T]) -> T:
    """Build a value once on each host, in memory that all ranks of that host read.

    Collective over all ranks. One rank of each host calls `build`; the others wait, for at most the
    collective timeout: `timeout=` of ``initialize`` or ``spawn`` must allow for it. The result is
    written to shared memory in the format of ``torch.save``, and then dropped; until then the host
    has it twice. All ranks of the host load it from there: tensors and numpy arrays stay in that
    memory, everything else is an unpickled copy. The memory is freed with the last of these tensors
    and arrays in the last process.

    Numpy arrays are read-only. Torch has no read-only tensors: a rank's writes to one are private
    to it, and only the pages that it writes to become its own memory.

    A rank that can't open the memory of the building rank calls `build` itself, for example in
    another container, on another system than Linux, or if ``memfd_create`` is forbidden.

    Args:
        build: called without arguments; returns any tree of tensors, arrays and objects that can be
            pickled: a data set, a ``state_dict``, a module. Tensors on accelerators arrive on each
            rank's own device.

    Returns:
        What `build` returned, on every rank.

    Raises:
        PeerFailedError: `build` raised, its result can't be pickled, or some rank lacks the memory
            for it (on every rank; on the failed rank the original error is its cause).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.shared(lambda: {"images": torch.ones(2), "names": ["a", "b"]})
        {'images': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    context = communicator()
    name = f"{getattr(build, '__qualname__', type(build).__qualname__)} (shared)"
    rank = context.model.topology.rank
    hosts = exchange(context, "shared", host_of_this_process())
    builder = hosts.index(hosts[rank])  # the first rank of this host
    with ExitStack() as stack:
        error, result, address = None, None, b""
        try:
            check_pickle_allowed("the result of shared()")
            if rank == builder:
                result, address = _built(context, build, stack)
        except BaseException as raised:  # any kind, as the other ranks must not wait forever
            error = raised
        address = agreed(context, name, error, address)[builder]
        try:
            if rank != builder:
                result = _opened(context, build, address)
        except BaseException as raised:
            error = raised
        # The builder must keep its memory open until all ranks are here.
        agreed(context, name, error)
    return cast("T", result)


def _built(context: ContextState, build: Callable[[], Any], stack: ExitStack) -> tuple[Any, bytes]:
    """Build a tree in memory that other ranks of this host can map while the stack is open."""
    try:
        fd = os.memfd_create("unisono")
    except (AttributeError, OSError):  # not on Linux, forbidden, or no descriptor is left
        return build(), b""
    stack.callback(os.close, fd)
    save_file(build(), memory.path_of(fd))
    # The builder loads it too, so that its tensors lie in this memory and the first ones are freed.
    return load_file(memory.path_of(fd), context.model.device), memory.address_of(fd)


def _opened(context: ContextState, build: Callable[[], Any], address: bytes) -> Any:
    """Map the tree that another rank of this host has built, or build it if that fails."""
    try:
        fd = memory.open_at(address, writes=False)
    except OSError:  # forbidden, or the builder has no such memory
        return build()
    try:
        return load_file(memory.path_of(fd), context.model.device)
    finally:  # the loaded tensors keep their mapping
        os.close(fd)
