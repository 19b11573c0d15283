"""Programs under a library's own launcher: parts, one after the other, on each rank."""

from __future__ import annotations

import math
import os
import re
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import unisono as idist
from tests.support.command import run, started
from tests.support.pages import ROOT
from tests.support.processes import SOURCES, marked
from unisono.model.contract import ComputationModel
from unisono.topology import ContextHint, RankInfo

EXAMPLE = ROOT / "examples" / "digits.py"
PATH = f"{SOURCES}:{ROOT}"
_FOLDER = "PROGRAMS_WRITE_TO"


M = TypeVar("M", bound=ComputationModel)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def writing_to(folder: Path) -> dict[str, str]:
    """Give the variables of a job whose programs write what they found into a folder."""
    return {_FOLDER: str(folder)}


def run_parts(parts: Mapping[str, Any]) -> None:
    """Run those that the command line names, and report each that has passed."""
    for name in sys.argv[1].split(","):
        parts[name]()
        say(f"passed {name}")


def adopted(cls: type[M], hint: ContextHint = ContextHint()) -> M:  # noqa: B008 - it is frozen
    """Give the model of a context that is there."""
    model = cls.from_context(hint)
    assert model is not None
    return model


def with_model(
    cls: type[ComputationModel],
    backend: str,
    entry: Callable[[Any], Any],
    options: dict[str, Any],
    info: RankInfo,
) -> Any:
    """Make the model, run `entry` with it, end it: what a rank of a launcher does."""
    model = cls.initialize(backend, info, **options)
    result = entry(model)
    model.finalize()
    return result


def run_job(
    command: Sequence[str],
    parts: str,
    size: int,
    environ: Mapping[str, str] | None = None,
    limit_s: float = 270,
) -> None:
    """Run parts of a program under a launcher, and see each pass on every rank."""
    done = run([*command, parts], limit_s, **{**(environ or {}), "PYTHONPATH": PATH})
    said = (done.out + done.err)[-6000:]
    passed = Counter(re.findall(r"passed (\w+)", done.out))
    assert (passed, done.code) == (dict.fromkeys(parts.split(","), size), 0), said


def go_on(local_rank: int) -> None:
    say("up")
    while True:
        idist.barrier()


def check_killed_parent(backend: str, folder: Path) -> None:
    """Kill a program that has spawned ranks, whose files lie in `folder`: the ranks end."""
    code = "import sys, unisono as idist; from tests.real.jobs import go_on"
    code += f"; idist.spawn({backend!r}, go_on, nproc_per_node=2)"
    variables = {"PYTHONPATH": PATH, "TMPDIR": str(folder)}
    with started([sys.executable, "-c", code], **variables) as job:
        job.wait_for("up", 2)
        job.end(signal.SIGKILL, 15)
        assert not marked(job.mark, 10)


def run_digits(backend: str) -> None:
    """Run the example of the digits as a program; rank 0 writes what it found."""
    sys.argv[1:] = ["--backend", backend, "--json", str(Path(os.environ[_FOLDER], "digits"))]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def check_digits(found: dict[str, Any], model: str, size: int, epochs: int = 20) -> None:
    """Compare what was learnt from the digits with what ranks that are threads learn."""
    example = runpy.run_path(str(EXAMPLE))
    given = (example["load"](), epochs, 0)
    wanted = idist.spawn("threads", example["train"], given, nproc_per_node=size)[0]
    assert (found["model"], found["world_size"]) == (model, size)
    assert found["checksums"] == found["checksums"][:1] * size
    parameters, others = (torch.tensor(each["parameters"]) for each in (found, wanted))
    torch.testing.assert_close(parameters, others, rtol=0, atol=1e-5)
    assert math.isclose(found["accuracy"], wanted["accuracy"], abs_tol=1e-6)  # of 360 images
