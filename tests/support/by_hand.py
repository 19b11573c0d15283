"""Plain processes that make their own gloo groups, without unisono."""

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
"""A function of rank, number of ranks, and a folder that all ranks share."""
_processes = multiprocessing.get_context("forkserver")


def prepare(*modules: str) -> None:
    """Start the fork server of the processes, which loads `modules` for all of them."""
    if unisono.is_distributed():  # in a rank of a marked test, which starts no processes
        return
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    if not {*modules} <= {*server._preload_modules}:
        server._stop()  # an earlier test module has started it with other modules
    if server._forkserver_pid is None:
        server.set_forkserver_preload(["tests.support.by_hand", "pytest", "unisono", *modules])
    server.ensure_running()


def dismiss() -> None:
    """End the fork server, and the resource tracker that belongs to it."""
    vars(multiprocessing.forkserver)["_forkserver"]._stop()
    vars(multiprocessing.resource_tracker)["_resource_tracker"]._stop()


def join(folder: Path, rank: int, size: int, name: str = "store", backend: str = "gloo") -> None:
    """Make the default group through a file."""
    store = FileStore(str(folder / name), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def join_by_tcp(folder: Path, rank: int, host: str, name: str = "meeting") -> None:
    """Make the default group of two ranks through a TCP store at a port that the kernel chose."""
    meeting = FileStore(str(folder / name), 2)
    if rank == 0:
        store = TCPStore(host, 0, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        port = int(meeting.get("port"))
        store = TCPStore(host, port, 2, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def leave() -> None:
    """Destroy all groups after a barrier. Collective over all ranks."""
    dist.barrier()
    dist.destroy_process_group()


def by_hand(fn: Callable[[int], Any], size: int = 2, killed: int = -1) -> list[Any]:
    """Run ``fn(rank)`` in separate processes; return their results, None for the rank `killed`."""
    blob = cloudpickle.dumps(fn)
    ends, processes = [], []
    for rank in range(size):
        end, other = _processes.Pipe()
        process = _processes.Process(target=_run, args=(blob, rank, other), daemon=True)
        process.start()
        other.close()
        ends.append(end)
        processes.append(process)
    replies = [_reply(end) if rank != killed else (None, "") for rank, end in enumerate(ends)]
    if killed >= 0:
        processes[killed].kill()
    for process, end in zip(processes, ends, strict=True):
        process.join()
        end.close()
    failed = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(replies) if text]
    assert not failed, "\n".join(failed)
    return [result for result, _ in replies]


def outcomes(
    checks: Sequence[Check],
    size: int,
    folder: Path,
    backend: str | None = None,
    ignored: str = "",
    set_up: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """Run checks one after the other in one job until one fails; return each one's failure or "".

    Warnings that match `ignored`, which other libraries raise, are no errors. `set_up` is called
    with the rank before all checks. Without a `backend` each check makes its own default group,
    and leaves it.
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


def _reply(end: Connection) -> tuple[Any, str]:
    """Receive a process's result and the text of its failure, one of which is empty."""
    try:
        reply: tuple[Any, str] = end.recv()
    except EOFError:
        return None, "it ended without a reply"
    return reply


def _run(blob: bytes, rank: int, end: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    try:
        end.send((cloudpickle.loads(blob)(rank), ""))
    except BaseException:
        end.send((None, traceback.format_exc()))
