"""The control plane of a context: the traffic between ranks other than their large tensors.

A model holds its control plane. A model without one gets the default `ControlPlane`, which adds
nothing to the model's own `exchange`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.control.absent_ranks import Absent, Wait
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.rendezvous import checks_by, connect_group
from unisono.control.signatures import SequenceNumbers, call_head, site, unpack
from unisono.errors import GroupMembershipError
from unisono.host.arena import Check
from unisono.host.collectives import HostCollectives
from unisono.host.hierarchical import MemoryCollectives, TwoLevels
from unisono.model import fallback
from unisono.topology import EVERYBODY, Group, name_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from unisono.model.contract import ComputationModel

_NO_HANDLE: tuple[Callable[[], Any], int] = (lambda: None), 0
_TENSOR_PART = 4
"""A round carries a CPU tensor of at most the longest blob's size divided by this: 1 MiB divided by
the number of ranks through memory, 256 KiB over sockets. Measured on 2 and 4 ranks; for sums in
memory `routing` has a lower limit."""


class ControlPlane:
    """The services of a context other than its collectives."""

    is_thread_bound: bool = False
    """Whether a context, created or found, belongs to one thread instead of the process.

    It is True only on XLA. The contract's `replicas_are_threads` differs, as it concerns ``spawn``:
    a context that `initialize` creates on `threads` belongs to the process.
    """
    is_lazy: bool = False
    """Whether the device computes lazily: `settle` precedes each collective."""

    def __init__(self, model: ComputationModel) -> None:
        self._model = weakref.ref(model)  # a cycle would keep torch's group and its sockets
        self.steps: SequenceNumbers = SequenceNumbers()
        """Operations that this rank has begun on the data plane."""
        self.setting: str = os.environ.get("UNISONO_DEBUG", "")
        """Whether ranks compare calls: 1 always, 0 never, anything else if it costs little."""
        self.ended: deque[str] = deque()
        """Names of groups that have ended, for caches whose keys are such names."""
        self._dropped: deque[tuple[str, tuple[int, ...]]] = deque()  # names, ranks; by finalizers

    @property
    def model(self) -> ComputationModel:
        """The model that holds this control plane."""
        model = self._model()
        assert model is not None
        return model

    @property
    def allows_threads(self) -> bool:
        """Whether threads other than the user's may call the model."""
        return True

    @property
    def separates_groups(self) -> bool:
        """Whether calls over different groups may run at the same time, each in its own thread."""
        # Not on accelerators: NCCL may wait forever if ranks begin the calls in different orders.
        return self.model.transport_device.type == "cpu"

    def is_connected(self, group: Group | None) -> bool:
        """Return whether a group's first call, in which its ranks connect, is done."""
        return True

    def inline_bytes(self, group: Group | None, folds: bool = False) -> int:
        """Return the size of the longest CPU tensor that an exchange of `group` carries."""
        # Local, and the same on every rank. This exchange consists of the model's own collectives,
        # so no reduction of a tensor gains by it: -1 if it would replace one.
        return -1 if folds else fallback.INLINE_TENSOR_BYTES

    def memory(self, group: Group | None) -> MemoryCollectives | None:
        """Return the collectives of `group` through memory that ranks of one host share, if any."""
        # Local, except that the creation of that memory is collective.
        return None

    def host(self, group: Group | None) -> HostCollectives | None:
        """Return `memory` if all ranks of `group` are on one host: then it has all collectives."""
        # Local or collective, as `memory` is.
        memory = self.memory(group)
        return memory if isinstance(memory, HostCollectives) else None

    def checks(self, group: Group | None) -> bool | None:
        """Return whether ranks compare calls before each collective of the data plane."""
        # Local, except that a group's first call, which connects its ranks, is collective.
        return checks_by([self.setting])

    def compares_calls(self, group: Group | None) -> bool:
        """Return whether comparing the ranks' calls costs little beside a collective of `group`."""
        # Local or collective, as `checks` is. If it is False, and one rank's call differs or is
        # rejected, the other ranks raise only at the deadline.
        model = self.model
        return model.transport_device.type == "cpu" and model.topology.size(group) > 1

    def watch_over(self, group: Group) -> None:
        """Register a group, which `begin_group` ends after this rank's last reference to it."""
        # A finalizer may run in any thread, in the middle of any call, so it only records the end.
        finalizer = weakref.finalize(group, self._dropped.append, (group.name, group.ranks))
        finalizer.atexit = False

    def begin_group(self, ranks: tuple[int, ...]) -> None:
        """End groups that were dropped, before a new one is created."""
        # Local here; collective over all ranks in subclasses that also compare the new group.
        while self._dropped:
            self.end(self._dropped.popleft()[0])

    def end(self, name: str) -> None:
        """Remove the records kept under a group's name."""
        self.steps.forget(name)
        self.ended.append(name)

    def bucket(self, size_bytes: int) -> int:
        """Return the buffer size to use for `size_bytes`: XLA compiles once per size."""
        return fallback.at_least_one(size_bytes)

    def settle(self) -> None:
        """Run the pending computations of a lazy device."""

    def interrupt(self, how: str) -> None:
        """Report to the other ranks that this one was interrupted in a collective."""

    def report_departure(self, how: str) -> None:
        """Report to the other ranks that this one makes no more calls."""

    def close(self, how: str = "left") -> None:
        """Report that this rank has left, unless `how` is empty, and close the connections."""

    def disown(self) -> None:
        """Close the inherited connections in a forked child; its parent keeps its own."""

    def take_over(self, other: Self) -> None:
        """Share the records and groups of another view of this context."""
        self.steps, self.ended, self._dropped = other.steps, other.ended, other._dropped


