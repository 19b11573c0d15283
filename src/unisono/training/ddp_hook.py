"""Averages of the gradients of ``DistributedDataParallel``, after every backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
from unisono.training.averaging import all_reduce_grads
from unisono.training.data_parallel import call_after_backward, hook_gradients, name_of_gradients


def average_gradients(
    module: nn.parallel.DistributedDataParallel, context: ContextState, group: Group | None
) -> None:
    """Average a module's gradients in every backward outside of ``no_sync``."""
    averager = DDPAverager(group, name_of_gradients(context, module.module, group))
    averager.module = weakref.ref(module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    # These hooks refer to the averager weakly; the forward hook below keeps it alive.
    hook_gradients(averager.on_gradient, parameters, module)
    module.register_forward_pre_hook(averager)


class DDPAverager:
    """Averages the gradients of a ``DistributedDataParallel`` in every backward."""

    # It is also the state of the communication hook `average`, unless the user registers a hook.
    # On one host, buckets go through shared memory, and are compared with other ranks' calls;
    # between hosts, torch's group reduces them, with unisono's call name and deadline. Gradients on
    # an accelerator are left to torch, as host memory cannot hold such tensors.
    # torch averages in the first backward after the module's forward outside of ``no_sync``. If a
    # forward ran in ``no_sync``, or on the inner module, or was an earlier one, gradients would
    # silently stay local. This class averages them after such a backward, as `Replicated` does.
    # The active context is looked up at each call.

    def __init__(self, group: Group | None = None, name: str = "") -> None:
        self.group: Group | None = group
        self._name = name
        self.module: Callable[[], Any] = lambda: None  # a weak reference once it is known
        self._was_called = False
        self._is_live = False  # whether this rank has inputs in this step
        self._started: list[tuple[Handle[Tensor], torch.futures.Future[Tensor]]] = []
        self._is_announced = False  # whether torch will average in the next backward
        self._announced = 0  # forwards so far after which torch averages
        self._backward = -1  # torch's id of the latest backward

    def __call__(self, module: Any, inputs: Any) -> None:
        """Record a forward with gradients; register the communication hook at the first one."""
        if not torch.is_grad_enabled():
            return
        self._is_live = True
        self._started.clear()  # left by a backward that failed
        if module.require_backward_grad_sync:
            self._is_announced = True
            self._announced += 1
        if self._was_called:
            return
        # ``DistributedDataParallel`` accepts one hook, before the first backward.
        # The averager of a copied module learns its module only here.
        self._was_called, self.module = True, weakref.ref(module)
        if not module._comm_hooks and all(p.device.type == "cpu" for p in module.parameters()):
            try:
                module.register_comm_hook(self, average)
            except RuntimeError as error:  # torch's built-in hooks aren't in `_comm_hooks`
                # torch lists this hook before it raises; the user's hook stays registered.
                module._comm_hooks.clear()
                if "once" not in str(error):
                    raise

    def on_gradient(self, parameter: Tensor) -> None:
        """Queue an average for the end of this backward, unless torch averages."""
        backward: int = torch._C._current_graph_task_id()
        module = self.module()
        # Each parameter has this hook, but a backward needs only one average.
        if backward == self._backward or module is None or not module.require_backward_grad_sync:
            return
        self._backward = backward
        if self._is_announced:
            # Queued twice, to run after torch's callback, which torch queues after this hook.
            call_after_backward(lambda: call_after_backward(self._note_end))
        else:
            call_after_backward(self._average_all)

    def _note_end(self) -> None:
        """Record that torch has averaged; within reentrant checkpointing it has not yet."""
        module = self.module()
        if module is None or (module.static_graph and self._announced == 1):
            return  # when torch averages in the first backward of a static graph is unknown
        with suppress(RuntimeError):  # torch has not averaged yet
            module._check_reducer_finalized()
            self._is_announced = False

    def _average_all(self) -> None:
        """Average all gradients after a backward in which torch didn't."""
        module = self.module()
        # In torch's join, ranks without batches only take part in torch's own averages.
        if module is not None and not module._join_config.enable:
            all_reduce_grads(module.parameters(), group=self.group)

    def reduce(
        self, index: int, flat: Tensor, op: ReduceOp, host: HostCollectives | None
    ) -> torch.futures.Future[Tensor]:
        """Reduce a bucket in place, between hosts in the background. Collective over the group."""
        context, done = communicator(self.group), torch.futures.Future[Tensor]()
        call = f"{self._name}, bucket {index}"
        with called(call):
            # Between hosts the call is recorded as in flight, as the backward doesn't wait for it.
            token = context.calls.begin("gradients", self.group, flat, host is None)
            try:
                compare_calls(context, call, flat, self.group, host)
                if host is None:
                    handle = context.start_all_reduce(flat, op, self.group)
                    # `end_step` waits for the handle, so that buckets overlap.
                    self._started.append((token.started(handle), done))
                    return done
                plane_is("memory")  # for the record of this call
                done.set_result(host.all_reduce(flat, op))
            except BaseException as error:
                token.end(error)
                raise
        token.end()
        return done

    def divisor(self, host: HostCollectives | None) -> Tensor | None:
        """Return the number of ranks with inputs if torch divides by it, else None."""
        # torch does in ``join(divide_by_initial_world_size=False)``; only then this is collective.
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

    # A copied module keeps a copy as forward hook, but its parameters lose their hooks.
    def __deepcopy__(self, memo: object) -> DDPAverager:
        return DDPAverager(self.group, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


def average(state: DDPAverager, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients in place, as communication hook. Collective over the group."""
    flat, group = bucket.buffer(), state.group
    if flat.layout is not torch.strided:  # sparse, which unisono's collectives refuse
        module = state.module()
        return default_hooks.allreduce_hook(module and module.process_group, bucket)
    # `communicator` waits for background calls; `host` is shared memory, None between hosts.
    host, op = communicator(group).control.host(group), ReduceOp.SUM
    with torch.no_grad():
        divisor = state.divisor(host)
        if divisor is not None:
            flat.div_(divisor.to(flat.dtype))
        # Shared memory can average as it sums; elsewhere the buckets are divided before the sum.
        elif host is not None and folds(flat.dtype, ReduceOp.AVERAGE):
            op = ReduceOp.AVERAGE
        else:
            flat.div_(communicator(group).model.topology.size(group))
        done = state.reduce(bucket.index(), flat, op, host)
    if bucket.is_last():
        state.end_step()
    return done


average.__annotations__.clear()  # torch expects classes there, not strings
