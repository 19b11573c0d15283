"""Functions in ranks that a launcher of programs makes: the function and its results are files.

The folder has mode 0700, and lies where all ranks see it; each rank runs this file's `work`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from unisono._table import load, plugin_environments
from unisono.control.deadlines import overdue
from unisono.errors import CollectiveTimeoutError, LaunchError, PayloadError, WorkerFailedError
from unisono.launchers._by_value import pickle_for_worker
from unisono.launchers._front import Outcome
from unisono.launchers._private import no_room, private_folder
from unisono.launchers._script import Script
from unisono.topology import RankInfo

__all__ = ("run_function", "work")

_BOOT = (
    "import pickle, sys; sys.path[:] = pickle.load(open({path!r}, 'rb')); "
    "from unisono.launchers._folder import work; work({folder!r})"
)


def run_function(
    entry: Callable[[RankInfo], Any],
    script: Script,
    run: Callable[[Script], Outcome],
    environ: Mapping[str, str],
    parent: Path | None = None,
) -> list[Any]:
    """Run `entry` in every rank of a job of programs.

    Local.

    Args:
        entry: called once in each rank with who it is.
        script: the job, its program left out.
        run: the launcher.
        environ: variables of the ranks besides this process's.
        parent: where the folder is made; None for the system's temporary files.

    Returns:
        What `entry` returned, by rank; of a launcher of one node, by rank of this node.

    Raises:
        PayloadError: `entry` can't be pickled.
        LaunchError: the launcher failed, or its files can't be written.
        WorkerFailedError: a rank failed.
        CollectiveTimeoutError: the block's deadline is over; all ranks have been ended.
    """
    try:
        pickled = pickle_for_worker(entry)
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise PayloadError(f"the function or its arguments can't be pickled: {error}") from error
    with private_folder(".unisono-", parent) as name:
        folder = Path(name)
        path = [os.path.abspath(item) if item == "" else item for item in sys.path]
        try:
            (folder / "path").write_bytes(pickle.dumps(path))
            (folder / "entry").write_bytes(pickled)
            (folder / "environ").write_bytes(pickle.dumps(dict(environ)))
        except OSError as error:
            raise no_room(error) from error
        boot = _BOOT.format(path=str(folder / "path"), folder=str(folder))
        outcome = run(replace(script, program=(sys.executable, "-c", boot), is_prefixed=False))
        if outcome.interrupted is not None:
            raise KeyboardInterrupt
        if outcome.is_late:
            raise CollectiveTimeoutError(overdue(_late(folder, script), script.world_size))
        if outcome.code != 0:
            raise _error(folder, outcome)
        found = sorted(folder.glob("result-*"), key=lambda file: int(file.name.split("-")[1]))
        if not found:
            raise LaunchError("the launcher ended without a result of any rank")
        return [cloudpickle.loads(file.read_bytes()) for file in found]


def _late(folder: Path, script: Script) -> list[int]:
    """Name the ranks that left no result, of those that leave theirs here."""
    ranks = range(script.world_size)
    if script.node_rank is not None:
        first = script.node_rank * script.nproc_per_node
        ranks = range(first, first + script.nproc_per_node)
    return [rank for rank in ranks if not (folder / f"result-{rank}").exists()]


def _error(folder: Path, outcome: Outcome) -> LaunchError:
    report = outcome.failed
    if report is None:
        return LaunchError(
            f"the launcher ended with exit code {outcome.code} before the ranks were at work; "
            "what it said is above"
        )
    text = report.text()
    exit_code = None if report.signal_name or report.traceback else report.code
    error = WorkerFailedError(text, report.rank, exit_code, report.signal_name, report.traceback)
    with contextlib.suppress(Exception):  # there is none, or its class can't be had here
        error.__cause__ = pickle.loads((folder / f"error-{report.rank}").read_bytes())
    return error


def work(folder: str) -> NoReturn:
    """Be one rank: run the function and leave its result. Local."""
    where = Path(folder)
    for name, value in pickle.loads((where / "environ").read_bytes()).items():
        os.environ.setdefault(name, value)
    info = load("unisono.environments:detect")(os.environ, plugin_environments())
    if info is None:
        raise LaunchError("no launcher's variables say who this rank is")
    try:
        result = cloudpickle.loads((where / "entry").read_bytes())(info)
        body = cloudpickle.dumps(result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        with contextlib.suppress(Exception):  # the traceback says what there is to say
            (where / f"error-{info.rank}").write_bytes(cloudpickle.dumps(error))
        traceback.print_exc()
        sys.exit(error.code if isinstance(error, SystemExit) and error.code else 1)
    partial = where / f"partial-{info.rank}"
    partial.write_bytes(body)
    partial.replace(where / f"result-{info.rank}")
    sys.exit(0)
