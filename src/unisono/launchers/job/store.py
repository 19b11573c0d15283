"""The rendezvous of a job's ranks: a store of the launching process, and private files."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from unisono.control.addresses import LOOPBACK
from unisono.errors import LaunchError
from unisono.topology import LaunchPlan


def private_store(held: ExitStack) -> str:
    """Create the rendezvous file of one host's ranks, closed to other users; return its path."""
    # On Linux the file has no name: ranks open it in this process's folder of ``/proc``, which only
    # this user can read, and it vanishes with the last process that has it open. Elsewhere, or if
    # the kernel forbids memory without a name, the file is in a folder of mode 0700.
    if sys.platform == "linux" and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):  # raised under a strict seccomp profile
            file = os.memfd_create("unisono-store")
            held.callback(os.close, file)
            return f"/proc/{os.getpid()}/fd/{file}"
    folder = held.enter_context(tempfile.TemporaryDirectory(prefix="unisono-"))
    return str(Path(folder, "store"))


def host(held: ExitStack, addr: str, port: int, is_one_host: bool) -> int:
    """Host torch's store in this process until `held` is closed; return its port."""
    from unisono.control.stores import host_store  # which imports torch

    store = host_store(addr, port, is_one_host=is_one_host)
    # No caller's frame holds the store, as an exception's traceback would keep it open.
    held.callback([store].clear)  # no function, whose frame Ctrl-C could keep alive, too
    return store.port


def hold(
    plan: LaunchPlan, held: ExitStack, host_at: Callable[..., int] | None = None
) -> LaunchPlan:
    """Host the rendezvous if this is node 0, until `held` is closed; return the plan with it."""
    # For ranks of one host the store listens on the loopback at a port of the kernel's choice, so
    # that no other job can take the port and no other host can reach it. For several hosts it
    # listens at `master_addr`, or at every address if that name isn't this host's.
    if plan.init_method is not None:  # the ranks meet there instead
        return plan
    if plan.node_rank != 0:  # node 0 hosts it
        return replace(plan, store_is_hosted=True)
    addr, is_one_host = plan.master_addr or LOOPBACK, plan.nnodes == 1
    try:
        port = (host_at or host)(held, addr, plan.master_port or 0, is_one_host)
    except OSError as error:
        raise LaunchError(
            f"can't listen at master_addr={addr!r}, master_port={plan.master_port}: {error}"
        ) from error
    plan = replace(plan, master_addr=addr, master_port=port, store_is_hosted=True)
    return replace(plan, private_store=private_store(held)) if is_one_host else plan
