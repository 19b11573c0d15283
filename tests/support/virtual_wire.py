"""A wire between two hosts that can be cut, that loses packets, and that is slow.

The kernel's own way, ``tc netem``, is missing in many kernels; so packets pass through this
process: each host's network card is a TAP device whose other end is a descriptor here.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import virtual_hosts
from tests.support.virtual_hosts import Hosts, bring_up, ip, namespaces

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA  # Linux, if_tun.h
_TAP_WITHOUT_HEADER = 0x1002
_LONGEST_PACKET = 1 << 16


class Wire:
    """What happens to packets; change it at any time.

    Args:
        ends: a descriptor for each of the two hosts.
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
        """Be a good wire again."""
        self.is_cut, self.loss, self.delay_s, self.lost = False, 0.0, 0.0, 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _carry(self) -> None:
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
                with contextlib.suppress(OSError):  # its host is going down
                    os.write(end, packet)


def why_not() -> str | None:
    """Say why there can be none here, None if there can."""
    reason = virtual_hosts.why_not()
    if reason is not None:
        return reason
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return f"{_DEVICE} can't be opened here"
    return None


@contextmanager
def virtual_wire(folder: Path) -> Iterator[tuple[Hosts, Wire]]:
    """Make two hosts and the wire between them, and take them away at the end."""
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
            ends.append(end)
        bring_up(hosts)
        wire = Wire((ends[0], ends[1]))
        wire.start()
        stack.callback(wire.stop)
        yield hosts, wire
