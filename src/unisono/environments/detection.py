"""Who am I? What the launcher's variables say, read without changing or importing anything.

Each environment knows one launcher: `NAME` and `detect(env) -> RankInfo | None`. None means that
its variables are not there. Variables that are partial, malformed or contradict each other raise
`EnvironmentDetectionError`, which names the environment, the variable, its value and what to do.
The functions here are pure: they read the mapping that they are given, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from unisono.environments import slurm, torchrun
from unisono.environments.mpi_family import CRAY, FLUX, LSF, MPICH, MVAPICH, OPENMPI, PALS
from unisono.errors import EnvironmentDetectionError
from unisono.plugins import PluginRegistry
from unisono.topology import RankInfo

__all__ = (
    "ENVIRONMENTS",
    "Environment",
    "Finding",
    "Verdict",
    "detect",
    "environments",
    "explain",
    "read",
)


class Environment(Protocol):
    """What a plug-in of the group ``unisono.environments`` gives: a module or an object."""

    @property
    def NAME(self) -> str:
        """Its name, as in `RankInfo.source`."""

    def detect(self, env: Mapping[str, str], /) -> RankInfo | None:
        """Read the variables of one launcher.

        Must read nothing but `env`, and must not write, import a backend, or communicate.

        Args:
            env: the variables; never written.

        Returns:
            The facts; None if the launcher's variables are not there.

        Raises:
            EnvironmentDetectionError: they are partial, malformed or contradict each other.
        """


# In order of priority: torchrun first, since it runs inside the steps and jobs of all others.
ENVIRONMENTS: tuple[Environment, ...] = (
    torchrun,
    slurm,
    OPENMPI,
    FLUX,
    MPICH,
    MVAPICH,
    PALS,
    LSF,
    CRAY,
)


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


@dataclass(frozen=True, slots=True)
class Finding:
    """What one environment says, for a person to read."""

    source: str
    info: RankInfo | None = None
    error: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    verdict: Verdict = "absent"


@dataclass(frozen=True, slots=True)
class _Answer:
    environment: Environment
    info: RankInfo | None = None
    error: EnvironmentDetectionError | None = None


class _Recorder(Mapping[str, str]):
    """A view of the variables that notes which ones were read."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.seen: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        value = self._env[name]
        self.seen[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)


def detect(env: Mapping[str, str], extra: Iterable[Environment] = ()) -> RankInfo | None:
    """Say who this process is: what the first environment that is there says.

    In the order of `ENVIRONMENTS`, then `extra`. An environment whose variables are half set
    gives way to a later one that it doesn't contradict: a job script that exports WORLD_SIZE for
    its own use doesn't spoil what srun says.

    Args:
        env: the variables, such as ``os.environ``; only read.
        extra: environments of plug-ins.

    Returns:
        The facts; None if no environment is there.

    Raises:
        EnvironmentDetectionError: the variables of the environment are partial, malformed or
            contradict each other.

    Example:
        >>> detect({"RANK": "0", "WORLD_SIZE": "1"}).source
        'torchrun'
        >>> detect({"HOME": "/home/ada"}) is None
        True
    """
    winner = _choose((_ask(each, env) for each in (*ENVIRONMENTS, *extra)), env)
    return None if winner is None else winner.info


def read(env: Mapping[str, str]) -> RankInfo | None:
    """Say who this process is, as `detect` does, with the environments of plug-ins too."""
    return detect(env, environments.load_plugins())


def explain(env: Mapping[str, str], extra: Iterable[Environment] = ()) -> list[Finding]:
    """Say what each environment found, which one `detect` gives, and which ones disagree with it.

    Raises nothing.

    Args:
        env: the variables, such as ``os.environ``; only read.
        extra: environments of plug-ins.

    Returns:
        One finding for each environment, in order of priority.

    Example:
        >>> finding = explain({"RANK": "0", "WORLD_SIZE": "1"})[0]
        >>> finding.source, finding.verdict, finding.variables
        ('torchrun', 'won', (('RANK', '0'), ('WORLD_SIZE', '1')))
    """
    environments = (*ENVIRONMENTS, *extra)
    views = [_Recorder(env) for _ in environments]
    answers = [_ask(each, view) for each, view in zip(environments, views, strict=True)]
    try:
        winner = _choose(answers, env)
    except EnvironmentDetectionError:
        winner = None
    return [
        Finding(
            str(answer.environment.NAME),
            answer.info,
            None if answer.error is None else str(answer.error),
            tuple(view.seen.items()),
            _verdict(answer, winner),
        )
        for answer, view in zip(answers, views, strict=True)
    ]


def _ask(environment: Environment, env: Mapping[str, str]) -> _Answer:
    """Ask one environment; what a plug-in raises or returns wrongly becomes an error of ours."""
    try:
        info = environment.detect(env)
        if not (info is None or isinstance(info, RankInfo)):
            raise TypeError(f"detect() returned {type(info).__name__}, not RankInfo or None")
    except EnvironmentDetectionError as error:
        return _Answer(environment, error=error)
    except Exception as raised:  # a plug-in may raise anything
        name = environment.NAME
        failure = EnvironmentDetectionError(
            f"{name} environment: its detect() failed with {type(raised).__name__}: {raised}; "
            "report this to its author, or uninstall the plug-in",
            source=name,
            value="",
        )
        failure.__cause__ = raised
        return _Answer(environment, error=failure)
    return _Answer(environment, info)


def _choose(answers: Iterable[_Answer], env: Mapping[str, str]) -> _Answer | None:
    """Take the first environment that is there; raise where it can't be used."""
    partial: _Answer | None = None
    for answer in answers:
        if answer.error is not None:
            if answer.error.value is not None:
                raise answer.error
            partial = partial or answer
        elif answer.info is not None:
            if partial is not None and not _gives_way(partial, answer.info, env):
                break
            return answer
    if partial is not None and partial.error is not None:
        raise partial.error
    return None


def _gives_way(partial: _Answer, winner: RankInfo, env: Mapping[str, str]) -> bool:
    """Say whether a half-set environment, once completed from the winner, says the same."""
    missing = "" if partial.error is None else partial.error.variable
    for value in (winner.rank, winner.world_size):
        info = _ask(partial.environment, {**env, missing: str(value)}).info
        if info is not None and _is_same(info, winner):
            return True
    return False


def _is_same(one: RankInfo, other: RankInfo) -> bool:
    if (one.rank, one.world_size) != (other.rank, other.world_size):
        return False
    return None in (one.local_rank, other.local_rank) or one.local_rank == other.local_rank


def _verdict(answer: _Answer, winner: _Answer | None) -> Verdict:
    if answer.error is not None:
        return "refused"
    if answer.info is None:
        return "absent"
    if winner is None or winner.info is None:
        return "unused"
    if answer is winner:
        return "won"
    return "agrees" if _is_same(answer.info, winner.info) else "disagrees"
