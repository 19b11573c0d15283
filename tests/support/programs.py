"""Many programs in one launch, as loading torch takes seconds, and most programs milliseconds."""

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
# Printed if gloo's thread aborts a process of plain torch at its exit.
_ABORTED = "terminate called without an active exception"


class Printed(dict[str, str]):
    """The output of each program, by name, if all its processes completed it."""

    why: str
    """All output, which shows why a program wasn't completed."""

    def __missing__(self, name: str) -> str:
        raise AssertionError(f"{name} wasn't completed:\n{self.why}")


def run_programs(
    launcher: Sequence[str], programs: Mapping[str, Sequence[str]], folder: Path
) -> Printed:
    """Run programs one after the other in the processes of one launch.

    Args:
        launcher: beginning of the command line, before the program.
        programs: file and arguments of each program, by name.
        folder: an empty working directory.
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
    # A program is completed if the next one has begun in every process.
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
