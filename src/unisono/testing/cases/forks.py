"""A fork of a rank can't use the rank's context, and gets a clear error."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono.context import current_model
from unisono.errors import ContextError
from unisono.testing.cases._law import law, quietly, same

_LIMIT_S = 20.0
_REFUSED = "every call raised ContextError"


def _calls() -> list[Callable[[], Any]]:
    """List calls of every kind, with a value for each path through the library."""
    one, few, many = torch.ones(1), torch.ones(9), torch.ones(1 << 20)
    calls: list[Callable[[], Any]] = [
        idist.barrier,
        idist.one_rank_only(with_barrier=True)(lambda: None),
        partial(idist.all_gather_tensors_with_shapes, one, [(1,)]),
        partial(idist.scatter, [1]),
        partial(idist.all_to_all, [1]),
        partial(idist.all_reduce_, few),
        partial(idist.broadcast_, few),
        partial(idist.reduce_scatter, few),
        partial(idist.all_reduce_, many, async_op=True),
    ]
    for call in (idist.all_reduce, idist.all_gather, idist.broadcast, idist.gather, idist.reduce):
        calls += [partial(call, 1), partial(call, few)]
    for call in (idist.all_reduce, idist.all_gather, idist.broadcast):
        calls += [partial(call, value, async_op=True) for value in (1, few, many, {"a": 1})]
    if "groups" in current_model().capabilities:
        calls += [partial(idist.new_group, [0]), partial(idist.all_reduce, 1, group=[0])]
    if "send_recv" in current_model().capabilities:
        calls += [partial(idist.send, 1, dst=0), partial(idist.recv, src=0)]
    return calls


@law()
def a_fork_of_a_rank_is_told_so_in_every_call(rank: int, size: int) -> None:
    """Every call in a fork raises, and the rank itself is unaffected."""
    if not hasattr(os, "fork"):
        return  # as on Windows
    calls = _calls()
    # This starts the thread of asynchronous calls, which the fork will lack.
    same(idist.all_reduce(1, async_op=True).wait(), size)
    reading, writing = os.pipe()
    child = quietly(os.fork)  # since 3.12 Python warns of forks of processes with threads
    if child == 0:
        _reply(writing, calls, f"fork of rank {rank}")
    os.close(writing)
    try:
        # Read once, as forks of other thread ranks also hold the other end, so it isn't closed.
        reply = f"nothing within {_LIMIT_S:g} s"
        if select.select([reading], [], [], _LIMIT_S)[0]:
            reply = os.read(reading, 4000).decode(errors="replace") or "it ended without a reply"
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # not waited for yet, so its pid isn't another process's
        os.waitpid(child, 0)
    assert reply == _REFUSED, f"in a fork: {reply}"


def _reply(writing: int, calls: list[Callable[[], Any]], who: str) -> None:
    """Make the calls, write the outcome to a pipe, and exit without the rank's exit handlers."""
    reply, index = _REFUSED, -1
    try:
        for index, call in enumerate(calls):
            try:
                reply = f"call {index} gave {call()!r}"
                break
            except ContextError as error:
                if who not in str(error):
                    raise
    except BaseException as error:
        reply = f"call {index} raised {type(error).__name__}: {error}"
    finally:
        os.write(writing, reply.encode("utf-8", "replace")[:4000])
        os._exit(0)
