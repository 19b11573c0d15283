"""Records of a rank's calls, and late ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

import unisono as idist
from unisono.recording.records import CollectiveRecord
from unisono.testing.cases._law import law, same
from unisono.topology import EVERYBODY

_LATE_S = 0.15  # more than the jitter of a busy machine
_LATE_CALLS = 4


@contextmanager
def _seen() -> Iterator[tuple[list[CollectiveRecord], list[CollectiveRecord]]]:
    """Collect the records that hooks get before and after this rank's calls."""
    rank = idist.get_rank()

    def note(into: list[CollectiveRecord], record: CollectiveRecord) -> None:
        if record.rank == rank:  # ranks that are threads share hooks
            into.append(record)

    begun: list[CollectiveRecord] = []
    done: list[CollectiveRecord] = []
    remove = idist.add_hook(before=partial(note, begun), after=partial(note, done))
    try:
        yield begun, done
    finally:
        remove()


@law()
def hooks_see_every_collective_with_name_bytes_group_and_number(rank: int, size: int) -> None:
    """Hooks get a record before and after each call; its number is the same on all ranks."""
    tensor = torch.ones(3, dtype=torch.float64)
    with _seen() as (begun, done):
        idist.all_reduce(tensor)
        idist.broadcast("text")
        idist.all_gather(tensor.float())
        idist.barrier()
    expected = [
        ("all_reduce", 24, "float64"),
        ("broadcast", 0, ""),
        ("all_gather", 12, "float32"),
        ("barrier", 0, ""),
    ]
    same([(each.name, each.size_bytes, each.dtype) for each in done], expected)
    same([each.name for each in begun], [name for name, _, _ in expected])
    for each in done:
        same((each.rank, each.world_size, each.group), (rank, size, EVERYBODY))
        same(list(each.ranks), list(range(size)))
        assert each.duration_ns >= 0, each
        assert each.plane in ("control", "memory", "data"), each
    arrivals = [each.arrival_ns for each in done]
    same(arrivals, sorted(arrivals), "arrivals")
    numbers = [each.number for each in done]
    same(numbers, list(range(numbers[0], numbers[0] + len(expected))), "numbers")
    same(idist.all_gather(numbers[0]), [numbers[0]] * size, "the number of one call")
    idist.barrier()
    same(len(done), len(expected), "after the hooks were taken back")


@law("groups")
def hooks_see_the_group_of_a_call(rank: int, size: int) -> None:
    """A group counts its own calls, and its record names its ranks."""
    group = idist.new_group([0, size - 1] if size > 1 else [0])
    with _seen() as (begun, done):
        idist.all_reduce(1, group=group)
        idist.all_reduce(2, group=group)
    found = [(each.group, list(each.ranks), each.number) for each in done]
    is_member = rank in group.ranks
    same(found, [(group.name, list(group.ranks), n) for n in (1, 2)] if is_member else [])


@law()
def a_call_that_fails_is_recorded_with_its_error(rank: int, size: int) -> None:
    """The record of a call that raises has its error, on every rank."""
    with _seen() as (begun, done), suppress(idist.UnisonoError):
        idist.all_reduce("text")  # type: ignore[call-overload]
    for each in done:
        assert "Error" in each.error, each
    same(len(begun), len(done))
    same(len(done), 1)


@law()
def watching_names_the_rank_that_comes_late(rank: int, size: int) -> None:
    """Every rank gets the number of the late rank, and the lost time."""
    slow = size - 1
    with idist.watching() as watch:
        for _ in range(_LATE_CALLS):
            if rank == slow:
                time.sleep(_LATE_S)
            idist.barrier()
    same(len(watch.lost_s), size)
    if size == 1:
        same((watch.slowest, watch.lost_s), (None, (0.0,)))
        return
    same(watch.slowest, slow, str(watch))
    assert watch.last[slow] >= _LATE_CALLS - 1, str(watch)  # another rank may be last once
    assert watch.lost_s[slow] >= (_LATE_CALLS - 1) * _LATE_S * 0.9, str(watch)
    same(idist.all_gather(watch.lost_s), [watch.lost_s] * size)
