"""The runner of laws in replicas of any backend, with an outcome for each law."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from unisono.collectives.gathers import all_gather
from unisono.context import current_model
from unisono.errors import LaunchError, WorkerFailedError
from unisono.lifecycle import spawn
from unisono.model.contract import ComputationModel
from unisono.recording import stack_signal
from unisono.registry import find_model
from unisono.testing.cases import LAWS, Law, same

__all__ = ("Kept", "LawBrokenError", "Outcome", "Status", "check", "keep_laws", "law_names")

Status = Literal["passed", "derived", "unsupported", "failed"]

# Members that the contract derives from others.
_DERIVED = (
    "exchange", "all_reduce", "broadcast", "reduce", "scatter", "reduce_scatter", "all_to_all",
)  # fmt: skip
# The model's timeout in multiples of the law's, which must pass first, as it shows all stacks.
_GRACE = 1.5
_POLL_S = 0.1
_ANSWER_S = 3.0  # time for a replica to write its stack


class LawBrokenError(AssertionError):
    """Raised in a replica in which a law does not hold."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(law, text)
        self.law = law
        self.text = text

    def __str__(self) -> str:
        return f"law {self.law} doesn't hold: {self.text}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one law ended at one number of replicas.

    Args:
        law: its name.
        nproc: number of replicas.
        status: ``"passed"``; ``"derived"`` if it holds, but the law used members that the model
            doesn't implement and the contract derives from others, correct and slow;
            ``"unsupported"`` if the model doesn't declare a capability that the law needs;
            ``"failed"``.
        reason: why it isn't ``"passed"``.
        seconds: its duration.
    """

    law: str
    nproc: int
    status: Status
    reason: str = ""
    seconds: float = 0.0


def law_names(pattern: str = "") -> list[str]:
    """List the laws whose name contains `pattern`.

    Args:
        pattern: a part of a name; all laws if empty.

    Returns:
        Names, in the order of execution.
    """
    return [name for name in LAWS if pattern in name]


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of a law that holds in one replica.

    Args:
        seconds: its duration there.
        derived: members used by the law that the contract derives for the model.
    """

    seconds: float
    derived: tuple[str, ...] = ()


def keep_laws(local_rank: int, names: Sequence[str], folder: str = "") -> list[Kept]:
    """Check laws in a replica, one after another; `check` spawns this function.

    Collective over all ranks.

    Args:
        local_rank: not used.
        names: laws to check, the same on every rank.
        folder: where each replica records its current law; empty to record nothing.

    Returns:
        The result of each law.

    Raises:
        LawBrokenError: the first law that doesn't hold here.
    """
    model = current_model()
    used, enter = _note_derived(model), _law_recorder(folder, model.topology.rank)
    kept = []
    for name in names:
        start = time.perf_counter()
        used.clear()
        enter(name)
        try:
            LAWS[name].check()
            derived = tuple(sorted(used))
            # A law that leaves the ranks out of step is broken itself, not the one after it.
            topology = model.topology
            same(all_gather(topology.rank), list(range(topology.world_size)), "the next call")
        except Exception as error:
            raise LawBrokenError(name, _text_of(error)) from error
        kept.append(Kept(time.perf_counter() - start, derived))
    enter("")
    return kept


def _note_derived(model: ComputationModel) -> set[str]:
    """Return a set to which each derived member is added as it is called on a model."""
    used: set[str] = set()
    cls: Any = type(model)
    members: dict[str, Any] = {"__module__": cls.__module__}

    def noting(name: str, derived: Callable[..., Any]) -> Callable[..., Any]:
        def member(*args: Any, **kwargs: Any) -> Any:
            used.add(name)
            return derived(*args, **kwargs)

        return member

    for name in _DERIVED:
        derived = getattr(ComputationModel, name)
        if getattr(cls, name) is derived:  # the model doesn't implement it
            members[name] = noting(name, derived)
    # The model gets a subclass of its class, so that other replicas are unaffected.
    model.__class__ = type(cls)(cls.__name__, (cls,), members)
    return used


