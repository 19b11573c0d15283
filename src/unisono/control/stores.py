"""Torch's stores for the rendezvous of a job's ranks."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from unisono.control.addresses import listen_for_ranks


def store_at(*args: Any, **options: Any) -> TCPStore:
    """Create torch's store with torch's arguments, which may include an open listener."""
    # With libuv, the store of torch 2.6 accepts no listener; that of torch 2.9 is known to accept
    # one.
    return TCPStore(*args, **{**options, "use_libuv": torch.__version__ >= "2.9"})


def host_store(addr: str, port: int, *, is_one_host: bool, **options: Any) -> TCPStore:
    """Host torch's store where a job's ranks can reach it; raise OSError if that fails."""
    listener, address = listen_for_ranks(addr, port, is_one_host=is_one_host)
    port = listener.getsockname()[1]
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


def host_forever(addr: str, port: int) -> NoReturn:
    """Host torch's store at the listener that is this process's standard input."""
    # Ranks that save after a signal to all processes of a job may still need it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    store = store_at(addr, port, is_master=True, wait_for_workers=False, master_listen_fd=0)
    while True:
        signal.pause()
        assert store.port  # and so keeps the store
