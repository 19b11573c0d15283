"""Base classes of pytest tests for every law on a backend, launcher or environment.

A law is a required behaviour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from unisono.testing.environments import check_environment
from unisono.testing.launchers import check_launcher
from unisono.testing.runner import Outcome, check

__all__ = ("Conformance", "EnvironmentConformance", "LauncherConformance")


class Conformance:
    """Every law on one backend, at several numbers of replicas.

    Example:
        >>> class TestMine(Conformance):
        ...     backend = "threads"
    """

    backend: ClassVar[str]
    """The backend to check."""
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 3)
    """Numbers of replicas; an odd one finds mistakes in index arithmetic."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further options of ``spawn``."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Create one test for each number of replicas."""
        if "nproc" in metafunc.fixturenames:
            metafunc.parametrize("nproc", self.sizes)

    def test_every_law_holds(self, nproc: int) -> None:
        """Check all laws with `nproc` replicas; the failure lists the broken ones."""
        _all_hold(check(self.backend, nproc, **self.options))


class LauncherConformance:
    """Every law on one launcher.

    Example:
        >>> class TestMine(LauncherConformance):
        ...     launcher = "processes"
    """

    launcher: ClassVar[str]
    """The launcher to check."""
    backend: ClassVar[str] = "gloo"
    """The backend of the ranks."""
    sizes: ClassVar[tuple[int, ...]] = (2,)
    """Numbers of ranks."""
    options: ClassVar[Mapping[str, Any]] = {}
    """The ``launcher_options`` of each job."""

    def test_every_law_holds(self) -> None:
        """Check all laws at all sizes; the failure lists the broken ones."""
        _all_hold(
            outcome
            for size in self.sizes
            for outcome in check_launcher(
                self.launcher, size, backend=self.backend, options=self.options
            )
        )


class EnvironmentConformance:
    """Every law on one environment.

    Example:
        >>> class TestMine(EnvironmentConformance):
        ...     environment = "slurm"
    """

    environment: ClassVar[str]
    """The environment to check: the name of its entry point."""
    examples: ClassVar[Iterable[Mapping[str, str]] | None] = None
    """Examples of a rank's variables; None for the environment's ``EXAMPLES``."""

    def test_every_law_holds(self) -> None:
        """Check all laws; the failure lists the broken ones."""
        _all_hold(check_environment(self.environment, examples=self.examples))


def _all_hold(checked: Iterable[Outcome]) -> None:
    """Fail if a law has failed; the message lists all laws that have."""
    outcomes = list(checked)
    failed = [f"{o.law}, nproc={o.nproc}: {o.reason}" for o in outcomes if o.status == "failed"]
    assert outcomes and not failed, "\n".join(failed)  # without outcomes nothing was checked
