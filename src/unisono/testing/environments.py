"""The laws for environments, one function each, and the runner of laws in this process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

from unisono.environments.detection import ENVIRONMENTS, Environment
from unisono.environments.reader import Recorder
from unisono.errors import EnvironmentDetectionError
from unisono.registry import find_environment
from unisono.testing.runner import Outcome, Status
from unisono.topology import RankInfo

__all__ = ("ENVIRONMENT_LAWS", "EnvironmentTrial", "check_environment")

_LOAD_S = 120.0  # limit for an interpreter that imports one module
_IMPORTS_TORCH = 3  # exit code of that interpreter if the module imports torch
_MALFORMED = ("x", "-1", "1.5", "1 2", "99999999999999999999", "\x00", "é")
_UNRELATED = {  # variables that don't mark a job
    "HOME": "/home/ada",
    "PATH": "/usr/bin",
    "LANG": "de_DE.UTF-8",
    "OMP_NUM_THREADS": "4",
    "PS1": "\x1b[0m$ ",
    "LONG": "x" * 100_000,
    "EMPTY": "",
    "ODD": "a=b=c\n\u2028é",
}


class UntestableError(Exception):
    """Raised if a law cannot be checked here."""


def text_of(error: BaseException) -> str:
    """Return an error's text, preceded by its type unless that is AssertionError."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def outcome_of(name: str, nproc: int, check: Callable[[], None]) -> Outcome:
    """Check one law in this process, and return its outcome."""
    begin = time.perf_counter()
    status: Status = "passed"
    reason = ""
    try:
        check()
    except UntestableError as error:
        status, reason = "unsupported", str(error)
    except Exception as error:
        status, reason = "failed", text_of(error)
    return Outcome(name, nproc, status, reason, time.perf_counter() - begin)


def check_info(info: Any) -> None:
    """Check that every field of a RankInfo is in its range."""
    assert isinstance(info, RankInfo), f"got {type(info).__name__}, not RankInfo"
    ranges = {
        "world_size": (1, math.inf),
        "rank": (0, info.world_size),
        "local_world_size": (1, info.world_size + 1),
        # An unknown number of local ranks or nodes is at most that of all ranks.
        "local_rank": (0, info.local_world_size or info.world_size),
        "nnodes": (1, info.world_size + 1),
        "node_rank": (0, info.nnodes or info.world_size),
        "master_port": (1, 65536),
    }
    for name, (low, end) in ranges.items():
        value = getattr(info, name)
        # Only rank and size must be known.
        if value is None and name not in ("rank", "world_size"):
            continue
        assert type(value) is int, f"{name}={value!r} isn't an int"
        assert value >= low, f"{name}={value} is below {low}"
        assert value < end, f"{name}={value} should be below {end}"
    for name in ("master_addr", "private_store", "job_id"):
        value = getattr(info, name)
        assert value is None or (isinstance(value, str) and value), f"{name}={value!r}"
    assert isinstance(info.source, str) and info.source.strip(), f"source={info.source!r}"
    assert isinstance(info.store_is_hosted, bool), f"store_is_hosted={info.store_is_hosted!r}"
    if info.store_is_hosted:
        for name in ("master_addr", "master_port"):
            assert getattr(info, name) is not None, f"a store is hosted, but there is no {name}"


