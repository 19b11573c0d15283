"""Every collective of a model, compared with what the tensors of all ranks say it gives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.context import ContextState
from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.topology import Group

SHAPES = ((), (0, 2), (5, 7))
OPS = [op for op in ReduceOp if op is not ReduceOp.AVERAGE]
OF_FLOATS = [ReduceOp.SUM, ReduceOp.PRODUCT]  # MIN and MAX of floats reach a model as integers
ODD = (-0.0, float("nan"), float("inf"), 1e-310, 2.5, -1.0)


def same(got: Tensor | None, want: Tensor, what: object = "") -> None:
    assert got is not None, what
    is_equal = torch.equal(got.cpu().nan_to_num(7.5), want.nan_to_num(7.5))
    is_equal = is_equal and torch.equal(got.cpu().isnan(), want.isnan())
    assert (got.dtype, is_equal) == (want.dtype, True), f"{what}: {got}, not {want}"


def moved(got: Tensor, want: Tensor, what: object) -> None:
    """Compare bit by bit."""
    same(got, want, what)
    bits, wanted = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
    assert torch.equal(bits, wanted), f"{what}: {got}, not {want}"


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, row: int = 0) -> Tensor:
    """Give what `rank` brings: all of the type's range for integers, exact sums for floats."""
    random = torch.Generator().manual_seed(97 * rank + 31 * row + len(shape))
    if dtype is torch.bool or dtype.is_floating_point:
        lowest, end = (0, 2) if dtype is torch.bool else (-9, 9)
        return torch.randint(lowest, end, shape, generator=random).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=random, dtype=dtype)


def groups_of(model: ComputationModel) -> Iterator[Group | None]:
    """Give all ranks, and every subset that this rank is in; all are made on all ranks."""
    yield None
    ranks = range(model.topology.world_size)
    sets = [each for count in ranks for each in itertools.combinations(ranks, count + 1)]
    made = [model.new_group(each) for each in sets]
    yield from (group for group in made if model.topology.rank in group.ranks)


def check_collectives(model: ComputationModel) -> None:
    for group in groups_of(model):
        check_exchange(model, group)
        if "send_recv" in model.capabilities:
            _check_pairs(model, group)
        for dtype in sorted(model.dtypes, key=str):
            for shape in SHAPES if group is None else SHAPES[-1:]:
                _check_movements(model, group, dtype, shape)
                _check_reductions(model, group, dtype, shape)
    _check_numbers(model)
    _check_handles(model)


def _check_movements(
    model: ComputationModel, group: Group | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    ranks, own = model.topology.members(group), model.topology.rank
    place, what = model.topology.position(group), (group, dtype)
    grids = [torch.stack([value(rank, shape, dtype, row) for row in ranks]) for rank in ranks]
    rows = [grid[0] for grid in grids]
    if dtype.is_floating_point and not shape:
        rows = [torch.tensor(ODD).roll(rank).to(dtype) for rank in ranks]
    moved(model.all_gather(rows[place].clone(), group), torch.stack(rows), what)
    crossed = torch.stack([grid[place] for grid in grids])
    moved(model.all_to_all(grids[place].clone(), group), crossed, what)
    for root, row, grid in zip(ranks, rows, grids, strict=True):
        moved(model.broadcast(rows[place].clone(), root, group), row, what)
        sent, into = grid.clone() if root == own else None, torch.empty_like(grid[0])
        moved(model.scatter(sent, into, root, group), grid[place], what)


def _check_reductions(
    model: ComputationModel, group: Group | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    ranks, own = model.topology.members(group), model.topology.rank
    place = model.topology.position(group)
    rows = [value(rank, shape, dtype) for rank in ranks]
    grids = [torch.stack([value(rank, shape, dtype, row) for row in ranks]) for rank in ranks]
    for op in OF_FLOATS if dtype.is_floating_point else OPS:
        total, mine, what = fold_tensors(op, rows), rows[place], (op, group, dtype)
        same(model.all_reduce(mine.clone(), op, group), total, what)
        same(ContextState(model).start_all_reduce(mine.clone(), op, group).wait(), total, what)
        for root in ranks:
            got = model.reduce(mine.clone(), root, op, group)
            if root == own:
                same(got, total, what)
            else:
                assert got is None, what
        got = model.reduce_scatter(grids[place].clone(), op, group)
        same(got, fold_tensors(op, grids)[place], what)


def _check_numbers(model: ComputationModel) -> None:
    """Check what a library's own operations might get wrong: NaN, infinity, integers that wrap."""
    rank, ranks = model.topology.rank, range(model.topology.world_size)
    nan, inf = float("nan"), float("inf")
    for dtype in sorted(model.dtypes - {torch.bool}, key=str):
        if dtype.is_floating_point:
            numbers = [
                [nan if r == 0 else 1.0, 1.0 if r == 0 else nan, inf, -inf, r] for r in ranks
            ]
        else:
            limits = torch.iinfo(dtype)
            numbers = [[limits.max, limits.min, limits.max - 1]] * len(ranks)
        rows = [torch.tensor(row, dtype=dtype) for row in numbers]
        for op in OF_FLOATS if dtype.is_floating_point else OPS:
            same(model.all_reduce(rows[rank].clone(), op), fold_tensors(op, rows), (op, dtype))


def _check_handles(model: ComputationModel) -> None:
    """Check many operations under way at once, and that each rank may wait in its own order."""
    context, rank, n = ContextState(model), model.topology.rank, model.topology.world_size
    handles = [
        context.start_all_reduce(torch.full((3,), rank + i + 1.0), ReduceOp.SUM) for i in range(700)
    ]
    context.start_all_reduce(torch.ones(100_000), ReduceOp.SUM)  # nobody waits for this one
    gathered = context.start(lambda: model.all_gather(torch.tensor(rank)))
    same(model.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(n)))
    same(gathered.wait(), torch.arange(n))
    numbered = list(enumerate(handles))
    for i, handle in numbered if rank % 2 else reversed(numbered):
        same(handle.wait(), torch.full((3,), n * (n + 1) / 2 + n * i))
        assert handle.is_completed()
        assert handle.wait() is handle.wait()
    slow = context.start_all_reduce(torch.ones(10), ReduceOp.SUM)
    while not slow.is_completed():
        time.sleep(0)
    same(slow.wait(), torch.full((10,), float(n)))


def _check_pairs(model: ComputationModel, group: Group | None) -> None:
    for src, dst in itertools.permutations(model.topology.members(group), 2):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            message = torch.full((2, 9), src, dtype=dtype)
            if model.topology.rank == src:
                model.send(message, dst, group)
            elif model.topology.rank == dst:
                same(model.recv(torch.empty_like(message), src, group), message)


def check_exchange(model: ComputationModel, group: Group | None, most: int = 100_000) -> None:
    members, place = model.topology.members(group), model.topology.position(group)
    for width in (0, 1, 247, 248, 249, most):
        for only in (None, *members) if width < most else (None,):
            blobs = [bytes([r]) * (width + 3 * r if only in (None, r) else 0) for r in members]
            assert model.exchange(blobs[place], group) == blobs
