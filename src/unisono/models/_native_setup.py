"""What the native model asks of torch before and while it makes a process group."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from unisono.errors import ArgumentError, BackendUnavailableError, ContextError
from unisono.model import ComputationModel
from unisono.topology import RankInfo, Topology

__all__ = (
    "accelerator",
    "backends_by_device",
    "choose_device",
    "host_url",
    "known_backends",
    "meet",
    "place_by_hosts",
    "place_by_store",
    "timeout_of",
)

_TIMEOUT = timedelta(minutes=5)  # torch's own for a rendezvous
_TRY_S = 0.1


def known_backends() -> tuple[str, ...]:
    """List the backends that torch knows or that somebody registered with it. Local."""
    if not dist.is_available():
        return ()
    return tuple(name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)


def accelerator() -> torch.device | None:
    """Give this machine's accelerator, without index, or None. Local."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def backends_by_device(backend: str) -> dict[str, str]:
    """Read which backend serves which device type out of a backend's name. Local.

    Args:
        backend: a name that torch knows, or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ArgumentError: the string isn't of that form.
    """
    if ":" not in backend:
        devices = dist.Backend.backend_capability.get(backend, ["cpu"])
        return dict.fromkeys(devices, backend)
    table: dict[str, str] = {}
    for pair in backend.split(","):
        device, separator, name = pair.partition(":")
        if not (device and separator and name) or device in table or ":" in name:
            raise ArgumentError(
                f"backend {backend!r}: {pair!r} should be device:backend, each device once, "
                "as in 'cpu:gloo,cuda:nccl'"
            )
        table[device] = name
    return table


def choose_device(backend: str, info: RankInfo, wanted: Any) -> torch.device:
    """Choose the device of a replica and make it the current one. Local.

    The accelerator serves if `backend` is what torch uses for it by default or names it; else the
    CPU. With one visible device (masked by the launcher) its index is 0 whatever the local rank.

    Args:
        backend: the job's backend.
        info: who the replica is; where its local rank isn't said, ranks take devices in turn.
        wanted: the user's own choice: a device, its name or an index; None for ours.

    Raises:
        BackendUnavailableError: there are fewer devices than local ranks.
    """
    kind = accelerator()
    if wanted is not None:
        device = _as_device(wanted, kind)
    elif kind is None or not _serves(backend, kind.type):
        return torch.device("cpu")
    else:
        count = torch.accelerator.device_count()
        index = info.rank % count if info.local_rank is None else info.local_rank
        if count == 1:
            index = 0
        if index >= count:
            raise BackendUnavailableError(
                f"backend {backend!r}: local rank {index} has no {kind.type} device of its own, "
                f"{count} are visible: start at most {count} on this node, or pass device="
            )
        device = torch.device(kind.type, index)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def _as_device(wanted: Any, kind: torch.device | None) -> torch.device:
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if kind is None:
            raise ArgumentError(f"device={wanted}: this machine has no accelerator with an index")
        return torch.device(kind.type, wanted)
    try:
        return torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={wanted!r} is no device: {error}") from error


def _serves(backend: str, device_type: str) -> bool:
    table = backends_by_device(backend)
    if ":" in backend:
        return device_type in table
    return dist.get_default_backend_for_device(device_type) == backend


def meet(info: RankInfo, timeout: timedelta | None) -> dict[str, Any]:
    """Give the arguments of ``init_process_group`` that make the ranks of `info` meet.

    Collective over all ranks of `info`.

    Raises:
        ContextError: there is no address, or nobody answers there.
    """
    ranks = {"rank": info.rank, "world_size": info.world_size}
    _reach(info, timeout)
    if info.source == "torchrun":  # torch's own reading knows of restarts and of the agent's store
        return {**ranks, "init_method": "env://"}
    if info.master_addr is None or info.master_port is None:
        if info.world_size == 1:
            return {**ranks, "store": HashStore()}
        raise ContextError(
            f"rank {info.rank} of {info.world_size} has no address to meet the others at: set "
            "MASTER_ADDR and MASTER_PORT, or pass init_method="
        )
    return {**ranks, "store": _store(info, timeout)}


