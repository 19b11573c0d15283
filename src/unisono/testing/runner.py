"""Run laws in the replicas of any backend and say, law by law, how each ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unisono.errors import LaunchError, UnsupportedOperation, WorkerFailedError
from unisono.lifecycle import spawn
from unisono.registry import find_model
from unisono.testing.cases import LAWS, Law

__all__ = ("LawBrokenError", "Outcome", "check", "keep_laws", "law_names")

Status = Literal["passed", "unsupported", "failed"]


class LawBrokenError(AssertionError):
    """Raised in a replica in which a law didn't hold; says which law and how."""

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
        status: ``"passed"``; ``"unsupported"`` where the model doesn't declare what the law needs,
            and says so as it must; ``"failed"``.
        reason: why it isn't ``"passed"``.
        seconds: how long it took.
    """

    law: str
    nproc: int
    status: Status
    reason: str = ""
    seconds: float = 0.0


def law_names(pattern: str = "") -> list[str]:
    """List the laws whose name has `pattern` in it.

    Local.

    Args:
        pattern: a part of a name; all laws if empty.

    Returns:
        Names, in the order in which they are run.
    """
    return [name for name in LAWS if pattern in name]


def keep_laws(local_rank: int, names: Sequence[str]) -> list[float]:
    """Check laws in a replica, one after another; the function that `check` spawns.

    Collective over all ranks.

    Args:
        local_rank: not used.
        names: laws to check, the same on every rank.

    Returns:
        Seconds for each law.

    Raises:
        LawBrokenError: the first law that doesn't hold here.
    """
    seconds = []
    for name in names:
        start = time.perf_counter()
        try:
            LAWS[name].check()
        except Exception as error:
            raise LawBrokenError(name, _text_of(error)) from error
        seconds.append(time.perf_counter() - start)
    return seconds


def _text_of(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "cases" in f.filename]
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def check(
    backend: str,
    nproc: int,
    *,
    laws: Iterable[str] | None = None,
    timeout_s: float = 30.0,
    launch: Callable[..., Any] = spawn,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    **options: Any,
) -> list[Outcome]:
    """Check laws on a backend with a number of replicas.

    Local. Laws share replicas until one doesn't hold; those after it run in new ones.

    Args:
        backend: as in ``spawn``.
        nproc: number of replicas.
        laws: names; all laws if None.
        timeout_s: seconds that a collective may take before its law has failed.
        launch: what starts the replicas; called as ``spawn`` is.
        on_outcome: told each outcome as soon as it is known.
        options: further options of `launch`.

    Returns:
        One outcome for each law, in order.

    Raises:
        BackendError: the backend is unknown or can't be used here.
        LaunchError: the replicas can't be started.
    """
    model = find_model(backend)
    if "timeout" in model.options:
        options.setdefault("timeout", timeout_s)
    waiting = [LAWS[name] for name in (law_names() if laws is None else laws)]
    done: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        done.append(outcome)
        on_outcome(outcome)

    while waiting:
        batch = [law for law in waiting if law.needs <= model.capabilities]
        names = [law.name for law in batch]
        broken, text, seconds = "", "", {}
        try:
            times = launch(backend, keep_laws, args=(names,), nproc_per_node=nproc, **options)
            seconds = dict(zip(names, times[0], strict=True))
        except WorkerFailedError as error:
            broken, text = _broken_law(error, names)
        for law in list(waiting):
            waiting.remove(law)
            tell(_outcome_of(law, model.capabilities, nproc, broken, text, seconds))
            if law.name == broken:
                break
    return done


def _broken_law(error: WorkerFailedError, names: Sequence[str]) -> tuple[str, str]:
    cause = error.__cause__
    if isinstance(cause, LawBrokenError):
        return cause.law, f"rank {error.rank}: {cause.text}"
    for name in names:  # the text has it even where the exception couldn't travel
        if f"law {name} doesn't hold" in str(error):
            return name, str(error)
    raise LaunchError(f"the replicas ended outside of any law: {error}") from error


def _outcome_of(
    law: Law,
    capabilities: frozenset[str],
    nproc: int,
    broken: str,
    text: str,
    seconds: dict[str, float],
) -> Outcome:
    if law.name == broken:
        return Outcome(law.name, nproc, "failed", text)
    missing = sorted(law.needs - capabilities)
    if missing:
        reason = str(UnsupportedOperation("the model", ", ".join(missing), "it doesn't declare it"))
        return Outcome(law.name, nproc, "unsupported", reason)
    return Outcome(law.name, nproc, "passed", "", seconds.get(law.name, 0.0))
