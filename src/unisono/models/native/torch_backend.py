"""The backend ``"unisono"`` of ``torch.distributed``: gloo, and memory shared by a host's ranks.

``torch.distributed.init_process_group("unisono")`` creates a process group whose collectives of CPU
tensors use that memory, for programs that only call torch. If all ranks of a group are on one
host they compare their calls first, so a mismatched call or a missing rank is reported.
Gloo carries the rest: messages, sparse tensors, groups over several hosts.

Torch 2.13 renames some methods; here both names have the same method. Torch's functional
collectives call the coalesced forms, and hold the GIL meanwhile: gloo's worker thread may wait for
the GIL while holding the lock on its queue, so these calls must not reach gloo from C++.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from unisono.control.plane import SocketControlPlane
from unisono.control.signatures import OUR_FRAMES, call_head, site, unpack
from unisono.errors import ContextError
from unisono.host.collectives import HostCollectives as Host, Turn, folds
from unisono.model.reduction import ReduceOp, parse_op
from unisono.models.native.process_group import settle_at_exit
from unisono.payload.tensors import from_bytes, to_bytes
from unisono.recording.records import UNRECORDED, CallLog, Token, job_of, plane_is
from unisono.recording.status_page import CALLED, IN_FLIGHT
from unisono.topology import Group, Topology, pair

_CPU = torch.device("cpu")
_PACKAGE = f"{OUR_FRAMES[0]}{os.sep}"
_SKIPPED_FILES = (__file__, *OUR_FRAMES[1:])  # files of the frames between a call and its caller
_c10d: Any = _distributed_c10d  # its stubs have other parameters in each version of torch
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.Work
_UNREADY = (UninitializedParameter, UninitializedBuffer)  # without memory yet
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPS: dict[Any, ReduceOp] = {
    getattr(dist.ReduceOp.RedOpType, name): parse_op(name) for name in _NAMES
}


def _through_shared_memory(
    name: str, at: int, count: int, is_list: bool = True
) -> Callable[..., Any]:
    """Decorate a collective.

    `name` is its name in the records; `count` is the number of arguments that precede torch's
    options. Argument `at` is the tensor, or a list of one, whose memory is shared. The method
    receives it, torch's options or None, and the other arguments; it returns False if gloo must
    carry the call. Gloo also carries a call whose tensor has no such memory, or that uses another
    of torch's signatures, which takes tensors instead of lists.
    """

    def decorate(method: Callable[..., bool | None]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, opts: Any = None, **named: Any) -> Any:
            given = args if opts is None else (*args, opts)
            by_gloo = functools.partial(getattr(self._gloo, method.__name__), *given, **named)
            # Torch's lists of tensors are among the first two arguments.
            bare_tensors = [each for each in args[:2] if is_list and isinstance(each, Tensor)]
            # Another of torch's signatures, which takes tensors instead of lists.
            if bare_tensors or named or not count <= len(args) <= count + 1:
                return self._by_gloo(name, bare_tensors[0] if bare_tensors else None, by_gloo)
            # Torch passes its options by name, or after the other arguments.
            opts, args = args[count] if len(args) > count else opts, args[:count]
            tensor = _single(args[at]) if is_list else args[at]
            host = self._shared if _has_memory(tensor) else None
            if host is None:
                return self._by_gloo(name, tensor, by_gloo)
            with self._recorded_call(name, tensor) as token:
                if method(self, host, tensor, opts, *args[:at], *args[at + 1 :]) is False:
                    return _start_recorded(token, by_gloo)
            # Torch's first argument has the outputs, whichever argument's memory is shared.
            return _done(args[0] if is_list else [args[0]])

        return call

    return decorate


def _one_by_one(name: str) -> Callable[..., Any]:
    """Return the coalesced form of a collective from one tensor to another."""

    def call(self: Any, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        # Not by gloo, as the GIL is held: see the module's docstring.
        for output, tensor in zip(outputs, tensors, strict=True):
            getattr(self, name)(output, tensor, opts).wait()
        return _done(outputs)

    return call


class _Gloo:
    """Minimal model on torch's gloo, through which the control plane communicates."""

    transport_device = _CPU

    def __init__(self, gloo: Any, topology: Topology) -> None:
        self._gloo, self.topology = gloo, topology

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        rows = tensor.new_empty((self._gloo.size(), *tensor.shape))
        self._gloo.allgather([list(rows)], [tensor]).wait()
        return rows

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        into = torch.empty_like(rows)
        self._gloo.alltoall_base(into, rows, [], []).wait()
        return into

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = self.topology.position(group, src), 0
        self._gloo.broadcast([tensor], options).wait()
        return tensor


