"""``unisono doctor``: the environment, backends and launchers that are usable here, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from unisono.cli._tables import folded

__all__ = ("doctor",)

_FACTS = (
    *("rank", "world_size", "local_rank", "local_world_size", "node_rank", "nnodes"),
    *("master_addr", "master_port"),
)
_VERDICTS = {
    "won": "this one decides",
    "agrees": "says the same",
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
    """Say what was found here: environment, backends, launchers, devices, network, versions.

    Local. Nothing is sent and no backend library is imported, but for what is asked for by name.

    Returns:
        The exit code: 0, or 1 where what was asked for, or any job here, can't work.
    """
    from unisono import diagnosis

    found = diagnosis.diagnose()
    found = {"recommended": _recommended(found), **found}
    problems = diagnosis.problems(found, backend, launcher)
    if as_json:
        typer.echo(json.dumps({**found, "problems": problems}, indent=2))
        return 1 if problems else 0
    for title, lines in _sections(found):
        typer.echo("\n".join([title, *(folded(line, 2) for line in lines)]) + "\n")
    if problems:
        typer.echo("\n".join(["problems", *(folded(line, 2) for line in problems)]), err=True)
        return 1
    typer.echo("no problem found")
    return 0


def _recommended(found: Mapping[str, Any]) -> dict[str, Any]:
    """Choose what a program here should use, if nothing speaks for anything else. Local."""
    from unisono.lifecycle import best_backend

    devices = found["devices"]["count"]
    return {
        "backend": best_backend(),
        "launcher": "processes",
        "nproc_per_node": devices or found["host"]["cores"],
    }


def _sections(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    host, devices = found["host"], found["devices"]
    what = f"{devices['count']} x {devices['type']}" if devices["count"] else "no accelerator"
    use = found["recommended"]
    count = use["nproc_per_node"]
    return [
        (
            "recommended here",
            [
                f"backend {use['backend']}, as there is {what}; ranks: {count}",
                f"unisono run -n {count} script.py",
                f'or in a program: idist.spawn("{use["backend"]}", fn, nproc_per_node={count})',
            ],
        ),
        ("environment", _environment(found["environment"])),
        ("host", [f"{host['name']}: {host['system']}, {host['cores']} cores"]),
        ("devices", [what, *devices["names"]]),
        ("backends", _table(found["backends"])),
        ("launchers", _table(found["launchers"])),
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
    """List what is usable in one line, then what would need something, which is optional."""
    usable = [name for name, why in table.items() if why is None]
    lines = [f"usable: {', '.join(usable)}"]
    if len(usable) < len(table):
        lines.append("optional, each needs something that isn't here:")
    by_reason: dict[str, list[str]] = {}
    for name, why in table.items():
        if why is not None:
            by_reason.setdefault(why, []).append(name)
    return lines + [f"  {', '.join(names)}: {why}" for why, names in by_reason.items()]


def _interfaces(interfaces: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} ({'up' if each['is_up'] else 'down'}): {', '.join(each['addresses']) or '-'}"
        for name, each in interfaces.items()
    ]
