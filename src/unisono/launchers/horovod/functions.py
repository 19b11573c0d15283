"""Replicas that horovodrun makes with its gloo controller, on this host or over ssh.

Horovodrun is a process of its own: it replaces signal handlers, prints, and leaves servers behind.
Functions and results don't travel through Horovod's store, which takes pickles from anybody on the
network. Each rank connects to a socket of ours, in a private directory where all are on this host,
and then is a worker like those of other launchers. When this process ends, however it does, the
connections close, and the ranks end with them.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError, LaunchError
from unisono.launchers.horovod.job import Job
from unisono.launchers.job import channel as messages
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.store import private_folder
from unisono.launchers.job.worker import work
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("join", "launch")

_DRIVER = """
import os, sys, threading
def end_with_parent():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
from horovod.runner.launch import run_commandline
run_commandline()
"""
_WORKER = "from unisono.launchers.horovod.functions import join; join({link!r})"
_HOST = re.compile(r"([\w.-]+):([1-9][0-9]*)")
# Variables of the job that this process may itself belong to, which horovodrun would let win.
_FOREIGN = re.compile(
    r"(HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME)$|OMPI_(?!MCA_|ALLOW_)|PMIX?_|PMI2_"
    r"|TORCHELASTIC_|ROLE_|GROUP_|MASTER_|(LOCAL_)?(RANK|WORLD_SIZE)$)"
)
_RESOLVE_S = 5.0
_LONGEST_FOLDER = 70  # a Unix socket's whole path has 107 bytes


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    hosts: str | None = None,
    verbose: int | bool | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run `entry` in ranks of a Horovod job.

    Local.

    Args:
        entry: called once in each rank, with who it is; Horovod isn't initialised yet.
        plan: how many ranks on this host, or at most on each of `hosts`.
        hosts: ``"name:ranks,name:ranks"``, this host among them or not; ssh reaches the others
            without a password, and each has the same programs at the same paths. Who may list the
            processes of these hosts can join the job, as with Horovod itself.
        verbose: whether horovodrun says on stderr what it does, as in ``horovod.run``.
        stop_limit_s: seconds for which a rank of this host may be stopped by a signal.

    Returns:
        What `entry` returned, by rank.

    Raises:
        ArgumentError: a bad value, or hosts that contradict the plan; nothing was started.
        PayloadError: `entry` can't be pickled.
        LaunchError: a host doesn't resolve, or the ranks can't be started.
        WorkerFailedError: a rank failed; all others have been ended.
        CollectiveTimeoutError: the block's deadline is over; all ranks have been ended.
    """
    slots = _slots(plan, hosts)
    _resolve(list(slots))
    pickled = pickle_for_worker(entry)
    is_local = set(slots) <= {"localhost", "127.0.0.1"}
    token = "" if is_local else secrets.token_hex(16)  # a folder of mode 0700 needs none
    with ExitStack() as held:
        listener, where = _listen(is_local, held)
        driver = _start(slots, json.dumps([where, token]), is_verbose=bool(verbose))
        job = Job(_infos(slots), pickled, listener, driver, token, held, stop_limit_s)
        job.is_verbose = bool(verbose)
        try:
            return job.results()
        finally:
            job.end()


def _slots(plan: LaunchPlan, hosts: str | None) -> dict[str, int]:
    for name in ("init_method", "start_method"):
        if getattr(plan, name) is not None:
            raise ArgumentError(f"horovod makes its ranks and their rendezvous: no {name}")
    if hosts is None and plan.nnodes > 1:
        raise ArgumentError(
            f"nnodes={plan.nnodes}: horovod starts all nodes from one: call it there alone, with "
            'hosts="name:ranks,name:ranks"'
        )
    if hosts is None:
        return {"localhost": plan.nproc_per_node}
    found = [_HOST.fullmatch(item.strip()) for item in hosts.split(",")] if hosts else [None]
    slots = {match[1]: int(match[2]) for match in found if match}
    if len(slots) != len(found):
        raise ArgumentError(
            f'hosts={hosts!r} should be "name:ranks,name:ranks", each name once, 1 rank or more'
        )
    if max(slots.values()) != plan.nproc_per_node:
        raise ArgumentError(
            f"hosts={hosts!r} has up to {max(slots.values())} ranks on a host: pass that as "
            f"nproc_per_node, not {plan.nproc_per_node}"
        )
    if plan.nnodes not in (1, len(slots)):
        raise ArgumentError(f"hosts={hosts!r} has {len(slots)} hosts, but nnodes={plan.nnodes}")
    return slots


def _infos(slots: dict[str, int]) -> list[RankInfo]:
    """Seat the ranks host by host, as horovodrun does. Local."""
    infos: list[RankInfo] = []
    world_size = sum(slots.values())
    for node_rank, count in enumerate(slots.values()):
        for local_rank in range(count):
            place = (len(infos), world_size, local_rank, count, node_rank, len(slots))
            infos.append(RankInfo(*place, source="spawn"))
    return infos


def _resolve(names: list[str]) -> None:
    """Refuse hosts without an address, and names that no name server answers for."""
    unknown: dict[str, object] = dict.fromkeys(names, f"no answer in {_RESOLVE_S:g} s")

    def look_up(name: str) -> None:
        try:
            socket.gethostbyname(name)
        except OSError as error:
            unknown[name] = error
        else:
            del unknown[name]

    lookups = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    for lookup in lookups:
        lookup.start()
    for lookup in lookups:
        lookup.join(_RESOLVE_S)
    if unknown:
        why = "; ".join(f"{name}: {reason}" for name, reason in unknown.items())
        raise LaunchError(f"hosts that don't resolve ({why}): nothing was started; check hosts=")


def _listen(is_local: bool, held: ExitStack) -> tuple[socket.socket, str | int]:
    """Open the socket that ranks connect to; gives its path, or its port. Local."""
    if not is_local:
        listener = held.enter_context(socket.socket())
        listener.bind(("", 0))
    else:
        folder = held.enter_context(private_folder(longest=_LONGEST_FOLDER))
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(Path(folder, "link")))
    listener.listen(1024)
    name = listener.getsockname()
    return listener, name if is_local else name[1]


def _start(slots: dict[str, int], link: str, is_verbose: bool) -> subprocess.Popen[bytes]:
    path = search_path()
    set_path = f"import sys; sys.path[:] = {path!r}\n"
    hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
    words = ["--gloo", "--disable-cache", "-np", str(sum(slots.values())), "-H", hosts]
    words += ["--verbose"] if is_verbose else []
    command = [sys.executable, "-c", set_path + _WORKER.format(link=link)]
    environ = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    return subprocess.Popen(
        [sys.executable, "-c", set_path + _DRIVER, *words, *command],
        env=environ,
        stdin=subprocess.PIPE,  # its end tells horovodrun that this process has ended
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def join(link: str) -> NoReturn:
    """Be a rank of a job: connect to the process that launched it, and work for it.

    Local.

    Args:
        link: where to connect, and what to show there, as JSON.
    """
    where, token = json.loads(link)
    if isinstance(where, str):
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(where)
    else:  # horovodrun's address, which it made sure that every host can reach
        channel = socket.create_connection((os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], where))
    channel.sendall(token.encode())
    hello = pickle.dumps((int(os.environ["HOROVOD_RANK"]), os.getpid(), dict(os.environ)))
    messages.send(channel, messages.TASK, hello)
    work(channel.detach(), os.getppid())
