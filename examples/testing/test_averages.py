"""Ten tests to copy. Where nothing else is said, each runs on threads and on processes (gloo)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from averages import EmptyShareError, Mean, gradients, make_model, share
from torch import Tensor, nn

import unisono as idist


@pytest.mark.ranks(1, 2, 3)
def test_a_number_of_ranks_is_a_parameter(world: Any) -> None:
    """Runs with 1, 2 and 3 ranks; what holds for one rank often doesn't for three."""
    assert idist.all_reduce(1) == world.size
    world.same(idist.broadcast(world.rank, src=world.size - 1))


@pytest.mark.ranks(2, on="gloo")
def test_backends_can_be_chosen(world: Any) -> None:
    """Runs on processes alone, for it is about processes."""
    assert len(set(idist.all_gather(os.getpid()))) == world.size


@pytest.mark.ranks(2)
def test_a_failure_can_be_expected_on_one_rank(world: Any) -> None:
    """One sample is enough for rank 0, and none is left for rank 1, which has to say so."""
    with world.raises_on(1, EmptyShareError):
        assert share([7]) == [7]


@pytest.mark.ranks(3)
def test_ranks_can_do_different_things(world: Any, tmp_path: Path) -> None:
    """The directory `tmp_path` is one for all ranks of a test."""
    if world.only(0):
        (tmp_path / "seed").write_text("17")
    idist.barrier()
    assert (tmp_path / "seed").read_text() == "17"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("samples", [2, 5, 8])
def test_parameters_are_pytests_own(samples: int) -> None:
    """Every sample is in the share of one rank."""
    shares = idist.all_gather(share(range(samples)))
    assert sorted(sample for part in shares for sample in part) == list(range(samples))


@pytest.mark.ranks(2, 3)
class TestMean:
    """A class bears the mark for its tests."""

    def test_it_counts_values_not_ranks(self, world: Any, uneven: Tensor) -> None:
        """A mean of the ranks' means would be another number."""
        mean = Mean()
        mean.update(uneven)
        everything = idist.all_gather(uneven)
        assert mean.compute() == pytest.approx(everything.mean().item())
        world.same(mean.compute())

    def test_a_rank_may_have_nothing(self, world: Any, uneven: Tensor) -> None:
        """The last rank has seen no batch, and still has to take part."""
        mean = Mean()
        if not world.only(world.size - 1):
            mean.update(uneven)
        seen = idist.all_gather(uneven)[: -world.size]
        assert mean.compute() == pytest.approx(seen.mean().item())


def first_of(samples: list[int]) -> int:
    """What the next test runs in ranks."""
    return share(samples)[0]


def test_the_parent_can_call_ranks(ranks: Any) -> None:
    """This one isn't marked: it stays in the parent, and looks at what all ranks returned."""
    assert ranks(3, on="gloo").run(first_of, [4, 5, 6]) == [4, 5, 6]


@pytest.mark.ranks(1, 2, 4)
def test_gradients_are_those_of_one_process(world: Any, batch: tuple[Tensor, Tensor]) -> None:
    """Each rank has its part of the batch; together they learn what one would from all of it."""
    parts = [whole.chunk(world.size)[world.rank] for whole in batch]
    together = gradients(idist.auto_model(make_model()), *parts)
    alone = gradients(make_model(), *batch)
    for mine, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, expected)
        world.same(mine)


@pytest.mark.ranks(2)
def test_a_checkpoint_comes_back_on_every_rank(world: Any, tmp_path: Path) -> None:
    """Every rank saves and loads; what is loaded is the same on all, and without wrapper."""
    saved = idist.auto_model(make_model())
    idist.save_checkpoint({"model": saved, "epoch": 3}, tmp_path / "last.pt")
    loaded = idist.load_checkpoint(tmp_path / "last.pt")
    assert loaded["epoch"] == 3
    fresh = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    fresh.load_state_dict(loaded["model"])
    inputs = torch.ones(1, 4, dtype=torch.float64)
    torch.testing.assert_close(fresh(inputs), make_model()(inputs))
    world.same(loaded["model"]["0.weight"])
