"""``unisono doctor``: what this process would do here, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from unisono import _diagnosis

__all__ = ("doctor",)

_FACTS = (
    *("rank", "world_size", "local_rank", "local_world_size", "node_rank", "nnodes"),
    *("master_addr", "master_port"),
)
_VERDICTS = {
    "won": "this one decides",
    "agrees": "says the same",
    "disagrees": "DISAGREES, and isn't heard",
    "refused": "REFUSED",
    "unused": "can't be heard, because another one is refused",
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
    """Say what was found here: environment, backends, launchers, devices, network, versions.

    Local. Nothing is sent and no backend library is imported, but for what is asked for by name.

    Returns:
        The exit code: 0, or 1 where what was asked for, or any job here, can't work.
    """
    found = _diagnosis.diagnose()
    problems = _diagnosis.problems(found, backend, launcher)
    if as_json:
        typer.echo(json.dumps({**found, "problems": problems}, indent=2))
        return 1 if problems else 0
    for title, lines in _sections(found):
        typer.echo(f"{title}\n" + "".join(f"  {line}\n" for line in lines))
    if problems:
        typer.echo("problems\n" + "\n".join(f"  {problem}" for problem in problems), err=True)
        return 1
    typer.echo("no problem found")
    return 0


def _sections(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    host, devices = found["host"], found["devices"]
    what = f"{devices['count']} x {devices['type']}" if devices["count"] else "no accelerator"
    return [
        ("host", [f"{host['name']}: {host['system']}, {host['cores']} cores"]),
        ("environment", _environment(found["environment"])),
        ("backends", _table(found["backends"])),
        ("launchers", _table(found["launchers"])),
        ("devices", [what, *devices["names"]]),
        ("network interfaces", _interfaces(found["interfaces"])),
        ("versions", [f"{name}: {text or '-'}" for name, text in found["versions"].items()]),
    ]


def _environment(environment: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for each in environment["findings"]:
        lines.append(f"{each['source']}: {_VERDICTS[each['verdict']]}")
        if each["facts"] is not None:
            facts = [f"{name} {each['facts'][name]}" for name in _FACTS]
            lines.append(f"  says: {', '.join(facts)}".replace("None", "unknown"))
        if each["error"] is not None:
            lines.append(f"  {each['error']}")
        lines += [f"  because of {name}={value}" for name, value in each["variables"].items()]
    return lines or ["none: no launcher's variables are set, so this process is alone"]


def _table(table: Mapping[str, str | None]) -> list[str]:
    width = max(map(len, table))
    return [
        f"{name:<{width}}  {'usable' if why is None else f'not usable: {why}'}"
        for name, why in table.items()
    ]


def _interfaces(interfaces: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} ({'up' if each['is_up'] else 'down'}): {', '.join(each['addresses']) or '-'}"
        for name, each in interfaces.items()
    ]
