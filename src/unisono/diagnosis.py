"""Facts about this process and its host, for ``unisono doctor`` and ``show_config``."""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from unisono import registry
from unisono.accelerators import accelerator, accelerator_count
from unisono.arguments import check_variables, number_in
from unisono.environments.detection import Finding, environments, explain
from unisono.environments.nodes import explain_nodes, meaning
from unisono.errors import ArgumentError, EnvironmentDetectionError
from unisono.host import arena, memory
from unisono.node import MACHINE
from unisono.plugins import load
from unisono.topology import usable_cores

_LIBRARIES = ("unisono", "torch", "mpi4py", "horovod", "torch_xla", "ray", "cloudpickle", "numpy")
_ADDRESSES = (socket.AF_INET, socket.AF_INET6)


def diagnose(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return facts about this process, its environment and its host."""
    # No backend library is imported, and nothing is sent.
    variables = os.environ if environ is None else environ
    plugins = environments.load_plugins()
    node = _decision(explain_nodes(variables, MACHINE, plugins))
    return {
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "cores": usable_cores(),
        },
        "memory": _memory(max(2, usable_cores())),  # a single rank shares no memory
        "environment": _decision(explain(variables, plugins)),
        "node": {**node, "meaning": meaning(variables, MACHINE, plugins)},
        "backends": registry.availability(),
        "launchers": registry.launchers.availability(),
        "devices": _devices(),
        "interfaces": _interfaces(),
        "versions": _versions(),
    }


def _memory(ranks: int) -> dict[str, Any]:
    """Return the size and the limit of the memory that `ranks` share, or why they share none."""
    facts: dict[str, Any] = {"ranks": ranks, "bytes": 0, "most_bytes": None}
    reason = memory.why_not()
    try:
        limit = number_in("UNISONO_SHARED_BYTES", math.inf)
    except EnvironmentDetectionError as error:
        return {**facts, "reason": str(error)}
    made = None if reason else memory.make(1)  # only an attempt shows whether this works here
    if made is None:
        return {**facts, "reason": reason or "anonymous shared memory is not available here"}
    os.close(made[0])
    most = None if limit == math.inf else int(limit)
    plan, free = (arena.layout(ranks, usable_cores(), each) for each in (most, None))
    if plan != free:  # a limit that changes nothing isn't reported
        facts["most_bytes"] = most
    reason = None if plan else f"UNISONO_SHARED_BYTES={most} is too little"
    return {**facts, "bytes": 0 if plan is None else plan.size_bytes, "reason": reason}


def _decision(all_findings: Sequence[Finding[Any]]) -> dict[str, Any]:
    """Return the findings with facts or errors, and the winner's name, else the error."""
    findings: list[dict[str, Any]] = [
        {
            "source": finding.source,
            "verdict": finding.verdict,
            "error": None if finding.error is None else str(finding.error),
            "facts": None if finding.info is None else asdict(finding.info),
            "variables": dict(finding.variables),
        }
        for finding in all_findings
        if finding.verdict != "absent"
    ]
    winner = next((each["source"] for each in findings if each["verdict"] == "won"), None)
    error = next((each["error"] for each in findings if each["verdict"] == "refused"), None)
    # If there is a winner, the error wasn't raised, because another environment was complete.
    return {"source": winner, "error": None if winner else error, "findings": findings}


def _devices() -> dict[str, Any]:
    kind = accelerator()
    if kind is None:
        return {"type": "cpu", "count": 0, "names": []}
    count = accelerator_count()
    module = getattr(torch, kind.type, None)  # a third-party accelerator may have no such module
    name_of = getattr(module, "get_device_name", lambda index: f"{kind.type}:{index}")
    return {"type": kind.type, "count": count, "names": [name_of(i) for i in range(count)]}


def _interfaces() -> dict[str, Any]:
    addresses, states = load("psutil:net_if_addrs")(), load("psutil:net_if_stats")()
    return {
        name: {
            # The second call may lack an interface that has gone since the first.
            "is_up": name in states and states[name].isup,
            "addresses": [item.address for item in items if item.family in _ADDRESSES],
        }
        for name, items in addresses.items()
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    versions |= {name: _version(name) for name in _LIBRARIES}
    versions["torch"] = torch.__version__  # of the imported torch, instead of the metadata's
    versions["cuda"] = torch.version.cuda
    return versions


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def problems(facts: Mapping[str, Any], backend: str | None, launcher: str | None) -> list[str]:
    """List the reasons why the environment, a backend or a launcher can't work, with remedies."""
    is_node = facts["node"]["source"] is not None  # then a launcher will set the ranks' variables
    errors = [None if is_node else facts["environment"]["error"], facts["node"]["error"]]
    reasons = [error for error in errors if error is not None]
    try:
        check_variables()
    except (ArgumentError, EnvironmentDetectionError) as error:
        reasons.append(str(error))
    for what, name, find in (
        ("backend", backend, registry.find_model),
        ("launcher", launcher, registry.find_launcher),
    ):
        if name is not None:
            try:
                find(name)
            except Exception as error:  # a plug-in's import may raise anything
                reasons.append(f"{what} {name!r}: {error}")
    return reasons


def lines() -> dict[str, str]:
    """Return the facts as lines for a log."""
    facts = diagnose()
    up = [name for name, interface in facts["interfaces"].items() if interface["is_up"]]
    versions = [f"{name} {text}" for name, text in facts["versions"].items() if text]
    return {
        "environment": _environment_line(facts["environment"]),
        "available backends": ", ".join(_usable(facts["backends"])),
        "available launchers": ", ".join(_usable(facts["launchers"])),
        "devices": f"{facts['devices']['count']} x {facts['devices']['type']}",
        "network interfaces": ", ".join(up),
        "versions": ", ".join(versions),
    }


def _usable(table: Mapping[str, str | None]) -> list[str]:
    return [name for name, reason in table.items() if reason is None]


def _environment_line(environment: Mapping[str, Any]) -> str:
    """Return the environment that won, its variables, and the environments that disagree."""
    if environment["error"] is not None:
        return f"refused: {environment['error']}"
    parts: list[str] = []
    for finding in environment["findings"]:
        names = ", ".join(f"{name}={value}" for name, value in finding["variables"].items())
        if finding["verdict"] == "won":
            parts.insert(0, f"{finding['source']} ({names})")
        elif finding["verdict"] == "disagrees":
            parts.append(f"{finding['source']} disagrees and is ignored ({names})")
    return "; ".join(parts) or "none"
