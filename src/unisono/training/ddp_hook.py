"""Gradients of ``DistributedDataParallel`` through memory that the ranks of one host share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from unisono.collectives.call import check
from unisono.context import ContextState, communicator
from unisono.host.collectives import HostCollectives
from unisono.host.folding import folds
from unisono.model.reduction import ReduceOp
from unisono.recording import plane_is
from unisono.topology import Group
from unisono.training.data_parallel import name_of_gradients

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ("Averaging", "average", "average_in_shared_memory")


def average_in_shared_memory(
    module: nn.parallel.DistributedDataParallel, context: ContextState, group: Group | None
) -> None:
    """Let a module average its buckets in shared memory, unless the user has a hook of their own.

    Collective over `group`. ``DistributedDataParallel`` takes one communication hook, which must be
    there before the first backward: ours is registered by the first forward that has one.

    Args:
        module: of parameters on the CPU.
        context: the active one.
        group: the ranks that train it together.
    """
    if context.control.host(group) is not None:
        name = name_of_gradients(context, module.module, group)
        module.register_forward_pre_hook(Averaging(group, name))


class Averaging:
    """Registers the hook, and is its state: what it needs it asks of the context that is active.

    Args:
        group: the ranks that train together; a copy in another process has all.
        name: what its buckets are called when calls are compared.
    """

    def __init__(self, group: Group | None = None, name: str = "") -> None:
        self._group, self._name = group, name
        self._module: Callable[[], Any] = _nothing
        self._is_live = False

    def __call__(self, module: Any, inputs: Any) -> None:
        """Register the hook, the first time; take note that this rank has inputs. Local."""
        if not torch.is_grad_enabled():
            return
        self._is_live, is_done = True, self._module() is not None
        if is_done:
            return
        self._module = weakref.ref(module)
        if not module._comm_hooks:
            try:
                module.register_comm_hook(self, average)
            except RuntimeError as error:  # torch's own hooks aren't in that list
                module._comm_hooks.clear()
                if "once" not in str(error):
                    raise

    def host(self) -> HostCollectives | None:
        """Give what the ranks share, after what runs in the background. Local."""
        return communicator().control.host(self._group)

    @contextmanager
    def bucket(self, index: int, flat: Tensor, host: HostCollectives) -> Iterator[None]:
        """Record what the body does as the averaging of one bucket, if all ranks have come to it.

        Collective over the group.
        """
        context = communicator()
        with context.calls.call("gradients", self._group, flat):
            plane_is("memory")
            check(context, f"{self._name}, bucket {index},", flat, self._group, host)
            yield

    def divisor(self, host: HostCollectives) -> Tensor | None:
        """Give the number of ranks that have inputs, where torch divides by that; None else.

        Collective over the group where it does: in ``join(divide_by_initial_world_size=False)``.
        """
        module = self._module()
        if module is None or not module._join_config.enable:
            return None
        if module._divide_by_initial_world_size:
            return None
        return host.all_reduce(torch.tensor([float(self._is_live)], device="cpu"), ReduceOp.SUM)

    def library_group(self) -> Any:
        """Give torch's own group of the module. Local."""
        module = self._module()
        return None if module is None else module.process_group

    def end_step(self) -> None:
        """Take note that a backward is done: a rank without inputs has no forward before the next.

        Local.
        """
        self._is_live = False

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self._group, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


def average(state: Averaging, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average one bucket of gradients in place: a communication hook. Collective over the group."""
    flat, host = bucket.buffer(), state.host()
    if host is None or flat.layout is not torch.strided:  # another context, or sparse gradients
        return default_hooks.allreduce_hook(state.library_group(), bucket)
    with torch.no_grad(), state.bucket(bucket.index(), flat, host):
        divisor = state.divisor(host)
        if divisor is not None:
            host.all_reduce(flat.div_(divisor.to(flat.dtype)), ReduceOp.SUM)
        elif folds(flat.dtype, ReduceOp.AVERAGE):
            host.all_reduce(flat, ReduceOp.AVERAGE)
        else:
            host.all_reduce(flat.div_(host.size), ReduceOp.SUM)
    if bucket.is_last():
        state.end_step()
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(flat)
    return done


def _nothing() -> None:
    return


average.__annotations__.clear()  # torch compares them with its own classes; ours are strings
