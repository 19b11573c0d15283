"""What a rank says of itself before the ranks of a group connect, and what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unisono._arguments import number_in
from unisono.control.absence import warn_after_s
from unisono.control.lane import LANE_BYTES
from unisono.control.tree import FAN_OUT
from unisono.errors import EnvironmentDetectionError, PeerRefusedError

__all__ = ("Offer", "host_of_this_process", "own_offer", "refusal_of_host", "refuse_wrong")

Offer = dict[str, Any]


def host_of_this_process() -> str:
    """Name what this process shares with those that it can reach by a Unix-domain socket. Local."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getuid() if hasattr(os, 'getuid') else ''}"


def own_offer(host: str | None) -> Offer:
    """Say who this process is and what its user has set.

    Local. A variable that is wrong is said too, so that every rank can refuse it.

    Args:
        host: what ranks that share a host have in common; None to find out.

    Returns:
        What JSON can carry; its `reason` is why this process can't be reached, if it can't.
    """
    offer: Offer = {
        "host": host_of_this_process() if host is None else host,
        "pid": os.getpid(),
        "user": os.getuid() if hasattr(os, "getuid") else None,
        "pids": _pid_namespace(),
        "reason": "",
        "key": secrets.token_bytes(16).hex(),
    }
    try:
        offer["warn_after_s"] = warn_after_s()
        offer["fan_out"] = int(number_in("UNISONO_FAN_OUT", FAN_OUT, least=1))
        offer["most_bytes"] = int(number_in("UNISONO_INLINE_BYTES", LANE_BYTES))
    except EnvironmentDetectionError as error:
        offer["wrong"] = {
            "message": str(error),
            "source": error.source,
            "variable": error.variable,
            "value": error.value,
        }
    return offer


def refuse_wrong(offers: Iterable[Offer], ranks: Sequence[int]) -> None:
    """Raise if a rank said that a variable of its is wrong.

    Local; every rank that has the same offers raises the same.

    Args:
        offers: of all ranks of the group.
        ranks: their global ranks, in the same order.

    Raises:
        EnvironmentDetectionError: the first rank that said so, in its words.
    """
    for rank, offer in zip(ranks, offers, strict=True):
        wrong = offer.get("wrong")
        if wrong is not None:
            wrong["message"] = f"rank {rank}: {wrong['message']}"
            raise EnvironmentDetectionError(**wrong)


def refusal_of_host(offers: Sequence[Offer], ranks: Sequence[int], place: int) -> PeerRefusedError:
    """Say which rank of a job of one host is on another one, or another user's. Local."""
    own = offers[place]["host"]
    other = next(at for at, offer in enumerate(offers) if offer["host"] != own)
    if offers[other].get("user") != offers[place]["user"]:
        what = f"a process of user {offers[other].get('user')}"
    else:
        what = "on another host, or in another network namespace"
    return PeerRefusedError(
        f"rank {ranks[place]} refuses rank {ranks[other]}, which is {what}: all ranks of this job "
        "are to be this user's on this host; give MASTER_ADDR an address that isn't the loopback, "
        "and the number of nodes, where that isn't so",
        ranks[other],
    )


def _pid_namespace() -> str:
    """Name what processes share that see each other by the same ids, empty if unknown. Local."""
    with contextlib.suppress(OSError):  # Linux alone has it
        return os.readlink("/proc/self/ns/pid")
    return ""
