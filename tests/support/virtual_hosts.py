"""Two hosts on one machine: network namespaces with addresses of their own on one bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("ip", "nsenter", "unshare")
_NET = "10.77.{third}.{host}"
# A mount namespace of its own lets each host have its own /etc/hosts, and the name of its own.
_ON = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts that were made.

    Args:
        names: of the namespaces, which are their hostnames.
        addresses: of each.
        files: their /etc/hosts.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    files: tuple[Path, ...]

    def on(self, index: int, words: Sequence[str]) -> list[str]:
        """Write the command line that runs a program on a host."""
        name = self.names[index]
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "--"]
        return [*enter, "sh", "-c", _ON, "sh", name, str(self.files[index]), *words]


def why_not() -> str | None:
    """Say why they can't be made here, None if they can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} are missing: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "network namespaces are made as root alone"
    probe = f"utest{uuid.uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode != 0:
        return f"this kernel makes no network namespace: {done.stderr.strip()}"
    ip("netns", "del", probe)
    return None


def ip(*words: str) -> None:
    """Run iproute2's command."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces(folder: Path, mark: str, count: int) -> Iterator[Hosts]:
    """Make hosts that no card connects yet, and take them away at the end."""
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
    """Give every host's card, its eth0, its address."""
    for name, addr in zip(hosts.names, hosts.addresses, strict=True):
        ip("-n", name, "addr", "add", f"{addr}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")


@contextmanager
def virtual_hosts(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """Make hosts on one bridge, and take them away at the end."""
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
