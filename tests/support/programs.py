"""Programs in one launch: a process that loads torch takes seconds, most programs milliseconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import one_by_one
from tests.support.processes import SOURCES

PYTHON = (sys.executable,)
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_LIMIT_S = 300
# How gloo's thread may end a process of plain torch that is done with its work.
_ABORTED = "terminate called without an active exception"


class Printed(dict[str, str]):
    """By name of a program what its processes printed, if all came to its end."""

    why: str
    """What they wrote into no program's output, a traceback for one."""

    def __missing__(self, name: str) -> str:
        raise AssertionError(f"{name} didn't come to its end:\n{self.why}")


def run_programs(
    launcher: Sequence[str], programs: Mapping[str, Sequence[str]], folder: Path
) -> Printed:
    """Run programs one after the other in the processes of one launch.

    Args:
        launcher: the words before a program's.
        programs: by name the words of each: its file, and its arguments.
        folder: an empty one, where they run.
    """
    for _ in range(3):
        done = _launched(launcher, programs, folder)
        files = [file.read_text() for file in folder.glob("*.out")]
        for file in folder.glob("*.out"):
            file.unlink()
        if done.returncode == 0 or _ABORTED not in done.stderr:
            break
    printed = Printed()
    printed.why = "\n".join([*files, done.stdout, done.stderr])
    begins = re.compile(rf"^{one_by_one.BEGINS}.*\n", re.MULTILINE)
    # A program has come to its end where the next one begins, in every process.
    ended = zip(*(begins.split(text)[1:-1] for text in files), strict=False)
    printed.update((name, "".join(texts)) for name, texts in zip(programs, ended, strict=False))
    assert done.returncode or [*printed] == [*programs], printed.why
    return printed


def _launched(
    launcher: Sequence[str], programs: Mapping[str, Sequence[str]], folder: Path
) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": SOURCES,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder / "tmp"),
    }
    return subprocess.run(
        [*launcher, one_by_one.__file__, str(folder), json.dumps(programs)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
