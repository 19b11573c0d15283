"""How many ranks tell each other where they are, before they are connected."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.context import communicator
from unisono.models.native import model as native
from unisono.models.native.model import NativeModel
from unisono.topology import EVERYBODY

RANKS = 8


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("the ring")


def gather_while_connecting(_local_rank: int) -> tuple[list[int], list[int], str]:
    """Gather before a control plane is there, with a root that lies, and after it is there."""
    rank = unisono.get_rank()
    model: Any = communicator().model
    fresh = NativeModel(model.topology, torch.device("cpu"), is_owner=False)
    vars(native)["_all_gather"] = refuse
    told = fresh.all_gather(torch.tensor([rank])).flatten().tolist()

    whole = dist.broadcast

    def lie(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            rows.fill_(-1)
        return whole(rows, *args, **kwargs)

    vars(dist)["broadcast"] = lie
    lied = fresh.all_gather(torch.tensor([rank])).flatten().tolist()
    fresh.control.hubs[EVERYBODY] = None
    try:
        fresh.all_gather(torch.tensor([rank]))
    except unisono.errors.CollectiveError as error:
        return told, lied, str(error)
    return told, lied, ""


def test_ranks_gather_over_rank_0_until_they_are_connected() -> None:
    found = unisono.spawn("gloo", gather_while_connecting, nproc_per_node=RANKS)
    for rank, (told, lied, later) in enumerate(found):
        assert told == list(range(RANKS))
        assert lied == [rank if at == rank else -1 for at in range(RANKS)]  # a rank knows its own
        assert "the ring" in later
