"""A whole session of pytest with 100 small tests on two ranks: ours, and how others test.

Each session is a process of its own, timed from its start to its end; the sessions take turns, and
each loads its own plug-in alone. The tests are those of ``session_tests/``: each sums a tensor
over two ranks. Peers that start processes for each test take minutes, so with `--few 10` they run
10 of the tests. Their time of all tests is then what it takes to collect them, and 10 times the
rest.

    python benchmarks/sessions.py [--tests 100] [--few 100] [--rounds 3] [--json | --markdown]
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import Timing, Work, parser, ratio_report

FOLDER = Path(__file__).with_name("session_tests")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
LIMITS_S = {"threads": 3.0, "gloo": 8.0}
BOUND = "One import of torch by pytest, one by the process that ranks are copied from, and a "
BOUND += "message to each rank and back for each test."
# As root, and with more ranks than cores, Open MPI starts only what is told so.
FOR_MPI = {
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@dataclass(frozen=True, slots=True)
class Session:
    """How one library's session is started.

    Args:
        tests: its file in ``session_tests/``.
        plugin: what pytest loads, and nothing else; empty for none.
        options: of pytest.
        within: the command that starts pytest; empty for none.
        needs: modules that have to be here.
        is_slow: whether it starts processes for each test.
    """

    tests: str
    plugin: str = ""
    options: Sequence[str] = ()
    within: Sequence[str] = ()
    needs: Sequence[str] = ()
    is_slow: bool = False

    @property
    def is_here(self) -> bool:
        """Whether all it needs is installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.needs)

    def run(self, tests: int, *options: str) -> float:
        """Run so many tests, or only collect them; give the seconds until the session has ended."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        loaded = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": self.plugin}
        own = {"SESSION_TESTS": str(tests), "PATH": path, "OMP_NUM_THREADS": "1", **loaded}
        command = [*self.within, *PYTEST, *self.options, *options, self.tests]
        begin = time.perf_counter()
        done = subprocess.run(
            command, cwd=FOLDER, env={**os.environ, **FOR_MPI, **own}, capture_output=True
        )
        seconds = time.perf_counter() - begin
        if done.returncode != 0:
            output = (done.stdout + done.stderr).decode(errors="replace")
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
        return seconds

    def seconds(self, tests: int, few: int) -> float:
        """Give the time of so many tests, reckoned from a few where each starts processes."""
        if not self.is_slow or few >= tests:
            return self.run(tests)
        collected = self.run(few, "--collect-only")
        return collected + (self.run(few) - collected) / few * tests


def ours(backend: str) -> Session:
    """Give the session with our plug-in on a backend."""
    return Session("test_ranks.py", "unisono.testing.pytest_plugin.plugin", ("--ranks-on", backend))


_MPI_PYTEST = Session(
    "test_mpi_pytest.py",
    "pytest_mpi.plugin,xdist.plugin",  # it asks the other, which has to be loaded if it is here
    needs=("mpi4py", "pytest_mpi"),
    is_slow=True,
)
PEERS = {
    "a session that imports torch, no more": Session("test_import.py"),
    "DeepSpeed's pattern": Session("test_deepspeed.py", is_slow=True),
    "pytest-isolate-mpi": Session(
        "test_isolate_mpi.py",
        "pytest_isolate_mpi._plugin",
        needs=("mpi4py", "pytest_isolate_mpi"),
        is_slow=True,
    ),
    "mpi-pytest": _MPI_PYTEST,
    "mpi-pytest within mpiexec": replace(_MPI_PYTEST, within=("mpiexec", "-n", "2"), is_slow=False),
    "MultiProcContinuousTest": Session("test_torch.py", needs=("expecttest",)),
}


def main() -> int:
    """Measure and print."""
    made = parser("A session of small tests on two ranks.", 3)
    made.add_argument("--tests", type=int, default=100, help="default: %(default)s")
    made.add_argument("--few", type=int, default=100, help="of peers that start processes for each")
    arguments = made.parse_args()
    if arguments.few < 1:
        made.error("--few should be at least 1")
    mine = {backend: ours(backend) for backend in LIMITS_S}
    peers = {name: session for name, session in PEERS.items() if session.is_here}
    names = [*mine, *peers]
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(arguments.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds = {**mine, **peers}[name].seconds(arguments.tests, arguments.few)
            times[name].append(seconds * 1e6)
    timings = {name: Timing(tuple(values)) for name, values in times.items()}
    works = [
        Work(
            f"{arguments.tests} tests on {backend}",
            {"unisono": timings[backend], peer: timings[peer]},
            limit_us=limit_s * 1e6,
            bound=BOUND,
        )
        for backend, limit_s in LIMITS_S.items()
        for peer in peers
    ]
    few = min(arguments.few, arguments.tests)
    about = {"ranks": 2, "rounds": arguments.rounds, "tests where each starts processes": few}
    return ratio_report("Sessions", works, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
