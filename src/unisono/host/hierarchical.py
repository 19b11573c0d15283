"""Reductions of tensors between hosts that have several ranks, in two levels.

Inside each host tensors go through the memory that its ranks share, between hosts through the
model's own all_reduce. A sum first adds the ranks of each host in their order, then the hosts: all
ranks get the same bits. A short tensor goes through the first rank of each host. A long one is cut
in slices, if all hosts have equally many ranks: each rank reduces one slice for its host, then with
its twins, the ranks at the same place of the other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unisono.host.arena import Arena, Check
from unisono.host.collectives import DTYPES, HostCollectives, Monitor, Turns
from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp, mean_factors
from unisono.topology import Group

_MIB = 1 << 20
_WHOLE_BYTES = 4 * _MIB  # longer tensors go in slices
_BLOCK_BYTES = 16 * _MIB


class HostsControl(Monitor, Protocol):
    """The members of the control plane that `TwoLevels` uses."""

    @property
    def model(self) -> ComputationModel:
        """The model that carries tensors between hosts."""

    def make_part(self, ranks: tuple[int, ...]) -> Group:
        """Create a group whose operations are parts of those of all ranks. Collective over all."""


class _HostMonitor:
    """The monitor of operations within one host, which are parts of one of all ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.check: Check = lambda rank: None
        self._ranks = ranks

    def begin(self, group: Group | None, call: str) -> Check:
        return lambda position: self.check(self._ranks[position])

    def interrupt(self, how: str) -> None:
        """Ignore it: the operation of all ranks reports it."""


class TwoLevels(Turns):
    """The all_reduce of a model, for all ranks of a context on several hosts."""

    # It accepts the same tensors as `HostCollectives`, if their dtype is in `dtypes`.
    _monitor: HostsControl

    def __init__(
        self,
        arena: Arena | None,
        hosts: Sequence[Sequence[int]],
        rank: int,
        control: HostsControl,
    ) -> None:
        super().__init__(control)
        self.size: int = sum(len(ranks) for ranks in hosts)
        self.block_bytes: int = _BLOCK_BYTES
        self.large_bytes: int = _WHOLE_BYTES
        self.dtypes: frozenset[torch.dtype] = DTYPES & control.model.dtypes
        self._hosts = hosts
        self._ranks = next(ranks for ranks in hosts if rank in ranks)
        self._position = self._ranks.index(rank)
        # Else a position has no twin on some host.
        self._is_even = len({len(ranks) for ranks in hosts}) == 1
        self._host_monitor = _HostMonitor(self._ranks)
        # Without an arena this rank is alone on its host, and has nothing to reduce there.
        self._host = (
            None if arena is None else HostCollectives(arena, self._ranks, self._host_monitor)
        )
        self._twins: list[Group] = []  # by position, as far as they exist yet

    def close(self) -> None:
        """Release the memory; later calls raise."""
        super().close()
        self._twins.clear()
        if self._host is not None:
            self._host.close()

    def _twins_at(self, position: int, count: int) -> Group:
        """Return the twins at a position; the first `count` are created at their first use."""
        # Creating a group is collective: all ranks create those of all twins, in the same order.
        while len(self._twins) < count:
            place = len(self._twins)
            ranks = tuple(sorted(ranks[place] for ranks in self._hosts))
            self._twins.append(self._monitor.make_part(ranks))
        return self._twins[position]

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        """Reduce [*shape] of all ranks to one [*shape] on every rank, in place."""
        # Collective over all ranks. Like `HostCollectives.all_reduce`, but it adds host by host.
        flat = tensor.view(-1)
        is_cut = self._is_even and flat.nbytes > _WHOLE_BYTES
        reduce = self._reduce_slices if is_cut else self._reduce_whole

        def work(check: Check) -> None:
            self._host_monitor.check = check  # waits within the host check all ranks, too
            reduce(flat, op)

        self._run(f"all_reduce {op.name}", work, tensor)
        return tensor

    def _reduce_whole(self, flat: Tensor, op: ReduceOp) -> None:
        """Reduce to the first rank of each host, then between these; broadcast in each host."""
        # On all ranks, not only the leaders: the first use creates the group, which is collective.
        leader, leaders = self._ranks[0], self._twins_at(0, 1)
        step, after = op, 1.0
        if op is ReduceOp.AVERAGE:
            before, after = mean_factors(self.size)
            step = ReduceOp.SUM  # hosts may have different numbers of ranks
            flat.mul_(before)  # before the sum, which could overflow
        if self._host is not None:
            self._host.reduce(flat, leader, step)
        if self._position == 0:
            self._reduce_between(flat, step, leaders)
            if after != 1.0:
                flat.div_(after)
        if self._host is not None:
            self._host.broadcast(flat, leader)

    def _reduce_slices(self, flat: Tensor, op: ReduceOp) -> None:
        """Reduce one slice in each rank of a host, and each slice between the hosts."""
        assert self._host is not None  # as hosts have equally many ranks, and one has several
        twins = self._twins_at(self._position, len(self._ranks))
        mine = self._host.reduce_slice(flat, op)
        if op is ReduceOp.AVERAGE:  # here of the averages of each host
            before, after = mean_factors(len(self._hosts))
            self._reduce_between(mine.mul_(before), ReduceOp.SUM, twins)
            if after != 1.0:
                mine.div_(after)
        else:
            self._reduce_between(mine, op, twins)
        self._host.gather_slices(flat)

    def _reduce_between(self, flat: Tensor, op: ReduceOp, group: Group) -> None:
        if flat.numel():  # a short tensor's last slices are empty, on all hosts alike
            total = self._monitor.model.all_reduce(flat, op, group)
            if total is not flat:
                flat.copy_(total)


MemoryCollectives = HostCollectives | TwoLevels
"""Collectives through memory, at least inside each host."""
