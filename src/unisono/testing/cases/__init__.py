"""The laws of every model, one function each.

Each law is called in every replica of a live context, at any number of replicas. A law requires of
one replica what it requires of two.
"""

from __future__ import annotations

from unisono.testing.cases import (  # noqa: F401 - imported to register their laws
    contract,
    facts,
    forks,
    groups,
    recording,
    reductions,
    refusals,
    sections,
    sharing,
    sums,
    training,
    transfers,
    values,
)
from unisono.testing.cases._law import (
    LAWS as LAWS,
    Law as Law,
    difference as difference,
    same as same,
)
