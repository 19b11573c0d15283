"""``unisono run``: a script in several ranks, started in any way that clusters start programs."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.arguments import check_variables, ranks_by_host, seconds, suggestion
from unisono.cli import OF_RUN
from unisono.environments.platforms import PORT
from unisono.errors import ArgumentError
from unisono.launchers.script.script import Script
from unisono.plugins import LAUNCHERS, NATIVE, by_name, load
from unisono.topology import GRACE_S, NodeInfo

if TYPE_CHECKING:
    from unisono.launchers.script.supervisor import ScriptOutcome

_NODES = re.compile(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?")


def run(
    script: Annotated[str, typer.Argument(help="The script, or a module with --module.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    *,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--nproc-per-node",
            metavar="N|gpu|cpu|auto",
            help="Ranks on each node. Default: the platform's number, else auto.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default of initialize() and Parallel() in the script."),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="processes, torchrun, mpi, slurm, ray, or a plug-in's. Default: processes, "
            "torchrun for several nodes, mpi for backend mpi4py.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Run it as python -m does.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="It is a program, not a Python script.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start a new interpreter for each rank, instead of copying one."
        ),
    ] = False,
    print_only: Annotated[
        bool,
        typer.Option(
            "--print",
            help="Print the command, or the sbatch script; run nothing.",
        ),
    ] = False,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX|auto",
            help="Nodes; a range for torchrun and slurm. Default: the platform's number, else "
            "1; with 1 the platform isn't asked; auto takes the hosts of PBS and Grid Engine, too.",
            rich_help_panel="Nodes",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=0, help="Which node this is, for torchrun.", rich_help_panel="Nodes"
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Host of node 0.", rich_help_panel="Nodes"),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            help="Free port of node 0. Default for torchrun: 29500.",
            rich_help_panel="Nodes",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A:3,B:1",
            help="Hosts and their ranks: mpi, slurm, ray.",
            rich_help_panel="Nodes",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds that nodes wait for each other.", rich_help_panel="Nodes"
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Times to start all ranks again after one fails. Default: Kubeflow's number, "
            "else 0.",
            rich_help_panel="Failures",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="Seconds that ranks have to save after SIGTERM or SIGHUP.",
            rich_help_panel="Failures",
        ),
    ] = GRACE_S,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep each rank's output in files.", rich_help_panel="Output"
        ),
    ] = None,
    local_ranks_filter: Annotated[
        str | None,
        typer.Option(
            metavar="R,R",
            help="Print only lines of these local ranks; log all.",
            rich_help_panel="Output",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Trace all ranks there: see unisono trace.",
            rich_help_panel="Output",
        ),
    ] = None,
    stdin: Annotated[
        int | None,
        typer.Option(
            metavar="RANK",
            min=0,
            help="The rank that has this terminal, for breakpoint() and input(): processes.",
            rich_help_panel="Output",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of Slurm's own, such as time=10:00 or gres=gpu:2; may be repeated.",
            rich_help_panel="Slurm",
        ),
    ] = None,
) -> int:
    """Run a script in several ranks: on this host, or by torchrun, MPI, Slurm or Ray.

    Each line that a rank prints begins with the rank. If one fails, the others are ended,
    and its traceback is printed last.

    Returns:
        The exit code of the rank that failed first, 128 plus the signal's number if one ended it;
        0 if all ranks exited by themselves, also after a SIGTERM.
    """
    from unisono.node import count_ranks

    _check_variables()
    if nnodes in (None, "auto") and node_rank is None and hosts is None:
        node = _node(launcher, backend, nproc_per_node, is_asked=nnodes == "auto")
        min_nnodes, max_nnodes = (1, 1) if node is None else (node.nnodes, node.max_nnodes)
    else:
        node = None
        min_nnodes, max_nnodes = _nodes(nnodes or "1")
    if node is not None:
        nproc_per_node = nproc_per_node or node.nproc_per_node
        max_restarts = node.max_restarts if max_restarts is None else max_restarts
        master_addr = master_addr or node.master_addr
        if max_nnodes > 1:
            node_rank, master_port = node.node_rank, master_port or node.master_port
    name = launcher or ("torchrun" if max_nnodes > 1 else _default_launcher(backend))
    runner = _runner(name, print_only)
    _export(backend, trace)
    job = Script(
        _program(script, args or [], module, no_python),
        nproc_per_node=count_ranks("--nproc-per-node", nproc_per_node or "auto"),
        nnodes=min_nnodes,
        max_nnodes=max_nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port or (PORT if name == "torchrun" and master_addr else None),
        hosts=() if hosts is None else tuple(ranks_by_host("--hosts", hosts).items()),
        max_restarts=max_restarts or 0,
        timeout_s=timeout,
        log_dir=None if log_dir is None else str(log_dir),
        # None if the shell has closed it.
        is_coloured=bool(sys.stdout) and sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        options=_options(option or (), name),
        stdin_rank=stdin,
        grace_s=grace,
        local_ranks=_local_ranks(local_ranks_filter),
        is_fresh=fresh,
    )
    _check(job, name)
    return _print_command(name, job, script) if runner is None else _finish(runner(job), job)


def _check(job: Script, launcher: str) -> None:
    """Raise if options contradict each other, or a value is out of its range."""
    if job.stdin_rank is not None and launcher != "processes":
        raise ArgumentError(
            f"launcher {launcher!r} does not support --stdin: its ranks have no terminal; run them "
            "on this host, with launcher 'processes'"
        )
    if job.stdin_rank is not None and job.stdin_rank >= job.world_size:
        raise ArgumentError(f"--stdin {job.stdin_rank} should be a rank below {job.world_size}")
    # With --hosts, each host has its own number of ranks, so `nproc_per_node` limits nothing.
    shown = max(job.local_ranks, default=0)
    if shown >= job.nproc_per_node and not job.hosts:
        raise ArgumentError(f"--local-ranks-filter {shown} should be below {job.nproc_per_node}")
    if job.node_rank is not None and job.node_rank >= job.max_nnodes:
        raise ArgumentError(
            f"--node-rank {job.node_rank} should be below --nnodes {job.max_nnodes}"
        )
    seconds("--grace", job.grace_s, may_be_zero=True)
    if job.timeout_s is not None:
        seconds("--timeout", job.timeout_s)


def _default_launcher(backend: str | None) -> str:
    """Return the launcher for one node."""
    return "mpi" if (backend or "").lower() == "mpi4py" else "processes"


def _runner(launcher: str, print_only: bool) -> Callable[[Script], ScriptOutcome] | None:
    """Return what runs scripts, None if nothing is to run; raise if a launcher can't be used."""
    if print_only and launcher == "slurm":  # a script for sbatch needs no Slurm here
        return None
    row = by_name(LAUNCHERS).get(launcher)
    if row is not None and not (row.library or row.check):  # always here
        runner: Callable[[Script], ScriptOutcome] = load(row.script)
    else:
        from unisono import registry  # which imports torch

        runner = registry.find_script_runner(launcher)
    return None if print_only else runner


