"""A job on real MPI: ``mpiexec -n N python -m tests.real.mpi_job PART,PART``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import unisono as idist
from tests.real.jobs import adopted, run_digits, run_parts, say
from tests.real.oracle import check_collectives, check_exchange, same
from unisono.context import ContextState, communicator
from unisono.errors import CollectiveTimeoutError, ContextError, GroupMembershipError
from unisono.model.reduction import ReduceOp
from unisono.models.mpi import world as setup
from unisono.models.mpi.model import MpiModel
from unisono.testing import keep_laws, law_names
from unisono.topology import ContextHint, RankInfo, Topology

UNKNOWN = RankInfo(0, 1)  # what is known where the environment says nothing


def uninitialised() -> None:
    """Check that an MPI that the user has imported, but not initialised, is left alone."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    assert MpiModel.from_context(ContextHint()) is None
    assert not MPI.Is_initialized()
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    model.exchange(b"")
    model.finalize()


def laws() -> None:
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    rank, size = model.topology.rank, model.topology.world_size
    assert model.topology == Topology(rank, size, rank, size, 0, 1)
    assert model.transport_device == torch.device("cpu")
    check_collectives(model)
    model.finalize()


def large() -> None:
    """Check tensors of more elements than a call of MPI takes; each waits forever, within MPI."""
    largest = MpiModel.largest_count
    MpiModel.largest_count = 8
    model = MpiModel.initialize("mpi4py", UNKNOWN, timeout=timedelta.max)
    check_collectives(model)
    model.finalize()
    MpiModel.largest_count = largest


def facade() -> None:
    """Use a context that the facade makes under mpiexec."""
    idist.initialize("mpi4py", timeout=60)
    assert (idist.backend(), idist.model_name()) == ("mpi4py", "mpi-dist")
    assert idist.get_world_size() == 3
    for dtype in (torch.bfloat16, torch.float16, torch.float32):  # of which MPI knows the last one
        rows = [torch.tensor([1.0, end, float("nan"), -2.0]).to(dtype) for end in (1.0, 3e38, 1.0)]
        mine, pair = rows[idist.get_rank()], idist.new_group([0, 1])
        same(idist.all_reduce(mine, async_op=True).wait(), rows[0] + rows[1] + rows[2])
        if idist.get_rank() in pair.ranks:
            same(idist.all_reduce(mine, "MAX", group=pair), torch.maximum(rows[0], rows[1]))
    idist.finalize()
    assert idist.get_world_size() == 1


def digits() -> None:
    run_digits("mpi4py")


def missed(rank: int, kind: type[Exception], call: Callable[[], object]) -> None:
    """Check that the other ranks are told who doesn't come, in time; the error ends the job."""
    world = setup.start()[0].COMM_WORLD
    if world.rank == rank:
        time.sleep(600)
    with pytest.raises(kind, match=f"rank {rank} never (arrived|reached)") as caught:
        call()
    say("MISSED")
    world.sendrecv(None, 3 - rank - world.rank)  # the first to end ends the other one
    raise caught.value


def nobody_to_set_up(rank: int = 2) -> None:
    limit = timedelta(seconds=2)
    missed(rank, ContextError, lambda: MpiModel.initialize("mpi4py", UNKNOWN, timeout=limit))


no_first_to_set_up = partial(nobody_to_set_up, 0)


def nobody_to_a_group() -> None:
    idist.initialize("mpi4py", timeout=2)
    idist.new_group([0, 2])
    idist.new_group([0, 1, 2])
    missed(1, CollectiveTimeoutError, lambda: idist.new_group([0, 1, 2]))


def twice() -> None:
    hook = sys.excepthook
    for _ in range(3):
        model = MpiModel.initialize("mpi4py", UNKNOWN)
        group = model.new_group(tuple(range(model.topology.world_size)))
        total = model.all_reduce(torch.ones(()), ReduceOp.MAX, group)
        assert total.item() == 1
        assert model.is_alive()
        assert sys.excepthook is not hook
        model.finalize()
        model.finalize()
        assert not model.is_alive()
        assert sys.excepthook is hook
        assert MpiModel.from_context(ContextHint()) is None, "our own world isn't a user's"


def contradiction() -> None:
    with pytest.raises(ContextError, match="torchrun"):
        MpiModel.initialize("mpi4py", RankInfo(0, 5, source="torchrun"))


class Elsewhere(MpiModel):
    @property
    def device(self) -> torch.device:
        return torch.device("meta", super().device.index)

    @property
    def topology(self) -> Topology:
        return replace(super().topology, nnodes=7)


