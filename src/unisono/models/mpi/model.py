"""Model ``mpi-dist``: the processes of an MPI world, through mpi4py's buffer interface."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from unisono.arguments import only_timeout_s
from unisono.control.plane import SocketControlPlane
from unisono.deadlines import DEFAULT_TIMEOUT_S, allowed_s
from unisono.model.contract import ComputationModel
from unisono.model.handle import Handle
from unisono.model.reduction import ReduceOp
from unisono.models.mpi import world
from unisono.models.mpi.operations import DATATYPES, MPICalls, is_folded_by_torch
from unisono.topology import EVERYBODY, ContextHint, Group, RankInfo, Topology, named, pair

if TYPE_CHECKING:
    from typing_extensions import Self


_TAG = 32_767  # the largest tag that every MPI allows, to avoid the tags of users' messages


class _ControlPlane(SocketControlPlane):
    """A control plane whose ranks meet in MPI calls, from the threads that MPI allows."""

    calls: MPICalls

    @property
    def allows_threads(self) -> bool:
        return self.calls.allows("SERIALIZED")

    @property
    def separates_groups(self) -> bool:
        return self.calls.allows("MULTIPLE") and super().separates_groups

    def compares_calls(self, group: Group | None) -> bool:
        """Return whether all ranks share memory, also if a group of the user's has no hub."""
        everybody = self.hubs.get(EVERYBODY)
        return super().compares_calls(group) or (everybody is not None and everybody.compares_calls)

    def interrupt(self, how: str) -> None:
        """Report an interrupted call to the other ranks, and end the job with this process."""
        super().interrupt(how)
        self.calls.mark_interrupted(how)


