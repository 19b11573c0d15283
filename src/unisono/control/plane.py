"""The exchange of models that have sockets beside their collectives: hubs, one for each group."""

from __future__ import annotations

import math
import struct
from typing import Any, Protocol

from torch import Tensor

from unisono.control.hub import Hub
from unisono.control.missing import Absent
from unisono.control.rendezvous import Met, meet
from unisono.deadlines import allowed_s, limit_of
from unisono.errors import CollectiveError
from unisono.model import fallback
from unisono.topology import EVERYBODY, Group, name_of
from unisono.tracebacks import hides

__all__ = ("INLINE_BYTES", "SocketControlPlane", "Meeting", "gone", "late", "warn_after_s")

__tracebackhide__ = hides

INLINE_BYTES = 1 << 16
"""Longest blob that travels through the hub; longer ones follow on the data plane.

Where all ranks share memory it is what fits into their lanes.
"""
_TENSOR_PART = 4
"""A CPU tensor travels in a round up to this part of the longest blob, measured on 2 and 4 ranks:
16 KiB over sockets, 1 MiB over the number of ranks where they share memory."""
_SHORT, _LONG = b"\0", b"\1"
_HEAD_BYTES = 256  # enough to tell of which call a long blob is
_LENGTH = struct.Struct("<Q")


class Meeting(Met, Protocol):
    """What this file needs of a model."""

    planes: dict[str, Any]

    def size(self, group: Group | None) -> int:
        """Count the ranks that take part."""

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a collective may take."""


class SocketControlPlane:
    """What models have in common whose ranks meet at sockets beside their collectives."""

    planes: dict[str, Any]

    def exchange(self: Meeting, blob: bytes, group: Group | None = None) -> list[bytes]:
        """Give every rank the bytes of every rank; the first call of a group connects it.

        Collective over `group`.

        Args:
            blob: any bytes, of any length.
            group: the ranks that take part.

        Returns:
            The blobs in the order of ranks.

        Raises:
            PeerFailedError: a rank is gone.
            CollectiveTimeoutError: ranks didn't come in time; names them.
        """
        if self.size(group) == 1:
            return [blob]
        hub = _hub(self, group)
        if hub is None:
            return fallback.exchange(self, blob, group)
        said, tail = blob, _SHORT
        if len(blob) > hub.inline_bytes:
            said, tail = blob[:_HEAD_BYTES], _LENGTH.pack(len(blob)) + _LONG
        limit_s = limit_of(allowed_s(self, group))
        limit_s = math.inf if limit_s is None else limit_s
        heard = hub.exchange(said, tail, limit_s)
        if all([each[-1:] == _SHORT for each in heard]):  # noqa: C419 - a third of the time
            return [each[:-1] for each in heard]
        return fallback.exchange_bodies(self, blob, [_size(each) for each in heard], group)

    def inline_bytes(self, group: Group | None) -> int:
        """Give the size of the longest CPU tensor that travels in an exchange. Local."""
        hub = self._connected(group)
        return fallback.INLINE_TENSOR_BYTES if hub is None else hub.inline_bytes // _TENSOR_PART

    def prefers_exchange(self, tensor: Tensor, group: Group | None) -> bool:
        """Tell whether a tensor is small, on the CPU, and its group connected. Local."""
        if not self.planes or tensor.device.type != "cpu":
            return False
        is_small = tensor.numel() * tensor.itemsize <= self.inline_bytes(group)
        return is_small and self._connected(group) is not None

    def compares_calls(self: Meeting, group: Group | None) -> bool:
        """Tell whether all ranks share memory, and their tensors are there: it costs 20 us then.

        Collective at creation: the first call of a group connects it.
        """
        if self.transport_device.type != "cpu" or self.size(group) == 1:
            return False
        hub = _hub(self, group)
        return hub is not None and hub.all_share_memory

    def _connected(self, group: Group | None) -> Hub | None:
        return self.planes.get(name_of(group))


def _size(said: bytes) -> int:
    if said[-1:] == _SHORT:
        return len(said) - 1
    if said[-1:] != _LONG or len(said) <= _LENGTH.size:
        raise CollectiveError("a damaged message came over the control plane")
    return int(_LENGTH.unpack_from(said, len(said) - 1 - _LENGTH.size)[0])


def _hub(model: Meeting, group: Group | None) -> Hub | None:
    key = name_of(group)
    if key not in model.planes:
        model.planes[key] = meet(model, group, INLINE_BYTES)
    hub: Hub | None = model.planes[key]
    return hub


def gone(model: Meeting, group: Group | None, step: int = 0) -> Absent | None:
    """Tell which rank of a group is known to be gone, if any.

    Local; doesn't wait, but for the word of one that has ended.

    Args:
        model: whose operation waits.
        group: the ranks that take part.
        step: the number of the operation in the group: a rank that had done it and left isn't gone.
    """
    ranks = () if group is None else group.ranks
    for key in dict.fromkeys((name_of(group), EVERYBODY)):
        hub: Hub | None = model.planes.get(key)
        absent = None if hub is None else hub.gone(ranks or None, name_of(group), step)
        if absent is not None:
            return absent
    return None


def late(model: Meeting, group: Group | None, step: int, is_over: bool = True) -> str:
    """Say which ranks haven't come to an operation of the data plane, if it can be found out.

    Local; waits a second at most.

    Args:
        model: whose operation it is.
        group: the ranks that take part.
        step: its number in the group.
        is_over: whether its time is over, which all ranks then learn.
    """
    ranks = () if group is None else group.ranks
    name = name_of(group)
    hub: Hub | None = model.planes.get(name) or model.planes.get(EVERYBODY)
    return "" if hub is None else hub.late(name, ranks, step, is_over)


def warn_after_s(model: Meeting) -> float:
    """Give the seconds after which a wait on the data plane says whom it waits for. Local."""
    hub: Hub | None = next((hub for hub in model.planes.values() if hub is not None), None)
    return math.inf if hub is None else hub.warn_after_s