def _check_variables() -> None:
    """Raise for misspelt variables; remove those that give options."""
    options = {*inspect.signature(run).parameters, "print"} - {"script", "args", "print_only"}
    known = {OF_RUN + option.upper() for option in options}
    for name in [name for name in os.environ if name.startswith(OF_RUN)]:
        if name not in known:
            raise ArgumentError(f"unknown variable {name}.{suggestion(name, known)} (see --help)")
        del os.environ[name]  # a command that a rank starts has options of its own
    check_variables()


def _export(backend: str | None, trace: Path | None) -> None:
    """Set the variables that all ranks inherit from this process."""
    if backend is not None and _has_threads(backend):
        raise ArgumentError(
            f"--backend {backend}: its replicas are threads, which no launcher starts: "
            f"use Parallel({backend!r}, nproc_per_node=N) in the script, and python to start it"
        )
    if backend:
        os.environ["UNISONO_BACKEND"] = backend
    if trace:
        # Absolute, because ranks may change their working directory.
        os.environ["UNISONO_TRACE"] = str(trace.absolute())


def _has_threads(backend: str) -> bool:
    """Return whether a backend's replicas are threads; raise if it is unknown."""
    if backend in NATIVE.names:  # known without torch, whose import takes a second
        return False
    from unisono import registry

    return registry.find_model(backend).replicas_are_threads


