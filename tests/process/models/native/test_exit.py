"""What gloo's threads still hold as a group or a program ends."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_python

PAIRS = 8
"""Two ranks at a time; each aborted in a quarter of the cases."""

# Gloo's threads are done with the operation, and wait for the interpreter, which they don't get
# before the program ends unless it gives it to them. They must be done: where the other rank comes
# late, its part arrives as this one ends, which aborts with torch alone, too.
PROGRAM = """
import os, sys, time
import numpy, torch
import torch.distributed as dist
import unisono

def pair(turn):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            return rank
        pids.append(pid)
    codes.extend(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)

codes = []
for turn in range(int(sys.argv[2])):
    rank = pair(turn)
    if rank is not None:
        break
if rank is None:
    print(*codes)
else:
    url = f"file://{sys.argv[1]}/{turn}"
    unisono.initialize("gloo", init_method=url, rank=rank, world_size=2, timeout=60)
    unisono.barrier()
    sys.setswitchinterval(60)
    ones = numpy.ones(4)
    dist.all_reduce(torch.from_numpy(ones), async_op=True)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    while ones[-1] != 2:  # the other rank is late, and this isn't the case to be seen
        time.sleep(0.01)
"""


def test_a_program_that_ends_right_after_an_operation_doesnt_abort(tmp_path: Path) -> None:
    printed = run_python("-c", PROGRAM, str(tmp_path), str(PAIRS))
    assert printed.split() == ["0"] * 2 * PAIRS


# On torch 2.6 a group that is destroyed keeps the interpreter while it waits for such a thread: one
# of a few contexts hung.
CONTEXTS = """
import os, sys, torch, unisono
import torch.distributed as dist

child = os.fork()
rank = 0 if child else 1
for turn in range(40):
    url = f"file://{sys.argv[1]}/{turn}"
    unisono.initialize("gloo", init_method=url, rank=rank, world_size=2, timeout=60)
    dist.all_reduce(torch.ones(4))
    unisono.finalize()
if child:
    print(os.waitpid(child, 0)[1])
"""


def test_a_context_that_ends_right_after_an_operation_ends(tmp_path: Path) -> None:
    assert run_python("-c", CONTEXTS, str(tmp_path)) == "0"
