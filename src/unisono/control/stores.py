"""Torch's stores for the rendezvous of a job's ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from unisono.control.addresses import listen_for_ranks, why_unreachable

_ANSWER_S = 5.0


def store_at(*args: Any, **options: Any) -> TCPStore:
    """Create torch's store with torch's arguments, which may include an open listener."""
    # With libuv, the store of torch 2.6 accepts no listener; that of torch 2.9 is known to accept
    # one.
    return TCPStore(*args, **{**options, "use_libuv": torch.__version__ >= "2.9"})


def host_store(addr: str, port: int, *, is_one_host: bool, **options: Any) -> TCPStore:
    """Host torch's store where a job's ranks can reach it; raise OSError if that fails."""
    listener, address = listen_for_ranks(addr, port, is_one_host=is_one_host)
    port = listener.getsockname()[1]
    if is_one_host and (reason := why_unreachable(address, port, _ANSWER_S)) is not None:
        listener.close()  # torch would try for five minutes
        raise OSError(
            f"no process of this host can connect to {address}: {reason}. The interface is down, "
            "as in a new network namespace: ip link set lo up"
        )
    how = {"is_master": True, "wait_for_workers": False, **options}
    try:
        store = store_at(address, port, master_listen_fd=listener.fileno(), **how)
    except Exception:  # the store owns the descriptor, and has failed
        listener.detach()
        raise
    except BaseException:  # Ctrl-C before the store exists, or just after it has closed it
        with suppress(OSError):
            listener.close()
        raise
    listener.detach()
    return store
