"""How the ranks of one context reach each other beside their tensors: a model holds one of these.

A model without one gets the default, which adds nothing to the model's own `exchange`.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

from unisono.control.hub import Hub
from unisono.control.missing import Absent
from unisono.control.rendezvous import connect_group
from unisono.control.signatures import SequenceNumbers
from unisono.deadlines import end_of_call
from unisono.model import fallback
from unisono.topology import EVERYBODY, Group, name_of
from unisono.tracebacks import hides

if TYPE_CHECKING:
    from typing_extensions import Self

    from unisono.model.contract import ComputationModel

__all__ = ("INLINE_BYTES", "ControlPlane", "SocketControlPlane", "control_of")

__tracebackhide__ = hides

INLINE_BYTES = 1 << 16
"""Longest blob that travels through the hub; longer ones follow on the data plane.

Where all ranks share memory it is what fits into their lanes.
"""
_TENSOR_PART = 4
"""A CPU tensor travels in a round up to this part of the longest blob, measured on 2 and 4 ranks:
16 KiB over sockets, 1 MiB over the number of ranks where they share memory."""


class ControlPlane:
    """What the facade asks of a context beside its collectives.

    Args:
        model: the model that holds it.
    """

    is_thread_bound: bool = False
    """Whether the context belongs to one thread instead of the process (XLA replicas)."""
    is_lazy: bool = False
    """Whether the device computes only when asked to: `settle` comes before each collective."""

    def __init__(self, model: ComputationModel) -> None:
        self._model = weakref.ref(model)  # a cycle would keep torch's group and its sockets
        self.steps: SequenceNumbers = SequenceNumbers()
        """What this rank has begun on the data plane."""

    @property
    def model(self) -> ComputationModel:
        """The model that holds it."""
        model = self._model()
        assert model is not None
        return model

    @property
    def allows_threads(self) -> bool:
        """Whether another thread than the user's may make the model's calls. Local."""
        return True

    def inline_bytes(self, group: Group | None, folds: bool = False) -> int:
        """Give the size of the longest CPU tensor that travels in an exchange of `group`.

        Local, and the same on every rank.

        Args:
            group: the ranks that take part.
            folds: for a tensor that everybody reduces from the bytes of all; less than 0 where the
                model's `all_reduce` is better for any.
        """
        return -1 if folds else fallback.INLINE_TENSOR_BYTES

    def compares_calls(self, group: Group | None) -> bool:
        """Tell whether comparing the ranks' calls costs little beside a collective of `group`.

        Local, or collective at creation of what they are compared over. Where it is False, what one
        rank refuses or calls differently is an error on the others at the deadline alone.
        """
        model = self.model
        return model.transport_device.type == "cpu" and model.topology.size(group) > 1

    def bucket(self, size_bytes: int) -> int:
        """Round a size up to one that the model likes to see. Local; XLA compiles per size."""
        return fallback.at_least_one(size_bytes)

    def settle(self) -> None:
        """Let a lazy device compute what was asked of it. Local."""

    def interrupt(self, how: str) -> None:
        """Tell the other ranks that this one left a collective half-way. Local."""

    def say_farewell(self, how: str) -> None:
        """Tell the other ranks that this one calls nothing more. Local."""

    def close(self, farewell: str = "left") -> None:
        """Close the connections. Local.

        Args:
            farewell: what the others hear this rank did; empty for no word, as of one that failed.
        """

    def disown(self) -> None:
        """Close what a forked child has inherited, without a word to the others. Local."""

    def take_over(self, other: Self) -> None:
        """Share what the ranks made together for another view of this context. Local."""
        self.steps = other.steps


def control_of(model: ComputationModel) -> ControlPlane:
    """Give the control plane that a model holds, else the default one. Local."""
    control: ControlPlane | None = getattr(model, "control", None)
    return ControlPlane(model) if control is None else control


class SocketControlPlane(ControlPlane):
    """The ranks meet at sockets, one hub for each group; the first call of a group connects it.

    Args:
        model: the model that holds it.
        timeout_s: seconds that a collective may take; None for no limit.
    """

    def __init__(self, model: ComputationModel, timeout_s: float | None) -> None:
        super().__init__(model)
        self.timeout_s = timeout_s
        self._is_alone = model.topology.world_size == 1
        self.hubs: dict[str, Hub | None] = {}
        """By the name of the group; None for one whose ranks can't be connected."""
        self.secret: bytes | None = None
        """What ranks prove to each other before their data plane is trusted; None where they share
        nothing yet."""
        self.proved: set[str] = set()
        """Names of the groups whose ranks have proved it."""
        self.is_one_host: bool = False
        """Whether a rank that isn't a process of this user on this host can't be of the job."""

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
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
        if self._is_alone or (group is not None and len(group.ranks) == 1):
            return [blob]
        hub = self.hubs.get(EVERYBODY if group is None else group.name) or self._hub(group)
        if hub is None:
            return fallback.exchange(self.model, blob, group)
        timeout_s = None if group is None else group.timeout_s
        until = end_of_call(self.timeout_s if timeout_s is None else timeout_s)
        blobs, sizes = hub.exchange(blob, until)
        if max(sizes) <= hub.inline_bytes:
            return list(blobs)
        return fallback.exchange_bodies(self.model, blob, list(sizes), group)

    def inline_bytes(self, group: Group | None, folds: bool = False) -> int:
        """Give what a connected group's rounds take. Local, as in the class above."""
        hub = self.hubs.get(EVERYBODY if group is None else group.name)
        if hub is None:
            return -1 if folds else fallback.INLINE_TENSOR_BYTES
        return hub.inline_bytes // _TENSOR_PART

    def compares_calls(self, group: Group | None) -> bool:
        """Tell whether all ranks share memory, and their tensors are there: it costs 20 us then.

        Collective at creation: the first call of a group connects it.
        """
        hub = self.hubs.get(EVERYBODY if group is None else group.name)
        if hub is None:
            model = self.model
            if model.transport_device.type != "cpu" or model.topology.size(group) == 1:
                return False
            hub = self._hub(group)
        return hub is not None and hub.compares_calls

    def _hub(self, group: Group | None) -> Hub | None:
        key = name_of(group)
        if key not in self.hubs:
            self.hubs[key] = hub = connect_group(self, group, INLINE_BYTES)
            if hub is not None:
                is_near = self.model.transport_device.type == "cpu"
                hub.compares_calls = hub.all_share_memory and is_near
        return self.hubs[key]

    def _connected(self) -> list[Hub]:
        return [hub for hub in self.hubs.values() if hub is not None]

    def interrupt(self, how: str) -> None:
        """Tell the other ranks that this one left a collective half-way. Local."""
        for hub in self._connected():
            hub.interrupt(how)

    def say_farewell(self, how: str) -> None:
        """Tell the other ranks that this one calls nothing more. Local."""
        for hub in self._connected():
            hub.say_farewell(how)

    def close(self, farewell: str = "left") -> None:
        """Close the connections. Local, as in the class above."""
        hubs = self._connected()
        self.hubs.clear()
        for hub in hubs:
            hub.close(farewell)

    def disown(self) -> None:
        """Close what a forked child has inherited, without a word to the others. Local."""
        hubs = self._connected()
        self.hubs.clear()
        for hub in hubs:
            hub.disown()

    def take_over(self, other: Self) -> None:
        """Share the connections of another view of this context, and what they proved. Local."""
        super().take_over(other)
        self.hubs, self.secret = other.hubs, other.secret
        self.proved, self.is_one_host = other.proved, other.is_one_host

    def gone(self, group: Group | None, step: int = 0) -> Absent | None:
        """Tell which rank of a group is known to be gone, if any.

        Local; doesn't wait, but for the word of one that has ended.

        Args:
            group: the ranks that take part.
            step: the number of the operation in the group: a rank that had done it and left isn't
                gone.
        """
        ranks = () if group is None else group.ranks
        for key in dict.fromkeys((name_of(group), EVERYBODY)):
            hub = self.hubs.get(key)
            absent = None if hub is None else hub.gone(ranks or None, name_of(group), step)
            if absent is not None:
                return absent
        return None

    def late(self, group: Group | None, step: int, is_over: bool = True) -> str:
        """Say which ranks haven't come to an operation of the data plane, if it can be found out.

        Local; waits a second at most.

        Args:
            group: the ranks that take part.
            step: its number in the group.
            is_over: whether its time is over, which all ranks then learn.
        """
        ranks = () if group is None else group.ranks
        name = name_of(group)
        hub = self.hubs.get(name) or self.hubs.get(EVERYBODY)
        return "" if hub is None else hub.late(name, ranks, step, is_over)

    def warn_after_s(self) -> float:
        """Give the seconds after which a wait on the data plane names the missing ranks. Local."""
        hub = next(iter(self._connected()), None)
        return math.inf if hub is None else hub.warn_after_s