def _text_of(error: Exception) -> str:
    """Return an error's text with the line of the law that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "cases" in f.filename]
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


@dataclass(slots=True)
class _Batch:
    """Results of laws that shared replicas: all hold, or one is broken."""

    kept: dict[str, Kept] = field(default_factory=dict)
    broken: str = ""
    reason: str = ""


def check(
    backend: str,
    nproc: int,
    *,
    laws: Iterable[str] | None = None,
    timeout_s: float = 60.0,
    launch: Callable[..., Any] = spawn,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    **options: Any,
) -> list[Outcome]:
    """Check laws on a backend with a number of replicas.

    Laws share replicas until one is broken; the rest run in new ones. A law that exceeds
    `timeout_s` fails, and its reason has the stacks of all replicas on this host.

    Args:
        backend: as in ``spawn``.
        nproc: number of replicas.
        laws: names; all laws if None.
        timeout_s: seconds that one law may take.
        launch: starts the replicas; called like ``spawn``.
        on_outcome: called with each outcome as soon as it is known.
        options: further options of `launch`.

    Returns:
        One outcome for each law, in order.

    Raises:
        BackendError: the backend is unknown or can't be used here.
        LaunchError: the replicas can't be started.
    """
    model = find_model(backend)
    if "timeout" in model.options:
        options.setdefault("timeout", timeout_s * _GRACE)
    waiting = [LAWS[name] for name in (law_names() if laws is None else laws)]
    done: list[Outcome] = []
    while waiting:
        # Other laws are reported as unsupported; one law checks that the model refuses their calls.
        names = [law.name for law in waiting if law.needs <= model.capabilities]
        start = partial(launch, backend, keep_laws, nproc_per_node=nproc, **options)
        batch = _run(start, names, timeout_s) if names else _Batch()
        while waiting:
            law = waiting.pop(0)
            done.append(_outcome_of(law, model, nproc, batch))
            on_outcome(done[-1])
            if law.name == batch.broken:  # its replicas have ended, so the rest need new ones
                break
    return done


def _run(start: Callable[..., Any], names: Sequence[str], timeout_s: float) -> _Batch:
    """Run laws in new replicas until one is broken."""
    batch = _Batch()
    with _Watchdog(timeout_s) as watch:
        try:
            rows: list[list[Kept]] = start(args=(names, watch.folder))
            batch.kept = {name: _joined(row) for name, *row in zip(names, *rows, strict=True)}
        except LaunchError as error:
            batch.broken, batch.reason = _broken_law(error, names, watch)
    # The watchdog has killed the replicas, so their failure says nothing.
    if watch.hung:
        batch.broken = watch.hung
        batch.reason = f"it wasn't done after {timeout_s:g} s\n{watch.stacks}"
    return batch


def _joined(row: Sequence[Kept]) -> Kept:
    """Join the results of one law in all replicas: the longest duration, all derived members."""
    derived = sorted({name for kept in row for name in kept.derived})
    return Kept(max(kept.seconds for kept in row), tuple(derived))


def _broken_law(error: LaunchError, names: Sequence[str], watch: _Watchdog) -> tuple[str, str]:
    """Return the law that was broken when a job failed, and the reason."""
    cause = error.__cause__
    rank = error.rank if isinstance(error, WorkerFailedError) else -1  # -1 if it is unknown
    if isinstance(cause, LawBrokenError):
        return cause.law, f"rank {rank}: {cause.text}"
    for name in names:  # the text names the law even if the exception couldn't be pickled
        if f"law {name} doesn't hold" in str(error):
            return name, str(error)
    last = next((entry.law for entry in watch.entries() if entry.rank == rank), "")
    # A replica that dies names no law, so the law that it entered last is the broken one.
    if last or watch.hung:
        return last, f"the replicas ended in it: {error}"  # after a hang `_run` replaces it
    raise LaunchError(f"the replicas ended outside of any law: {error}") from error


def _outcome_of(law: Law, model: type[ComputationModel], nproc: int, batch: _Batch) -> Outcome:
    """Return the outcome of a law whose batch has run."""
    if law.name == batch.broken:
        return Outcome(law.name, nproc, "failed", batch.reason)
    missing = sorted(law.needs - model.capabilities)
    if missing:
        text = f"{model.name} doesn't declare {', '.join(missing)}, and refuses it as it must"
        return Outcome(law.name, nproc, "unsupported", text)
    # Laws before a broken one hold, but their durations were lost with the replicas.
    kept = batch.kept.get(law.name, Kept(0.0))
    if kept.derived:
        text = f"derived: {', '.join(kept.derived)}"
        return Outcome(law.name, nproc, "derived", text, kept.seconds)
    return Outcome(law.name, nproc, "passed", "", kept.seconds)


# A hang watchdog: each replica records the law it has entered in its own file. The process that
# started them reads these files. When a law exceeds its time limit, that process requests every
# replica's stack, by a signal that is handled in C and so works while the interpreter lock is held;
# then it kills the processes. Replicas on other hosts aren't covered.


@dataclass(frozen=True, slots=True)
class _Entry:
    """A replica's current law, its start, and the facts needed to read its stack."""

    rank: int
    law: str
    since_s: float
    pid: int
    thread_id: int
    facts: Mapping[str, int]

    def text(self) -> str:
        """Request the replica's stack, and return it without the frames of this module."""
        stack = stack_signal.ask(self.pid, self.facts, self.thread_id, _ANSWER_S) or ""
        inner = takewhile(lambda frame: frame[2] != keep_laws.__name__, stack_signal.parse(stack))
        frames = [f'  File "{file}", line {line} in {name}' for file, line, name in inner]
        shown = "\n".join(frames) or "  (it showed no stack)"
        return f"rank {self.rank}, in {self.law or 'no law any more'}:\n{shown}"


