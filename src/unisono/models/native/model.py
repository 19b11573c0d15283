"""Model of replicas that ``torch.distributed`` connects, over any of its backends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.accelerators import accelerator, current_device
from unisono.control.absent_ranks import LOOK_S, Wait
from unisono.control.plane import SocketControlPlane
from unisono.control.rendezvous import authenticate, host_of_this_process
from unisono.control.signatures import purpose_or
from unisono.deadlines import allowed_s, deadline, end_of_block, host_s, limit_of
from unisono.errors import (
    ArgumentError,
    CollectiveError,
    CollectiveTimeoutError,
    ContextError,
    GroupMembershipError,
    PeerFailedError,
    PeerRefusedError,
)
from unisono.model.contract import COMMON_DTYPES, ComputationModel
from unisono.model.handle import Handle
from unisono.model.launching import LaunchHooks
from unisono.model.reduction import ReduceOp, parse_op
from unisono.model.training import TrainingHooks
from unisono.models.native import process_group
from unisono.models.native.registration import NAME
from unisono.models.native.rendezvous import (
    Rendezvous,
    gloo_interface,
    is_one_host,
    listening_at,
    wrong_interface,
)
from unisono.topology import (
    EVERYBODY,
    ContextHint,
    Group,
    LaunchPlan,
    RankInfo,
    Topology,
    name_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_NAMES = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")  # the last three only on gloo
_OPS = {parse_op(name): getattr(dist.ReduceOp, name) for name in _NAMES}
_SLICE = timedelta(seconds=LOOK_S)
_LEAST_S = 0.001  # 0 means no limit to torch
_ERRORS: dict[str, type[CollectiveError]] = {
    "timed out": CollectiveTimeoutError,
    "closed by peer|reset by peer|connection closed|broken pipe|socket closed": PeerFailedError,
}
_MANY = 8  # from this many ranks, a ring is slower than two operations over rank 0
# Torch 2.13 deprecates the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _KnownBackends:
    """The backends that torch knows at the time of access, as more may be registered later."""

    def __get__(self, _instance: object, _owner: type) -> tuple[str, ...]:
        names = dist.Backend.backend_list
        # torch has made the names "undefined" and "fake", of its own tests, for no ranks.
        return tuple(name for name in names if name not in (dist.Backend.UNDEFINED, "fake"))


class _Device:
    """A model's device; without one, the current accelerator, which a program may change."""

    def __get__(self, instance: Any, _owner: type) -> Any:
        if instance is None or instance._device is None:
            return self if instance is None else current_device()  # which initialises it
        return vars(instance).setdefault("device", instance._device)


