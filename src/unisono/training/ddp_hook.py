"""Communication hook for ``DistributedDataParallel``: shared memory, named collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from unisono.collectives.call import compare_calls
from unisono.context import ContextState, communicator
from unisono.control.signatures import called
from unisono.host.collectives import HostCollectives, folds
from unisono.model.handle import Handle
from unisono.model.reduction import ReduceOp
from unisono.recording.records import plane_is
from unisono.topology import Group
from unisono.training.data_parallel import name_of_gradients

if TYPE_CHECKING:
    from typing_extensions import Self


def average_by_name(
    module: nn.parallel.DistributedDataParallel, context: ContextState, group: Group | None
) -> None:
    """Average a module's CPU gradients by the facade, unless the user registers a hook."""
    # Local. On one host buckets go through shared memory, and are compared with other ranks' calls;
    # between hosts torch's group reduces them, with our call name and deadline. Gradients on an
    # accelerator are left to torch, as host memory cannot hold such tensors.
    # ``DistributedDataParallel`` accepts one communication hook, before the first backward: ours is
    # registered by the first forward with gradients.
    if all(p.device.type == "cpu" for p in module.parameters()):
        name = name_of_gradients(context, module.module, group)
        module.register_forward_pre_hook(Averaging(group, name))


class Averaging:
    """Registers the hook and is its state; looks up the active context at each call."""

    def __init__(self, group: Group | None = None, name: str = "") -> None:
        self.group: Group | None = group
        self._name = name
        self.module: Callable[[], Any] = lambda: None
        self._is_live = False
        self._started: list[tuple[Handle[Tensor], torch.futures.Future[Tensor]]] = []

    def __call__(self, module: Any, inputs: Any) -> None:
        """Register the hook at the first forward; record that this rank has inputs."""
        if not torch.is_grad_enabled():
            return
        self._is_live, is_done = True, self.module() is not None
        self._started.clear()  # of a backward that failed
        if is_done:
            return
        self.module = weakref.ref(module)
        if not module._comm_hooks:
            try:
                module.register_comm_hook(self, average)
            except RuntimeError as error:  # torch's own hooks aren't in that list
                # torch has already listed our hook when it raises; the user's stays registered.
                module._comm_hooks.clear()
                if "once" not in str(error):
                    raise

    def reduce(
        self, index: int, flat: Tensor, op: ReduceOp, host: HostCollectives | None
    ) -> torch.futures.Future[Tensor]:
        """Reduce one bucket in place; only start it between hosts. Collective over the group."""
        context, done = communicator(self.group), torch.futures.Future[Tensor]()
        call = f"{self._name}, bucket {index}"
        with called(call):
            token = context.calls.begin("gradients", self.group, flat, host is None)
            try:
                compare_calls(context, call, flat, self.group, host)
                if host is None:
                    handle = context.start_all_reduce(flat, op, self.group)
                    # `end_step` waits for it, so that buckets overlap.
                    self._started.append((token.started(handle), done))
                    return done
                plane_is("memory")
                done.set_result(host.all_reduce(flat, op))
            except BaseException as error:
                token.end(error)
                raise
        token.end()
        return done

    def divisor(self, host: HostCollectives | None) -> Tensor | None:
        """Return the number of ranks with inputs if torch divides by it, else None."""
        # Collective over the group if so: in ``join(divide_by_initial_world_size=False)``.
        module = self.module()
        if module is None or not module._join_config.enable:
            return None
        if module._divide_by_initial_world_size:
            return None
        live = torch.tensor([float(self._is_live)], device="cpu")
        if host is None:
            return communicator(self.group).model.all_reduce(live, ReduceOp.SUM, self.group)
        return host.all_reduce(live, ReduceOp.SUM)

    def end_step(self) -> None:
        """Wait for started reductions; clear the inputs mark, which the next forward sets."""
        self._is_live, started, self._started = False, self._started, []
        for handle, done in started:
            done.set_result(handle.wait())

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.group, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


def average(state: Averaging, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average one bucket of gradients in place: a communication hook. Collective over the group."""
    flat, group = bucket.buffer(), state.group
    if flat.layout is not torch.strided:  # sparse gradients
        module = state.module()
        return default_hooks.allreduce_hook(module and module.process_group, bucket)
    # Waits for background calls. The ranks' shared memory; None between hosts.
    host, op = communicator(group).control.host(group), ReduceOp.SUM
    with torch.no_grad():
        divisor = state.divisor(host)
        if divisor is not None:
            flat.div_(divisor.to(flat.dtype))
        elif host is not None and folds(flat.dtype, ReduceOp.AVERAGE):
            op = ReduceOp.AVERAGE
        else:
            flat.div_(communicator(group).model.topology.size(group))
        done = state.reduce(bucket.index(), flat, op, host)
    if bucket.is_last():
        state.end_step()
    return done


average.__annotations__.clear()  # torch compares them with its classes; ours are strings
