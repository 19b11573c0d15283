"""A replica that dies at any moment: while ranks meet, leading a group, while they part."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import unisono
from tests.support.measures import Clock, Table
from unisono.errors import WorkerFailedError

DELAYS_MS = (0, 2, 5, 10, 15, 20, 30, 50)
WHO = ("the leader", "a member")  # of the control plane: rank 0 leads


def die_in(delay_ms: int, clock: Clock) -> None:
    """Kill this process in a while, whatever its main thread is doing then."""

    def die() -> None:
        threading.Event().wait(delay_ms / 1000)
        clock.strike()
        os.kill(os.getpid(), signal.SIGKILL)

    if delay_ms == 0:
        die()
    threading.Thread(target=die, daemon=True).start()


class Doomed:
    """It is unpickled before its process has a context; the victim has little time then."""

    def __init__(self, victim: int, delay_ms: int, clock: Clock) -> None:
        self.victim, self.delay_ms, self.clock = victim, delay_ms, clock

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if os.environ.get("RANK") == str(self.victim):
            die_in(self.delay_ms, self.clock)

    def __call__(self, local_rank: int) -> None:
        while True:
            unisono.barrier()


@pytest.mark.parametrize("victim", [0, 1], ids=WHO)
def test_a_death_while_ranks_meet(victim: int, clock: Clock, table: Table) -> None:
    for delay_ms in DELAYS_MS:
        with pytest.raises(WorkerFailedError) as caught:
            unisono.spawn("gloo", Doomed(victim, delay_ms, clock), nproc_per_node=3, timeout=60)
        seconds, text = clock.since(), str(caught.value)
        assert text.startswith(f"rank {victim} of 3 was ended by SIGKILL"), delay_ms
        case = f"spawn: SIGKILL of {WHO[victim]} while ranks meet, {len(DELAYS_MS)} moments"
        table.add(case, seconds, 1, text)


@pytest.mark.parametrize("victim", [0, 1], ids=WHO)
def test_a_death_while_ranks_part(victim: int, clock: Clock, table: Table) -> None:
    """Either its work was done by then, or it is the dead one that is named."""

    def fn(local_rank: int, delay_ms: int) -> int:
        unisono.barrier()
        if local_rank == victim:
            die_in(delay_ms, clock)
        return local_rank

    def part(delay_ms: int) -> None:
        try:
            found = unisono.spawn("gloo", fn, (delay_ms,), nproc_per_node=3, timeout=60)
        except WorkerFailedError as error:
            seconds, text = clock.since(), str(error)
            assert text.startswith(f"rank {victim} of 3 was ended by SIGKILL"), delay_ms
            case = f"spawn: SIGKILL of {WHO[victim]} while ranks part, {len(DELAYS_MS)} moments"
            table.add(case, seconds, 1, text)
        else:
            assert delay_ms > 0, "a rank that died before it could return anything wasn't a failure"
            assert found == [0, 1, 2]

    for delay_ms in DELAYS_MS:
        part(delay_ms)


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
