"""A fork of a rank can't use its context, and gets a clear error."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono.context import current_model
from unisono.errors import ContextError
from unisono.testing.cases._law import law, quietly, same, worlds

_LIMIT_S = 20.0


def _calls() -> list[Callable[[], Any]]:
    calls: list[Callable[[], Any]] = [
        idist.barrier,
        idist.one_rank_only(with_barrier=True)(lambda: None),
        lambda: idist.all_gather_tensors_with_shapes(torch.ones(1), [(1,)]),
        lambda: idist.scatter([1]),
        lambda: idist.all_to_all([1]),
    ]
    for takes in (idist.all_reduce, idist.all_gather, idist.broadcast, idist.gather, idist.reduce):
        calls += [partial(takes, 1), partial(takes, torch.ones(9))]
    for goes_on in (idist.all_reduce, idist.all_gather, idist.broadcast):
        values = (1, torch.ones(9), torch.ones(1 << 20), {"a": 1})
        calls += [partial(goes_on, value, async_op=True) for value in values]
    calls += [partial(idist.all_reduce_, torch.ones(1 << 20), async_op=True)]
    for works in (idist.all_reduce_, idist.broadcast_, idist.reduce_scatter):
        calls += [partial(works, torch.ones(9))]
    if "groups" in current_model().capabilities:
        calls += [lambda: idist.new_group([0]), lambda: idist.all_reduce(1, group=[0])]
    if "send_recv" in current_model().capabilities:
        calls += [lambda: idist.send(1, dst=0), lambda: idist.recv(src=0)]
    return calls


@law()
def a_fork_of_a_rank_is_told_so_in_every_call() -> None:
    """Every call in a fork raises, and the rank itself is unaffected."""
    if not hasattr(os, "fork"):
        return  # as on Windows
    rank, size = worlds()
    calls = _calls()
    # Starts the thread of asynchronous calls, which the fork lacks.
    same(idist.all_reduce(1, async_op=True).wait(), size)
    reading, writing = os.pipe()
    child = quietly(os.fork)
    if child == 0:
        _answer(writing, calls, f"fork of rank {rank}")
    os.close(writing)
    reply = _read(reading, child)
    assert reply == b"told", f"in a fork: {reply.decode() or f'nothing within {_LIMIT_S:g} s'}"
    same(idist.all_gather(rank), list(range(size)))


def _answer(writing: int, calls: list[Callable[[], Any]], text: str) -> None:
    """Write the results of the calls to a pipe, and exit without the rank's exit handlers."""
    reply = "told"
    try:
        for index, call in enumerate(calls):
            try:
                reply = f"call {index} gave {call()!r}"
                break
            except ContextError as error:
                if text not in str(error):
                    reply = f"call {index}: {error}"
                    break
    except BaseException as error:
        reply = f"call {index} raised {type(error).__name__}: {error}"
    finally:
        os.write(writing, reply.encode("utf-8", "replace")[:4000])
        os._exit(0)


def _read(reading: int, child: int) -> bytes:
    reply = b""
    try:
        if select.select([reading], [], [], _LIMIT_S)[0]:
            reply = os.read(reading, 4000)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    return reply