class MpiModel(ComputationModel):
    """``MPI.COMM_WORLD``, started by `initialize` or adopted from the user's program."""

    # Collectives use a duplicate of the world, so that their messages never match the user's. An
    # adopted world is duplicated by the first collective over it, which every rank calls anyway;
    # `send` and `recv` use the adopted world itself, with a reserved tag. MPI runs until the
    # process exits, since it can't be initialised twice. MPI itself reduces types of 32 and 64
    # bits; torch computes sums and products of smaller types, within an MPI operation made of its
    # functions. With two ranks every result equals that of `fold_tensors` bit for bit. Set-up waits
    # for all ranks for at most ``timeout`` (60 s by default), and calls no MPI collective before.
    # All later calls have the same ``timeout`` (30 minutes by default), and so poll the
    # non-blocking form of the call, which adds about 1 us, and takes up to twice as long for
    # megabytes. With ``timeout=datetime.timedelta.max`` the call blocks in MPI without a limit.

    name: ClassVar[str] = "mpi-dist"
    backends: ClassVar[tuple[str, ...]] = ("mpi4py",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"groups", "send_recv"})
    launcher: ClassVar[str] = "mpi"
    options: ClassVar[frozenset[str]] = frozenset({"timeout", "device"})
    dtypes: frozenset[torch.dtype] = frozenset(DATATYPES)
    largest_count: ClassVar[int] = 2**31 - 1
    """Elements in one MPI call, which MPI 3 counts with a C int; more are sent in several calls."""
    _has_started_mpi: ClassVar[bool] = False
    _adopted: ClassVar[Any] = None

    def __init__(
        self,
        mpi: Any,
        topology: Topology,
        device: torch.device,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._mpi = mpi
        self._topology, self._device = topology, device
        self._end = world.EndOfJob.install(mpi)
        self._world: Any = None  # the duplicate of the world, once `_communicator` has made it
        self._message_comm: Any = mpi.COMM_WORLD  # of `send` and `recv` among all ranks
        self._comms: list[Any] = []  # made here, so that `finalize` frees those that are left
        self._is_live = True
        self._groups_made: dict[tuple[int, ...], int] = {}  # how many of the same ranks
        self.control: _ControlPlane = _ControlPlane(self, timeout_s)
        self.control.destroy = mpi.Comm.Free
        self._calls = self.control.calls = MPICalls(mpi, self.control, self._end.end_at_exit)

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        mpi = world.live()
        if mpi is None or MpiModel._has_started_mpi:  # not started by the user
            return None
        topology = world.adopted_topology(mpi, hint, os.environ)
        if topology is None:
            return None
        adopted = cls._adopted
        # A second instance would duplicate the world again, and wait for ranks that have only one.
        if not (isinstance(adopted, cls) and adopted.is_alive()):
            adopted = cls._adopted = cls(mpi, topology, world.choose_device(None, None))
        adopted._topology = topology  # the hint may have changed
        vars(adopted).pop("topology", None)
        return adopted

    @classmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        mpi, has_started = world.start()
        MpiModel._has_started_mpi |= has_started
        timeout = options.get("timeout")
        world.gather(mpi, info, timeout)  # first, because MPI's collectives can't time out
        topology = world.measured_topology(mpi, info)
        device = world.choose_device(topology.local_rank, options.get("device"))
        timeout_s = DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        model = cls(mpi, topology, device, None if timeout == timedelta.max else timeout_s)
        # All ranks are in this call, so the duplicate of the world can carry messages, too.
        model._message_comm = model._communicator(None)
        model.exchange(b"")  # connects the ranks
        return model

    @classmethod
    def why_unavailable(cls, backend: str) -> str | None:
        return world.why_unavailable()

    def finalize(self) -> None:
        self._end.remove()  # first, also for an aborted context: a call below may raise
        self.control.close()
        if self.is_alive():  # else pending operations may never end, or MPI is finalized
            is_finished = self._calls.finish()
            with self._calls.mapped_errors("Comm_free"):
                # Unfinished calls still use them; a freed one is null, and so false.
                for comm in filter(None, self._comms if is_finished else ()):
                    comm.Free()
        self._is_live = False

    def abort(self) -> None:
        """Close the context; the job ends when this process has printed its error and exits."""
        self.control.close(how="")
        self._is_live = False
        self._end.end_at_exit(f"rank {self.topology.rank}: the context was aborted")

    def is_alive(self) -> bool:
        return self._is_live and not self._mpi.Is_finalized()

    # Collectives read these, and call nothing after the first time; subclasses may override them.

    @cached_property
    def topology(self) -> Topology:
        return self._topology

    @cached_property
    def device(self) -> torch.device:
        return self._device

    @cached_property
    def transport_device(self) -> torch.device:
        is_direct = self.device.type == "cuda" and world.is_cuda_aware(self._mpi)
        return self.device if is_direct else torch.device("cpu")

    def _communicator(self, group: Group | None) -> Any:
        """Return a group's communicator; the first call for all ranks duplicates the world."""
        if group is not None:
            return group.handle
        if self._world is None:
            with self._calls.mapped_errors("Comm_dup"):
                self._world = self._keep(self._mpi.COMM_WORLD.Dup())
        return self._world

    def _keep(self, comm: Any) -> Any:
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._comms = [*filter(None, self._comms), comm]
        return comm

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor into parts small enough for one call of MPI."""
        return torch.split(tensor.view(-1), self.largest_count)

    def _is_too_large(self, row: Tensor, group: Group | None) -> bool:
        return row.numel() * self.topology.size(group) > self.largest_count

    @staticmethod
    def _is_fold_of_device_memory(tensor: Tensor) -> bool:
        """Return whether torch's fold within MPI would read device memory, which it can't."""
        return not tensor.is_cpu and is_folded_by_torch(tensor.dtype)

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        return self.control.exchange(blob, group)

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        rows = tensor.new_empty((self.topology.size(group), *tensor.shape))
        if self._is_too_large(tensor, group):
            rows[self.topology.position(group)] = tensor
            for row, rank in zip(rows, self.topology.members(group), strict=True):
                self.broadcast(row, rank, group)
            return rows
        self._run("Allgather", group, tensor, rows)
        return rows

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if self._is_fold_of_device_memory(tensor):
            return super().all_reduce(tensor, op, group)
        native = self._calls.native_op(op, tensor.dtype)
        for piece in self._pieces(tensor):
            self._run("Allreduce", group, self._mpi.IN_PLACE, piece, native)
        return tensor

    def start_all_reduce(
        self, tensor: Tensor, op: ReduceOp, group: Group | None = None
    ) -> Handle[Tensor] | None:
        is_whole = tensor.numel() <= self.largest_count and tensor.is_cpu
        # A handle may be waited for in any thread, while another thread is in MPI.
        if not is_whole or not self._calls.allows("MULTIPLE"):
            return None
        calls, comm = self._calls, self._communicator(group)
        native = calls.native_op(op, tensor.dtype)
        in_place = self._mpi.IN_PLACE
        return calls.start("Iallreduce", group, comm, tensor, in_place, tensor, native)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        root = self.topology.position(group, src)
        for piece in self._pieces(tensor):
            self._run("Bcast", group, piece, root)
        return tensor

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp, group: Group | None = None
    ) -> Tensor | None:
        if self._is_fold_of_device_memory(tensor):
            return super().reduce(tensor, dst, op, group)
        native = self._calls.native_op(op, tensor.dtype)
        is_root, root = self.topology.rank == dst, self.topology.position(group, dst)
        for piece in self._pieces(tensor):
            # MPI allows IN_PLACE only at the root, and a target only there.
            buffers = (self._mpi.IN_PLACE, piece) if is_root else (piece, None)
            self._run("Reduce", group, *buffers, native, root)
        return tensor if is_root else None

    def scatter(
        self, rows: Tensor | None, into: Tensor, src: int, group: Group | None = None
    ) -> Tensor:
        if self._is_too_large(into, group):
            return super().scatter(rows, into, src, group)
        root = self.topology.position(group, src)
        self._run("Scatter", group, rows, into, root)
        return into

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if rows.numel() > self.largest_count or self._is_fold_of_device_memory(rows):
            return super().reduce_scatter(rows, op, group)
        row, native = rows.new_empty(rows.shape[1:]), self._calls.native_op(op, rows.dtype)
        self._run("Reduce_scatter_block", group, rows, row, native)
        return row

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        if rows.numel() > self.largest_count:
            return super().all_to_all(rows, group)
        received = torch.empty_like(rows)
        self._run("Alltoall", group, rows, received)
        return received

    def _run(self, name: str, group: Group | None, *args: Any) -> None:
        """Call a method of the group's communicator. Collective over `group`."""
        self._calls.run(name, group, self._communicator(group), *args)

    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        self._message("Send", tensor, (self.topology.rank, dst), dst, group)

    def recv(self, into: Tensor, src: int, group: Group | None = None) -> Tensor:
        self._message("Recv", into, (src, self.topology.rank), src, group)
        return into

    def _message(
        self, name: str, tensor: Tensor, ends: tuple[int, int], peer: int, group: Group | None
    ) -> None:
        # An adopted world itself is used, because only all ranks together could duplicate it.
        comm = self._message_comm if group is None else group.handle
        both = replace(pair(*ends), timeout_s=allowed_s(None, group))
        position = self.topology.position(group, peer)
        for piece in self._pieces(tensor):
            self._calls.run(name, both, comm, piece, position, _TAG)

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        """Create a communicator of some ranks; other ranks return at once."""
        # Collective at creation, over the members.
        timeout_s = only_timeout_s("new_group on mpi4py", options)
        if self.topology.rank not in ranks:
            return Group(ranks)
        parent = self._message_comm
        # MPI can't time out here, but all ranks have just met in `begin_group`.
        with self._calls.mapped_errors(f"new_group({list(ranks)})"):
            comm = self._keep(parent.Create_group(parent.group.Incl(ranks), _TAG))
        # The count gives each group of the same ranks its own connections.
        count = self._groups_made[ranks] = self._groups_made.get(ranks, 0) + 1
        group = Group(ranks, comm, f"{ranks} {count}", timeout_s)
        if self.control.hubs.get(EVERYBODY, self) is None:  # the ranks couldn't be connected
            self.control.hubs[group.name] = None  # nor these: trying again may take 10 s
        return group

    def adopt_group(self, handle: object) -> Group | None:
        if not isinstance(handle, self._mpi.Comm):
            return None
        ranks = world.ranks_of(self._mpi, handle)
        # MPI has no name of a communicator that is the same on all ranks. Those of the same ranks
        # share a name, and so can't have connections of their own.
        name = f"communicator of {named(ranks)}"
        self.control.hubs[name] = None
        return Group(ranks, handle, name)
