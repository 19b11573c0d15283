"""A job on real Horovod: ``horovodrun python -m tests.real.horovod_job PART,PART``, or mpirun.

A part before the others named ``mpi4py`` initialises MPI, which then outlives Horovod's contexts.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import horovod.torch as hvd  # type: ignore[import-not-found,import-untyped,unused-ignore]
import pytest
import torch

import unisono as idist
from tests.real.jobs import adopted, run_digits, run_parts
from tests.real.oracle import check_collectives, check_exchange, same
from tests.support import at_a_glance
from tests.support.processes import until
from unisono.errors import (
    AlreadyInitializedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    PayloadError,
    PeerFailedError,
    UnsupportedOperation,
)
from unisono.model.reduction import ReduceOp
from unisono.models.horovod.model import HorovodModel
from unisono.models.horovod.setup import Store, wait_for_all
from unisono.topology import ContextHint, RankInfo

BRIEF = timedelta(seconds=3)


def make(**options: object) -> HorovodModel:
    """Initialise as a user under a launcher that unisono doesn't know would."""
    return HorovodModel.initialize("horovod", RankInfo(0, 1), **options)


def init() -> None:
    """Initialise by hand; Horovod 0.28.1 alone fails at times where there was a context before."""
    wait_for_all(os.environ, 60)
    hvd.init()


def refused(kind: type[Exception], sign: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(sign)):
        call()


def part_collectives() -> None:
    model = make()
    assert "HOROVOD_DYNAMIC_PROCESS_SETS" not in os.environ
    check_collectives(model)
    check_exchange(model, None, 3_000_000)
    model.finalize()
    assert not model.is_alive()


def part_digits() -> None:
    run_digits("horovod")


def part_glance() -> None:
    """Make every call that a page shows, or bind its arguments."""
    at_a_glance.check("Horovod")


def part_adopt() -> None:
    """A context of the user's own, without dynamic process sets."""
    assert HorovodModel.from_context(ContextHint()) is None
    pair = hvd.ProcessSet([0, 1])
    wait_for_all(os.environ, 60)
    hvd.init(process_sets=[pair] if of_launcher("SIZE", 1) > 2 else None)
    model = adopted(HorovodModel)
    assert HorovodModel.from_context(ContextHint()) is model
    n = hvd.size()
    facts = model.topology
    assert (facts.rank, facts.world_size) == (hvd.rank(), n)
    assert (facts.local_rank, facts.nnodes) == (hvd.local_rank(), 1)
    assert adopted(HorovodModel, ContextHint(local_rank=9)).topology.local_rank == 9
    os.environ["LOCAL_RANK"] = "0"  # which a shell has left, perhaps
    assert idist.get_local_rank() == hvd.local_rank()
    del os.environ["LOCAL_RANK"]
    same(model.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(n)))
    everybody = model.new_group(tuple(range(n)))
    same(model.all_reduce(torch.ones(2), ReduceOp.SUM, everybody), torch.full((2,), float(n)))
    if n > 2:
        found = model.new_group((0, 1))
        users = model.adopt_group(pair)
        assert users is not None
        assert users.ranks == found.ranks == (0, 1)
        for group in (found, users):
            if model.topology.rank in group.ranks:
                same(model.all_reduce(torch.ones(2), ReduceOp.SUM, group), torch.full((2,), 2.0))
    remedy = "HOROVOD_DYNAMIC_PROCESS_SETS=1"
    refused(UnsupportedOperation, remedy, lambda: model.new_group((n - 1,)))
    model.finalize()
    assert hvd.is_initialized()
    assert model.is_alive()
    hvd.allreduce_(torch.ones(1), name="the user's own")
    hvd.shutdown()
    assert not model.is_alive()
    assert HorovodModel.from_context(ContextHint()) is None


