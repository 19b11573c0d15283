"""This node: facts from its variables, name and files, and its number of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from unisono.control.addresses import own_address
from unisono.environments.detection import environments
from unisono.environments.nodes import alone, detect_node, is_gap, not_a_node
from unisono.environments.platforms import Machine
from unisono.errors import ArgumentError, EnvironmentDetectionError
from unisono.plugins import load
from unisono.topology import NodeInfo, usable_cores


def _name() -> str:
    """Return this host's name with its domain, if its own files or DNS have one."""
    name = socket.gethostname()
    full = name if "." in name else socket.getfqdn(name)
    # `getfqdn` may return an unrelated name, such as localhost.
    return full if full.partition(".")[0] == name.partition(".")[0] else name


MACHINE = Machine(_name, own_address, lambda path: Path(path).read_text(encoding="utf-8"))
"""This machine, as an argument of platforms."""


def read_node(*, is_asked: bool = False) -> NodeInfo | None:
    """Return this process's node, from its variables."""
    # This may read a file that a variable names, and look up this host's name, but sends no more.
    return detect_node(os.environ, MACHINE, environments.load_plugins(), is_asked=is_asked)


def find_node(
    warn: Callable[[str], object], *, is_asked: bool, may_be_several: bool
) -> NodeInfo | None:
    """Return this process's node; only warn about faults that a job of one node may also have."""
    try:
        node = read_node(is_asked=is_asked)
    except EnvironmentDetectionError as error:
        if is_asked or not is_gap(error, may_be_several=may_be_several):
            raise
        warn(f"this process continues alone: {error}")
        return None
    # A node has `hosts` only on a platform that starts its script on the first host alone.
    if node is None or is_asked or not node.hosts:
        return node
    if node.max_nnodes > 1:
        warn(alone(node))
    return None


def refuse_rank(what: str) -> None:
    """Raise if this process, which is about to start a job, is one of several ranks itself."""
    # Used if `find_node` finds no node, although the user requests the platform's.
    error = not_a_node(what, os.environ, environments.load_plugins())
    if error is not None:
        raise error


def count_ranks(name: str, text: str) -> int:
    """Return the number of ranks for a node, from its text."""
    # isdigit() alone accepts "²", which int() refuses; MPI stores a number of ranks as a C int.
    if text.isascii() and text.isdigit() and 0 < int(text) < 2**31:
        return int(text)
    # Not at the top: it imports torch, which takes a second.
    n_devices: int = load("unisono.accelerators").accelerator_count()
    kind = text.lower()
    if kind == "cpu" or (kind == "auto" and n_devices == 0):
        return usable_cores()
    if kind in ("gpu", "auto"):
        if n_devices == 0:
            raise ArgumentError(f"{name} gpu: torch finds no accelerator here; use cpu")
        return n_devices
    raise ArgumentError(f"{name} {text} should be a number of at least 1, or gpu, cpu or auto")
