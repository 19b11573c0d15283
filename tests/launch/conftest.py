"""The real launchers; one that isn't here is skipped with its reason, or fails if required."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support import virtual_hosts, virtual_slurm
from tests.support.command import LIMIT_S, Done, Started, started
from tests.support.examples import EXAMPLES, command_of, pods_of
from tests.support.processes import until
from tests.support.requirements import require
from unisono.launchers.job.signals import END_S
from unisono.launchers.mpi import why_unavailable

collect_ignore = ["hang.py"]  # it hangs where it is imported, as for its doctests
# Ray sets some of them by itself, and knows one way of authentication for each process.
OF_RAY = {
    **dict.fromkeys(("RAY_USAGE_STATS_ENABLED", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT"), "0"),
    "RAY_AUTH_MODE": "disabled",
}
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
LAUNCHERS = ("processes", "torchrun", "mpi", "slurm", "ray")


@contextmanager
def on_hosts(
    hosts: virtual_hosts.Hosts, words: Sequence[Sequence[str]], *variables: Mapping[str, str]
) -> Iterator[list[Started]]:
    """Start commands on both hosts, half of them on each, with variables for each if any."""
    with ExitStack() as stack:
        jobs = []
        for i, (each, more) in enumerate(zip(words, variables or [{}] * len(words), strict=True)):
            job = started(hosts.on(2 * i // len(words), each), **more)
            jobs.append(stack.enter_context(job))
        yield jobs


def on_both(
    hosts: virtual_hosts.Hosts, words: Sequence[Sequence[str]], *variables: Mapping[str, str]
) -> list[Done]:
    """Run a command on each host; both end well."""
    with on_hosts(hosts, words, *variables) as jobs:
        return [ended_well(job) for job in jobs]


def ended_well(job: Started) -> Done:
    """Wait for the end of a job."""
    code = job.process.wait(LIMIT_S)
    assert code == 0, job.err() + job.out()
    return Done(0, job.out(), job.err(), 0.0)


def pods(name: str, hosts: virtual_hosts.Hosts) -> list[list[str]]:
    """Give the commands of a manifest's pods, of which the first is on the first host."""
    template, count = pods_of(name)
    found = []
    for index in range(count):
        words = command_of(template, index)
        words = [re.sub(r"(--master-addr)=.*", rf"\1={hosts.addresses[0]}", w) for w in words]
        found.append([str(EXAMPLES.parent / w) if w.startswith("examples/") else w for w in words])
    return found


def all_save(*jobs: Started, out: Callable[[Started], str] = Started.out) -> None:
    """See two ranks of each job save in mode "save", for longer than programs without time live."""
    for job in jobs:
        until(lambda job=job: out(job).count("SAVING") == 2, LIMIT_S)  # type: ignore[misc]
    with pytest.raises(subprocess.TimeoutExpired):
        jobs[0].process.wait(3 * END_S)
    for job in jobs:
        (job.folder / "go").touch()
    for job in jobs:
        assert job.process.wait(LIMIT_S) == 0, job.err() + job.out()
        assert len([*job.folder.glob("saved*")]) == 2


@contextmanager
def known(files: Sequence[Path], edit: Callable[[str], str]) -> Iterator[None]:
    """Change the /etc/hosts of hosts while the block lasts."""
    before = [file.read_text() for file in files]
    try:
        for file, text in zip(files, before, strict=True):
            file.write_text(edit(text))
        yield
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes; gives the variables that lead to it."""
    require("slurm", virtual_slurm.why_not())
    with virtual_slurm.virtual_slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.fixture(scope="session")
def mpi() -> None:
    require("mpi", why_unavailable())


@pytest.fixture(scope="session")
def ray() -> None:
    is_here = importlib.util.find_spec("ray") is not None
    require("ray", None if is_here else "ray isn't installed")


@pytest.fixture
def own_ray(ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray in this process, where no cluster has been named or noted."""
    has(monkeypatch, OF_RAY)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets lie in it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def has(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[virtual_hosts.Hosts]:
    """Two hosts with addresses of their own."""
    require("netns", virtual_hosts.why_not())
    with virtual_hosts.virtual_hosts(Path(tmp_path_factory.mktemp("hosts"))) as found:
        yield found


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each launcher, which finds the variables that it needs."""
    name: str = request.param
    needs = None if name in ("processes", "torchrun") else request.getfixturevalue(name)
    has(monkeypatch, {**OF_RAY, **(needs or {})})
    return name
