"""Hosts on one machine: network namespaces with their own addresses, on one bridge or one wire.

The wire between two hosts can be cut, lose packets, or be slow. Many kernels lack ``tc netem``,
which could do this, so packets pass through this process: each host's network card is a TAP device
whose other end is a descriptor here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("ip", "nsenter", "unshare")
_NET = "10.77.{third}.{host}"
# Separate mount and UTS namespaces give each host its own /etc/hosts and hostname.
_ON = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA  # Linux, if_tun.h
_TAP_WITHOUT_HEADER = 0x1002
_LONGEST_PACKET = 1 << 16
_PR_SET_TIMERSLACK = 29  # Linux, prctl.h
LONGEST_UNIT = 65000
"""Of the wire's MTU: with it, 16 MB cost no more than on a bridge."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Virtual hosts.

    Args:
        names: names of the namespaces, which are also the hostnames.
        addresses: address of each host.
        files: /etc/hosts of each host.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    files: tuple[Path, ...]

    def on(self, index: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on a host."""
        name = self.names[index]
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "--"]
        return [*enter, "sh", "-c", _ON, "sh", name, str(self.files[index]), *words]


def why_not() -> str | None:
    """Return why virtual hosts can't be made here, None if they can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} are missing: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    probe = f"utest{uuid.uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode != 0:
        return f"this kernel can't make a network namespace: {done.stderr.strip()}"
    ip("netns", "del", probe)
    return None


def ip(*words: str) -> None:
    """Run iproute2's command."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces(folder: Path, mark: str, count: int) -> Iterator[Hosts]:
    """Make hosts without network cards, and remove them at the end."""
    third = str(os.getpid() % 200 + 1)
    names = tuple(f"{mark}h{i + 1}" for i in range(count))
    addresses = tuple(_NET.format(third=third, host=i + 1) for i in range(count))
    text = "127.0.0.1 localhost\n"
    text += "".join(f"{addr} {name}\n" for addr, name in zip(addresses, names, strict=True))
    files = tuple(folder / name for name in names)
    with contextlib.ExitStack() as stack:
        for name, file in zip(names, files, strict=True):
            file.write_text(text)
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        yield Hosts(names, addresses, files)


def bring_up(hosts: Hosts) -> None:
    """Set the address of each host's network card, eth0, and bring it up."""
    for name, addr in zip(hosts.names, hosts.addresses, strict=True):
        ip("-n", name, "addr", "add", f"{addr}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")


@contextmanager
def virtual_hosts(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """Make hosts on one bridge, and remove them at the end."""
    mark = f"u{uuid.uuid4().hex[:4]}"
    with namespaces(folder, mark, count) as hosts, contextlib.ExitStack() as stack:
        bridge = f"{mark}br"
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        for name in hosts.names:
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}v", "master", bridge, "up")
        bring_up(hosts)
        yield hosts


class Wire:
    """A wire between two hosts, whose attributes can be changed at any time.

    Args:
        ends: descriptor of each host's TAP device.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self.is_cut = False
        self.loss = 0.0
        self.delay_s = 0.0
        self.lost = 0
        self._ends = ends
        self._chance = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire")

    def mend(self) -> None:
        """Remove all faults of the wire."""
        self.is_cut, self.loss, self.delay_s, self.lost = False, 0.0, 0.0, 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _carry(self) -> None:
        # Otherwise each packet may come 50 us late.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread
        under_way: list[tuple[float, int, int, bytes]] = []
        number = itertools.count()
        other = dict(zip(self._ends, self._ends[::-1], strict=True))
        while not self._stop.is_set():
            wait_s = under_way[0][0] - time.monotonic() if under_way else 0.2
            for end in select.select(self._ends, [], [], min(max(wait_s, 0.0), 0.2))[0]:
                packet = os.read(end, _LONGEST_PACKET)
                if self.is_cut or self._chance.random() < self.loss:
                    self.lost += 1
                    continue
                arrival = time.monotonic() + self.delay_s
                heapq.heappush(under_way, (arrival, next(number), other[end], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # the host of this end is being removed
                    os.write(end, packet)


def why_no_wire() -> str | None:
    """Return why a wire can't be made here, None if it can."""
    reason = why_not()
    if reason is None and not os.access(_DEVICE, os.R_OK | os.W_OK):
        return f"{_DEVICE} can't be opened here"
    return reason


@contextmanager
def virtual_wire(folder: Path, mtu: int = 1500) -> Iterator[tuple[Hosts, Wire]]:
    """Make two hosts and the wire between them, and remove them at the end."""
    with (
        namespaces(folder, f"w{uuid.uuid4().hex[:4]}", 2) as hosts,
        contextlib.ExitStack() as stack,
    ):
        ends = []
        for name in hosts.names:
            end = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, end)
            request = struct.pack("16sH", f"{name}t".encode(), _TAP_WITHOUT_HEADER)
            fcntl.ioctl(end, _TUNSETIFF, request)
            ip("link", "set", f"{name}t", "netns", name, "name", "eth0")
            ip("-n", name, "link", "set", "eth0", "mtu", str(mtu))
            ends.append(end)
        bring_up(hosts)
        wire = Wire((ends[0], ends[1]))
        wire.start()
        stack.callback(wire.stop)
        yield hosts, wire
