"""A real Slurm on this host: one controller and two virtual nodes, n1 and n2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import gone, until

_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "sinfo")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_START_S = 60.0
_CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=2000\n"
)
_PARTITION = "PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE OverSubscribe=YES\n"


def why_not() -> str | None:
    """Return why Slurm can't be started here, None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} are missing: apt-get install slurmctld slurmd munge"
    return None if os.geteuid() == 0 else "only root can start Slurm's daemons"


@contextmanager
def virtual_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm, and stop it at the end; yield the variables with which commands find it."""
    conf = folder / "slurm.conf"
    for name in ("state", "spool/n1", "spool/n2"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(3)
    text = _CONF.format(host=host, port=ports[0], folder=folder)
    for name, port in zip(("n1", "n2"), ports[1:], strict=True):
        text += _NODE.format(name=name, host=host, port=port)
    conf.write_text(text + _PARTITION)
    _name_nodes()
    _start_munge()
    environ = {"SLURM_CONF": str(conf)}
    try:
        _run("slurmctld", "-f", str(conf))
        for name in ("n1", "n2"):
            _run("slurmd", "-N", name, "-f", str(conf))
        until(lambda: _are_idle(environ), _START_S)
        yield environ
    finally:
        for file in (*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(file.read_text())
                os.kill(pid, signal.SIGTERM)
                gone([pid], 10.0)


def _run(*words: str) -> None:
    done = subprocess.run(words, env={**os.environ, "PATH": _PATH}, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _name_nodes() -> None:
    """Add the nodes' names to /etc/hosts, because one of them becomes MASTER_ADDR."""
    hosts = Path("/etc/hosts")
    for name in ("n1", "n2"):
        if name not in hosts.read_text().split():
            with hosts.open("a") as file:
                file.write(f"127.0.0.1 {name}\n")


def _start_munge() -> None:
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        return
    key = Path("/etc/munge/munge.key")
    Path("/run/munge").mkdir(parents=True, exist_ok=True)
    if not key.exists() or not key.read_bytes():
        key.write_bytes(os.urandom(1024))
    for path in (key, key.parent, "/run/munge", "/var/lib/munge", "/var/log/munge"):
        shutil.chown(path, "munge", "munge")
    key.chmod(0o400)
    Path("/run/munge").chmod(0o755)
    _run("runuser", "-u", "munge", "--", "munged", "--force")


def _are_idle(environ: dict[str, str]) -> bool:
    words = ["sinfo", "-h", "-N", "-o", "%t"]
    said = subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True)
    return said.stdout.split() == ["idle", "idle"]
