"""The store that ranks meet at, kept by the process that launched them."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import TCPStore

from unisono._listening import listen_at, listen_everywhere, listen_for_others
from unisono.errors import LaunchError
from unisono.topology import LaunchPlan

__all__ = ("hold", "host")

_LOOPBACK = "127.0.0.1"
_ANSWER_S = 5.0


def host(plan: LaunchPlan) -> tuple[Any, LaunchPlan]:
    """Host the rendezvous where that is this node's part; it outlives every worker.

    Local. Alone on one host it listens on the loopback at a port of the kernel's choice, so that
    no other job can take it and nobody else can reach it. Of several hosts it listens at
    `master_addr`, or at every address where that name isn't this host's own.
    """
    if plan.init_method is not None:
        return None, plan
    if plan.node_rank != 0:  # node 0 does so
        return None, replace(plan, store_is_hosted=True)
    addr = plan.master_addr or _LOOPBACK
    try:
        listener, own = _listen(addr, plan.master_port or 0, is_one_host=plan.nnodes == 1)
    except OSError as error:
        raise LaunchError(
            f"can't listen at master_addr={addr!r}, master_port={plan.master_port}: {error}"
        ) from error
    port = listener.getsockname()[1]
    fd = listener.fileno()
    try:
        store = TCPStore(
            own, port, None, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
    except Exception:  # the store has taken it, and has failed
        listener.detach()
        raise
    except BaseException:  # Ctrl-C came before the store, or just after it, which has closed it
        with suppress(OSError):
            listener.close()
        raise
    listener.detach()
    return store, replace(plan, master_addr=addr, master_port=port, store_is_hosted=True)


def _listen(addr: str, port: int, *, is_one_host: bool) -> tuple[socket.socket, str]:
    """Listen where the ranks can reach it; give the socket, and its address on this host."""
    if is_one_host:
        listener = listen_at(addr, port)
        _check_that_it_answers(listener)
        return listener, addr
    found = listen_for_others(addr, port)
    return (listen_everywhere(port), _LOOPBACK) if found is None else (found, addr)


def _check_that_it_answers(listener: socket.socket) -> None:
    """Fail at once where this host can't reach itself; torch would try for five minutes."""
    where = listener.getsockname()
    try:
        socket.create_connection(where[:2], _ANSWER_S).close()
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"no process of this host can connect to {where[0]}: {error}. The interface is down, "
            "as in a new network namespace: ip link set lo up"
        ) from error


def hold(plan: LaunchPlan, held: ExitStack) -> LaunchPlan:
    """Host the rendezvous until `held` is closed.

    Local. No caller's frame has the store, which an exception's traceback would keep open.
    """
    store, plan = host(plan)
    held.callback([store].clear)  # in no frame of its own, which Ctrl-C could keep alive, too
    return plan
