"""A program that mpiexec runs: one check of the MPI model in each rank, named by the argument."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import unisono as idist
from unisono.context import ContextState
from unisono.errors import CollectiveTimeoutError, ContextError, GroupMembershipError
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.models.mpi import world as setup
from unisono.models.mpi.model import MpiModel
from unisono.testing import keep_laws, law_names
from unisono.topology import ContextHint, Group, RankInfo

SHAPES = ((), (3,), (2, 3), (0, 2), (257,))
GROUP_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
OPS = [op for op in ReduceOp if op is not ReduceOp.AVERAGE]
OF_FLOATS = [ReduceOp.SUM, ReduceOp.PRODUCT]  # MIN and MAX of floats reach a model as integers
UNKNOWN = RankInfo(0, 1)  # what is known where the environment says nothing


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def same(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, shift: int = 0) -> Tensor:
    """Give a rank's own values: small integers, so that every order of adding gives the same."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 7 + rank * 3 + shift) % 5 + 1
    return values.reshape(shape).to(dtype)


def groups_of(model: MpiModel) -> Iterator[Group | None]:
    """Give all ranks, and every subset that this rank is in; all are made on all ranks."""
    yield None
    size = model.topology.world_size
    for count in range(1, size + 1):
        for ranks in itertools.combinations(range(size), count):
            group = model.new_group(ranks)
            if model.topology.rank in ranks:
                yield group


def shapes_for(group: Group | None) -> tuple[tuple[int, ...], ...]:
    """Give fewer shapes for groups, of which there are many: they take the same ways."""
    return SHAPES if group is None else SHAPES[1:2]


def check_movement(model: MpiModel, group: Group | None, dtype: torch.dtype) -> None:
    me, members = model.topology.rank, list(model.topology.members(group))
    place = members.index(me)
    for shape in shapes_for(group):
        parts = [part(rank, shape, dtype) for rank in members]
        same(model.all_gather(parts[place].clone(), group), torch.stack(parts))
        rows = torch.stack([part(me, shape, dtype, at) for at in range(len(members))])
        crossed = torch.stack([part(rank, shape, dtype, place) for rank in members])
        same(model.all_to_all(rows.clone(), group), crossed)
        for root in members:
            is_root = root == me
            own = parts[place].clone() if is_root else torch.zeros(shape, dtype=dtype)
            same(model.broadcast(own, root, group), part(root, shape, dtype))
            given = torch.stack(parts) if is_root else None
            into = torch.empty(shape, dtype=dtype)
            same(model.scatter(given, into, root, group), parts[place])


def check_reductions(model: MpiModel, group: Group | None, dtype: torch.dtype) -> None:
    me, members = model.topology.rank, list(model.topology.members(group))
    place = members.index(me)
    ops = OF_FLOATS if dtype.is_floating_point else OPS
    for op, shape in itertools.product(ops, shapes_for(group)):
        parts = [part(rank, shape, dtype) for rank in members]
        expected = fold_tensors(op, parts)
        same(model.all_reduce(parts[place].clone(), op, group), expected)
        same(ContextState(model).start_all_reduce(parts[place].clone(), op, group).wait(), expected)
        for root in members:
            got = model.reduce(parts[place].clone(), root, op, group)
            if root == me:
                same(got, expected)
            else:
                assert got is None
        tables = [
            torch.stack([part(rank, shape, dtype, at) for at in range(len(members))])
            for rank in members
        ]
        row = model.reduce_scatter(tables[place].clone(), op, group)
        same(row, fold_tensors(op, tables)[place])


def check_edges_of_numbers(model: MpiModel) -> None:
    """Check what MPI's own operations get wrong, or might: NaN, infinity, integers that wrap."""
    rank, ranks = model.topology.rank, range(model.topology.world_size)
    nan, inf = float("nan"), float("inf")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        parts = [
            torch.tensor([nan if rank == 0 else 1.0, 1.0 if rank == 0 else nan, inf, -inf, rank])
            for rank in ranks
        ]
        typed = [values.to(dtype) for values in parts]
        for op in OF_FLOATS:
            same(model.all_reduce(typed[rank].clone(), op), fold_tensors(op, typed))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        typed = [torch.tensor([info.max, info.min, info.max - 1], dtype=dtype) for _ in ranks]
        for op in OPS:
            same(model.all_reduce(typed[rank].clone(), op), fold_tensors(op, typed))


def check_exchange(model: MpiModel, group: Group | None) -> None:
    for width in (0, 1, 247, 248, 249, 100_000):
        blobs = [bytes([rank]) * (width * (rank % 2 + 1)) for rank in model.topology.members(group)]
        assert model.exchange(blobs[model.topology.position(group)], group) == blobs
    model.exchange(b"", group)