class _UnisonoGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of torch over gloo, with CPU tensors in shared memory."""

    # Collective at creation, over its ranks.

    def __init__(self, group_options: Any) -> None:
        rank, size = group_options.group_rank, group_options.group_size
        timeout = group_options.timeout
        super().__init__(rank, size)
        gloo: Any = dist.ProcessGroupGloo(
            _c10d.PrefixStore("gloo/", group_options.store), rank, size, timeout
        )
        gloo._set_sequence_number_for_group()  # as torch does for a group of its own
        kind = dist.ProcessGroup.BackendType.GLOO
        # Calls left to gloo use a group of torch's own, which never calls back here.
        self._gloo: Any = _ProcessGroup(rank, size)
        for group in (self, self._gloo):
            group._register_backend(_CPU, kind, gloo)
            group._set_default_backend(kind)
        ranks = tuple(group_options.global_ranks_in_group)  # empty for the default group
        self._group = Group(ranks, name=group_options.group_id) if ranks else None
        topology = Topology(ranks[rank], dist.get_world_size()) if ranks else Topology(rank, size)
        self._members: Sequence[int] = ranks or range(size)
        model: Any = _Gloo(gloo, topology)
        self._model = model  # the control plane doesn't keep it alive
        self._control = SocketControlPlane(model, timeout.total_seconds())
        self._turn = Turn()  # one for all calls: threads must agree on the order anyway
        # The ranks connect now that all are here: later, one might miss the others' first call.
        self._shared = self._control.host(self._group)
        self._inline_bytes = self._control.inline_bytes(self._group)
        self._is_forked = False
        self._calls = _log_of(topology)
        everyone = ranks or tuple(range(size))
        self._group_in_records = Group(everyone, name=f"torch's {group_options.group_id}")
        _alive.add(self)
        settle_at_exit()

    # Prologue and record of each call

    @contextmanager
    def _recorded_call(
        self, name: str, tensor: Tensor | None = None, plane: str = "memory"
    ) -> Iterator[Token]:
        """Run an operation exclusively, without autograd and tensor subclasses, and record it."""
        self._check_process(name)
        with self._turn.of(name), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._turn.call = name  # for the error of a call made within this one
            token = self._begin(name, tensor)
            if token is not UNRECORDED:  # else unisono's calling function has recorded its plane
                plane_is(plane)
            try:
                yield token
            except BaseException as error:
                token.end(error)
                raise
            if not token.plane:  # else gloo continues the call
                token.end()

    def _by_gloo(
        self,
        name: str,
        tensor: Tensor | None,
        start: Callable[[], Any],
        group: Group | None = None,
    ) -> Any:
        """Start an operation that gloo carries, and record it until its end; return the handle."""
        self._check_process(name)
        token = self._begin(name, tensor, group, IN_FLIGHT)
        try:
            return _start_recorded(token, start)
        except BaseException as error:
            token.end(error)
            raise

    def _begin(
        self, name: str, tensor: Tensor | None, group: Group | None = None, state: int = CALLED
    ) -> Token:
        """Record the start of a call, unless unisono itself makes it."""
        # Unisono itself calls torch from its public functions, which are recorded there, and while
        # a group connects.
        if _is_called_by_unisono(sys._getframe(1)):
            return UNRECORDED
        return self._calls.begin(name, group or self._group_in_records, tensor, state)

    def _check_process(self, call: str) -> None:
        if self._is_forked:
            raise ContextError(
                f"{call}: this process is a fork of rank {self._model.topology.rank}, whose "
                "connections it must not use: call this in the process that made the group"
            )

    def _compare(self, call: str, tensor: Tensor | None = None, value: bytes = b"") -> list[bytes]:
        """Compare the ranks' calls, and return the value that each rank attached."""
        if tensor is not None:
            call = f"{call} of {str(tensor.dtype)[6:]}[{tensor.numel()}]"  # without "torch."
        head = call_head(call, site())
        blobs = self._control.exchange(head + value, self._group)
        return unpack(blobs, head, lambda: self._members)

    def _fits_round(self, tensor: Tensor) -> bool:
        """Return whether the round in which the ranks compare their calls can carry a tensor."""
        return tensor.numel() * tensor.itemsize <= self._inline_bytes

    # Reductions

    @_through_shared_memory("all_reduce", 0, 1)
    def allreduce(self, host: Host, tensor: Tensor, opts: Any) -> bool:
        return self._reduced(host, tensor, opts, None)

    @_through_shared_memory("reduce", 0, 1)
    def reduce(self, host: Host, tensor: Tensor, opts: Any) -> bool:
        return self._reduced(host, tensor, opts, self._members[opts.rootRank])

    def _reduced(self, host: Host, tensor: Tensor, opts: Any, dst: int | None) -> bool:
        """Reduce to all ranks or to `dst`; return False to leave the call to gloo."""
        op = _reduce_op_of(opts)
        if op is None:
            return False
        self._compare(
            f"all_reduce {op.name}" if dst is None else f"reduce {op.name} to {dst}", tensor
        )
        if not _can_reduce(tensor, op):  # now all ranks are known to decide this alike
            return False
        mine = _memory_of(tensor)
        total = host.all_reduce(mine, op) if dst is None else host.reduce(mine, dst, op)
        if total is not None:  # else this rank isn't `dst`
            _copy_back(total, tensor)
        return True

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        single = _c10d.AllreduceOptions()  # for one tensor gloo accepts no other options
        if opts is not None:
            single.reduceOp, single.timeout = opts.reduceOp, opts.timeout
        for tensor in tensors:
            self.allreduce([tensor], single).wait()
        return _done(tensors)

    @_through_shared_memory("reduce_scatter", 0, 2)
    def reduce_scatter(self, host: Host, output: Tensor, opts: Any, tensors: Any) -> bool:
        parts = _single(tensors)
        is_even = parts is not None and _are_alike(parts, output, len(parts))
        return is_even and self._scattered(host, torch.stack(list(parts)), opts, output)

    @_through_shared_memory("reduce_scatter", 1, 2, is_list=False)
    def _reduce_scatter_base(self, host: Host, tensor: Tensor, opts: Any, output: Tensor) -> bool:
        return self._scattered(host, tensor, opts, output)

    def _scattered(self, host: Host, tensor: Tensor, opts: Any, output: Tensor) -> bool:
        """Reduce to this rank's part; return False to leave the call to gloo."""
        op = _reduce_op_of(opts)
        if op is None or not _is_multiple(tensor, output, host.size):
            return False
        self._compare(f"reduce_scatter {op.name}", tensor)
        if not _can_reduce(tensor, op):
            return False
        _copy_back(host.reduce_scatter(_memory_of(tensor).view(host.size, -1), op), output)
        return True

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced: Callable[..., Any] = _one_by_one("_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movement

    @_through_shared_memory("broadcast", 0, 1)
    def broadcast(self, host: Host, tensor: Tensor, opts: Any) -> None:
        root, is_inline = opts.rootRank, self._fits_round(tensor)
        src, is_src, mine = self._members[root], root == self.rank(), _memory_of(tensor)
        value = to_bytes(mine) if is_src and is_inline else b""
        values = self._compare(f"broadcast from {src}", tensor, value)
        if not is_inline:
            _copy_back(host.broadcast(mine, src), tensor)
        elif not is_src:
            _copy_back(from_bytes(values[root], tensor.dtype, tuple(tensor.shape)), tensor)

    def _gathered(self, host: Host, call: str, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks, all with the shape of this rank's tensor."""
        mine = _memory_of(tensor)
        if not self._fits_round(mine):
            self._compare(call, tensor)
            return list(host.all_gather(mine))
        values = self._compare(call, tensor, to_bytes(mine))
        return [from_bytes(value, tensor.dtype, tuple(tensor.shape)) for value in values]

    @_through_shared_memory("all_gather", 1, 2, is_list=False)
    def _allgather_base(self, host: Host, tensor: Tensor, _: Any, output: Tensor) -> bool:
        if not _is_multiple(output, tensor, host.size):
            return False
        rows, into = self._gathered(host, "all_gather", tensor), output.data
        if into.is_contiguous():  # needs no stack, which would be a copy
            for part, row in zip(into.view(host.size, -1), rows, strict=True):
                part.copy_(row.view(-1))
        else:
            into.copy_(torch.stack(list(rows)).view(output.shape))
        return True

    all_gather_single = _allgather_base
    all_gather_single_coalesced: Callable[..., Any] = _one_by_one("_allgather_base")
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_through_shared_memory("all_gather", 1, 2)
    def allgather(self, host: Host, tensor: Tensor, _: Any, outputs: Any) -> bool:
        return len(outputs) == 1 and self._gather_into(host, "all_gather", tensor, outputs)

    @_through_shared_memory("gather", 1, 2)
    def gather(self, host: Host, tensor: Tensor, opts: Any, outputs: Any) -> bool:
        return self._gather_into(host, f"gather to {self._members[opts.rootRank]}", tensor, outputs)

    def _gather_into(self, host: Host, call: str, tensor: Tensor, outputs: Any) -> bool:
        """Copy all ranks' tensors into `outputs`; return False to leave the call to gloo."""
        # Only the root of a gather has outputs.
        if outputs and not _are_alike(outputs[0], tensor, host.size):
            return False
        rows = self._gathered(host, call, tensor)
        if outputs:
            for output, row in zip(outputs[0], rows, strict=True):
                _copy_back(row, output)
        return True

    @_through_shared_memory("scatter", 0, 2)
    def scatter(self, host: Host, output: Tensor, opts: Any, tensors: Any) -> None:
        src, parts = self._members[opts.rootRank], _single(tensors)
        rows = None if parts is None else torch.stack([part.data for part in parts])
        self._compare(f"scatter from {src}", output)
        _copy_back(host.scatter(rows, _memory_of(output), src), output)

    @_through_shared_memory("all_to_all", 1, 4, is_list=False)
    def alltoall_base(
        self, host: Host, tensor: Tensor, _: Any, output: Tensor, *sizes: Any
    ) -> bool:
        is_even = not any(sizes) and _is_multiple(output, tensor, 1)
        # The split may be even on only some ranks.
        size = b"%d" % tensor.numel() if is_even else b""
        every = self._compare(f"all_to_all of {str(tensor.dtype)[6:]}", None, size)
        # All ranks decide alike, as gloo must carry the call on every rank or on none.
        if not size or any(other != size for other in every):
            return False
        _copy_back(host.all_to_all(_memory_of(tensor).view(host.size, -1)), output)
        return True

    all_to_all_single = alltoall_base

    def barrier(self, *args: Any, **named: Any) -> Any:
        if named.keys() - {"opts"}:
            start = functools.partial(self._gloo.barrier, *args, **named)
            return self._by_gloo("barrier", None, start)
        with self._recorded_call("barrier", None, "control"):
            self._compare("barrier")
        return _done([])

    # Messages

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        group = pair(self._model.topology.rank, self._members[dst])
        start = functools.partial(self._gloo.send, tensors, dst, tag)
        return self._by_gloo("send", _single(tensors), start, group)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        group = pair(self._members[src], self._model.topology.rank)
        start = functools.partial(self._gloo.recv, tensors, src, tag)
        return self._by_gloo("recv", _single(tensors), start, group)

    # Shutdown

    def shutdown(self) -> None:
        self._end("left")
        super().shutdown()

    def abort(self) -> None:
        self._end("")
        super().abort()

    def _end(self, how: str) -> None:
        _alive.discard(self)
        if not any(group._calls is self._calls for group in _alive):  # the groups share a log
            self._calls.close()
        self._shared = None  # gloo carries later calls
        self._control.close(how)


class _Recorded(_Work):  # type: ignore[misc]
    """Torch's handle of a call that gloo carries, which ends the record of the call."""

    def __init__(self, work: Any, token: Token) -> None:
        super().__init__()
        self._work, self._token = work, token

    def wait(self, *timeout: Any, **named: Any) -> Any:
        return self._token.wait(functools.partial(self._work.wait, *timeout, **named))

    def synchronize(self) -> None:
        self._token.wait(self._work.synchronize)

    def get_future(self) -> Any:
        """Return torch's future, which ends with the call; C++ waits only for the future."""
        self._token.overlap_ns = 0  # when the wait starts is unknown, so it counts from the call
        # `then` returns another future, which completes after the call has been recorded.
        token = self._token
        return self._work.get_future().then(lambda future: token.carry_out(future.value))


def _delegate(name: str) -> Callable[..., Any]:
    return lambda self, *args, **named: getattr(self._work, name)(*args, **named)


# The base class, in C++, has all of torch's methods, so a `__getattr__` would never be called.
for _name in set(dir(_Work)) - set(dir(object)) - set(vars(_Recorded)) - {"boxed", "unbox"}:
    if not _name.startswith("_pybind"):
        setattr(_Recorded, _name, _delegate(_name))


def _start_recorded(token: Token, start: Callable[[], Any]) -> Any:
    """Start a call that gloo carries; return the handle whose end is that of the call."""
    return _Recorded(start(), token) if token.defer_end("data") else start()


def _is_called_by_unisono(frame: FrameType | None) -> bool:
    """Return whether the first frame outside this file and torch is unisono's."""
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


def create(group_options: Any) -> dist.ProcessGroup:
    """Create a process group for ``torch.distributed``."""
    return _UnisonoGroup(group_options)


def _log_of(topology: Topology) -> CallLog:
    """Return the log that this rank's groups share: that of a live group, else a new one."""
    for group in _alive:
        known: CallLog = group._calls
        if known.rank == topology.rank:
            return known
    job = job_of(None)  # None: from this process's variables
    rank, size = topology.rank, topology.world_size
    return CallLog.of_rank(rank, size, job, backend="unisono", model="torch.distributed")


def _single(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else None


def _reduce_op_of(opts: Any) -> ReduceOp | None:
    """Return the operation of torch's options; None for one that only gloo might have."""
    if opts is None:
        return ReduceOp.SUM
    op = getattr(opts, "reduceOp", opts)
    return _OPS.get(getattr(op, "op", op))


def _can_reduce(tensor: Tensor, op: ReduceOp) -> bool:
    """Return whether the ranks' shared memory reduces a tensor as gloo would."""
    return tensor.numel() > 0 and folds(tensor.dtype, op)


def _has_memory(tensor: Any) -> bool:
    """Return whether a tensor has readable memory, regardless of its class."""
    # The class may differ between ranks. A subclass with a dispatch of its own, such as DTensor,
    # may have no memory itself.
    return (
        isinstance(tensor, Tensor)
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not isinstance(tensor, _UNREADY)
        and tensor.is_cpu
        and tensor.layout is torch.strided
    )


def _are_alike(tensors: Sequence[Tensor], other: Tensor, count: int) -> bool:
    return len(tensors) == count and all(
        tensor.shape == other.shape and tensor.dtype == other.dtype for tensor in tensors
    )


def _is_multiple(whole: Tensor, part: Tensor, count: int) -> bool:
    return whole.dtype == part.dtype and whole.numel() == part.numel() * count


def _memory_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, sharing memory if possible."""
    # The result has its own version counter, so autograd doesn't notice writes, as with gloo.
    return tensor.data.resolve_conj().resolve_neg().contiguous()


def _copy_back(result: Tensor, tensor: Tensor) -> None:
    """Copy a result into torch's tensor, unless it is in that memory already."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(result.view(tensor.shape))


def _done(result: Any) -> Any:
    """Return torch's handle of a completed operation."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _c10d._create_work_from_future(future)


_alive: weakref.WeakSet[_UnisonoGroup] = weakref.WeakSet()


def _after_fork() -> None:
    """Release the connections that a forked child inherited; its parent keeps its own."""
    for group in list(_alive):
        # The parent's thread that held the turn doesn't exist here.
        group._is_forked, group._turn = True, Turn()
        group._calls.disown()
        group._control.disown()
    _alive.clear()


def _at_exit() -> None:
    """Report an orderly departure, unless an exception ended the program."""
    # The interpreter sets this attribute when it prints an uncaught exception.
    if not hasattr(sys, "last_type"):
        for group in list(_alive):
            group._control.report_departure("ended its program")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