def part_facade() -> None:
    """The facade on a context of the user's own, then on one that it makes."""
    rank, n = of_launcher("RANK", 0), of_launcher("SIZE", 1)
    assert idist.model_name() == "serial"
    init()
    assert (idist.model_name(), idist.backend()) == ("horovod-dist", "horovod")
    assert (idist.get_rank(), idist.get_world_size()) == (rank, n)
    assert (idist.get_local_rank(), idist.get_nproc_per_node()) == (rank, n)
    assert (idist.get_nnodes(), idist.get_node_rank()) == (1, 0)
    assert idist.all_gather("é" * rank) == ["é" * r for r in range(n)]
    idist.finalize()
    assert hvd.is_initialized()
    assert idist.all_reduce(2) == 2 * n
    hvd.shutdown()
    assert (idist.model_name(), idist.get_world_size()) == ("serial", 1)
    for _ in range(3):
        idist.initialize("horovod", timeout=60)
        assert (idist.get_rank(), idist.get_world_size()) == (rank, n)
        refused(AlreadyInitializedError, "finalize", lambda: idist.initialize("horovod"))
        assert idist.all_reduce(rank, group=idist.new_group([0, 1])) == (1 if rank < 2 else rank)
        idist.finalize()
        assert not hvd.is_initialized()


LARGE = 600_000  # too much for the control plane


def part_names() -> None:
    """Values of every type, whose names in Horovod's timeline are for the caller to count."""
    idist.initialize("horovod")
    rank = idist.get_rank()
    for i in range(20):
        idist.all_reduce(torch.ones(i + LARGE))
        idist.all_reduce({"a": i, "b": [1.5, torch.ones(i + LARGE)]})
        idist.broadcast({"a": i} if rank == 1 else None, src=1)
        idist.all_gather("x" * (i + 4 * LARGE))
        idist.all_gather([None, i, b"x", Path()][(rank + i) % 4])
        idist.barrier()
    idist.finalize()


def part_fail() -> None:
    """The last rank raises while the others wait for it."""
    idist.initialize("horovod")
    for number in range(1_000_000):
        idist.all_reduce(torch.ones(2))
        if number == 5 and idist.get_rank() == idist.get_world_size() - 1:
            raise ValueError(f"the original at {time.time()!r}")


def part_again() -> None:
    """Shut down by the user and made again: noticed in both directions."""
    for _ in range(2):
        init()
        model = adopted(HorovodModel)
        hvd.allreduce_(torch.ones(1), name="warm")
        hvd.shutdown()
        assert not model.is_alive()
        init()
        assert not model.is_alive()
        second = adopted(HorovodModel)
        assert second is not model
        same(second.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(hvd.size())))
        hvd.shutdown()
        third = make()
        third.new_group((0,))
        third.finalize()
        assert not hvd.is_initialized()


def part_mismatch() -> None:
    """Every disagreement that Horovod can see is an error on all ranks, and the job goes on."""
    model = make()
    n, two = model.topology.world_size, torch.ones(2)
    odd = model.topology.rank == n - 1
    length = torch.ones(3) if odd else two
    shape = torch.ones((3, 2) if odd else (2, 3))
    dtype = two.to(torch.int32 if odd else torch.float32)
    calls: list[Callable[[], object]] = [
        *(partial(model.all_reduce, each, ReduceOp.SUM) for each in (length, shape, dtype)),
        lambda: model.all_reduce(two, ReduceOp.MAX if odd else ReduceOp.SUM),
        *(partial(model.all_gather, each) for each in (length, two.view(2, 1) if odd else two)),
        partial(model.all_gather, dtype),
        partial(model.broadcast, length, 0),
        partial(model.broadcast, two, 1 if odd else 0),
        partial(model.reduce_scatter, length.repeat(n, 1), ReduceOp.SUM),
        partial(model.all_to_all, length.repeat(n, 1)),
        partial(model.control.begin_group, (0,) if odd else (0, 1)),
    ]
    for call in calls:
        for _ in range(2):
            refused(CollectiveMismatchError, f"rank {model.topology.rank}", call)
            same(model.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(n)))
    model.finalize()


def part_absent() -> None:
    """A rank that initialises too late is named by the others, and the job can go on."""
    rank, n = of_launcher("RANK", 0), of_launcher("SIZE", 1)
    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    board = Store(address, int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]), "absent")
    for late in (0, n - 1):
        others = [other for other in range(n) if other != late]
        if rank == late:
            for other in others:
                assert board.wait(f"{late}.{other}", time.monotonic() + 60, n) is not None
        sign = (
            f"ranks [{late}] did not arrive" if rank != 0 or late != 0 else "rank 1 had timed out"
        )
        refused(CollectiveTimeoutError, sign, lambda: make(timeout=BRIEF))
        assert not hvd.is_initialized()
        board.ask("PUT", f"{late}.{rank}")
        make().finalize()


