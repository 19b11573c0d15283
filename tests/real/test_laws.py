"""The laws on real libraries: all of them with two ranks, with three what depends on a third."""

from __future__ import annotations

import pytest

from tests.support.requirements import require
from unisono import available_backends
from unisono.testing import LAWS, check

OF_A_THIRD = {"contract", "groups", "reductions", "sums", "transfers"}
"""Files of laws about an order, a part or a fold of ranks, which two ranks can't tell apart."""
REQUIRED = {"mpi4py": "mpi", "horovod": "horovod", "xla-cpu": "xla"}
PLACES = [(backend, n) for backend in REQUIRED for n in (2, 3) if (backend, n) != ("mpi4py", 3)]
"""All but MPI with three ranks, which keep all laws in a world of the user's: `mpi_job`."""
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("backend", "nproc"), PLACES)
def test_the_laws_hold(backend: str, nproc: int) -> None:
    is_here = backend in available_backends()
    require(REQUIRED[backend], None if is_here else f"{backend} can't be used here")
    laws = [
        name
        for name, law in LAWS.items()
        if nproc == 2 or law.check.__module__.rpartition(".")[2] in OF_A_THIRD
    ]
    outcomes = check(backend, nproc, laws=laws)
    assert [o.law for o in outcomes] == laws
    failed = [f"{o.law}: {o.reason}" for o in outcomes if o.status == "failed"]
    assert not failed, "\n".join(failed)
