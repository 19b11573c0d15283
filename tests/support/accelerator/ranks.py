"""Ranks on the device: forks of a process that knows it and hasn't touched it.

What is tested happens in `initialize`, so ranks call it themselves, after a mutant has its way.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore

import unisono as idist
from unisono.errors import LaunchError, WorkerFailedError

LIMIT_S = 30.0


def launch(
    backend: str | None,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    nproc_per_node: int = 2,
    before: Callable[[], None] = lambda: None,
    environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
    **options: Any,
) -> list[Any]:
    """Run `fn` in forked ranks that have initialised, and give the results by rank."""
    context = mp.get_context("fork")
    ranks, ends = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(nproc_per_node):
            ours, theirs = context.Pipe(duplex=False)
            facts = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc_per_node)}
            job = partial(_run, backend, fn, args, before, str(Path(folder, "store")), options)
            process = context.Process(target=job, args=({**facts, **environ(rank)}, theirs))
            process.start()
            theirs.close()
            ranks.append(process)
            ends.append(ours)
        try:
            return _results(ends)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _results(ends: list[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = wait(waiting, LIMIT_S)
        if not ready:
            raise LaunchError(f"no result after {LIMIT_S} s")
        rank = ends.index(ready[0])
        try:
            result, error = ends[rank].recv()
        except EOFError:
            raise WorkerFailedError("it ended without a result", rank) from None
        if error is not None:
            raise WorkerFailedError.of(error, rank, len(ends)) from error
        found[rank] = result
    return [found[rank] for rank in range(len(ends))]


def _run(
    backend: str | None,
    fn: Callable[..., Any],
    args: Sequence[Any],
    before: Callable[[], None],
    path: str,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    results: Any,
) -> None:
    os.environ.update(environ)
    size = int(environ["WORLD_SIZE"])
    result: Any = None
    error: Exception | None = None
    try:
        before()
        idist.initialize(backend, store=FileStore(path, size), **options)
        result = fn(int(environ["LOCAL_RANK"]), *args)
        idist.finalize()
    except Exception as raised:
        error = raised
    results.send((result, error))
