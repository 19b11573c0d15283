"""The names and the semantics of ``mmengine.dist``: ``import unisono.compat.mmengine as dist``.

Functions work in place and return lists as mmengine's do, but on every model and device. The docs
list the differences: mmengine rounds, drops or mixes up some values, and this module doesn't.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono import facts
from unisono.collectives import broadcasts, gathers, groups, membership, reductions
from unisono.compat import mmcv
from unisono.compat.mmcv import infer_launcher
from unisono.context import current, current_model
from unisono.errors import ArgumentError, NotInitializedError
from unisono.facts import is_distributed
from unisono.model.reduction import ReduceOp, parse_op
from unisono.sections import master_only
from unisono.training import averaging, randomness
from unisono.training.same_tensors import is_integer

__all__ = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cast_data_device",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "gather",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_default_group",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "infer_launcher",
    "init_dist",
    "init_local_group",
    "is_distributed",
    "is_main_process",
    "master_only",
    "sync_random_seed",
)


def get_data_device(data: Any) -> torch.device:
    """Return the device of a tensor, or the common device of a container's tensors."""
    if isinstance(data, Tensor):
        return data.device
    devices = {get_data_device(item) for item in _items(data)}
    if len(devices) != 1:
        raise ArgumentError(
            f"the tensors should be on one device, not on {sorted(map(str, devices))}"
        )
    return devices.pop()


def cast_data_device(data: Any, device: torch.device, out: Any = None) -> Any:
    """Move the tensors of a container to a device, and copy them to `out` if given."""
    if out is not None and (type(data) is not type(out) or isinstance(out, set)):
        raise ArgumentError(
            f"out must have the same type as data ({type(data).__qualname__}), and not be a set: "
            f"it is a {type(out).__qualname__}"
        )
    if isinstance(data, Tensor):
        moved = data.to(device)
        if out is not None:
            with torch.no_grad():  # `out` may require gradients
                out.copy_(moved)
        return moved
    items = _items(data)
    if out is not None and len(out) != len(items):
        raise ArgumentError(f"out has {len(out)} items, but data has {len(items)}")
    if isinstance(data, Mapping):
        targets = dict.fromkeys(data) if out is None else out
        return {key: cast_data_device(item, device, targets[key]) for key, item in data.items()}
    pairs = zip(items, [None] * len(items) if out is None else out, strict=True)
    cast = [cast_data_device(item, device, target) for item, target in pairs]
    return tuple(cast) if isinstance(data, tuple) else cast


def _items(data: Any) -> list[Any]:
    """Return the items of a container, or the values of a mapping."""
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ArgumentError(f"a tensor, or a list or dict of tensors is needed: {data!r}")
    return list(data.values() if isinstance(data, Mapping) else data)


Group = Any


class _RefusedError(ArgumentError, AssertionError, NotImplementedError):
    """Raised where mmengine raises AssertionError or NotImplementedError."""


def all_reduce(data: Tensor, op: str = "sum", group: Group = None) -> None:
    """Reduce a tensor of all ranks in place. Collective over `group`.

    Args:
        data: as in ``all_reduce_`` of the facade.
        op: ``sum mean product min max band bor bxor``. A mean of ints is cut to an int, towards 0.
        group: a group of ranks; None for all ranks.
    """
    operation = parse_op(op)
    if operation is ReduceOp.AVERAGE and _is_int(data):
        # `all_reduce_` refuses a mean of ints. True and -1 are the defaults for buckets.
        averaging.reduce_params([data], True, -1, operation, group, cuts_means=True)
    else:
        reductions.all_reduce_(data, operation, group)


def _is_int(data: Tensor) -> bool:
    return is_integer(data) and data.dtype is not torch.bool


def all_gather(data: Tensor, group: Group = None) -> list[Tensor]:
    """Gather the tensors of all ranks, whose shapes may differ. Collective over `group`."""
    parts: list[Tensor] = gathers.all_gather(data, group, uneven=True)
    # A rank outside the group gets its own tensor.
    return parts if isinstance(parts, list) else [data]


def gather(data: Tensor, dst: int = 0, group: Group = None) -> list[Tensor]:
    """Gather all ranks' tensors on global rank `dst`, [] elsewhere. Collective over `group`."""
    return gather_object(data, dst, group) or []  # as objects, since the shapes may differ


def broadcast(data: Tensor, src: int = 0, group: Group = None) -> None:
    """Overwrite a tensor with that of global rank `src`. Collective over `group`."""
    broadcasts.broadcast_(data, src, group)


