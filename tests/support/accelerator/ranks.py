"""Ranks on the device: forks of a process that knows it and hasn't touched it, each with its job.

What is tested here happens in `initialize`, so ranks call it themselves, after a mutant has its way.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import unisono as idist
from unisono.errors import WorkerFailedError

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
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(
                target=_run,
                args=(rank, nproc_per_node, backend, fn, args, before, environ(rank), options),
                kwargs={"path": store, "results": results},
            )
            for rank in range(nproc_per_node)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < nproc_per_node:
                rank, result, error = results.get()
                if error is not None:
                    raise WorkerFailedError.of(error, rank, nproc_per_node) from error
                found[rank] = result
        finally:
            for process in ranks:
                process.join(0 if len(found) < nproc_per_node else LIMIT_S)
                process.kill()
                process.join()
    return [found[rank] for rank in range(nproc_per_node)]


def _run(
    rank: int,
    size: int,
    backend: str | None,
    fn: Callable[..., Any],
    args: Sequence[Any],
    before: Callable[[], None],
    environ: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    path: str,
    results: Any,
) -> None:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **environ}
    )
    try:
        before()
        idist.initialize(backend, store=dist.FileStore(path, size), **options)
        results.put((rank, fn(int(os.environ["LOCAL_RANK"]), *args), None))
        idist.finalize()
    except Exception as error:
        traceback.print_exc()
        results.put((rank, None, error))
