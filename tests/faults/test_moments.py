"""A replica that dies at any moment: while ranks meet, leading a group, while they part."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from _measures import Clock, Table

import unisono
from unisono.errors import WorkerFailedError

DELAYS_MS = (0, 2, 5, 10, 15, 20, 30, 50)


def die_in(delay_ms: int, clock: Clock) -> None:
    """Kill this process in a while, whatever its main thread is doing then."""

    def die() -> None:
        threading.Event().wait(delay_ms / 1000)
        clock.strike()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


class Doomed:
    """It is unpickled before its process has a context; rank 1 has little time then."""

    def __init__(self, delay_ms: int, clock: Clock, rounds: int) -> None:
        self.delay_ms, self.clock, self.rounds = delay_ms, clock, rounds

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if os.environ.get("RANK") == "1":
            die_in(self.delay_ms, self.clock)

    def __call__(self, local_rank: int) -> int:
        for _ in range(self.rounds):
            unisono.barrier()
        return local_rank


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_a_death_while_ranks_meet(delay_ms: int, clock: Clock, table: Table) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn("gloo", Doomed(delay_ms, clock, 10**9), nproc_per_node=3, timeout=60)
    seconds = clock.since()
    assert str(caught.value).startswith("rank 1 of 3 was ended by SIGKILL")
    table.add("spawn: SIGKILL while ranks meet, 8 moments", seconds, 1, str(caught.value))


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_a_death_while_ranks_part(delay_ms: int, clock: Clock, table: Table) -> None:
    """They may have parted by then; if not, it is the dead one that is named."""
    begin = time.monotonic()
    try:
        found = unisono.spawn("gloo", Doomed(60 + delay_ms, clock, 1), nproc_per_node=3, timeout=60)
    except WorkerFailedError as error:
        seconds = clock.since()
        assert str(error).startswith("rank 1 of 3 was ended by SIGKILL")
        table.add("spawn: SIGKILL while ranks part, 8 moments", seconds, 1, str(error))
    else:
        assert found == [0, 1, 2]
        assert time.monotonic() - begin < 60


def test_the_leader_of_a_groups_control_plane_dies(clock: Clock, table: Table) -> None:
    def fn(local_rank: int) -> None:
        group = unisono.new_group([1, 2, 3])
        if local_rank:
            unisono.barrier(group=group)
        if local_rank == 1:
            clock.strike()
            os.kill(os.getpid(), signal.SIGKILL)
        unisono.all_gather("x", group=group) if local_rank else unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn("gloo", fn, nproc_per_node=4, timeout=60)
    seconds = clock.since()
    assert str(caught.value).startswith("rank 1 of 4 was ended by SIGKILL")
    table.add("spawn: the leader of a group's control plane dies", seconds, 1, str(caught.value))
