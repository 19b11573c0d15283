"""How long it takes until replicas have met in one barrier: the first time, again, and in a pool.

Every start is a fresh program that times its own calls; the peers take turns. torchrun is a program
and is timed as a whole, so our whole program is shown too, in which torch is imported twice at the
same time: by the caller, and by the process that workers are copied from.

    python benchmarks/starts.py [--nproc-per-node 4] [--rounds 3] [--json | --markdown]
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Timing, Work, parser, ratio_report

FIRST = "One import of torch by the process that workers are copied from, and one beside it by the "
FIRST += "caller."
AGAIN = "Copies of a process, torch's store and gloo's connections: each pair of ranks makes one."
POOL = "A message to each worker and back, and the kernel's turns where workers outnumber cores."
PROGRAMS = {
    "unisono": """
import json, sys, time
started = time.perf_counter()
import unisono

def meet(local_rank):
    unisono.barrier()

if __name__ == "__main__":
    n = int(sys.argv[1])
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        unisono.spawn("gloo", meet, nproc_per_node=n)
        times.append(time.perf_counter() - begin)
        if len(times) == 1:
            whole = time.perf_counter() - started
    with unisono.WorkerPool("gloo", nproc_per_node=n) as pool:
        pool.run(meet)
        runs = []
        for _ in range(50):
            begin = time.perf_counter()
            pool.run(int)
            runs.append(time.perf_counter() - begin)
    print(json.dumps([times[0], sorted(times[1:])[1], sorted(runs)[25], whole]))
""",
    "ignite": """
import json, sys, time
import ignite.distributed as idist

def meet(local_rank):
    idist.barrier()

if __name__ == "__main__":
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        idist.spawn("gloo", meet, (), nproc_per_node=int(sys.argv[1]))
        times.append(time.perf_counter() - begin)
    print(json.dumps(times))
""",
}
TORCHRUN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def run(folder: Path, name: str, size: int) -> list[float]:
    """Run one program; give its times in seconds."""
    script = folder / f"start_{name}.py"
    if name == "torchrun":
        script.write_text(TORCHRUN)
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [sys.executable, *words, str(script)]
    else:
        script.write_text(PROGRAMS[name])
        command = [sys.executable, str(script), str(size)]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet)
    if name == "torchrun":
        return [time.perf_counter() - begin] * 2
    return [float(seconds) for seconds in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    """Measure and print."""
    made = parser("Until replicas have met in one barrier.", 3)
    made.add_argument("--nproc-per-node", type=int, default=4)
    arguments = made.parse_args()
    names = ["unisono", "torchrun"]
    if importlib.util.find_spec("ignite") is not None:
        names.append("ignite")
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                times[name].append(run(Path(folder), name, arguments.nproc_per_node))

    def timing(name: str, which: int) -> Timing:
        return Timing(tuple(row[which] * 1e6 for row in times[name]))

    ours, again, pool, whole = (timing("unisono", which) for which in range(4))
    four = arguments.nproc_per_node >= 4

    def over(peer: str, which: int, mine: Timing) -> dict[str, Timing]:
        return {"unisono": mine, peer: timing(peer, which)}

    works = [
        Work("first spawn", over("torchrun", 0, ours), 2.5 if four else 2, bound=FIRST),
        Work("the whole program", over("torchrun", 0, whole), 2 if four else 1, bound=FIRST),
        Work("a second spawn", over("torchrun", 1, again), 2.5, bound=AGAIN),
        Work("WorkerPool.run", {"unisono": pool, "our second spawn": again}, 100, 2000, POOL),
    ]
    if "ignite" in names:
        works += [
            Work("first spawn", over("ignite", 0, ours), 4 if four else 2, bound=FIRST),
            Work("a second spawn", over("ignite", 1, again), 40 if four else 20, bound=AGAIN),
            Work("WorkerPool.run", over("ignite", 1, pool), 100, 2000, POOL),
        ]
    about = {"ranks": arguments.nproc_per_node, "rounds": arguments.rounds}
    return ratio_report("Starts", works, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