def check_pairs(model: MpiModel, group: Group | None) -> None:
    members = list(model.topology.members(group))
    for src, dst in itertools.permutations(members, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if model.topology.rank == src:
                model.send(part(src, (2, 9), dtype), dst, group)
            elif model.topology.rank == dst:
                into = torch.empty((2, 9), dtype=dtype)
                same(model.recv(into, src, group), part(src, (2, 9), dtype))


def check_handles(model: MpiModel) -> None:
    context = ContextState(model)
    rank, ranks = model.topology.rank, range(model.topology.world_size)
    total = sum(range(1, len(ranks) + 1))
    handles = [
        context.start_all_reduce(torch.full((1000,), float(rank + 1)), ReduceOp.SUM)
        for _ in range(5)
    ]
    context.start_all_reduce(torch.ones(100_000), ReduceOp.SUM)  # nobody waits for this one
    gathered = context.start(lambda: model.all_gather(torch.tensor(rank)))
    same(gathered.wait(), torch.tensor(list(ranks)))
    for handle in reversed(handles):
        same(handle.wait(), torch.full((1000,), float(total)))
        assert handle.is_completed()
    slow = context.start_all_reduce(torch.ones(10), ReduceOp.MAX)
    while not slow.is_completed():
        time.sleep(0)
    same(slow.wait(), torch.ones(10))


def check_all(model: MpiModel) -> None:
    for group in groups_of(model):
        check_exchange(model, group)
        check_pairs(model, group)
        for dtype in sorted(model.dtypes, key=str) if group is None else GROUP_DTYPES:
            check_movement(model, group, dtype)
            check_reductions(model, group, dtype)
    check_edges_of_numbers(model)
    check_handles(model)


def laws() -> None:
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    rank, size = model.topology.rank, model.topology.world_size
    assert model.topology.local_rank == rank
    assert model.topology.local_world_size == size
    assert (model.topology.node_rank, model.topology.nnodes) == (0, 1)
    assert model.transport_device == torch.device("cpu")
    check_all(model)
    model.finalize()


def large() -> None:
    """Check tensors of more elements than one MPI call takes, with a limit that is soon reached."""
    MpiModel.largest_count = 8
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    check_all(model)
    model.finalize()


def deadline() -> None:
    """Check everything with a deadline, which takes MPI's non-blocking calls; then miss it."""
    model = MpiModel.initialize("mpi4py", UNKNOWN, timeout=timedelta(seconds=60))
    check_all(model)
    model.finalize()
    model = MpiModel.initialize("mpi4py", UNKNOWN, timeout=timedelta(seconds=1))
    if model.topology.rank == 0:
        try:
            model.all_reduce(torch.ones(3), ReduceOp.SUM)
        except CollectiveTimeoutError as error:
            assert "Allreduce" in str(error), error
            assert "rank 0" in str(error), error
            say("TIMED OUT")
            raise
    time.sleep(60)


def missed(rank: int, kind: type[Exception], call: Callable[[], object]) -> None:
    """Check that the other ranks are told who doesn't come, in time; the error ends the job."""
    world = setup.start()[0].COMM_WORLD
    if world.rank == rank:
        time.sleep(60)
    begin = time.monotonic()
    try:
        call()
    except kind as error:
        assert f"rank {rank} never came" in str(error), error
        assert time.monotonic() - begin < 10
        say("MISSED")
        world.sendrecv(None, 3 - rank - world.rank)  # the first to end ends the other one
        raise


def nobody_to_set_up() -> None:
    limit = timedelta(seconds=2)
    missed(2, ContextError, lambda: MpiModel.initialize("mpi4py", UNKNOWN, timeout=limit))


def no_first_to_set_up() -> None:
    limit = timedelta(seconds=2)
    missed(0, ContextError, lambda: MpiModel.initialize("mpi4py", UNKNOWN, timeout=limit))


def nobody_to_a_group() -> None:
    model = MpiModel.initialize("mpi4py", UNKNOWN, timeout=timedelta(seconds=2))
    model.new_group((0, 2))
    model.new_group((0, 1, 2))
    missed(1, CollectiveTimeoutError, lambda: model.new_group((0, 1, 2)))


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
    try:
        MpiModel.initialize("mpi4py", RankInfo(0, 5, source="torchrun"))
    except ContextError as error:
        assert "torchrun" in str(error), error
        say("REFUSED")


def adopt() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    handler = world.Get_errhandler()
    if world.rank == 0:  # alone, while the others can't answer
        asked = MpiModel.from_context(ContextHint())
        assert asked is not None
        assert (asked.topology.rank, asked.topology.world_size) == (0, world.size)
        assert asked.topology.local_rank == 0
        asked.finalize()
    world.Barrier()
    hinted = MpiModel.from_context(ContextHint(local_rank=7))
    assert hinted is not None
    assert hinted.topology.local_rank == 7
    info = RankInfo(world.rank, world.size, 3, 4, 1, 2)
    model = MpiModel.from_context(ContextHint(environment=info))
    assert model is not None
    assert model.topology == info.topology()
    foreign = ContextHint(environment=RankInfo(0, 64, 0, 64, 0, 1))
    other = MpiModel.from_context(foreign)
    assert other is not None
    assert other.topology.local_world_size == world.size

    # A message of the user's, under way all the time, meets none of ours.
    mine = bytearray(4)
    request = world.Irecv([mine, MPI.BYTE], source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    same(model.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(world.size)))
    check_exchange(model, None)
    world.Send([b"user", MPI.BYTE], (world.rank + 1) % world.size, tag=5)
    request.Wait()
    assert bytes(mine) == b"user"
    check_all(model)
    adopt_groups(model, MPI)
    assert world.Get_errhandler() == handler
    model.finalize()
    assert not model.is_alive()
    world.Barrier()
    again = MpiModel.from_context(ContextHint())
    assert again is not None
    again.exchange(b"")
    MPI.Finalize()
    assert not again.is_alive()
    again.finalize()
    assert MpiModel.from_context(ContextHint()) is None
    try:
        MpiModel.initialize("mpi4py", UNKNOWN)
    except ContextError as error:
        assert "finalized" in str(error), error


def adopt_groups(model: MpiModel, mpi: Any) -> None:
    world = mpi.COMM_WORLD
    assert model.adopt_group(object()) is None
    comm = world.Split(world.rank % 2, key=world.rank)
    group = model.adopt_group(comm)
    assert group is not None
    assert group.ranks == tuple(range(world.rank % 2, world.size, 2))
    same(model.all_gather(torch.tensor(world.rank), group), torch.tensor(group.ranks))
    turned = world.Split(0, key=-world.rank)
    try:
        model.adopt_group(turned)
    except GroupMembershipError as error:
        assert "ascending" in str(error), error
    else:
        raise AssertionError("a communicator in another order was adopted")
    comm.Free()
    turned.Free()


def funneled() -> None:
    """Check that nothing runs in a thread where MPI was told that only one thread calls it."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    model = MpiModel.from_context(ContextHint())
    assert model is not None
    context = ContextState(model)
    handle = context.start(lambda: model.all_gather(torch.tensor(1)))
    same(handle.wait(), torch.ones(model.topology.world_size, dtype=torch.int64))
    started = context.start_all_reduce(torch.ones(1), ReduceOp.SUM)
    assert started.wait().item() == model.topology.world_size
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        assert context.background is None
        say("NO THREAD")


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


def facade() -> None:
    """Check every law in a context that the facade made under mpiexec."""
    idist.initialize("mpi4py", timeout=60)
    assert (idist.backend(), idist.model_name()) == ("mpi4py", "mpi-dist")
    assert idist.get_world_size() == int(os.environ["EXPECTED_SIZE"])
    keep_laws(0, law_names())
    idist.finalize()
    assert idist.get_world_size() == 1


def facade_adopted() -> None:
    """Check every law in a world that the user's own program initialised."""
    assert idist.get_world_size() == 1, "before anybody has imported mpi4py"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size == 1:
        assert idist.model_name() == "mpi-dist"
    assert (idist.get_rank(), idist.get_world_size()) == (world.rank, world.size)
    assert idist.get_local_rank() == world.rank
    keep_laws(0, law_names())
    total = idist.all_reduce(torch.ones(3), group=world)
    same(total, torch.full((3,), float(world.size)))
    idist.finalize()
    world.Barrier()  # the user's own world is as it was
    assert not MPI.Is_finalized()


def facade_fail() -> None:
    idist.initialize("mpi4py")
    idist.barrier()
    say("AT WORK")
    if idist.get_rank() == 1:
        raise KeyError("rank 1 has a bug")
    idist.all_reduce(1)


def fail() -> None:
    model = MpiModel.initialize("mpi4py", UNKNOWN)
    fail_in(model)


def fail_adopted() -> None:
    from mpi4py import MPI

    assert MPI.Is_initialized()
    model = MpiModel.from_context(ContextHint())
    assert model is not None
    fail_in(model)


def fail_in(model: MpiModel) -> None:
    model.exchange(b"")
    say("AT WORK")
    if model.topology.rank == 1:
        raise KeyError("rank 1 has a bug")
    model.all_reduce(torch.ones(1), ReduceOp.SUM)


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


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        laws, large, deadline, twice, contradiction, nobody_to_set_up, no_first_to_set_up,
        nobody_to_a_group, adopt, funneled, uninitialised, fail,
        fail_adopted, abort, forked, facade, facade_adopted, facade_fail,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    CHECKS[sys.argv[1]]()
    say("DONE")