def part_late() -> None:
    """A rank that doesn't come is named by the others, which finalize with it when it has come."""
    for block in (contextlib.nullcontext(), idist.deadline(1)):
        model = make(timeout=timedelta(seconds=3))
        rank, n = model.topology.rank, model.topology.world_size
        name = next(iter(model.exchange(os.urandom(8)))).hex()
        signs = [Path(tempfile.gettempdir(), f"late-{name}-{other}") for other in range(n - 1)]
        if rank == n - 1:
            for sign in signs:
                until(sign.exists, 60)
                sign.unlink()
            model.all_reduce(torch.ones(2), ReduceOp.SUM)
        else:
            with block, pytest.raises(CollectiveTimeoutError) as caught:
                model.all_reduce(torch.ones(2), ReduceOp.SUM)
            text = str(caught.value)
            assert text.startswith(f"rank {n - 1} never")
            # The first rank that times out reports it, which may end the wait of the other one.
            assert re.search(rf"rank \d of {n}: all_reduce: not done after", text)
            assert f"rank {rank} of {n}" in text
            signs[rank].touch()
        model.finalize()


def part_gone() -> None:
    """The last rank ends the user's way; the others get an error that says so."""
    model = make()
    rank, n = model.topology.rank, model.topology.world_size
    if rank == n - 1:
        hvd.shutdown()
        return
    try:
        while True:
            model.all_reduce(torch.ones(2), ReduceOp.SUM)
    except PeerFailedError as error:
        assert isinstance(error, CollectiveError)
        assert f"rank {rank} of {n}" in str(error)
        assert error.__cause__ is not None
    model.abort()
    assert not model.is_alive()


def part_nodes() -> None:
    """Two nodes of one and two ranks, as HOROVOD_HOSTNAME tells them apart."""
    model = make()
    facts = model.topology
    want = [(0, 1, 0), (0, 2, 1), (1, 2, 1)][facts.rank]
    assert (facts.local_rank, facts.local_world_size, facts.node_rank) == want, facts
    assert facts.nnodes == 2
    model.finalize()
    init()
    found = adopted(HorovodModel).topology
    nodes = (found.node_rank, found.nnodes)
    assert nodes == ((None, None) if facts.rank == 2 else (want[2], 2)), found
    environment = RankInfo(facts.rank, 3, node_rank=want[2], nnodes=2)
    told = adopted(HorovodModel, ContextHint(environment=environment))
    assert (told.topology.node_rank, told.topology.nnodes) == (want[2], 2)
    hvd.shutdown()


def part_alone() -> None:
    """A job that should have peers and has none is an error, not a job of one."""
    info = RankInfo(1, 2, source="torchrun")
    refused(ContextError, "horovodrun", lambda: HorovodModel.initialize("horovod", info))
    assert not hvd.is_initialized()


def part_mpi4py() -> None:
    """Initialise MPI as a user's program does that has work of its own for it."""
    importlib.import_module("mpi4py.MPI")


def part_mpi_again() -> None:
    """Horovod ended MPI with the context of an earlier part: an error, not an abort."""
    refused(ContextError, "mpi4py", make)


def part_large() -> None:
    """What Horovod's 32-bit counts can't hold is refused on every rank before it starts."""
    model = make()
    huge = torch.empty(1, dtype=torch.uint8).expand(2**31)
    refused(PayloadError, "32 bits", lambda: model.broadcast(huge, 0))
    refused(PayloadError, "32 bits", lambda: model.all_gather(huge[: 2**30 + 1]))
    model.finalize()


def of_launcher(fact: str, default: int) -> int:
    """Read SIZE or RANK before Horovod is initialised."""
    names = (f"HOROVOD_{fact}", f"OMPI_COMM_WORLD_{fact}")
    return int(next((os.environ[name] for name in names if name in os.environ), default))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts({name.removeprefix("part_"): part for name, part in globals().items()})
