"""Detection of this process's rank, by the first environment whose variables are set.

An environment is an object with `NAME` and `detect(env) -> RankInfo | None`, which reads the
variables of one launcher, and only from `env`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

from unisono.environments.ranks import LAUNCHERS
from unisono.environments.reader import Recorder
from unisono.errors import EnvironmentDetectionError
from unisono.plugins import PluginRegistry
from unisono.topology import NodeInfo, RankInfo


class Environment(Protocol):
    """A plug-in of the group ``unisono.environments``: a module or an object."""

    @property
    def NAME(self) -> str:
        """Name of the environment, as in `RankInfo.source`."""

    def detect(self, env: Mapping[str, str], /) -> RankInfo | None:
        """Read the variables of one launcher.

        Must read nothing but `env`, and must not write, import a backend, or communicate.

        Args:
            env: the variables; never written.

        Returns:
            The facts; None if the launcher's variables aren't set.

        Raises:
            EnvironmentDetectionError: they are partial, malformed or inconsistent.
        """


ENVIRONMENTS: tuple[Environment, ...] = LAUNCHERS


def _check_is_environment(thing: Any) -> Environment:
    missing = [member for member in ("NAME", "detect") if not hasattr(thing, member)]
    if missing:
        raise TypeError(f"it lacks {missing}")
    environment: Environment = thing
    return environment


environments: PluginRegistry[Environment] = PluginRegistry(
    "environment",
    "unisono.environments",
    {environment.NAME: environment for environment in ENVIRONMENTS},
    _check_is_environment,
)

Verdict = Literal["won", "agrees", "disagrees", "unused", "refused", "absent"]
Info = TypeVar("Info", RankInfo, NodeInfo)


@dataclass(frozen=True, slots=True)
class Finding(Generic[Info]):
    """Facts or error of one environment or platform, and the verdict on them."""

    source: str
    info: Info | None = None
    error: EnvironmentDetectionError | None = None
    variables: tuple[tuple[str, str], ...] = ()
    verdict: Verdict = "absent"


def detect(env: Mapping[str, str], extra: Iterable[Environment] = ()) -> RankInfo | None:
    """Return this process's rank, from the first environment whose variables are set."""
    # An incomplete environment yields to a later one that it doesn't contradict: a job script that
    # exports WORLD_SIZE for its own use must not invalidate srun's variables.
    winner = _choose((*ENVIRONMENTS, *extra), env)
    return None if winner is None else winner.info


def read(env: Mapping[str, str]) -> RankInfo | None:
    """Return this process's rank, from built-in environments and those of plug-ins."""
    return detect(env, environments.load_plugins())


def explain(env: Mapping[str, str], extra: Iterable[Environment] = ()) -> list[Finding[RankInfo]]:
    """Return the findings of all environments, in order of priority; raise nothing."""
    candidates = (*ENVIRONMENTS, *extra)
    try:
        winner = _choose(candidates, env)
    except EnvironmentDetectionError:  # its finding shows the error
        winner = None
    return [judge(partial(_ask, each), env, winner, _is_same) for each in candidates]


def judge(
    ask: Callable[[Mapping[str, str]], Finding[Info]],
    env: Mapping[str, str],
    winner: Finding[Info] | None,
    is_same: Callable[[Info, Info], bool],
) -> Finding[Info]:
    """Return a finding with the variables read for it, and its verdict."""
    view = Recorder(env)
    finding = ask(view)
    verdict: Verdict
    if finding.error is not None:
        verdict = "refused"
    elif finding.info is None:
        verdict = "absent"
    elif winner is None or winner.info is None:
        verdict = "unused"  # the error of another environment was raised instead
    elif finding.source == winner.source:
        verdict = "won"
    else:
        verdict = "agrees" if is_same(finding.info, winner.info) else "disagrees"
    variables = tuple((name, value) for name, value in view.read.items() if value is not None)
    return replace(finding, variables=variables, verdict=verdict)


def _ask(environment: Environment, env: Mapping[str, str]) -> Finding[RankInfo]:
    """Return one environment's facts or error; other exceptions and results become errors, too."""
    name = str(environment.NAME)
    try:
        info = environment.detect(env)
        if not (info is None or isinstance(info, RankInfo)):
            raise TypeError(f"detect() returned {type(info).__name__}, not RankInfo or None")
    except EnvironmentDetectionError as error:
        return Finding(name, error=error)
    except Exception as raised:  # a plug-in may raise anything
        failure = EnvironmentDetectionError(
            f"{name} environment: its detect() failed with {type(raised).__name__}: {raised}; "
            "report this to its author, or uninstall the plug-in",
            source=name,
            value="",  # None would mean a missing variable, and yield to a later environment
        )
        failure.__cause__ = raised
        return Finding(name, error=failure)
    return Finding(name, info)


def _choose(candidates: Iterable[Environment], env: Mapping[str, str]) -> Finding[RankInfo] | None:
    """Return the first finding with facts; raise an earlier error if it rules this finding out."""
    incomplete: tuple[Environment, EnvironmentDetectionError] | None = None
    for environment in candidates:
        finding = _ask(environment, env)
        if finding.error is not None:
            if finding.error.value is not None:  # a wrong value, not a missing variable
                raise finding.error
            incomplete = incomplete or (environment, finding.error)
        elif finding.info is not None:
            if incomplete is not None and not _is_agreed(*incomplete, finding.info, env):
                break  # they contradict each other, and it is unknown which one is right
            return finding
    if incomplete is not None:
        raise incomplete[1]
    return None


def _is_agreed(
    environment: Environment,
    error: EnvironmentDetectionError,
    winner: RankInfo,
    env: Mapping[str, str],
) -> bool:
    """Return whether an incomplete environment agrees if the winner's facts complete it."""
    for value in (winner.rank, winner.world_size):  # the missing variable has one of these values
        info = _ask(environment, {**env, error.variable: str(value)}).info
        if info is not None and _is_same(info, winner):
            return True
    return False


def _is_same(one: RankInfo, other: RankInfo) -> bool:
    if (one.rank, one.world_size) != (other.rank, other.world_size):
        return False
    # Not every launcher reports a local rank, so an unknown one contradicts nothing.
    return None in (one.local_rank, other.local_rank) or one.local_rank == other.local_rank
