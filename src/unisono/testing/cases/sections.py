"""Guarded sections: ranks that run the body, their order, and the report of a failure."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import unisono as idist
from unisono.errors import ArgumentError, PeerFailedError
from unisono.testing.cases._law import law, raises, same


@law()
def one_rank_only_runs_on_one_rank_and_gives_its_value_there(rank: int, size: int) -> None:
    for chosen in range(size):
        for with_barrier in (False, True):
            ran: list[int] = []

            @idist.one_rank_only(rank=chosen, with_barrier=with_barrier)
            def body(number: int, ran: list[int] = ran) -> int:
                ran.append(number)
                return number * 2

            same(body(3), 6 if rank == chosen else None)
            same(ran, [3] if rank == chosen else [])
    same(idist.master_only(lambda: "here")(), "here" if rank == 0 else None)


@law()
def a_failure_in_one_rank_only_with_barrier_reaches_every_rank(rank: int, size: int) -> None:
    for chosen in range(size):

        @idist.one_rank_only(rank=chosen, with_barrier=True)
        def body() -> None:
            raise ValueError("no such file")

        raises(PeerFailedError, [f"rank {chosen}", "ValueError: no such file", "in body"], body)


@law()
def one_rank_first_runs_before_the_others(rank: int, size: int) -> None:
    for chosen in range(size):
        with idist.one_rank_first(rank=chosen):
            value = f"made by {rank}"
        same(idist.all_gather(value), [f"made by {r}" for r in range(size)])


@law()
def a_failure_in_one_rank_first_reaches_every_rank_before_the_body_runs(
    rank: int, size: int
) -> None:
    for chosen in range(size):
        ran: list[int] = []

        def section(chosen: int = chosen, ran: list[int] = ran) -> None:
            with idist.one_rank_first(rank=chosen):
                ran.append(rank)
                raise KeyError("lost")

        parts = [f"rank {chosen}", "KeyError: 'lost'", "in section"]
        raises(PeerFailedError, parts, section)
        same(ran, [rank] if rank == chosen else [])


@law("groups")
def one_rank_of_each_node_goes_first(rank: int, size: int) -> None:
    with idist.one_rank_first(rank=0, local=True):
        value = rank
    same(idist.all_gather(value), list(range(size)))


@law()
def sections_of_a_rank_that_isnt_there_are_refused(rank: int, size: int) -> None:
    wrong: Any
    for wrong in (-1, size, True, "0"):
        raises(ArgumentError, ["rank"], idist.one_rank_only(rank=wrong)(bool))
        raises(ArgumentError, ["rank"], ExitStack().enter_context, idist.one_rank_first(wrong))