class NativeModel(ComputationModel, LaunchHooks, TrainingHooks):
    """The default process group of ``torch.distributed``, created here or by the user."""

    name: ClassVar[str] = "native-dist"
    backends: ClassVar[tuple[str, ...]] = cast("Any", _KnownBackends())
    capabilities: ClassVar[frozenset[str]] = frozenset({"groups", "send_recv"})
    options: ClassVar[frozenset[str]] = frozenset(
        {"timeout", "init_method", "store", "device", "device_id", "pg_options", "group_name"}
    )
    dtypes: frozenset[torch.dtype] = COMMON_DTYPES
    # Calls nothing after its first access, since collectives read it; subclasses may override it.
    device: torch.device = cast("Any", _Device())

    def __init__(
        self,
        topology: Topology,
        device: torch.device | None,
        is_owner: bool,
        timeout: timedelta | None = None,
        interface: str = "",
    ) -> None:
        # For `is_alive`: once torch has another default group, this context is over.
        self._pg = dist.group.WORLD
        self._backend = str(dist.get_backend())
        self._topology = topology
        self._is_owner = is_owner
        self._interface = interface
        if device is None:
            kind = accelerator()
            if kind is None or not process_group.serves(self._backend, kind.type):
                device = torch.device("cpu")
        self._device = device
        self._table = process_group.backends_by_device(self._backend)
        self._timeout = timeout or process_group.timeout_of(self._pg, self.transport_device)
        carrier = self._table.get(self.transport_device.type)
        is_gloo = carrier in ("gloo", NAME)
        self._gathers_at_root = carrier == "gloo" and topology.world_size >= _MANY
        timeout_s = None if self._timeout is None else self._timeout.total_seconds()
        self.control: SocketControlPlane = SocketControlPlane(self, timeout_s)
        self.control.has_levels = is_gloo
        if torch.__version__ >= "2.7":  # in older ones, a destroyed group may wait for its threads
            self.control.destroy = _destroy
        if is_gloo:
            process_group.settle_at_exit()
        # On an accelerator a wait only orders streams, so that it can't be watched.
        self._is_watched = self.transport_device.type == "cpu" and topology.world_size > 1
        self._ops = {op: _OPS[op] for op in _OPS if is_gloo or not op.is_bitwise}
        # Gloo's reduce_scatter sums whatever the operation: in torch 2.6, but not in torch 2.9.
        only_sums = is_gloo and torch.__version__ < "2.9"
        self._scatter_ops = {ReduceOp.SUM: self._ops[ReduceOp.SUM]} if only_sums else self._ops

    @classmethod
    def why_unavailable(cls, backend: str) -> str | None:
        names = [pair.rpartition(":")[2] for pair in backend.split(",")]
        missing = [name for name in names if not dist.is_backend_available(name)]
        if not missing:
            return None
        what = "it" if missing == [backend] else ", ".join(missing)
        return f"torch {torch.__version__} was built without {what}: install a build that has it"

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        pg = dist.group.WORLD
        if pg is None or dist.get_backend(pg) == "xla":  # those replicas are the XLA model's
            return None
        rank, world_size = pg.rank(), pg.size()
        info = hint.environment
        topology = placed = process_group.place_by_store(rank, world_size)
        if info is not None and (info.rank, info.world_size) == (rank, world_size):
            topology = info.topology()
            # A store on this host suggests one node; another local rank shows that there are more.
            if topology.local_rank in (None, placed.local_rank) and not placed.is_guess:
                topology = topology.or_else(placed)
        local_rank = hint.local_rank
        if local_rank is None and info is None:
            text = os.environ.get("LOCAL_RANK", "")  # LOCAL_RANK alone doesn't show the other ranks
            local_rank = int(text) if text.isdecimal() else None
        if local_rank is not None:
            topology = replace(topology, local_rank=local_rank, is_guess=False)
        return cls(topology, getattr(pg, "bound_device_id", None), is_owner=False)

    @classmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        device = process_group.choose_device(backend, info, options.pop("device", None))
        carrier = process_group.backends_by_device(backend).get(device.type)
        if device.type != "cpu" and carrier != "gloo":
            # Binds the group to the device, so its barriers and new groups needn't guess it.
            options.setdefault("device_id", device)
        timeout = options.pop("timeout", None)
        rendezvous = Rendezvous(info, timeout)
        url = options.get("init_method")
        if "store" not in options and (url is None or rendezvous.set_address(url)):
            options["store"] = rendezvous.store()
            options.pop("init_method", None)  # torch rejects both together
        is_local = is_one_host(rendezvous.info)
        interface = gloo_interface(rendezvous.info)
        try:
            with listening_at(interface):
                left = rendezvous.left()
                allowed = process_group.join(backend, rendezvous.info, timeout, left, options)
            model = cls(info.topology(), device, True, allowed, interface)
            model.control.secret, model.control.is_one_host = rendezvous.secret, is_local
            if info.world_size > 1:
                # The exchange also keeps ranks from ending, and looking dead, while others join.
                with deadline(rendezvous.left()):
                    hosts = model.exchange(host_of_this_process().encode())
                    model._topology = info.topology().among(hosts)
                    vars(model).pop("topology", None)  # that of `info`
        except (RuntimeError, ValueError, OSError) as error:
            if dist.group.WORLD is not None:
                dist.destroy_process_group()
            options.clear()  # the error refers to this frame, and a store listens
            if isinstance(error, PeerRefusedError):  # it says more than the text below
                raise
            here = rendezvous.info
            where = url or f"{here.master_addr}:{here.master_port}"
            raise ContextError(
                f"rank {info.rank} of {info.world_size} couldn't join the {backend} group at "
                f"{where} (from {info.source}): {error}{wrong_interface(here)}"
            ) from error
        return model

    @classmethod
    def worker_environ(cls, plan: LaunchPlan) -> dict[str, str]:
        if plan.nnodes > 1 or sys.platform != "linux":
            return {}
        return {"GLOO_SOCKET_IFNAME": "lo"}  # else gloo listens at the address of the host's name

    def finalize(self) -> None:
        self.control.close()
        if self._is_owner and self.is_alive():
            process_group.settle()  # else destroying a group could deadlock with gloo's threads
            dist.destroy_process_group()

    def abort(self) -> None:
        self.control.close(how="")
        if not (self._is_owner and self.is_alive()):
            return
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if self.transport_device.type != "cpu" and abort is not None:
            # Destroying waits for kernels that never end: github.com/pytorch/torchtitan/issues/1342
            abort()
        else:
            dist.destroy_process_group()

    def is_alive(self) -> bool:
        return dist.group.WORLD is self._pg

    @property
    def backend(self) -> str:
        return self._backend

    # Cached, as `device` is.

    @cached_property
    def topology(self) -> Topology:
        return self._topology

    @cached_property
    def transport_device(self) -> torch.device:
        # Gloo takes only tensors in the host's memory, and a backend without this device gets them.
        is_hosted = self._table.get(self.device.type, "gloo") == "gloo"
        return torch.device("cpu") if is_hosted else self.device

    def wrap_module(self, module: nn.Module, wrapper: str, **options: Any) -> nn.Module | None:
        return process_group.wrap(module, wrapper, self.device, **options)

    @property
    def has_torch_sync_batchnorm(self) -> bool:
        return self.device.type in ("cuda", "xpu", "hpu")

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        return self.control.exchange(blob, group)

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        rows = tensor.new_empty((self.topology.size(group), *tensor.shape))
        # Used only until unisono's own sockets connect the ranks.
        if self._gathers_at_root and group is None and EVERYBODY not in self.control.hubs:
            return self._gather_at_root(tensor, rows)
        flat = (rows.view(-1), tensor.view(-1))
        self._run("all_gather", group, _all_gather, *flat)
        return rows

    def _gather_at_root(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Gather over rank 0 while many ranks are set up, as gloo's own all_gather is a ring."""
        # The ring takes as many steps as there are ranks, each on every rank.
        is_root = self.topology.rank == 0
        self._run("all_gather", None, dist.gather, tensor, [*rows] if is_root else None, 0)
        self._run("all_gather", None, dist.broadcast, rows, 0)
        # Overwritten, because a stranger in rank 0's place could replay this rank's earlier proof.
        rows[self.topology.rank] = tensor
        return rows

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        native = self._ops.get(op)
        if native is None:
            return super().all_reduce(tensor, op, group)
        self._run(f"all_reduce {op.name}", group, dist.all_reduce, tensor, native)
        return tensor

    def start_all_reduce(
        self, tensor: Tensor, op: ReduceOp, group: Group | None = None
    ) -> Handle[Tensor] | None:
        native = self._ops.get(op)
        if native is None:
            return None
        started = self._begin(f"all_reduce {op.name}", group, dist.all_reduce, tensor, native)
        # This thread's deadline also limits a wait in another thread.
        wait = partial(self._wait, group, *started, end_of_block())
        return Handle(wait, started[1].is_completed).then(lambda _: tensor)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        self._run(f"broadcast from {src}", group, dist.broadcast, tensor, src)
        return tensor

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        native = self._scatter_ops.get(op)
        if native is None:
            return super().reduce_scatter(rows, op, group)
        row = rows.new_empty(rows.shape[1:])
        flat = (row.view(-1), rows.view(-1), native)
        self._run(f"reduce_scatter {op.name}", group, _reduce_scatter, *flat)
        return row

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        got = torch.empty_like(rows)
        self._run("all_to_all", group, dist.all_to_all_single, got, rows, None, None)
        return got

    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        self._message(f"send to rank {dst}", group, dist.isend, tensor, dst)

    def recv(self, into: Tensor, src: int, group: Group | None = None) -> Tensor:
        self._message(f"recv from rank {src}", group, dist.irecv, into, src)
        return into

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        allowed = options.setdefault("timeout", self._timeout)
        try:
            # Without use_local_synchronization, because that names the group by this rank's count
            # of groups, which differs between members of overlapping groups (torch 2.13).
            with listening_at(self._interface):
                made = dist.new_group(list(ranks), **options)
        except TypeError as error:
            raise ArgumentError(f"new_group: {error}") from error
        except (RuntimeError, ValueError) as error:
            self._fail(f"new_group({list(ranks)})", None, error)
        if self.topology.rank not in ranks:
            return Group(ranks)
        timeout_s = None if allowed is None else allowed.total_seconds()
        group = Group(ranks, made, made.group_name, timeout_s)
        secret = self.control.secret
        if secret is not None and len(ranks) > 1:  # torch has opened new connections for it
            # A group of another backend, such as gloo, may take CPU tensors only.
            kinds = {device.type for device in made._device_types}
            device = (
                self.transport_device
                if self.transport_device.type in kinds
                else torch.device("cpu")
            )
            authenticate(self, group, secret, group.name, device)
            self.control.proved.add(group.name)
        return group

    def adopt_group(self, handle: object) -> Group | None:
        if handle is dist.GroupMember.NON_GROUP_MEMBER:
            return Group(())  # stands for a group without this rank
        if not isinstance(handle, dist.ProcessGroup):
            return None
        try:
            ranks = tuple(dist.get_process_group_ranks(handle))
        except KeyError as error:
            raise GroupMembershipError(
                f"{handle} isn't a group of the live context: create it again with new_group"
            ) from error
        if handle is self._pg:
            return Group(ranks, handle, EVERYBODY)
        timeout = process_group.timeout_of(handle, self.transport_device)
        timeout_s = None if timeout is None else timeout.total_seconds()
        group = Group(ranks, handle, handle.group_name, timeout_s)
        self.control.adopt(group)
        return group

    def _run(self, call: str, group: Group | None, start: Callable[..., Any], *args: Any) -> None:
        """Run one operation to completion. Collective over `group`."""
        # Without other ranks to watch, or on an accelerator, torch's own wait is enough.
        if not self._is_watched:
            try:
                start(*args, _handle(group))
            except RuntimeError as error:
                self._fail(call, group, error)
            return
        self._wait(group, *self._begin(call, group, start, *args))

    def _begin(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> tuple[str, Any, int]:
        """Start an operation; return its name, torch's handle and its number, 0 for none."""
        call, step = purpose_or(call), 0
        if self._is_watched:
            step = self.control.steps.begin(name_of(group), call)
        try:
            return call, start(*args, _handle(group), async_op=True), step
        except RuntimeError as error:
            self._fail(call, group, error, step)

    def _wait(
        self, group: Group | None, call: str, work: Any, step: int, until: float | None = None
    ) -> None:
        check = Wait(self.control, group, call, step, until)
        while True:
            # Read before the wait: an error of an operation that was over is its own, while any
            # other error may be only the end of a slice.
            is_over = not self._is_watched or work.is_completed()
            try:
                if is_over:
                    work.wait()
                else:
                    work.wait(_SLICE)
                return
            except RuntimeError as error:  # also raised at the end of a slice
                if is_over:
                    check.fail(_ERRORS, error)
            if not work.is_completed():  # else it was done just after the slice, or failed
                check()

    def _message(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> None:
        """Send or receive with a single wait, because gloo's messages allow no second one."""
        # Called on two ranks; raises as `_run` does.
        limit_s = limit_of(allowed_s(self.control.timeout_s, group))
        try:
            work = start(*args, _handle(group))
            if self._is_watched and limit_s is not None:
                work.wait(timedelta(seconds=max(host_s(limit_s), _LEAST_S)))
            else:
                work.wait()
        except RuntimeError as error:
            self._fail(call, group, error)

    def _fail(self, call: str, group: Group | None, error: Exception, step: int = 0) -> NoReturn:
        """Raise unisono's error for one of torch's."""
        Wait(self.control, group, call, step).fail(_ERRORS, error)


def _handle(group: Group | None) -> Any:
    return None if group is None else group.handle


def _destroy(handle: Any) -> None:
    process_group.settle()
    with suppress(ValueError):  # the user has destroyed it
        dist.destroy_process_group(handle)
