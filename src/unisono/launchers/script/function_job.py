"""Functions in ranks that a launcher of programs makes: the function and its results are files.

The folder has mode 0700, and lies where all ranks see it; each rank runs this file's `work`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from unisono.at_exit import LastCalls
from unisono.deadlines import overdue
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.forkserver import interpreter
from unisono.launchers.job.lifetime import PEERS_S, Lifetime, flush
from unisono.launchers.job.pickling import load_from_parent, pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.store import no_room, private_folder
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import Outcome, held_back, show
from unisono.pickling import dumps
from unisono.plugins import read_environment
from unisono.topology import RankInfo

_BOOT = (
    "import pathlib, pickle, sys; sys.path[:] = pickle.loads(pathlib.Path({path!r}).read_bytes()); "
    "from unisono.launchers.script.function_job import work; work({folder!r})"
)


def run_function(
    entry: Callable[[RankInfo], Any],
    script: Script,
    run: Callable[[Script], Outcome],
    environ: Mapping[str, str],
    parent: Path | None = None,
) -> list[Any]:
    """Run `entry` in every rank of a job of programs."""
    # Success is a result of every rank, not what the launcher says.
    pickled = pickle_for_worker(entry)
    is_local = parent is None
    with private_folder(".unisono-", parent) as name:
        folder = Path(name)
        path = search_path()
        try:
            (folder / "path").write_bytes(pickle.dumps(path))
            (folder / "entry").write_bytes(pickled)
            (folder / "job").write_bytes(pickle.dumps((dict(environ), is_local)))
        except OSError as error:
            raise no_room(error) from error
        boot = _BOOT.format(path=str(folder / "path"), folder=str(folder))
        outcome = run(replace(script, program=(*interpreter(), "-c", boot), is_prefixed=False))
        for line in held_back(outcome):
            show(2, f"{line}\n".encode())
        if outcome.interrupted is None or outcome.code == 0:
            return _collect(folder, outcome, script, is_local)
    if outcome.interrupted == signal.SIGINT:
        raise KeyboardInterrupt
    signal.raise_signal(outcome.interrupted)  # for this process's own handler, which may go on
    raise LaunchError(f"{signal_name(outcome.interrupted)} came, and all ranks have been ended")


def _collect(folder: Path, outcome: Outcome, script: Script, is_local: bool) -> list[Any]:
    """Return the results, or raise why there are none."""
    places = range(script.nproc_per_node if is_local else script.world_size)
    if outcome.is_late:
        first = (script.node_rank or 0) * script.nproc_per_node if is_local else 0
        raise CollectiveTimeoutError(overdue(_late(folder, places, first), script.world_size))
    if outcome.code != 0:
        raise _error(folder, outcome)
    return _results([_Leaving.read(folder, place) for place in places])


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What a rank leaves in its place: who it is, and its result once it has one."""

    # A rank of a later attempt writes over what the one before it left in the same place, as soon
    # as it begins.

    rank: int
    world_size: int
    attempt: int
    result: bytes | None = None

    def write(self, folder: Path, place: int) -> None:
        """Write it in one piece."""
        partial = folder / f"partial-{place}-{os.getpid()}"
        partial.write_bytes(pickle.dumps(self))
        partial.replace(folder / f"left-{place}")

    @classmethod
    def read(cls, folder: Path, place: int) -> _Leaving | None:
        """Read it; None if no rank has begun there."""
        try:
            left: _Leaving = pickle.loads((folder / f"left-{place}").read_bytes())
        except FileNotFoundError:
            return None
        return left


def _results(left: Sequence[_Leaving | None]) -> list[Any]:
    """Take the results of the last attempt, one of each place: exit status 0 proves nothing."""
    begun = [item for item in left if item is not None]
    if not begun:
        raise LaunchError("the launcher ended well, but no rank has begun")
    last = max(begun, key=lambda item: item.attempt)
    for place, item in enumerate(left):
        if item is None or (item.attempt, item.world_size) != (last.attempt, last.world_size):
            raise WorkerFailedError(
                f"rank {place} of {len(left)} ended before its work was begun, though its "
                "launcher ended well",
                place,
                exit_code=0,
            )
        if item.result is None:
            raise WorkerFailedError(
                f"rank {item.rank} of {item.world_size} ended with exit code 0 before its work was "
                "done",
                item.rank,
                0,
            )
    return [pickle.loads(item.result) for item in begun if item.result is not None]


def _late(folder: Path, places: Sequence[int], first: int) -> list[int]:
    """Name the ranks that left no result, of those that leave theirs here."""
    left = [(first + place, _Leaving.read(folder, place)) for place in places]
    named = [(item.rank if item else rank, item) for rank, item in left]
    return [rank for rank, item in named if item is None or item.result is None]


def _error(folder: Path, outcome: Outcome) -> LaunchError:
    report = outcome.failed
    if report is None:
        return LaunchError(
            f"the launcher ended with exit code {outcome.code} before the ranks were at work; "
            "what it said is above"
        )
    error = report.error(report.rank, report.world_size)
    with contextlib.suppress(Exception):  # there is none, or its class can't be had here
        error.__cause__ = pickle.loads(
            (folder / f"error-{report.attempt}-{report.rank}").read_bytes()
        )
    return error


def work(folder: str) -> NoReturn:
    """Be one rank: run the function and leave its result."""
    where = Path(folder)
    environ, is_local = pickle.loads((where / "job").read_bytes())
    for name, value in environ.items():
        os.environ.setdefault(name, value)
    info = read_environment(os.environ)
    if info is None:
        raise LaunchError("no launcher's variables say who this rank is")
    place = info.rank if info.local_rank is None or not is_local else info.local_rank
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    mine = _Leaving(info.rank, info.world_size, int(attempt) if attempt.isdecimal() else 0)
    Lifetime.begin()
    try:
        mine.write(where, place)
        result = load_from_parent((where / "entry").read_bytes())(info)
        body = dumps(result)
        Lifetime.run_exit_handlers()
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        with contextlib.suppress(Exception):  # the traceback says what there is to say
            (where / f"error-{mine.attempt}-{info.rank}").write_bytes(dumps(error))
        flush()
        traceback.print_exc(file=sys.__stderr__)  # without a prefix, for it is read again
        code = WorkerFailedError.exit_code_of(error) or 1
        os._exit(code & 0xFF or 1)  # the job waits for no thread of a rank that has failed
    replace(mine, result=body).write(where, place)
    LastCalls.make(lambda _: time.sleep(PEERS_S))
    sys.exit(0)