def _reach(info: RankInfo, timeout: timedelta | None) -> None:
    """Wait until the rendezvous listens, where that isn't this rank's own part.

    Torch's own attempts take up to three times as long as they may, and call a host that doesn't
    resolve a timeout.
    """
    addr, port = info.master_addr, info.master_port
    is_host = info.rank == 0 and not info.store_is_hosted
    if addr is None or port is None or is_host or info.world_size == 1:
        return
    limit_s = (timeout or _TIMEOUT).total_seconds()
    deadline = time.monotonic() + limit_s
    where = f"rank {info.rank} of {info.world_size} can't reach the rendezvous at {addr}:{port}"
    try:
        socket.getaddrinfo(addr, port)
    except OSError as error:
        raise ContextError(
            f"{where}: the host doesn't resolve: {error}; check MASTER_ADDR (from {info.source})"
        ) from error
    while (reason := _knock(addr, port, deadline - time.monotonic())) is not None:
        if time.monotonic() + _TRY_S > deadline:
            raise ContextError(
                f"{where}, {limit_s:g} s long: {reason}; is rank 0 started there, and are "
                f"MASTER_ADDR and MASTER_PORT right (from {info.source})?"
            ) from reason
        time.sleep(_TRY_S)


def _knock(addr: str, port: int, limit_s: float) -> OSError | None:
    """Tell why nobody answers at an address, None if somebody does. Local."""
    try:
        socket.create_connection((addr, port), max(_TRY_S, limit_s)).close()
    except OSError as error:
        return error
    return None


def _store(info: RankInfo, timeout: timedelta | None) -> TCPStore:
    addr, port = info.master_addr, info.master_port
    assert addr is not None
    assert port is not None
    try:
        socket.getaddrinfo(addr, port)
        return TCPStore(
            addr,
            port,
            info.world_size,
            info.rank == 0 and not info.store_is_hosted,
            timeout=timeout or _TIMEOUT,
            wait_for_workers=False,
        )
    except (OSError, RuntimeError) as error:
        raise ContextError(
            f"rank {info.rank} of {info.world_size} can't reach the rendezvous at {addr}:{port} "
            f"(from {info.source}): {error}"
        ) from error


def host_url(options: dict[str, Any], info: RankInfo) -> None:
    """Make the store of a ``tcp://`` URL where torch would wait for torchrun's agent to make it.

    Collective over all ranks of `info`. Changes `options`.

    Raises:
        ArgumentError: the URL has no host or no port.
        ContextError: nobody answers there.
    """
    url = urlsplit(options.get("init_method") or "")
    # until torch 2.14.1: under torchrun all ranks wait for somebody to listen at a tcp:// URL
    if url.scheme != "tcp" or not info.store_is_hosted:
        return
    try:
        addr, port = url.hostname, url.port
    except ValueError:
        addr, port = url.hostname, None
    if addr is None or port is None:
        raise ArgumentError(f"init_method={options['init_method']!r} should be tcp://HOST:PORT")
    there = replace(info, master_addr=addr, master_port=port, store_is_hosted=False)
    _reach(there, options.get("timeout"))
    options["store"] = _store(there, options.get("timeout"))
    del options["init_method"]


def place_by_store(rank: int, world_size: int) -> Topology:
    """Tell where a rank stands from where the default group's store can be reached.

    Local.

    Returns:
        One node where the store can be reached from this host alone; a guess for a store in a
        file, which a network file system might share; the ranks alone where neither is so.
    """
    one_node = Topology(rank, world_size, rank, world_size, 0, 1)
    if world_size == 1:
        return one_node
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if isinstance(store, HashStore):
            return one_node
        if isinstance(store, FileStore):
            return replace(one_node, is_guess=True)
        if isinstance(store, TCPStore):
            host = store.host
            if host in ("localhost", "::1") or host.startswith("127."):
                return one_node
    return Topology(rank, world_size)


def place_by_hosts(model: ComputationModel) -> Topology:
    """Find where a rank stands by asking every rank for its host.

    Collective over all ranks.

    Returns:
        What is known of this rank already, and for the rest what the hosts' names say.
    """
    known = model.topology
    hosts = model.exchange(socket.gethostname().encode())
    nodes = list(dict.fromkeys(hosts))
    here = [rank for rank, host in enumerate(hosts) if host == hosts[known.rank]]
    found = Topology(
        known.rank,
        known.world_size,
        here.index(known.rank),
        len(here),
        nodes.index(hosts[known.rank]),
        len(nodes),
    )
    said = {name: getattr(known, name) for name in ("local_rank", "local_world_size")}
    said |= {name: getattr(known, name) for name in ("node_rank", "nnodes")}
    return replace(found, **{name: value for name, value in said.items() if value is not None})


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Read the timeout that a process group was made with, or None. Local."""
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout = group._get_backend(device).options._timeout  # no public name in torch 2.13
        return timeout if isinstance(timeout, timedelta) else None
    return None
