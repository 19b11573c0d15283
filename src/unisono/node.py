"""This node: what its variables, its name and its files say, and how many ranks it has room for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from unisono.accelerators import accelerator_count
from unisono.control.addresses import own_address
from unisono.environments.detection import environments
from unisono.environments.nodes import alone, detect_node, is_gap, not_a_node
from unisono.environments.platforms import Machine
from unisono.errors import ArgumentError, EnvironmentDetectionError
from unisono.topology import NodeInfo, usable_cores

__all__ = ("MACHINE", "count_ranks", "devices_here", "find_node", "read_node", "refuse_rank")


def _name() -> str:
    """Give this host's name with its domain, where its own files or DNS know one."""
    name = socket.gethostname()
    full = name if "." in name else socket.getfqdn(name)
    return full if full.partition(".")[0] == name.partition(".")[0] else name


MACHINE = Machine(_name, own_address, lambda path: Path(path).read_text(encoding="utf-8"))
"""This machine, as platforms ask for it."""


def read_node(
    environ: Mapping[str, str] | None = None, *, is_asked: bool = False
) -> NodeInfo | None:
    """Read which node of which job this is.

    Local. A file that a variable names is read; nothing is sent but to look up this host's name.

    Args:
        environ: the variables; None for this process's.
        is_asked: as in `detect_node`.

    Returns:
        The facts; None where no platform has started this process, or where it is a rank already.

    Raises:
        EnvironmentDetectionError: they are partial, malformed or contradict each other.
    """
    variables = os.environ if environ is None else environ
    return detect_node(variables, MACHINE, environments.load_plugins(), is_asked=is_asked)


def find_node(
    warn: Callable[[str], object], *, is_asked: bool, may_be_several: bool
) -> NodeInfo | None:
    """Read which node of which job to take this for; what a job of one node may lack is a warning.

    Local.

    Args:
        warn: is told why this process goes on alone.
        is_asked: whether the user asks for what the platform says: then nothing goes on alone.
        may_be_several: as in `is_gap`.

    Returns:
        The facts; None where this process is alone, or a rank.

    Raises:
        EnvironmentDetectionError: the variables contradict each other, or are malformed.
    """
    try:
        node = read_node(is_asked=is_asked)
    except EnvironmentDetectionError as error:
        if is_asked or not is_gap(error, may_be_several=may_be_several):
            raise
        warn(f"this process goes on alone: {error}")
        return None
    if node is None or is_asked or not node.hosts:
        return node
    if node.max_nnodes > 1:
        warn(alone(node))
    return None


def refuse_rank(what: str) -> None:
    """Refuse to start a job of this process's own where it is one of several ranks.

    Local. For where `find_node` finds no node, though the user asks for what the platform says.

    Args:
        what: the user's option.

    Raises:
        EnvironmentDetectionError: a launcher has started this process as one of several.
    """
    error = not_a_node(what, os.environ, environments.load_plugins())
    if error is not None:
        raise error


def devices_here() -> int:
    """Count the accelerators of this node. Local."""
    return accelerator_count()


def count_ranks(name: str, text: str) -> int:
    """Count the ranks that a node is to have.

    Local.

    Args:
        name: what the count is called, for messages.
        text: a number, ``"gpu"`` for the accelerators, ``"cpu"`` for the cores, ``"auto"`` for the
            accelerators where there are any, else the cores.

    Raises:
        ArgumentError: it is none of these, or there is no accelerator.
    """
    if text.isascii() and text.isdigit() and 0 < int(text) < 2**31:
        return int(text)
    has_devices = devices_here() > 0
    kind = text.lower()
    if kind == "cpu" or (kind == "auto" and not has_devices):
        return usable_cores()
    if kind in ("gpu", "auto"):
        if not has_devices:
            raise ArgumentError(f"{name} gpu: torch finds no accelerator here; use cpu")
        return devices_here()
    raise ArgumentError(f"{name} {text} should be a number of at least 1, or gpu, cpu or auto")
