"""A rank that dies or is stopped at any moment of a collective of 100 MB in shared memory."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.by_hand import by_hand, dismiss, join, prepare
from tests.support.measures import Table
from unisono.context import communicator
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError
from unisono.host import memory

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

SIZE = 3
MOMENTS = 20
SEED = int(os.environ.get("UNISONO_SEED", random.SystemRandom().randrange(2**32)))
COUNT = 25_000_002  # of float32: 100 MB, in one part for each rank
LIMIT_S = 1.0

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": unisono.all_reduce_,
    "reduce_scatter": unisono.reduce_scatter,
    "all_gather": lambda tensor: unisono.all_gather(tensor[: COUNT // SIZE]),
    "broadcast": unisono.broadcast_,
}
KILL, SEGFAULT, STOP = signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP
ORDER = (KILL, SEGFAULT, KILL, SEGFAULT, STOP)  # which lasts until a deadline


@dataclass(frozen=True)
class Moment:
    """When which rank ends, and how: after so many lengths of a call."""

    call: str
    how: signal.Signals
    victim: int
    calls: float


def moments() -> Iterator[Moment]:
    """Draw the moments; most are of all_reduce."""
    dice = random.Random(SEED)
    for how in ORDER * (MOMENTS // len(ORDER)):
        call = dice.choice(["all_reduce", "all_reduce", *CALLS])
        yield Moment(call, how, dice.randrange(SIZE), dice.uniform(0, 2))


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield
    dismiss()  # the tests after these look for what is left


def strike(path: Path, number: int, delay_s: float) -> None:
    """End or stop this process in a while, whatever its main thread is doing then."""

    def end() -> None:
        path.write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)

    timer = threading.Timer(delay_s, end)
    timer.daemon = True
    timer.start()


def until_the_end(moment: Moment, folder: Path, rank: int) -> tuple[str, int | None, float, float]:
    """Call until a rank fails; give the error, whom it names, when it came, and the limit."""
    torch.set_num_threads(1)  # more would fight for the cores
    join(folder, rank, SIZE)
    tensor, call = torch.ones(COUNT), CALLS[moment.call]
    call(tensor)
    assert communicator().control.host(None) is not None
    unisono.barrier()
    start = time.monotonic()
    call(tensor)
    lengths: list[float] = unisono.all_gather(time.monotonic() - start)
    limit_s = max(LIMIT_S, 10 * max(lengths)) if moment.how == STOP else 0.0
    if rank == moment.victim:
        strike(folder / "struck", moment.how, moment.calls * max(lengths))
    try:
        while True:
            with unisono.deadline(limit_s or 60):
                call(tensor)
    except (PeerFailedError, CollectiveTimeoutError) as error:
        came = time.monotonic()
        with pytest.raises(CollectiveError):  # and so it stays
            call(tensor)
        return str(error), getattr(error, "rank", None), came, limit_s


@pytest.mark.timeout(300)
def test_every_other_rank_names_the_one_that_ended(tmp_path: Path, table: Table) -> None:
    for at, moment in enumerate(moments()):
        folder = tmp_path / str(at)
        folder.mkdir()
        reports = by_hand(partial(until_the_end, moment, folder), SIZE, moment.victim)
        struck = float((folder / "struck").read_text())
        for rank in set(range(SIZE)) - {moment.victim}:
            text, named, came, limit_s = reports[rank]
            is_named = named == moment.victim
            if moment.how == STOP:
                is_named = f"rank {moment.victim}" in text and "stopped" in text
            assert is_named, f"{moment}, UNISONO_SEED={SEED}: rank {rank} has heard {text!r}"
            late_s = came - struck - limit_s
            case = f"100 MB in shared memory: {moment.how.name} in the middle"
            case += ", from the deadline" * (moment.how == STOP)
            table.add(f"{case}, {MOMENTS} moments", late_s, LIMIT_S, text)
