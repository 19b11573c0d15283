"""The laws of every model, one function each.

Each law is called in every replica of a live context, at any number of replicas. It requires the
same at one replica as at two.
"""

from __future__ import annotations

from unisono.testing.cases import (  # noqa: F401 - they register themselves
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