def _law_recorder(folder: str, rank: int) -> Callable[[str], None]:
    """Return a function that records the law that this replica enters, "" after the last one."""
    if not folder or not Path(folder).is_dir():  # no watchdog, or one on another host
        return lambda law: None
    path, facts = Path(folder, f"{rank}.rank"), stack_signal.install()
    unfinished = path.with_suffix(".partial")

    def enter(law: str) -> None:
        entry = _Entry(rank, law, time.monotonic(), os.getpid(), threading.get_native_id(), facts)
        with contextlib.suppress(OSError):  # the folder is removed with the job
            unfinished.write_text(json.dumps(astuple(entry)))
            unfinished.replace(path)  # atomic, so that the parent never reads a part

    return enter


class _Watchdog:
    """Watches the replicas of one job from the process that started them."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-laws-")
        self.folder: str = self._folder.name
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unisono-watch", daemon=True)
        self.hung = ""  # the law that took too long
        self.stacks = ""  # of all replicas at that time

    def __enter__(self) -> _Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._folder.cleanup()

    def entries(self) -> list[_Entry]:
        """Return the current entry of each replica, by rank."""
        entries = []
        for path in Path(self.folder).glob("*.rank"):
            with contextlib.suppress(OSError):
                entries.append(_Entry(*json.loads(path.read_text())))
        return sorted(entries, key=lambda entry: entry.rank)

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_S):
            entries, now = self.entries(), time.monotonic()
            late = [each for each in entries if each.law and now - each.since_s > self._limit_s]
            if late:
                # First the stacks, as killed replicas can't write theirs.
                self.stacks = "\n".join(entry.text() for entry in entries)
                self.hung = min(late, key=lambda entry: entry.since_s).law
                # Replicas that are threads are in this process, which must not be killed.
                for pid in {entry.pid for entry in entries} - {os.getpid()}:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                return