def sync_random_seed(group: Group = None) -> int:
    """Draw one random seed for all ranks. Collective over `group`."""
    return randomness.sync_random_seed(group=group) % 2**31  # mmengine's range


def broadcast_object_list(data: list[Any], src: int = 0, group: Group = None) -> None:
    """Overwrite the items of a list with those of global rank `src`. Collective over `group`."""
    if not isinstance(data, list):
        raise _RefusedError(f"a list is needed, not a {type(data).__qualname__}")
    data[:] = broadcasts.broadcast(data, src, group)


def all_reduce_dict(data: dict[str, Tensor], op: str = "sum", group: Group = None) -> None:
    """Replace the tensors of a dict by those reduced over all ranks. Collective over `group`.

    Args:
        data: tensors by name; each keeps its dtype, except ints mixed with floats under a mean.
        op: as in `all_reduce`. A mean of ints mixed with floats is a float, of only ints an int.
        group: a group of ranks; None for all ranks.
    """
    if not isinstance(data, dict):
        raise _RefusedError(f"a dict is needed, not a {type(data).__qualname__}")
    operation = parse_op(op)
    if get_world_size(group) == 1 or get_rank(group) < 0:  # alone, or not a member
        return
    is_mean = operation is ReduceOp.AVERAGE
    # Sorted, as the ranks may have the keys in different orders.
    values = {key: data[key] for key in sorted(data)}
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    ints = {key: value for key, value in values.items() if is_mean and _is_int(value)}
    floats = {value.dtype for value in tensors if value.is_floating_point()}
    if ints and floats:
        # In the dtype of the floats, large ints would be rounded before the sum.
        widest = functools.reduce(torch.promote_types, floats)
        values |= {key: value.to(torch.float64) for key, value in ints.items()}
    else:
        values = {key: value for key, value in values.items() if key not in ints}
    data.update(reductions.all_reduce(values, operation, group) if values else {})
    if ints and floats:
        data.update({key: data[key].to(widest) for key in ints})
    elif ints:
        # Clones, because `reduce_params` overwrites its tensors, which the caller may still use.
        means = {key: value.clone() for key, value in ints.items()}
        averaging.reduce_params(means, True, -1, operation, group, cuts_means=True)
        data.update(means)


def all_gather_object(data: Any, group: Group = None) -> list[Any]:
    """Gather the objects of all ranks. Collective over `group`."""
    mine = [data]
    rows = gathers.all_gather(mine, group)
    return mine if rows is mine else [row[0] for row in rows]  # non-members get `mine` back


def gather_object(data: Any, dst: int = 0, group: Group = None) -> list[Any] | None:
    """Gather the objects of all ranks on global rank `dst`, None elsewhere.

    Collective over `group`.
    """
    # In lists, because tensors would be joined. A rank outside the group gets its own list back.
    rows = gathers.gather([data], dst, group)
    return [row[0] for row in rows] if rows and get_rank() == dst else None


def collect_results(
    results: list[Any], size: int, device: str = "cpu", tmpdir: str | None = None
) -> list[Any] | None:
    """Gather results in dataset order on rank 0, None elsewhere.

    Collective over all ranks.

    Args:
        results: this rank's results, in the order of a sampler that deals samples out in turn; None
            entries are kept.
        size: maximum number of results; further ones, which are of repeated samples, are dropped.
        device: ``"cpu"``, ``"gpu"`` or ``"npu"``; without effect.
        tmpdir: without effect: no file is written.
    """
    if device not in ("cpu", "gpu", "npu"):
        raise _RefusedError(f"device={device!r} should be 'cpu', 'gpu' or 'npu'")
    if device != "cpu" and tmpdir is not None:
        raise _RefusedError(f"tmpdir should be None where device={device!r}")
    rows = gathers.gather([list(results)], 0)
    if rows is None:
        return None
    nothing = object()  # ranks may have fewer results than others
    turns = itertools.zip_longest(*(row for (row,) in rows), fillvalue=nothing)
    return [item for turn in turns for item in turn if item is not nothing][:size]


def collect_results_cpu(
    result_part: list[Any], size: int, tmpdir: str | None = None
) -> list[Any] | None:
    """Call `collect_results`. Collective over all ranks."""
    return collect_results(result_part, size, "cpu", tmpdir)