@dataclass(frozen=True, slots=True)
class EnvironmentTrial:
    """An environment with example variables of its launcher."""

    name: str
    environment: Environment
    examples: Sequence[Mapping[str, str]]

    def detect(self, env: Mapping[str, str]) -> RankInfo | None:
        """Call `detect`; check its result, or that its error names a variable that it read."""
        reads = Recorder(MappingProxyType(dict(env)))
        try:
            info = self.environment.detect(reads)
        except EnvironmentDetectionError as error:
            name = self.environment.NAME
            assert error.source == name, f"source={error.source!r}, not {name!r}: {error}"
            assert error.variable in reads.read, f"detect didn't read {error.variable!r}"
            assert error.variable in str(error), f"{error.variable} isn't in the text: {error}"
            is_missing = not env.get(error.variable, "").strip()  # a blank one counts as missing
            shown = f"value=None, but {error.variable} is set: {error}"
            assert error.value is not None or is_missing, shown
            raise
        except Exception as error:
            raise AssertionError(
                f"detect raised {type(error).__name__}: {error}, and may raise nothing but "
                "EnvironmentDetectionError"
            ) from error
        if info is not None:
            check_info(info)
        return info

    def facts(self, env: Mapping[str, str]) -> RankInfo:
        """Return the RankInfo for a rank's variables; raise AssertionError if there is none."""
        try:
            info = self.detect(env)
        except EnvironmentDetectionError as error:
            raise AssertionError(f"{self.name} refuses its own example: {error}") from error
        assert info is not None, f"{self.name} finds no job in its own example: {dict(env)}"
        return info

    def variables(self, env: Mapping[str, str]) -> list[str]:
        """List the variables of an example that `detect` reads."""
        reads = Recorder(env)
        self.environment.detect(reads)
        return [name for name in reads.read if name in env]

    def examples_with_facts(self) -> Iterator[tuple[Mapping[str, str], RankInfo]]:
        """Iterate over the examples with their facts."""
        if not self.examples:
            raise UntestableError(f"{self.name} has no EXAMPLES of a rank's variables")
        for example in self.examples:
            yield example, self.facts(example)

    def answer(self, env: Mapping[str, str]) -> tuple[int, int] | str | None:
        """Return rank and size, None for no job, or the text of the error."""
        try:
            return _identity(self.detect(env))
        except EnvironmentDetectionError as error:
            return str(error)


Law = Callable[[EnvironmentTrial], None]
ENVIRONMENT_LAWS: dict[str, Law] = {}


def _law(check: Law) -> Law:
    """Register a law by its function's name."""
    ENVIRONMENT_LAWS[check.__name__] = check
    return check


def _process_variables(env: Mapping[str, str]) -> Any:
    """Replace all variables of this process within a block."""
    return mock.patch.dict(os.environ, env, clear=True)


def _identity(info: RankInfo | None) -> tuple[int, int] | None:
    """Return rank and size, the facts that every environment must give."""
    return None if info is None else (info.rank, info.world_size)


@_law
def its_name_is_known_and_its_own(trial: EnvironmentTrial) -> None:
    """``NAME`` is the name of the entry point, and isn't that of a built-in environment."""
    name = trial.environment.NAME
    assert isinstance(name, str) and name.strip(), f"NAME={name!r}"
    is_same = name.lower() == trial.name.lower()  # lookup ignores case
    assert is_same, f"NAME={name!r}, but its entry point is {trial.name!r}"
    others = [each.NAME for each in ENVIRONMENTS if each is not trial.environment]
    assert name not in others, f"{name!r} is built in"


@_law
def no_variables_are_no_job(trial: EnvironmentTrial) -> None:
    """Without variables, or with all the environment's variables blank, there is no job."""
    assert trial.detect({}) is None, "detect({}) isn't None"
    for example in trial.examples:
        blank = dict.fromkeys(trial.variables(example), " ")
        assert trial.detect(blank) is None, f"blank variables count as set: {sorted(blank)}"


@_law
def variables_of_others_are_no_job(trial: EnvironmentTrial) -> None:
    """Variables of other launchers are ignored, and never cause an error."""
    assert trial.detect(_UNRELATED) is None, f"{trial.name} takes {sorted(_UNRELATED)} for a job"
    for other in ENVIRONMENTS:
        if other is trial.environment:
            continue
        for env in getattr(other, "EXAMPLES", ()):
            found = trial.answer(env)
            # Another launcher may also set variables of the environment under test; both
            # environments must then find the same rank.
            is_right = found in (None, _identity(other.detect(env)))
            what = f"raises: {found}" if isinstance(found, str) else f"returns {found}"
            assert is_right, f"given the variables of {other.NAME}, detect {what}"


@_law
def a_whole_example_gives_every_fact_in_its_range(trial: EnvironmentTrial) -> None:
    """Rank, size and all other facts have the right type and range, and are consistent."""
    name = trial.environment.NAME
    for example, info in trial.examples_with_facts():
        assert info.source == name, f"source={info.source!r}, not {name!r}"
        facts = trial.facts({**_UNRELATED, **example})
        assert facts == info, "unrelated variables change the facts"


