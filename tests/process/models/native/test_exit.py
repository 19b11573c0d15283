"""What gloo's threads still hold as a group or a program ends."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_python

# Rank 1 joins the operation when rank 0 is past unisono's exit handler, or 0.3 seconds after its
# end began. Rank 0 then keeps the interpreter, which gloo's thread asks for, to its finalization.
PROGRAM = """
import atexit, os, sys, time
from pathlib import Path

def last():
    if rank == 0:
        sys.setswitchinterval(60)
        ending.touch()
        until = time.monotonic() + 0.3
        while ones[-1] != 2 or time.monotonic() < until:
            pass

atexit.register(last)
import numpy, torch
import torch.distributed as dist
import unisono

class Interpreter:
    def __del__(self, sleep=time.sleep):
        sleep(0.1)  # finalization is under way, and the thread that asked gets its answer

at_exit, ending = (Path(sys.argv[1], name) for name in ("at exit", "ending"))
pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[rank] == 0:
        break
else:
    rank = None
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
    sys.exit()
url = f"file://{sys.argv[1]}/store"
unisono.initialize("gloo", init_method=url, rank=rank, world_size=2, timeout=60)
unisono.barrier()
ones, interpreter = numpy.ones(4), Interpreter()
if rank == 0:
    atexit.register(at_exit.touch)
    dist.all_reduce(torch.from_numpy(ones), async_op=True)
else:
    while not at_exit.exists():
        time.sleep(0.01)
    until = time.monotonic() + 0.3
    while not ending.exists() and time.monotonic() < until:
        time.sleep(0.01)
    dist.all_reduce(torch.from_numpy(ones))
"""


def test_a_program_that_ends_right_after_an_operation_doesnt_abort(tmp_path: Path) -> None:
    assert run_python("-c", PROGRAM, str(tmp_path)) == "0 0"


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
