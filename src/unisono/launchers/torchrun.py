"""Ranks that torch's own elastic agent starts: torchrun, on one node or on several."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unisono.control.addresses import why_unreachable
from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError, LaunchError
from unisono.launchers.job.store import private_store
from unisono.launchers.script.forks import ForkServer
from unisono.launchers.script.remote_workers import LauncherSpec, run_function
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import ScriptOutcome, Supervisor, run_launcher
from unisono.launchers.variables import OF_TORCH, without
from unisono.topology import PRIVATE_STORE, LaunchPlan, RankInfo

_TRY_S = 0.2  # between two attempts to reach node 0
_TIMEOUT_S = 600.0  # until the agents of all nodes have met


def argv(script: Script) -> list[str]:
    """Return torchrun's command line for this node."""
    nodes = str(script.nnodes)
    if script.max_nnodes > script.nnodes:
        nodes = f"{script.nnodes}:{script.max_nnodes}"
    arguments = [sys.executable, "-m", "torch.distributed.run"]
    arguments += ["--nnodes", nodes, "--nproc-per-node", str(script.nproc_per_node)]
    # --monitor-interval: seconds between the agent's checks for failures.
    arguments += ["--max-restarts", str(script.max_restarts), "--monitor-interval", "0.1"]
    arguments += _rendezvous(script)
    return [*arguments, "--no-python", *script.rank_argv()]


def _rendezvous(script: Script) -> list[str]:
    """Return the options with which the nodes' agents meet."""
    script.refuse("torchrun", "run it on each node", "hosts")
    if script.max_nnodes == 1 and script.master_addr is None:
        return ["--standalone"]
    if script.master_addr is None or script.master_port is None:
        lacking = "--master-addr" if script.master_addr is None else "--master-port"
        raise ArgumentError(
            f"--nnodes {script.nnodes} needs {lacking}: give each node the same --master-addr and "
            "--master-port, a host and a free port of node 0"
        )
    timeout_s = int(script.timeout_s or _TIMEOUT_S)
    # An elastic job, and one without --node-rank, lets torch's rendezvous number the nodes.
    if script.node_rank is not None and script.max_nnodes == script.nnodes:
        where = ["--master-addr", script.master_addr, "--master-port", str(script.master_port)]
        conf = ["--rdzv-conf", f"timeout={timeout_s}"]
        return ["--node-rank", str(script.node_rank), *where, *conf]
    # Every node must pass the same id, so it is fixed.
    end = f"{script.master_addr}:{script.master_port}"
    conf = ["--rdzv-conf", f"join_timeout={timeout_s},read_timeout={timeout_s}"]
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", end, "--rdzv-id", "unisono", *conf]


def command(script: Script) -> list[str]:
    """Return the plain torchrun command that is equivalent to this `unisono` command."""
    return argv(replace(script, token="", is_coloured=False))


def environment(script: Script, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the agent's variables."""
    variables = without(environ, OF_TORCH)
    variables.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, but without its warning
    # How long the agent waits for its ranks after a signal, a second longer than they may take;
    # agents of older torch wait 30 s.
    variables.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{math.ceil(script.grace_s) + 1}")
    # The agent sets it for ranks, which are forks if they read what their server has read at start.
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if script.may_restart:
        # https://github.com/pytorch/pytorch/issues/135712: stale keys of the previous attempt
        variables.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return variables


def _prepare(script: Script, held: contextlib.ExitStack) -> tuple[list[str], dict[str, str]]:
    """Return the agent's command line and variables, once node 0 can be reached."""
    arguments = argv(script)
    if script.master_addr is not None and script.master_port is not None:
        _wait_for_node_0(script, script.master_addr, script.master_port)
    variables = environment(script, os.environ)
    if script.max_nnodes == 1:  # the private store is a file, which only this host can open
        variables[PRIVATE_STORE] = private_store(held)
    return arguments, variables


def run(script: Script) -> ScriptOutcome:
    """Run a script in ranks of torch's agent on this node."""
    with contextlib.ExitStack() as held:
        server = ForkServer.of(script, environment(script, os.environ), held)
        arguments, variables = _prepare(script, held)
        if server is not None and not server.why_unusable():
            _python, _m, _module, *options = argv(replace(script, has_server=True))
            supervisor = Supervisor(script)
            try:
                supervisor.start_agent(server.control, options, variables)
            except OSError as error:
                raise LaunchError(f"torch's agent can't be started: {error}") from error
            return supervisor.run()
        return run_launcher(script, arguments, variables, signal.SIGINT)


def _wait_for_node_0(script: Script, addr: str, port: int) -> None:
    """Wait until node 0's address accepts connections, unless that is this node."""
    timeout_s = script.timeout_s or _TIMEOUT_S
    deadline = time.monotonic() + timeout_s
    reason = _why_node_0_is_unreachable(script, addr, port, timeout_s)
    while reason is not None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_TRY_S, left))  # a pod may start before DNS knows node 0's pod
        limit_s = max(_TRY_S, deadline - time.monotonic())  # the last attempt needs time, too
        reason = _why_node_0_is_unreachable(script, addr, port, limit_s)
    if reason is not None:
        who = f"node {script.node_rank}" if script.node_rank is not None else "this node"
        raise LaunchError(
            f"{who} of {script.nnodes} couldn't reach node 0 at {addr}:{port} in {timeout_s:g} s "
            f"({reason}): has the job been started there, is --master-addr right, is the port "
            "open? On Kubernetes, create the headless Service named in the pods' `subdomain` field"
        ) from reason


def _why_node_0_is_unreachable(
    script: Script, addr: str, port: int, limit_s: float
) -> OSError | None:
    """Return why node 0 can't be reached; None if it can, or if it is this node."""
    try:
        address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return error
    if script.node_rank == 0 or (script.node_rank is None and _is_here(address)):
        return None
    return why_unreachable(addr, port, limit_s)


def _is_here(address: Any) -> bool:
    """Return whether an address is this host's; a host can bind only its own addresses."""
    family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    join: bool = True,
    timeout_s: float | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run `entry` in ranks of torch's agent on this node."""
    # A single node needs no number.
    node_rank = None if plan.nnodes == 1 else plan.node_rank
    script = replace(Script.of(plan), node_rank=node_rank, timeout_s=timeout_s)
    spec = LauncherSpec(
        "torchrun",
        script.world_size,
        script.nproc_per_node,
        start_s=math.inf,  # the agents wait up to `timeout_s` for each other
        exit_s=timeout_s or _TIMEOUT_S,  # the agent exits only when the other nodes are done, too
        stop_limit_s=stop_limit_s,
    )
    return run_function(entry, script, spec, _prepare, environ or {}, join=join)