def collect_results_gpu(result_part: list[Any], size: int) -> list[Any] | None:
    """Call `collect_results`. Collective over all ranks."""
    return collect_results(result_part, size, "gpu")


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: int = -1,
    op: str = "sum",
    group: Group = None,
) -> None:
    """Reduce parameters in place, as the facade does, but to a sum by default."""
    # Collective over `group`. In mmengine every number up to 0 means the default.
    limit = bucket_size_mb if bucket_size_mb > 0 else -1
    averaging.reduce_params(params, coalesce, limit, op, group, cuts_means=True)


def init_dist(
    launcher: str, backend: str = "nccl", init_backend: str = "torch", **kwargs: Any
) -> None:
    """Create the context of a launched job. Collective over all ranks of the job.

    Args:
        launcher: ``"pytorch"``, ``"mpi"`` or ``"slurm"``.
        backend: any backend of the facade.
        init_backend: only ``"torch"``.
        kwargs: options of ``initialize``, such as ``timeout`` in seconds.
    """
    if init_backend != "torch":
        raise ArgumentError(f"init_backend={init_backend!r} should be 'torch'")
    mmcv.init_dist(launcher, backend, **kwargs)


def init_local_group(node_rank: int, num_gpus_per_node: int) -> None:
    """Create the groups of the ranks that share a node.

    Collective at creation, over all ranks.

    Args:
        node_rank: the rank of this node.
        num_gpus_per_node: the number of ranks on this node.
    """
    context = current()
    nodes = gathers.all_gather([int(node_rank), int(num_gpus_per_node)])
    for node in sorted({host for host, _ in nodes}):
        ranks = [rank for rank, (host, _) in enumerate(nodes) if host == node]
        counts = {nodes[rank][1] for rank in ranks}
        if counts != {len(ranks)}:
            raise ArgumentError(
                f"init_local_group: node {node} has ranks {ranks}, but num_gpus_per_node is "
                f"{sorted(counts)} there: pass the number of its ranks"
            )
        # All ranks create the groups of all nodes, because creation is collective over all ranks.
        made = membership.resolve(context, ranks)
        if node == node_rank and made is not None:
            context.groups[()] = made  # the key of the local group


def get_local_group() -> Group:
    """Return the group of this node's ranks, None without a distributed context."""
    if not is_distributed():
        return None
    local = current().groups.get(())  # the key that `init_local_group` uses
    if local is None:
        raise NotInitializedError("there is no local group: call init_local_group first")
    return groups.library_group(local)


def get_default_group() -> Group:
    """Return the group of all ranks, which every function here accepts.

    Returns:
        Torch's process group if torch.distributed connects the ranks, else None.
    """
    # torch may have a default group that the context's model doesn't use.
    world = torch.distributed.group.WORLD
    model = current_model()
    return world if world is not None and model.adopt_group(world) is not None else None


def _members(group: Group) -> tuple[int, ...] | range:
    """Return the global ranks of a group."""
    context = current()
    return context.model.topology.members(membership.resolve(context, group))


def get_backend(group: Group = None) -> str | None:
    """Return the backend of a group, None without a distributed context."""
    context = current()
    # A group of torch.distributed may have another backend than the job.
    handle = None if group is None else getattr(membership.resolve(context, group), "handle", None)
    if isinstance(handle, torch.distributed.ProcessGroup):
        return str(torch.distributed.get_backend(handle))
    return facts.backend()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in a group, 1 without a distributed context."""
    return len(_members(group))


def get_rank(group: Group = None) -> int:
    """Return this rank's position in a group, -1 if it isn't a member."""
    members, rank = _members(group), facts.get_rank()
    return members.index(rank) if rank in members else -1


def get_local_size() -> int:
    """Return the number of ranks on this node, also without a call of `init_local_group`."""
    local = current().groups.get(())
    return facts.get_nproc_per_node() if local is None else local.size


def get_local_rank() -> int:
    """Return the rank within this node, also without a call of `init_local_group`."""
    local = current().groups.get(())
    return facts.get_local_rank() if local is None else local.position(facts.get_rank())


def get_dist_info(group: Group = None) -> tuple[int, int]:
    """Return the rank in a group and its size, (0, 1) without a distributed context."""
    return get_rank(group), get_world_size(group)


def is_main_process(group: Group = None) -> bool:
    """Return whether this is the first rank of a group."""
    return get_rank(group) == 0


def barrier(group: Group = None) -> None:
    """Wait until every rank has called this. Collective over `group`."""
    groups.barrier(group)


def get_comm_device(group: Group = None) -> torch.device:
    """Return the device on which collectives accept tensors."""
    return current_model().transport_device
