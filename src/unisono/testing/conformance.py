"""A class for pytest that checks every law on one backend: inherit from it and name the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from unisono.testing.runner import check

__all__ = ("Conformance",)


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

    def test_every_law_holds(self) -> None:
        """Check all laws at all sizes, and list those that don't hold. Local."""
        outcomes = [o for size in self.sizes for o in check(self.backend, size, **self.options)]
        failed = [f"{o.law} at {o.nproc}: {o.reason}" for o in outcomes if o.status == "failed"]
        assert outcomes and not failed, "\n".join(failed)
