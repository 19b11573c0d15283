"""Every collective of a model, compared with what the tensors of all ranks say it gives.

The laws take small values, mostly to all ranks: here are the ends of each type, in every group.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.context import ContextState
from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.testing.cases import _law
from unisono.topology import Group

SHAPES = ((), (0, 2), (5, 7))
OPS = [op for op in ReduceOp if op is not ReduceOp.AVERAGE]
OF_FLOATS = [ReduceOp.SUM, ReduceOp.PRODUCT]  # MIN and MAX of floats reach a model as integers
ODD = (-0.0, float("nan"), float("inf"), 1e-310, 2.5, -1.0)


def same(got: Tensor | None, want: Tensor, what: object = "") -> None:
    """Compare values; a NaN is as good as any other."""
    assert got is not None, what
    is_equal = torch.equal(got.cpu().nan_to_num(7.5), want.nan_to_num(7.5))
    is_equal = is_equal and torch.equal(got.cpu().isnan(), want.isnan())
    assert (got.dtype, is_equal) == (want.dtype, True), f"{what}: {got}, not {want}"


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, row: int = 0) -> Tensor:
    """Give what `rank` brings: all of the type's range for integers, exact sums for floats."""
    random = torch.Generator().manual_seed(97 * rank + 31 * row + len(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, generator=random, dtype=dtype)
    numbers = torch.randint(-9, 9, shape, generator=random).to(dtype)
    if shape and numbers.numel():
        nan, inf = float("nan"), float("inf")
        ends = [nan if rank == 0 else 1.0, 1.0 if rank == 0 else nan, inf, -inf]
        numbers.view(-1)[:4] = torch.tensor(ends)
    return numbers


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
                _check_tensors(model, group, dtype, shape)
    _check_handles(model)


def _check_tensors(
    model: ComputationModel, group: Group | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    ranks, own = model.topology.members(group), model.topology.rank
    place, what = model.topology.position(group), (group, dtype)
    grids = [torch.stack([value(rank, shape, dtype, row) for row in ranks]) for rank in ranks]
    rows = totals = [value(rank, shape, dtype) for rank in ranks]
    if dtype.is_floating_point and not shape:
        rows = [torch.tensor(ODD).roll(rank).to(dtype) for rank in ranks]

    def moved(got: Tensor, want: Tensor) -> None:
        _law.same(got.cpu(), want, what)

    moved(model.all_gather(rows[place].clone(), group), torch.stack(rows))
    crossed = torch.stack([grid[place] for grid in grids])
    moved(model.all_to_all(grids[place].clone(), group), crossed)
    for root, row, grid in zip(ranks, rows, grids, strict=True):
        moved(model.broadcast(rows[place].clone(), root, group), row)
        sent, into = grid.clone() if root == own else None, torch.empty_like(grid[0])
        moved(model.scatter(sent, into, root, group), grid[place])
    for op in OF_FLOATS if dtype.is_floating_point else OPS:
        total, mine = fold_tensors(op, totals), totals[place]
        same(model.all_reduce(mine.clone(), op, group), total, (op, what))
        handle = ContextState(model).start_all_reduce(mine.clone(), op, group)
        same(handle.wait(), total, (op, what))
        for root in ranks:
            got = model.reduce(mine.clone(), root, op, group)
            if root == own:
                same(got, total, (op, what))
            else:
                assert got is None, (op, what)
        got = model.reduce_scatter(grids[place].clone(), op, group)
        same(got, fold_tensors(op, grids)[place], (op, what))


def _check_handles(model: ComputationModel) -> None:
    """Check many operations under way at once, and that each rank may wait in its own order."""
    context, rank, n = ContextState(model), model.topology.rank, model.topology.world_size
    started = [
        (i, context.start_all_reduce(torch.full((3,), rank + i + 1.0), ReduceOp.SUM))
        for i in range(700)
    ]
    slow = context.start_all_reduce(torch.ones(100_000), ReduceOp.SUM)
    same(model.all_reduce(torch.ones(2), ReduceOp.SUM), torch.full((2,), float(n)))
    for i, handle in started if rank % 2 else reversed(started):
        same(handle.wait(), torch.full((3,), n * (n + 1) / 2 + n * i))
    while not slow.is_completed():  # nobody waits for it
        time.sleep(0)


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