def adopt() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    handler = world.Get_errhandler()
    if world.rank == 0:  # alone, while the others can't answer
        asked = adopted(MpiModel)
        facts = asked.topology
        assert (facts.rank, facts.world_size, facts.local_rank) == (0, world.size, 0)
        asked.finalize()
    world.Barrier()
    assert adopted(MpiModel, ContextHint(local_rank=7)).topology.local_rank == 7
    info = RankInfo(world.rank, world.size, 3, 4, 1, 2)
    model = adopted(MpiModel, ContextHint(environment=info))
    assert model.topology == info.topology()
    elsewhere = Elsewhere(MPI, info.topology(), torch.device("cpu"))
    assert elsewhere.topology == replace(info.topology(), nnodes=7)
    devices = elsewhere.device, elsewhere.transport_device
    assert devices == (torch.device("meta"), torch.device("cpu"))
    foreign = ContextHint(environment=RankInfo(0, 64, 0, 64, 0, 1))
    assert adopted(MpiModel, foreign).topology.local_world_size == world.size

    # A message of the user's, under way all the time, meets none of ours.
    mine = bytearray(4)
    request = world.Irecv([mine, MPI.BYTE], source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    same(model.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(world.size)))
    check_exchange(model, None)
    world.Send([b"user", MPI.BYTE], (world.rank + 1) % world.size, tag=5)
    request.Wait()
    assert bytes(mine) == b"user"
    check_collectives(model)
    adopt_groups(model, MPI)
    assert world.Get_errhandler() == handler
    model.finalize()
    assert not model.is_alive()
    world.Barrier()
    again = adopted(MpiModel)
    again.exchange(b"")
    MPI.Finalize()
    assert not again.is_alive()
    again.finalize()
    assert MpiModel.from_context(ContextHint()) is None
    with pytest.raises(ContextError, match="finalized"):
        MpiModel.initialize("mpi4py", UNKNOWN)


def adopt_groups(model: MpiModel, mpi: Any) -> None:
    world = mpi.COMM_WORLD
    assert model.adopt_group(object()) is None
    comm = world.Split(world.rank % 2, key=world.rank)
    group = model.adopt_group(comm)
    assert group is not None
    assert group.ranks == tuple(range(world.rank % 2, world.size, 2))
    same(model.all_gather(torch.tensor(world.rank), group), torch.tensor(group.ranks))
    turned = world.Split(0, key=-world.rank)
    with pytest.raises(GroupMembershipError, match="ascending"):
        model.adopt_group(turned)
    comm.Free()
    turned.Free()


def funneled() -> None:
    """Check that nothing runs in a thread where MPI was told that only one thread calls it."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    model = adopted(MpiModel)
    context = ContextState(model)
    handle = context.start(lambda: model.all_gather(torch.tensor(1)), None)
    same(handle.wait(), torch.ones(model.topology.world_size, dtype=torch.int64))
    started = context.start_all_reduce(torch.ones(1), ReduceOp.SUM)
    assert started.wait().item() == model.topology.world_size
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        assert not context.backgrounds
        say("NO THREAD")


def facade_adopted() -> None:
    """Check every law in a world that the user's own program initialised."""
    assert idist.get_world_size() == 1, "before anybody has imported mpi4py"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert (idist.get_rank(), idist.get_world_size()) == (world.rank, world.size)
    assert idist.get_local_rank() == world.rank
    keep_laws(0, law_names())
    total = idist.all_reduce(torch.ones(3), group=world)
    same(total, torch.full((3,), float(world.size)))
    idist.finalize()
    world.Barrier()  # the user's own world is as it was
    assert not MPI.Is_finalized()


def fail(model: Any) -> None:
    """Raise on rank 1 while the other waits for it."""
    model.exchange(b"")
    say("AT WORK")
    if model.topology.rank == 1:
        raise KeyError("rank 1 has a bug")
    model.all_reduce(torch.ones(1), ReduceOp.SUM)


def facade_fail() -> None:
    idist.initialize("mpi4py")
    fail(communicator().model)


def fail_adopted() -> None:
    from mpi4py import MPI

    assert MPI.Is_initialized()
    fail(adopted(MpiModel))


def abort() -> None:
    """Leave with an error that the program itself catches."""
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    model.exchange(b"")
    say("AT WORK")
    if model.topology.rank == 1:
        model.abort()
        assert not model.is_alive()
        say("STILL HERE")
        return
    model.all_reduce(torch.ones(1), ReduceOp.SUM)


def dropped() -> None:
    """Check that a group that all its ranks have dropped is freed, and MPI's other ones stay."""
    idist.initialize("mpi4py")
    from mpi4py import MPI

    freed: list[str] = []
    key = MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, name: freed.append(name))
    rank = MPI.COMM_WORLD.rank
    for name in ("first", "second"):
        group = idist.new_group([0, 1])
        if rank in group.ranks:
            group.handle.Set_attr(key, name)  # type: ignore[attr-defined]
        assert idist.all_gather(rank, group) in ([0, 1], rank)
        del group
    assert freed == ["first"] * (rank < 2)
    idist.finalize()
    assert freed == ["first", "second"] * (rank < 2)


def forked() -> None:
    """Check that a forked child that fails or exits leaves the job alone."""
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    for is_failing in (True, False):
        child = os.fork()
        if child == 0:
            if is_failing:
                raise KeyError("only the child has a bug")
            sys.exit(0)
        os.waitpid(child, 0)
    model.exchange(b"")
    model.finalize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(globals())