@_law
def a_partial_example_is_refused_by_name(trial: EnvironmentTrial) -> None:
    """If a variable is missing, the facts stay the same or an error names it.

    At most one variable may instead be the mark of a job: without it, there is no job.
    """
    for example, info in trial.examples_with_facts():
        whole, marks = _identity(info), []
        for name in trial.variables(example):
            left_out = {each: value for each, value in example.items() if each != name}
            found = {trial.answer(env) for env in ({**example, name: ""}, left_out)}
            wrong = [each for each in found - {None, whole} if not isinstance(each, str)]
            assert not wrong, f"without {name} rank and size are {wrong}, not {whole}"
            if None in found:  # the variable marks a job of this launcher
                marks.append(name)
        assert len(marks) <= 1, (
            f"if one of {marks} is missing, detect returns None, and no error names it: raise "
            "EnvironmentDetectionError if the other ones are set"
        )


@_law
def a_malformed_variable_is_refused_by_name(trial: EnvironmentTrial) -> None:
    """A value that is not a number in range is an error, and never a rank."""
    for example, info in trial.examples_with_facts():
        for name in trial.variables(example):
            # Only the variable that marks a job may make detect return None if it is malformed.
            is_mark = trial.answer({**example, name: ""}) is None
            for value in _MALFORMED:
                found, what = trial.answer({**example, name: value}), f"{name}={value!r}"
                is_right = isinstance(found, str) or found in (None, _identity(info))
                assert is_right, f"{what} is accepted as rank and size {found}"
                assert is_mark or found is not None, (
                    f"{what} makes detect return None: raise EnvironmentDetectionError instead"
                )


@_law
def it_reads_what_it_is_given_alone(trial: EnvironmentTrial) -> None:
    """The process's own variables are neither read nor changed; no state is kept between calls."""
    for example in (*trial.examples, {}):
        with _process_variables({}):
            alone = trial.detect(example)
            assert not os.environ, f"{trial.name} has set {sorted(os.environ)}"
        with _process_variables(example):
            assert trial.detect({}) is None, "detect({}) reads the process's own variables"
        with _process_variables(dict.fromkeys(example, "x")):
            assert trial.detect(example) == alone, f"{trial.name} reads the process's own variables"
        trial.detect({})  # state kept from this call would show in the next
        assert trial.detect(example) == alone, "a later call has another result"


@_law
def it_is_loaded_without_torch(trial: EnvironmentTrial) -> None:
    """Loading it does not import torch, since every rank of a script loads it."""
    module = getattr(trial.environment, "__module__", None)
    if module is None:  # the environment is a module or an instance, not a class
        module = getattr(trial.environment, "__name__", type(trial.environment).__module__)
    code = f"import sys, {module}; sys.exit({_IMPORTS_TORCH} * ('torch' in sys.modules))"
    # A plug-in under test may be only on this process's search path.
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LOAD_S,
    )
    assert done.returncode != _IMPORTS_TORCH, f"module {module} imports torch"
    reason = done.stderr.strip()
    assert done.returncode == 0, f"module {module} can't be imported alone: {reason}"


def check_environment(
    environment: str,
    *,
    laws: Iterable[str] | None = None,
    examples: Iterable[Mapping[str, str]] | None = None,
) -> list[Outcome]:
    """Check laws on an environment.

    Args:
        environment: name of an entry point of ``unisono.environments``, or of a built-in one.
        laws: names; all laws if None.
        examples: in each, the variables of one rank, as the launcher sets them; None for the
            environment's ``EXAMPLES``.

    Returns:
        One outcome for each law, in order, with ``nproc=0``; ``"unsupported"`` without
        examples.

    Raises:
        ArgumentError: the environment is unknown.
        BackendUnavailableError: loading it failed.

    Example:
        >>> {outcome.status for outcome in check_environment("slurm")}
        {'passed'}
    """
    module = find_environment(environment)
    if examples is None:
        examples = getattr(module, "EXAMPLES", ())
    trial = EnvironmentTrial(environment, module, tuple(examples))
    return [
        outcome_of(name, 0, partial(ENVIRONMENT_LAWS[name], trial))
        for name in (ENVIRONMENT_LAWS if laws is None else laws)
    ]
