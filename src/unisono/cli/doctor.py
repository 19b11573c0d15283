"""``unisono doctor``: the environment, backends and launchers that are usable here, and why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from unisono.cli._tables import wrapped
from unisono.launchers.script.forks import ForkServer, why_fresh
from unisono.launchers.script.script import Script

_FACTS = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "nnodes",
    "master_addr",
    "master_port",
)
_FACTS_OF_NODE = ("node_rank", "nnodes", "nproc_per_node", "master_addr", "master_port")
_VERDICTS = {
    "won": "this one decides",
    "agrees": "agrees",
    "disagrees": "DISAGREES, and is ignored",
    "refused": "REFUSED",
    "unused": "is ignored, because another one is refused",
}


def doctor(
    *,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fail unless this backend can be used.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fail unless this launcher can be used.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> int:
    """Report the environment, backends, launchers, devices, network and versions here.

    Sends nothing, and imports no backend library but that of a backend or launcher named.

    Returns:
        The exit code: 0, or 1 if the backend or launcher named, or any job here, can't work.
    """
    from unisono import diagnosis
    from unisono.lifecycle import best_backend

    report = diagnosis.diagnose()
    count = report["devices"]["count"] or report["host"]["cores"]
    use = {"backend": best_backend(), "launcher": "processes", "nproc_per_node": count}
    use["why_new_interpreters"] = _why_fresh()
    report = {"recommended": use, **report}
    problems = diagnosis.problems(report, backend, launcher)
    if as_json:
        typer.echo(json.dumps({**report, "problems": problems}, indent=2))
        return 1 if problems else 0
    for title, lines in _sections(report):
        typer.echo("\n".join([title, *(wrapped(line, 2) for line in lines)]) + "\n")
    if problems:
        typer.echo("\n".join(["problems", *(wrapped(line, 2) for line in problems)]), err=True)
        return 1
    typer.echo("no problem found")
    return 0


def _why_fresh() -> str | None:
    """Return why `unisono run` starts a new interpreter for each rank here; None if it doesn't."""
    script = Script((sys.executable, "-c", ""))
    if why := why_fresh(script):
        return why
    server = ForkServer(script.program, os.environ)
    try:
        return server.why_unusable() or None
    finally:
        server.end()


def _sections(report: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the title and the lines of each section."""
    host, devices, use = report["host"], report["devices"], report["recommended"]
    backend, count = use["backend"], use["nproc_per_node"]
    accelerators = "no accelerator"
    if devices["count"]:
        accelerators = f"{devices['count']} x {devices['type']}"
    interfaces = [
        f"{name} ({'up' if each['is_up'] else 'down'}): {', '.join(each['addresses']) or '-'}"
        for name, each in report["interfaces"].items()
    ]
    environment = _findings(report["environment"], _VERDICTS, _FACTS)
    why = use["why_new_interpreters"]
    ranks = f"new interpreters: {why}" if why else "copies of one interpreter, unless --fresh"
    alone = "none: no launcher's variables are set, so this process is alone"
    return [
        (
            "recommended here",
            [
                f"backend {backend}, as there is {accelerators}; ranks: {count}",
                f"unisono run -n {count} script.py",
                f"its ranks are {ranks}",
                f'or in a program: idist.spawn("{backend}", fn, nproc_per_node={count})',
            ],
        ),
        ("environment", environment or [alone]),
        ("node, where unisono run and Parallel start the ranks", _node(report["node"])),
        ("host", [f"{host['name']}: {host['system']}, {host['cores']} cores"]),
        ("memory for CPU tensors, shared by the ranks of this host", [_memory(report["memory"])]),
        ("devices", [accelerators, *devices["names"]]),
        ("backends", _table(report["backends"])),
        ("launchers", _table(report["launchers"])),
        ("network interfaces", interfaces),
        ("versions", [f"{name}: {text or '-'}" for name, text in report["versions"].items()]),
    ]


def _memory(memory: Mapping[str, Any]) -> str:
    if memory["reason"] is not None:
        return f"none, so the backend carries them: {memory['reason']}"
    line = f"up to {memory['bytes'] / (1 << 20):.3g} MiB for {memory['ranks']} ranks"
    if memory["most_bytes"] is not None:
        return f"{line}, because of UNISONO_SHARED_BYTES={memory['most_bytes']}"
    return line


def _node(node: Mapping[str, Any]) -> list[str]:
    lines = _findings(node, {**_VERDICTS, "unused": "is ignored"}, _FACTS_OF_NODE)
    lines = lines or ["none: no platform's variables are set, so there is no other node"]
    for each in node["findings"]:
        if each["verdict"] == "won" and each["facts"]["hosts"]:
            where = f"{each['source']} starts a script on the first of its hosts alone, so others"
            lines.append(f'{where} count only with --nnodes auto, or nnodes="auto" to Parallel')
    return lines if node["meaning"] is None else [*lines, node["meaning"]]


def _findings(
    part: Mapping[str, Any], verdicts: Mapping[str, str], names: Sequence[str]
) -> list[str]:
    """Return lines on each finding, its facts and its variables."""
    lines: list[str] = []
    for each in part["findings"]:
        lines.append(f"{each['source']}: {verdicts[each['verdict']]}")
        if each["facts"] is not None:
            facts = [f"{name} {each['facts'][name]}" for name in names]
            lines.append(f"  reports: {', '.join(facts)}".replace("None", "unknown"))
        if each["error"] is not None:
            lines.append(f"  {each['error']}")
        for name, value in each["variables"].items():
            lines.append(f"  because of {name}={' '.join(value.splitlines())}")
    return lines


def _table(table: Mapping[str, str | None]) -> list[str]:
    """List the usable names in one line, then the others by the reason why they aren't."""
    usable = [name for name, why in table.items() if why is None]
    lines = [f"usable: {', '.join(usable)}"]
    if len(usable) < len(table):
        lines.append("optional, each needs something that isn't here:")
    for reason in dict.fromkeys(filter(None, table.values())):
        names = [name for name, why in table.items() if why == reason]
        lines.append(f"  {', '.join(names)}: {reason}")
    return lines
