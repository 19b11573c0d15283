"""Facts are correct, and reading them never communicates."""

from __future__ import annotations

import torch

import unisono as idist
from unisono.testing.cases._law import law, same, worlds


@law()
def ranks_are_numbered_from_0_without_gaps() -> None:
    rank, size = worlds()
    same(idist.get_rank(), rank)
    same(idist.get_world_size(), size)
    same(idist.all_gather(idist.get_rank()), list(range(size)))
    same(idist.is_main_process(), rank == 0)


@law()
def nodes_and_local_ranks_agree_with_each_other() -> None:
    _, size = worlds()
    local = idist.get_local_rank(), idist.get_nproc_per_node()
    node = idist.get_node_rank(), idist.get_nnodes()
    topologies = idist.all_gather((*local, *node))
    assert len({(local_rank, node_rank) for local_rank, _, node_rank, _ in topologies}) == size, (
        topologies
    )
    for local_rank, nproc, node_rank, nnodes in topologies:
        on_node = [other for other in topologies if other[2] == node_rank]
        assert 0 <= local_rank < nproc == len(on_node), topologies
        assert 0 <= node_rank < nnodes, topologies


@law()
def facts_have_their_types() -> None:
    assert isinstance(idist.device(), torch.device)
    assert isinstance(idist.hostname(), str)
    assert isinstance(idist.model_name(), str)
    assert idist.backend() is None or isinstance(idist.backend(), str)
    same(idist.is_distributed(), idist.backend() is not None)


@law()
def facts_never_communicate() -> None:
    rank, size = worlds()
    if rank == size - 1:  # alone: a collective in any of these would hang
        _ = idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.device()
        _ = idist.get_nnodes(), idist.get_node_rank(), idist.get_nproc_per_node()
        _ = idist.backend(), idist.model_name(), idist.is_main_process(), idist.is_distributed()
    idist.sync()  # collective in a context created elsewhere: it finds the ranks of each host
    idist.barrier()
