"""The store that ranks meet at, kept by the process that launched them."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import TCPStore

from unisono._listening import listen_at
from unisono.errors import LaunchError
from unisono.topology import LaunchPlan

__all__ = ("hold", "host")


def host(plan: LaunchPlan) -> tuple[Any, LaunchPlan]:
    """Host the rendezvous where that is this node's part; it outlives every worker.

    Local. Alone on one host it listens on the loopback at a port of the kernel's choice, so that
    no other job can take it and nobody else can reach it.
    """
    if plan.init_method is not None or plan.node_rank != 0:
        return None, plan
    addr = plan.master_addr or "127.0.0.1"
    try:
        listener = listen_at(addr, plan.master_port or 0)
    except OSError as error:
        raise LaunchError(
            f"can't listen at master_addr={addr!r}, master_port={plan.master_port}: {error}"
        ) from error
    port = listener.getsockname()[1]
    fd = listener.fileno()
    try:
        store = TCPStore(
            addr, port, None, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
    except Exception:  # the store has taken it, and has failed
        listener.detach()
        raise
    except BaseException:  # Ctrl-C came before the store, or just after it, which has closed it
        with suppress(OSError):
            listener.close()
        raise
    listener.detach()
    return store, replace(plan, master_addr=addr, master_port=port)


def hold(plan: LaunchPlan, held: ExitStack) -> LaunchPlan:
    """Host the rendezvous until `held` is closed.

    Local. No caller's frame has the store, which an exception's traceback would keep open.
    """
    store, plan = host(plan)
    held.callback([store].clear)  # in no frame of its own, which Ctrl-C could keep alive, too
    return plan
