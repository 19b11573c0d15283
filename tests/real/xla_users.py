"""A program that uses XLA in a user's ways, each in a fork that has no runtime yet.

It prints the name of each that has passed, once for each replica.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial

import pytest
import torch

import unisono as idist
from tests.real.jobs import adopted, say
from tests.support.processes import in_fork
from unisono.errors import AlreadyInitializedError, BackendUnavailableError, ContextError
from unisono.model.reduction import ReduceOp
from unisono.models.xla.model import XlaModel
from unisono.topology import ContextHint, RankInfo

WAYS = ("adopt", "initialize", "process group")
MADE = threading.Event()


def reported(use: Callable[[], None]) -> None:
    try:
        use()
        say(use.__name__)
    except BaseException:
        traceback.print_exc()
        raise


def asks() -> None:
    assert XlaModel.from_context(ContextHint()) is None
    assert XlaModel.why_unavailable("xla-cpu") is None
    assert "torch_xla" not in sys.modules


def probes() -> None:
    import torch_xla

    assert XlaModel.from_context(ContextHint()) is None
    assert not torch_xla._XLAC._xla_runtime_is_initialized()
    torch_xla.device()
    assert adopted(XlaModel).topology.world_size == 1


def initializes_alone() -> None:
    with pytest.raises(ContextError, match="rank 1 of 2"):
        XlaModel.initialize("xla-cpu", RankInfo(1, 2))
    model = XlaModel.initialize("xla-cpu", RankInfo(0, 1))
    assert model.topology.world_size == 1
    assert model.all_reduce(torch.ones(1), ReduceOp.SUM).item() == 1.0


def lacks_something() -> None:
    """Check that an import that fails is an error, and a context without XLA warns once."""
    sys.modules["torch_xla.runtime"] = None  # type: ignore[assignment]
    with pytest.raises(BackendUnavailableError) as caught:
        XlaModel.initialize("xla-cpu", RankInfo(0, 1))
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.warns(RuntimeWarning, match="XLA is left out") as seen:
        assert [idist.get_rank() for _ in range(3)] == [0, 0, 0]
        assert idist.model_name() == "serial"
    assert len(seen) == 1
    idist.initialize("gloo")
    assert idist.all_reduce(2) == 2
    idist.finalize()


def adopts(_index: int) -> None:
    import torch_xla.runtime as xr

    model = adopted(XlaModel)
    assert model.topology.rank == xr.global_ordinal()
    assert model.all_reduce(torch.ones(2), ReduceOp.SUM).tolist() == [2.0, 2.0]
    model.finalize()
    adopted(XlaModel)  # it was the user's, and still is
    say("adopts")


def facts() -> None:
    import torch_xla.runtime as xr

    rank, n = xr.global_ordinal(), xr.world_size()
    facts = (idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), str(idist.device()))
    assert facts == (rank, n, rank, f"xla:{rank}")
    assert (idist.model_name(), idist.backend()) == ("xla-dist", "xla-cpu")
    assert idist.all_gather(f"rank {rank}") == [f"rank {other}" for other in range(n)]
    ones = torch.full((3,), rank + 1.0, device=idist.device())
    assert idist.all_reduce(ones).tolist() == [3.0] * 3
    assert idist.all_reduce(rank) == 1


def finds(_index: int, how: str) -> None:
    """Use the facade in replicas that the program made itself, in one of the ways to do so."""
    if how == "process group":
        import torch.distributed as dist
        import torch_xla.distributed.xla_backend  # noqa: F401 - it registers the backend
        import torch_xla.runtime as xr

        # Replicas that are threads share what torch knows of process groups: one makes it for all.
        if xr.global_ordinal() == 0:
            dist.init_process_group("xla", init_method="xla://")
            MADE.set()
        assert MADE.wait(60)
        assert dist.get_backend() == "xla"
    if how == "initialize":
        for _ in range(3):  # a rank that is back early isn't taken for one that is gone
            idist.initialize("xla-cpu", timeout=60)
            facts()
            idist.finalize()
            assert not idist.is_distributed()
        idist.initialize("xla-cpu")
        with pytest.raises(AlreadyInitializedError):
            idist.initialize("xla-cpu")
    with pytest.raises(AlreadyInitializedError, match="xla-dist"):
        idist.initialize("gloo")
    for _ in range(20):
        facts()
    say(how)


def main(port: str) -> None:
    os.environ["PJRT_DEVICE"] = "CPU"
    reported(asks)
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp

    for use in (probes, initializes_alone, lacks_something):
        assert in_fork(partial(reported, use)) == 0, use
    os.environ.update(CPU_NUM_DEVICES="2", MASTER_PORT=port, TORCH_DIST_INIT_BARRIER="0")
    torch_xla.launch(adopts, start_method="fork")
    for how in WAYS:
        xmp.spawn(finds, args=(how,), start_method="fork")


if __name__ == "__main__":
    xla_users = importlib.import_module("tests.real.xla_users")  # whose functions have this name
    xla_users.main(sys.argv[1])
