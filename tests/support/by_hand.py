"""Plain processes that make gloo groups by hand, which unisono knows nothing of."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

import unisono

TIMEOUT = timedelta(seconds=30)
Check = Callable[[int, int, Path], None]
"""Takes rank, number of ranks, and a folder that all of them see."""
_processes = multiprocessing.get_context("forkserver")


def prepare(*modules: str) -> None:
    """Start the process that the others are forks of, which loads `modules` for all of them."""
    if unisono.is_distributed():  # a rank of a test that runs there, which starts no processes
        return
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    if not {*modules} <= {*server._preload_modules}:
        server._stop()  # the one that an earlier module of tests has started
    if server._forkserver_pid is None:
        server.set_forkserver_preload(["tests.support.by_hand", "pytest", "unisono", *modules])
    server.ensure_running()


def dismiss() -> None:
    """End that process, and the one that cleans up after it."""
    vars(multiprocessing.forkserver)["_forkserver"]._stop()
    vars(multiprocessing.resource_tracker)["_resource_tracker"]._stop()


def join(folder: Path, rank: int, size: int, name: str = "store", backend: str = "gloo") -> None:
    """Make the default group through a file."""
    store = FileStore(str(folder / name), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def join_by_tcp(folder: Path, rank: int, host: str, name: str = "meeting") -> None:
    """Make the default group of two through a store at a port of the kernel's choice."""
    meeting = FileStore(str(folder / name), 2)
    if rank == 0:
        store = TCPStore(host, 0, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        port = int(meeting.get("port"))
        store = TCPStore(host, port, 2, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def leave() -> None:
    """Destroy all groups, after everybody has come so far."""
    dist.barrier()
    dist.destroy_process_group()


def by_hand(fn: Callable[[int], Any], size: int = 2, killed: int = -1) -> list[Any]:
    """Run ``fn(rank)`` in processes of their own; give what each returned, None for `killed`."""
    blob = cloudpickle.dumps(fn)
    ends, processes = [], []
    for rank in range(size):
        end, other = _processes.Pipe()
        process = _processes.Process(target=_run, args=(blob, rank, other), daemon=True)
        process.start()
        other.close()
        ends.append(end)
        processes.append(process)
    told = [_hear(end) if rank != killed else (None, "") for rank, end in enumerate(ends)]
    if killed >= 0:
        processes[killed].kill()
    for process, end in zip(processes, ends, strict=True):
        process.join()
        end.close()
    failed = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(told) if text]
    assert not failed, "\n".join(failed)
    return [result for result, _ in told]


def outcomes(
    checks: Sequence[Check],
    size: int,
    folder: Path,
    backend: str | None = None,
    ignored: str = "",
    set_up: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """Run checks one after the other in one job until one fails; give by name what failed, or "".

    Warnings that match `ignored` are other libraries' own; `set_up` is called with the rank first.
    Without a `backend` each check makes its default group, and leaves it.
    """

    def fn(rank: int) -> tuple[str, str]:
        warnings.filterwarnings("ignore", ignored or "$")
        if set_up is not None:
            set_up(rank)
        if backend is not None:
            join(folder, rank, size, backend=backend)
        for check in checks:
            own = folder / check.__name__
            own.mkdir(exist_ok=True)
            try:
                check(rank, size, own)
                if backend is not None:
                    dist.barrier()
            except BaseException:
                return check.__name__, f"rank {rank}:\n{traceback.format_exc()}"
        if backend is not None:
            leave()
        return "", ""

    failed = by_hand(fn, size)
    names = [check.__name__ for check in checks]
    first = min((names.index(name) for name, _ in failed if name), default=len(names))
    table = dict.fromkeys(names[:first], "")
    table |= dict.fromkeys(names[first:], "it wasn't run, as a check before it failed")
    for name in names[first : first + 1]:
        table[name] = "\n".join(text for _, text in failed)
    return table


def _hear(end: Connection) -> tuple[Any, str]:
    try:
        told: tuple[Any, str] = end.recv()
    except EOFError:
        return None, "it ended without a word"
    return told


def _run(blob: bytes, rank: int, end: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    try:
        end.send((cloudpickle.loads(blob)(rank), ""))
    except BaseException:
        end.send((None, traceback.format_exc()))
