"""What helps a training script: positions, preemption, and what ranks agree on."""

from __future__ import annotations

import signal
import threading
from typing import Any

import unisono as idist
from unisono.errors import UnsupportedOperation
from unisono.testing.cases._law import law, raises, same, worlds

__all__ = ()


@law()
def a_position_is_followed_by_what_was_not_seen() -> None:
    rank, size = worlds()
    data = list(range(12 * size))

    def make() -> Any:
        return idist.auto_dataloader(data, batch_size=3 * size)

    loader = make()
    loader.set_epoch(1)
    whole = [rows.tolist() for rows in loader]
    same(sorted(i for part in idist.all_gather(whole) for rows in part for i in rows), data)
    loader.set_epoch(1)
    for _, _rows in zip(range(2), loader, strict=False):
        pass
    state = loader.state_dict()
    same(idist.all_gather(state), [state] * size, "the position")
    again = make()
    again.load_state_dict(state)
    again.set_epoch(again.epoch)
    same([rows.tolist() for rows in again], whole[2:], f"the rest on rank {rank}")
    same([rows.tolist() for rows in make()] == whole, False, "each epoch has an order of its own")


@law()
def a_signal_to_one_rank_is_told_to_all_at_the_same_point() -> None:
    rank, size = worlds()
    if threading.current_thread() is not threading.main_thread():
        raises(UnsupportedOperation, idist.preemption_point, ["preemption_point", "threads"])
        same(idist.all_reduce(1), size, "ranks are in step")
        return
    with idist.preemptible(signal.SIGUSR1):
        same(idist.all_gather(idist.preemption_point()), [False] * size)
        if rank == size - 1:
            signal.raise_signal(signal.SIGUSR1)
        same(idist.preemption_point(), True)
        same(idist.preemption_point(), True)
        idist.barrier()
