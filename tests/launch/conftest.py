"""The real launchers; one that isn't here is skipped with its reason, or fails if required."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import virtual_hosts, virtual_slurm
from tests.support.requirements import require
from unisono.launchers.availability import why_no_mpi

collect_ignore = ["hang.py"]  # it hangs where it is imported, as for its doctests
# Ray sets some of them by itself, and knows one way of authentication for each process.
OF_RAY = {
    **dict.fromkeys(("RAY_USAGE_STATS_ENABLED", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT"), "0"),
    "RAY_AUTH_MODE": "disabled",
}
LAUNCHERS = ("processes", "torchrun", "mpi", "slurm", "ray")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes; gives the variables that lead to it."""
    require("slurm", virtual_slurm.why_not())
    with virtual_slurm.virtual_slurm(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.fixture(scope="session")
def mpi() -> None:
    require("mpi", why_no_mpi())


@pytest.fixture(scope="session")
def ray() -> None:
    is_here = importlib.util.find_spec("ray") is not None
    require("ray", None if is_here else "ray isn't installed")


@pytest.fixture
def own_ray(ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray in this process, where no cluster has been named or noted."""
    for key, value in OF_RAY.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets lie in it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[virtual_hosts.Hosts]:
    """Two hosts with addresses of their own."""
    require("netns", virtual_hosts.why_not())
    with virtual_hosts.virtual_hosts(Path(tmp_path_factory.mktemp("hosts"))) as found:
        yield found


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """Each launcher, and the variables that it needs."""
    name: str = request.param
    if name == "slurm":
        return name, request.getfixturevalue("slurm")
    if name in ("mpi", "ray"):
        request.getfixturevalue(name)
    return name, {}
