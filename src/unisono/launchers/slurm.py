"""Ranks as tasks of a Slurm step, started by ``srun`` or by an equivalent batch script."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError
from unisono.launchers.job.signals import TO_SAVE
from unisono.launchers.script.remote_workers import LauncherSpec, run_function
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import ScriptOutcome, run_launcher
from unisono.launchers.variables import LINK, OF_SLURM_STEP, OF_TORCH, without
from unisono.topology import LaunchPlan, RankInfo

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_INSTEAD = {  # options that the job's shape decides, with the argument to use instead
    "nodes": "nnodes",
    "ntasks": "nproc_per_node and nnodes",
    "ntasks-per-node": "nproc_per_node",
    "nodelist": "hosts",
    "distribution": "hosts",
    "input": "a file of the script's own",
    "kill-on-bad-exit": "nothing instead",
    "immediate": "timeout",
}


def why_unavailable() -> str | None:
    """Return why a Slurm step can't be started here and what to do; None if it can."""
    if shutil.which("srun"):
        return None
    return (
        "there is no srun on the PATH: run on a node of the cluster, or apt-get install "
        "slurm-client and set it up for one"
    )


def argv(script: Script) -> list[str]:
    """Return srun's command line."""
    # The first failure ends the other ranks, and none reads this process's stdin.
    arguments = ["srun", "--kill-on-bad-exit=1", "--input=none"]
    arguments += [*_shape(script), *_options(script)]
    if script.timeout_s is not None:  # srun gives up if it has no nodes by then
        arguments.append(f"--immediate={max(1, round(script.timeout_s))}")
    return [*arguments, *script.rank_argv()]


def _shape(script: Script) -> list[str]:
    """Return the options for the number of tasks and their nodes."""
    script.refuse("slurm", "Slurm numbers the nodes itself", "node_rank")
    script.refuse("slurm", "use sbatch --requeue, or launcher 'torchrun'", "max_restarts")
    if script.hosts:
        # The arbitrary distribution expects a host's name once for each of its tasks.
        names = ",".join(name for name, count in script.hosts for _ in range(count))
        counts = [f"--nodes={len(script.hosts)}", f"--ntasks={script.world_size}"]
        return [*counts, f"--nodelist={names}", "--distribution=arbitrary"]
    each = f"--ntasks-per-node={script.nproc_per_node}"
    if script.max_nnodes > script.nnodes:
        return [f"--nodes={script.nnodes}-{script.max_nnodes}", each]
    return [f"--nodes={script.nnodes}", f"--ntasks={script.world_size}", each]


def _options(script: Script) -> list[str]:
    """Return the user's options, which srun and sbatch both accept."""
    arguments = []
    for name, value in script.options:
        option = name.strip("-").replace("_", "-")
        # A newline would end the option in a batch script.
        if not _OPTION.fullmatch(option) or "\n" in value:
            raise ArgumentError(f"option {name}={value!r} should be NAME or NAME=VALUE of sbatch")
        if option in _INSTEAD:
            raise ArgumentError(
                f"option {option!r} of Slurm follows from the number of ranks and their nodes: "
                f"leave it out, and use {_INSTEAD[option]}"
            )
        arguments.append(f"--{option}={value}" if value else f"--{option}")
    return arguments


def environment(script: Script, environ: Mapping[str, str]) -> dict[str, str]:
    """Return srun's variables, which its tasks inherit."""
    variables = without(environ, OF_TORCH, OF_SLURM_STEP)
    if script.hosts:  # task 0 of an arbitrary distribution is on the first host of the list
        variables["MASTER_ADDR"] = script.hosts[0][0]
    return variables | script.address()


def batch_script(script: Script, name: str) -> str:
    """Return a script for ``sbatch`` that runs the same job."""
    alone = replace(script, token="", is_coloured=False)  # no supervisor reads reports or lines
    # Options of an allocation name each host once; the srun command below places the tasks.
    placement = ("--nodelist", "--distribution")
    shape = [option for option in _shape(alone) if not option.startswith(placement)]
    if alone.hosts:
        shape.append("--nodelist=" + ",".join(host for host, _ in alone.hosts))
    given = _options(alone)
    named = [] if any(item.startswith("--job-name") for item in given) else [f"--job-name={name}"]
    options = [*named, *shape, *given]
    address = environment(alone, {})
    exports = [f"export {key}={shlex.quote(value)}" for key, value in address.items()]
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), *exports]
    # srun takes the user's options from the allocation.
    return "\n".join([*lines, "exec " + shlex.join(argv(replace(alone, options=()))), ""])


def run(script: Script) -> ScriptOutcome:
    """Run a script in tasks of a step, in this allocation or in one that srun requests."""
    return run_launcher(script, argv(script), environment(script, os.environ), reach=_reach)


def _reach(srun: int, number: int) -> bool:
    """Signal a step's tasks if srun would kill them at that signal; return whether it was sent."""
    if number not in TO_SAVE:  # srun forwards the other signals
        return False
    steps = ["scontrol", "--oneliner", "show", "step"]
    shown = subprocess.run(steps, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    here = re.escape(socket.gethostname().partition(".")[0])
    # A step is identified by the host and the process id of its srun.
    step = re.search(rf"^StepId=(\S+) .*SrunHost:Pid={here}\S*:{srun}$", shown, re.MULTILINE)
    if step is None:
        return False
    arguments = ["scancel", f"--signal={signal.Signals(number).name}", step[1]]
    return subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _texts(options: Mapping[str, str | int | bool]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value as text, which is empty for True."""
    for name, value in options.items():
        if value is not False and value is not None:
            yield name, "" if value is True else str(value)


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    port: int = 0,
    timeout_s: float | None = None,
    options: Mapping[str, str | int | bool] | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run `entry` in tasks of a Slurm step, which connect to `port` of this host."""
    given = tuple(_texts(options or {}))
    script = replace(Script.of(plan), timeout_s=timeout_s, options=given)
    _options(script)  # raises before anything is started
    host = "SLURM_LAUNCH_NODE_IPADDR"  # srun's address, which its tasks can reach
    spec = LauncherSpec(
        "srun",
        script.world_size,
        host=host,
        port=port,
        start_s=math.inf,  # the step may wait in the queue
        stop_limit_s=stop_limit_s,
    )
    return run_function(entry, script, spec, _prepare, environ or {})


def _prepare(script: Script, _: ExitStack) -> tuple[list[str], dict[str, str]]:
    """Return srun's command line and variables; tasks always inherit the link's variable."""
    options = [
        (name, _with_link(text) if name == "export" else text) for name, text in script.options
    ]
    variables = environment(script, os.environ)
    if "SLURM_EXPORT_ENV" in variables:
        variables["SLURM_EXPORT_ENV"] = _with_link(variables["SLURM_EXPORT_ENV"])
    return argv(replace(script, options=tuple(options))), variables


def _with_link(exported: str) -> str:
    """Add the link's variable to a list of variables that srun exports."""
    # NONE and NIL mean an empty list, and can't be part of a longer one.
    names = [name for name in exported.split(",") if name not in ("", "NONE", "NIL")]
    return exported if "ALL" in names else ",".join([*names, LINK])