def _program(script: str, args: list[str], module: bool, no_python: bool) -> tuple[str, ...]:
    """Return the command line of each rank."""
    if module and no_python:
        raise ArgumentError("--module and --no-python contradict each other: a module needs Python")
    if module:
        return (sys.executable, "-m", script, *args)
    if no_python:
        return (script, *args)
    if script == "-":
        raise ArgumentError(
            "script '-' can't be read: a rank's standard input is empty; use a file"
        )
    if not Path(script).is_file() and not Path(script, "__main__.py").is_file():
        what = "is a folder without __main__.py" if Path(script).is_dir() else "doesn't exist"
        raise ArgumentError(
            f"script {script!r} {what} (looked from {Path.cwd()}): check its path, or pass "
            "--module for a module, --no-python for a program"
        )
    return (sys.executable, script, *args)


def _node(
    launcher: str | None, backend: str | None, nproc_per_node: str | None, *, is_asked: bool
) -> NodeInfo | None:
    """Return this node as the platform reports it; print it if there are several."""
    from unisono.environments.nodes import ambiguity
    from unisono.node import find_node, refuse_rank

    name = launcher or _default_launcher(backend)
    # Only torchrun joins several nodes. It then replaces the default launcher, "processes".
    is_for_nodes = name == "torchrun" or (not launcher and name == "processes")
    if not is_for_nodes:
        if is_asked:
            raise ArgumentError(f"--nnodes auto is for torchrun, and not for {name}")
        return None

    def warn(text: str) -> None:
        typer.echo(f"unisono run: {text}", err=True)

    node = find_node(warn, is_asked=is_asked, may_be_several=False)
    if node is None and is_asked:
        refuse_rank("--nnodes auto")
    # With one rank on each node, RANK and WORLD_SIZE are right, whichever of the two they count.
    if node is not None and node.is_ambiguous and nproc_per_node != "1":
        raise ambiguity(node)
    if node is not None and node.max_nnodes > 1:
        which = "a node" if node.node_rank is None else f"node {node.node_rank}"
        where = f"node 0 is {node.master_addr}, port {node.master_port}"
        least = "" if node.nnodes == node.max_nnodes else f"{node.nnodes}:"
        warn(f"{which} of {least}{node.max_nnodes}, according to {node.source}; {where}")
    return node


def _nodes(text: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes."""
    match = _NODES.fullmatch(text)
    if text == "auto":  # `run` handles it unless one of these options is given
        raise ArgumentError(
            "--nnodes auto takes neither --node-rank nor --hosts: it finds both out"
        )
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise ArgumentError(f"--nnodes {text} should be a number of at least 1, or MIN:MAX or auto")
    return int(match[1]), int(match[2] or match[1])


def _local_ranks(text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ArgumentError(f"--local-ranks-filter {text} should be local ranks, such as 0 or 0,1")
    return tuple(int(word) for word in words)


def _options(texts: Sequence[str], launcher: str) -> tuple[tuple[str, str], ...]:
    if texts and launcher != "slurm":
        raise ArgumentError(
            f"launcher {launcher!r} does not support --option: use launcher 'slurm'"
        )
    pairs = [word.partition("=") for word in texts]
    return tuple((name, value) for name, _, value in pairs)


def _print_command(name: str, job: Script, script: str) -> int:
    """Print the command or batch script of a launcher; return the exit code."""
    # None for the launcher of a plug-in.
    row = next((row for row in LAUNCHERS if name in row.names), None)
    module: Any = None if row is None else load(row.module)
    if name == "slurm":
        text = module.batch_script(job, Path(script).name.removesuffix(".py"))
    elif hasattr(module, "command"):
        text = shlex.join(module.command(job))
    else:
        raise ArgumentError(f"--print: launcher {name!r} runs no command that could be printed")
    typer.echo(text, nl=not text.endswith("\n"))
    return 0


def _finish(outcome: ScriptOutcome, job: Script) -> int:
    """Print the first failure and the folder of the logs; return the exit code."""
    from unisono.launchers.script.supervisor import failure

    lines = list(failure(outcome))
    if outcome.failed is not None and job.log_dir:
        lines.insert(0, f"logs of all ranks are in {job.log_dir}")  # the failure is printed last
    if outcome.interrupted is not None:
        line = f"interrupted by {signal.Signals(outcome.interrupted).name}"
        if outcome.code == 0:
            line += ": all ranks have left by themselves"
        elif outcome.is_ended:
            line += ": all ranks have been ended"
        lines.append(line)
    elif outcome.failed is None and outcome.code != 0:
        lines.append(f"error: the launcher ended with exit code {outcome.code}")
    for line in lines:
        typer.echo(line, err=True)
    return outcome.code
