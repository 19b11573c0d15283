"""The runner of laws in replicas of any backend, with an outcome for each law."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from unisono.context import current_model
from unisono.errors import LaunchError, WorkerFailedError
from unisono.lifecycle import spawn
from unisono.model.contract import ComputationModel
from unisono.registry import find_model
from unisono.testing._watchdog import Board, Watchdog
from unisono.testing.cases import LAWS, Law

__all__ = ("Kept", "LawBrokenError", "Outcome", "Status", "check", "keep_laws", "law_names")

Status = Literal["passed", "derived", "unsupported", "failed"]

_DERIVED = (
    *("exchange", "all_reduce", "broadcast", "reduce", "scatter", "reduce_scatter", "all_to_all"),
)
_GRACE = 1.5  # model's deadline in multiples of the law's, which fires first and shows all stacks


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
        folder: folder for the replicas' `Board`; empty for none.

    Returns:
        The result of each law.

    Raises:
        LawBrokenError: the first law that doesn't hold here.
    """
    model = current_model()
    used, board = _note_derived(model), Board(folder, model.topology.rank)
    kept = []
    for name in names:
        start = time.perf_counter()
        used.clear()
        board.enter(name)
        try:
            LAWS[name].check()
        except Exception as error:
            raise LawBrokenError(name, _text_of(error)) from error
        kept.append(Kept(time.perf_counter() - start, tuple(sorted(used))))
    board.enter("")
    return kept


def _note_derived(model: ComputationModel) -> set[str]:
    """Record each derived member that is called on a model."""
    # The model gets a subclass of its class, so that other replicas are unaffected.
    used: set[str] = set()
    cls: Any = type(model)

    def noting(name: str, derived: Callable[..., Any]) -> Callable[..., Any]:
        def member(*args: Any, **kwargs: Any) -> Any:
            used.add(name)
            return derived(*args, **kwargs)

        return member

    base = {name: getattr(ComputationModel, name) for name in _DERIVED}
    own = {name: noting(name, of) for name, of in base.items() if getattr(cls, name) is of}
    model.__class__ = type(cls)(cls.__name__, (cls,), {**own, "__module__": cls.__module__})
    return used


def _text_of(error: Exception) -> str:
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
        names = [law.name for law in waiting if law.needs <= model.capabilities]
        start = partial(launch, backend, keep_laws, nproc_per_node=nproc, **options)
        batch = _run(start, names, timeout_s) if names else _Batch()
        while waiting:
            law = waiting.pop(0)
            done.append(_outcome_of(law, model, nproc, batch))
            on_outcome(done[-1])
            if law.name == batch.broken:
                break
    return done


def _run(start: Callable[..., Any], names: Sequence[str], timeout_s: float) -> _Batch:
    """Run laws in new replicas until one is broken."""
    batch = _Batch()
    with Watchdog(timeout_s) as watch:
        try:
            rows: list[list[Kept]] = start(args=(names, watch.folder))
            batch.kept = {name: _joined(row) for name, *row in zip(names, *rows, strict=True)}
        except LaunchError as error:
            batch.broken, batch.reason = _broken_law(error, names, watch)
    if watch.hung:
        batch.broken = watch.hung
        batch.reason = f"it wasn't done after {timeout_s:g} s\n{watch.stacks}"
    return batch


def _joined(row: Sequence[Kept]) -> Kept:
    derived = sorted({name for kept in row for name in kept.derived})
    return Kept(max(kept.seconds for kept in row), tuple(derived))


def _broken_law(error: LaunchError, names: Sequence[str], watch: Watchdog) -> tuple[str, str]:
    cause = error.__cause__
    rank = error.rank if isinstance(error, WorkerFailedError) else -1
    if isinstance(cause, LawBrokenError):
        return cause.law, f"rank {rank}: {cause.text}"
    for name in names:  # the text has it even if the exception couldn't be pickled
        if f"law {name} doesn't hold" in str(error):
            return name, str(error)
    last = watch.law_of(rank)
    if last or watch.hung:
        return last, f"the replicas ended in it: {error}"
    raise LaunchError(f"the replicas ended outside of any law: {error}") from error


def _outcome_of(law: Law, model: type[ComputationModel], nproc: int, batch: _Batch) -> Outcome:
    if law.name == batch.broken:
        return Outcome(law.name, nproc, "failed", batch.reason)
    missing = sorted(law.needs - model.capabilities)
    if missing:
        text = f"{model.name} doesn't declare {', '.join(missing)}, and refuses it as it must"
        return Outcome(law.name, nproc, "unsupported", text)
    kept = batch.kept.get(law.name, Kept(0.0))
    if kept.derived:
        text = f"derived: {', '.join(kept.derived)}"
        return Outcome(law.name, nproc, "derived", text, kept.seconds)
    return Outcome(law.name, nproc, "passed", "", kept.seconds)