def control_of(model: ComputationModel) -> ControlPlane:
    """Return the control plane that a model holds; a default one if it holds none."""
    control: ControlPlane | None = getattr(model, "control", None)
    return ControlPlane(model) if control is None else control


class SocketControlPlane(ControlPlane):
    """A control plane over sockets, with a hub for each group, whose first call connects it."""

    def __init__(self, model: ComputationModel, timeout_s: float | None) -> None:
        super().__init__(model)
        self.timeout_s = timeout_s
        self._is_alone = model.topology.world_size == 1
        self.hubs: dict[str, Hub | None] = {}
        """Hubs by the name of the group; None for a group whose ranks can't be connected."""
        self._memories: dict[str, MemoryCollectives] = {}  # by the group's name
        self._parts: set[str] = set()
        """Names of groups whose operations are parts of those of all ranks."""
        self._connects: dict[str, threading.RLock] = {}
        """Locks by group, held while it connects, as two threads may make its first call."""
        self.secret: bytes | None = None
        """The secret that ranks prove to each other before they trust their data plane; None
        until they share one."""
        self.proved: set[str] = set()
        """Names of the groups whose ranks have proved the secret."""
        self.has_levels: bool = False
        """Whether `TwoLevels` may use the model's collectives for the traffic between hosts."""
        self.is_one_host: bool = False
        """Whether all ranks of the job must be processes of this user on this host."""
        self.destroy: Callable[[Any], object] | None = None
        """Ends a group of the model's library, given its handle; None if the library can't."""
        self._handles: dict[str, tuple[Callable[[], Any], int]] = {}
        """By group: a weak reference to the library's own group, and its first reference count."""
        self._ending: dict[str, tuple[int, ...]] = {}
        """Groups that this rank has dropped, but not yet all of their ranks: the ranks, by name."""

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        """Return the blobs of every rank; the first call over a group connects it."""
        # Collective over `group`.
        if self._is_alone or (group is not None and len(group.ranks) == 1):
            return [blob]
        hub = self.hubs.get(EVERYBODY if group is None else group.name) or self._hub_of(group)
        if hub is None:
            return fallback.exchange(self.model, blob, group)
        # Like `allowed_s`, but without one more call in every collective.
        own_s = None if group is None else group.timeout_s
        blobs, sizes = hub.exchange(blob, self.timeout_s if own_s is None else own_s)
        # The round has cut longer blobs: if there is one, the data plane carries all of them whole.
        if max(sizes) <= hub.inline_bytes:
            return blobs
        host = self.host(group)
        if host is not None:
            return host.exchange(blob, sizes)
        return fallback.exchange_bodies(self.model, blob, list(sizes), group)

    def is_connected(self, group: Group | None) -> bool:
        """Return whether a group is connected."""
        return name_of(group) in self.hubs or self.model.topology.size(group) == 1

    def inline_bytes(self, group: Group | None, folds: bool = False) -> int:
        """Return the size of the longest CPU tensor in a round, a part of the longest blob."""
        hub = self.hubs.get(EVERYBODY if group is None else group.name)
        if hub is None:
            return super().inline_bytes(group, folds)
        return hub.inline_bytes // _TENSOR_PART

    def checks(self, group: Group | None) -> bool | None:
        """Return the setting that all ranks of `group` agreed on. Collective at creation."""
        key = EVERYBODY if group is None else group.name
        if key not in self.hubs and self.model.topology.size(group) > 1:
            self._hub_of(group)
        hub = self.hubs.get(key)
        return super().checks(group) if hub is None else hub.checks

    def compares_calls(self, group: Group | None) -> bool:
        """Return whether all ranks share memory for CPU tensors: comparing then costs 20 us."""
        key = EVERYBODY if group is None else group.name
        if key not in self.hubs:
            self.memory(group)  # collective at creation: connects a group with tensors on the CPU
        hub = self.hubs.get(key)
        return hub is not None and hub.compares_calls

    def memory(self, group: Group | None) -> MemoryCollectives | None:
        """Return the shared-memory collectives of `group`. Collective at creation."""
        key = EVERYBODY if group is None else group.name
        if key not in self.hubs:
            model = self.model
            # Accelerators' tensors can't lie in that memory, and one rank shares it with nobody.
            if model.transport_device.type != "cpu" or model.topology.size(group) == 1:
                return None
            self._hub_of(group)
        return self._memories.get(key)

    def _hub_of(self, group: Group | None) -> Hub | None:
        """Return the hub of a group, which this connects at its first call."""
        key = name_of(group)
        with self._connects.setdefault(key, threading.RLock()):
            if key not in self.hubs:  # another thread may have connected it meanwhile
                hub = connect_group(self, group)
                if hub is not None and self.model.transport_device.type == "cpu":
                    self._share_tensors(hub, key, group)
                    is_shared = type(self._memories.get(key)) is HostCollectives  # not across hosts
                    hub.compares_calls = hub.all_share_memory or is_shared
                self.hubs[key] = hub  # last: it shows other threads that the group is connected
        return self.hubs[key]

    def _share_tensors(self, hub: Hub, key: str, group: Group | None) -> None:
        """Create the collectives of a group through memory, if its ranks share any."""
        hosts = hub.hosts  # empty unless the ranks of every host share memory
        if len(hosts) == 1 and hub.arena is not None:
            # A copy without the handle: a reference to the group would keep the group alive.
            whose = None if group is None else replace(group, handle=None)
            self._memories[key] = HostCollectives(hub.arena, hosts[0], self, whose)
        # With one rank on each host, no ranks can share memory.
        elif len(hosts) < self.model.topology.size(group) and len(hosts) > 1:
            self._memories[key] = TwoLevels(hub.arena, hosts, self.model.topology.rank, self)

    def watch_over(self, group: Group) -> None:
        """Register a group, with a weak reference to its handle."""
        super().watch_over(group)
        handle = group.handle
        self._handles[group.name] = weakref.ref(handle), sys.getrefcount(handle)

    def begin_group(self, ranks: tuple[int, ...]) -> None:
        """End groups that all of their ranks have dropped. Collective over all ranks."""
        while self._dropped:
            name, members = self._dropped.popleft()
            self._ending[name] = members
        head = call_head(f"new_group {list(ranks)}", site())
        # A dropped group that is still in use, such as by DDP, ends later.
        mine = [name for name in self._ending if not self._is_lent(name)]
        blobs = self.exchange(head + json.dumps(mine).encode())
        everybody = range(len(blobs))
        dropped = [json.loads(bytes(each)) for each in unpack(blobs, head, lambda: everybody)]
        for name in sorted(self._ending):  # in the same order on all ranks
            if all(name in dropped[rank] for rank in self._ending[name]):
                del self._ending[name]
                handle = self._handles.get(name, _NO_HANDLE)[0]()
                if self.destroy is not None and handle is not None:
                    self.destroy(handle)
                self.end(name)

    def _is_lent(self, name: str) -> bool:
        """Return whether a dropped group's handle is still in use, such as by DDP."""
        reference, count = self._handles.get(name, _NO_HANDLE)
        handle = reference()
        # Without other users the count is lower now, by the reference of the dropped group.
        return handle is not None and sys.getrefcount(handle) >= count

    def adopt(self, group: Group) -> None:
        """Record a group created outside unisono, and end groups that were destroyed there."""
        known = self._handles.get(group.name)
        if known is not None and known[0]() is group.handle:
            return
        for name, (handle, _) in list(self._handles.items()):
            if self._is_destroyed(handle()):
                self.end(name)
        self._handles[group.name] = weakref.ref(group.handle), 0  # 0: lent until it is freed

    def _is_destroyed(self, handle: object) -> bool:
        """Return whether the library's group was destroyed; a freed one, None, counts as such."""
        try:
            return self.model.adopt_group(handle) is None
        except GroupMembershipError:
            return True

    def end(self, name: str) -> None:
        """Close a group's connections, and remove its records."""
        self._close_groups([name], lambda peers: peers.close("left"))
        for kept in (self._handles, self._connects):
            kept.pop(name, None)
        self.proved.discard(name)
        super().end(name)

    def _close_groups(self, names: list[str], leave: Callable[[Peers], object]) -> None:
        """Close the memory of groups, and leave their peers."""
        # Hubs first: a thread that waits in that memory raises once it finds no hub.
        hubs = [self.hubs.pop(name, None) for name in names]
        for memory in [self._memories.pop(name, None) for name in names]:
            if memory is not None:
                memory.close()
        for hub in hubs:
            if hub is not None:
                leave(hub.peers)

    def make_part(self, ranks: tuple[int, ...]) -> Group:
        """Create a group whose operations are parts of those of all ranks. Collective over all."""
        group = self.model.new_group(ranks)
        if self.model.topology.rank in ranks:
            self._parts.add(group.name)
        return group

    @property
    def shared_bytes(self) -> int:
        """Bytes that this rank's groups share for tensors."""
        arenas = [hub.arena for hub in self._connected_hubs()]
        return sum(arena.layout.size_bytes for arena in arenas if arena is not None)

    def _connected_hubs(self) -> list[Hub]:
        return [hub for hub in list(self.hubs.values()) if hub is not None]  # threads may add some

    def interrupt(self, how: str) -> None:
        """Report to the other ranks that this one was interrupted in a collective."""
        for hub in self._connected_hubs():
            hub.peers.interrupt(how)

    def report_departure(self, how: str) -> None:
        """Report to the other ranks that this one makes no more calls."""
        for hub in self._connected_hubs():
            hub.peers.report_departure(how)

    def close(self, how: str = "left") -> None:
        """Report that this rank has left, unless `how` is empty, and close the connections."""
        self._close_groups(list(self.hubs), lambda peers: peers.close(how))

    def disown(self) -> None:
        """Close the inherited connections in a forked child; its parent keeps its own."""
        self._close_groups(list(self.hubs), Peers.disown)

    def take_over(self, other: Self) -> None:
        """Share the connections, memory and proofs of another view of this context."""
        super().take_over(other)
        self.hubs, self.secret, self._memories = other.hubs, other.secret, other._memories
        self.proved, self._parts, self.is_one_host = other.proved, other._parts, other.is_one_host
        self._handles, self._ending = other._handles, other._ending
        for memory in self._memories.values():
            memory.belong_to(self)  # whose waits ask this view from now on

    def begin(self, group: Group | None, call: str) -> Check:
        """Record the start of an operation through memory; return the check for its waits."""
        return Wait(self, group, call, self.steps.begin(name_of(group), call))

    def gone(self, group: Group | None, step: int) -> Absent | None:
        """Return a rank of a group known to be gone, if any; waits for its report."""
        group, step = self._containing_operation(group, step)
        name = name_of(group)
        for key in dict.fromkeys((name, EVERYBODY)):  # a group may have no connections of its own
            hub = self.hubs.get(key)
            # None, for all: a group's own hub knows only its ranks.
            ranks = None if group is None or key == name else group.ranks
            absent = None if hub is None else hub.peers.gone(ranks, name, step)
            if absent is not None:
                return absent
        return None

    def late(self, group: Group | None, step: int, is_over: bool = True) -> str:
        """Return a report on ranks that haven't begun an operation, if known; waits 1 s at most."""
        group, step = self._containing_operation(group, step)
        name, ranks = name_of(group), None if group is None else group.ranks
        hub = self.hubs.get(name) or self.hubs.get(EVERYBODY)
        return "" if hub is None else hub.peers.late(ranks, name, step, is_over)

    def _containing_operation(self, group: Group | None, step: int) -> tuple[Group | None, int]:
        """Return group and number of the operation that contains this one, else its own."""
        if group is None or group.name not in self._parts:
            return group, step
        return None, self.steps.counts.get(EVERYBODY, 0)

    def where(self, call: str) -> str:
        """Return the prefix of a call's error."""
        topology = self.model.topology
        return f"rank {topology.rank} of {topology.world_size}: {call}"

    def warn_after_s(self) -> float:
        """Return the seconds after which a wait on the data plane logs the missing ranks."""
        hub = next(iter(self._connected_hubs()), None)
        return math.inf if hub is None else hub.warn_after_s
