"""Checkpoints are loaded completely, in part or not at all; a manager keeps some of them."""

from __future__ import annotations

import copy
import logging
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as idist
from tests.support.worlds import alone_and_several, run_all
from unisono.errors import ArgumentError, PayloadError, PeerFailedError, UnisonoError


class Average:
    """An object that loads half of a state before it refuses the other half."""

    def __init__(self, refuses: bool = False) -> None:
        self.state: Any = {"low": torch.zeros(2), "high": 0}
        self.refuses = refuses

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state["low"].copy_(state["low"])
        if self.refuses:
            raise ValueError("too high")
        self.state["high"] = state["high"]


def net(classes: int = 3, value: float = 0.0) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))
    with torch.no_grad():
        for item in made.parameters():
            item.fill_(value)
    return made


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    optimizer.step()


def everything(value: float, classes: int = 3, refuses: bool = False) -> dict[str, Any]:
    model = net(classes, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    average = Average(refuses)
    average.state = {"low": torch.full((2,), value), "high": 9}
    return {
        "model": model,
        "optimizer": optimizer,
        "mine": idist.ByRank(Average()),
        "average": average,
        "list": [model[1], torch.full((2,), value), int(value)],
        "epoch": int(value),
    }


def states_of(into: dict[str, Any]) -> dict[str, Any]:
    kept = {name: into[name].state_dict() for name in ("model", "optimizer", "average")}
    return copy.deepcopy({**kept, "list": into["list"][1:], "epoch": into["epoch"]})


@alone_and_several
def test_nothing_is_changed_where_loading_fails(tmp_path: Path) -> None:
    """With `src`, this holds on every rank, though loading fails only on the last one."""
    path, size = tmp_path / "x.pt", idist.get_world_size()
    idist.save_checkpoint(everything(1.0), path)
    is_last = idist.get_rank() == size - 1
    other_head = partial(everything, 2.0, 5 if is_last else 3)
    refusing = partial(everything, 2.0, refuses=is_last)
    for make, text in ((other_head, "size mismatch for 2.weight"), (refusing, "too high")):
        into = make()
        before = states_of(into)
        with pytest.raises(PayloadError, match=text):
            idist.load_checkpoint(path, into=into, src=0)
        assert_same(states_of(into), before)
    into = everything(2.0)
    into["more"] = 1
    before = states_of(into)
    with pytest.raises(PayloadError, match="has no 'more'"):
        idist.load_checkpoint(path, into=into)
    assert_same(states_of(into), before)
    del into["more"]
    assert idist.load_checkpoint(path, into=into, src=0) is into
    assert_same(states_of(into), states_of(everything(1.0)))


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@alone_and_several
def test_a_file_that_one_rank_alone_has_reaches_all(tmp_path: Path) -> None:
    rank, src = idist.get_rank(), idist.get_world_size() - 1
    disk = tmp_path / f"host{rank}"
    disk.mkdir()
    if rank == src:
        torch.save({"model": net(3, 7.0).state_dict(), "epoch": 2}, disk / "x.pt")
        (disk / "empty.pt").touch()
        (disk / "damaged.pt").write_bytes((disk / "x.pt").read_bytes()[:-200])
    model = idist.auto_model(net())
    into = idist.load_checkpoint(disk / "x.pt", into={"model": model, "epoch": 0}, src=src)
    assert into["epoch"] == 2
    assert all(bool((item == 7.0).all()) for item in model.parameters())
    whole = idist.load_checkpoint(disk / "x.pt", src=src)
    assert whole["model"]["0.weight"].device == idist.device()
    refused: list[tuple[str, type[UnisonoError], str]] = [
        ("none.pt", ArgumentError, rf"rank {src} has no checkpoint .*none.pt"),
        ("empty.pt", PayloadError, r"empty.pt can't be read"),
        ("damaged.pt", PayloadError, "damaged"),
    ]
    for name, kind, text in refused:
        with pytest.raises(kind, match=text):
            idist.load_checkpoint(disk / name, src=src)
    with pytest.raises(ArgumentError, match="src=9"):
        idist.load_checkpoint(disk / "x.pt", src=9)
    idist.barrier()


def test_a_part_is_loaded_by_its_name_or_as_far_as_it_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old = tmp_path / "x.pt", net(3, 1.0)
    idist.save_checkpoint({"model": old, "epoch": 3}, path)
    new: Any = net(5)
    idist.load_checkpoint(path, into={"model": {0: new[0], "1": new[1]}})
    assert_same(new[0].state_dict(), old[0].state_dict())
    assert int(new[2].weight.count_nonzero()) == 0
    with pytest.raises(PayloadError, match="has no 'head'"):
        idist.load_checkpoint(path, into={"model": {"head": new[2]}})
    assert not caplog.messages
    new, weight = net(5), torch.zeros(2, 2)
    into = {"model": new, "later": 5, "parts": {"w": weight}, "epoch": 0}
    idist.load_checkpoint(path, into=into, strict=False)
    names = ("['later']", "['parts']", "['model']['2.weight']", "['model']['2.bias']")
    assert caplog.messages == [left_out(*names)]
    assert_same(new[0].state_dict(), old[0].state_dict())
    assert (into["epoch"], into["later"], int(new[2].weight.count_nonzero())) == (3, 5, 0)
    idist.load_checkpoint(path, into={"model": {"0.weight": weight}}, strict=False)
    assert caplog.messages[1:] == [left_out("['model']['0.weight']")]


class Migrated(nn.Linear):
    """A layer that divides the weights of its first version by 100."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 100
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_named_part_keeps_its_version(tmp_path: Path) -> None:
    path, old, new = tmp_path / "x.pt", Migrated(2, 2), Migrated(2, 2)
    idist.save_checkpoint(nn.Sequential(nn.Sequential(old)), path)
    for into in ({0: nn.Sequential(new)}, {"0.0": new}):
        nn.init.zeros_(new.weight)
        idist.load_checkpoint(path, into=into)
        assert_same(new.weight, old.weight)


def test_an_optimizer_is_filled_whole_from_shards_or_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old = tmp_path / "shards", net(3, 1.0)
    optimizer = torch.optim.Adam(old.parameters())
    step(old, optimizer)
    idist.save_checkpoint({"model": old, "optimizer": optimizer}, path, sharded=True)
    new = net()
    more = torch.optim.Adam([*new.parameters(), nn.Parameter(torch.ones(1))])
    with pytest.raises(PayloadError, match="doesn't match the size of optimizer's group"):
        idist.load_checkpoint(path, into={"model": new, "optimizer": more}, strict=False)
    assert_same(new.state_dict(), net().state_dict())
    assert not more.state and not warnings_of(caplog)
    into: Any = {"model": new, "optimizer": torch.optim.Adam(new.parameters(), amsgrad=True)}
    step(new, into["optimizer"])
    idist.load_checkpoint(path, into={**into, "new": {"w": torch.ones(1)}}, strict=False)
    assert_same(into["optimizer"].state_dict(), optimizer.state_dict())
    assert warnings_of(caplog) == [left_out("['new']['w']")]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def left_out(*names: str) -> str:
    return f"strict=False left out {', '.join(f'the checkpoint{name}' for name in names)}"


def test_shards_fill_what_was_saved_or_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path)
    jobs = ((saves_shards, folder), (fills_shards, folder), (fits_on_one_rank, folder))
    run_all("gloo", 2, *jobs, (is_there_on_one_rank, folder), (clips_by_the_largest,))


def sharded(classes: int = 3) -> tuple[Any, torch.optim.Optimizer]:
    """Create a sharded model whose first layer is frozen, and its optimizer."""
    model: Any = idist.auto_model(net(classes, 0.5), wrapper="fsdp")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def saves_shards(local_rank: int, folder: str) -> None:
    model, optimizer = sharded()
    step(model, optimizer)
    model[0].requires_grad_(False)
    step(model, optimizer)
    for group in optimizer.param_groups:
        del group["maximize"]  # as an older torch saved it
        group["mine"] = 7
    idist.save_checkpoint({"model": model, "optimizer": optimizer}, Path(folder, "shards"))


def fills_shards(local_rank: int, folder: str) -> None:
    path = Path(folder, "shards")
    model, optimizer = sharded()
    model[0].requires_grad_(False)
    idist.load_checkpoint(path, into={"model": model, "optimizer": optimizer})
    steps = [float(each["step"]) for each in optimizer.state.values()]
    assert steps == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    group = optimizer.param_groups[0]
    assert (group["maximize"], group["mine"], group["lr"]) == (False, 7, 0.1)
    other, new = sharded(classes=5)
    into: dict[str, Any] = {"model": other, "more": torch.ones(1)}
    with pytest.raises(PayloadError, match="(?s)Size mismatch.*model.2.weight|Missing key"):
        idist.load_checkpoint(path, into=into)
    with pytest.raises(PayloadError, match="Size mismatch.*model.2.weight"):
        idist.load_checkpoint(path, into=into, strict=False)
    into["model"], _ = sharded()
    idist.load_checkpoint(path, into=into, strict=False)
    assert bool((into["more"] == 1).all())
    assert_same(into["model"][0].weight.full_tensor(), model[0].weight.full_tensor())


def fits_on_one_rank(local_rank: int, folder: str) -> None:
    """Rank 0 could fill its part, but doesn't, because rank 1 can't."""
    model, optimizer = sharded()
    into: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if local_rank == 1:
        into["more"] = torch.ones(1)
    before = [item.to_local().clone() for item in model.parameters()]
    with pytest.raises(PayloadError, match=r"can't be read \(rank 1 of 2\)"):
        idist.load_checkpoint(Path(folder, "shards"), into=into)
    after = [item.to_local() for item in model.parameters()]
    assert_same(after, before)
    assert not optimizer.state
    average = Average(refuses=local_rank == 1)
    saved = {"average": Average(), "w": torch.ones(1)}
    idist.save_checkpoint(saved, Path(folder, "average"), sharded=True)
    weight = torch.zeros(1)
    with pytest.raises(PayloadError, match=r"\(rank 1 of 2\).*too high"):
        idist.load_checkpoint(Path(folder, "average"), into={"average": average, "w": weight})
    assert not weight.any()


class Gathered(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        idist.all_gather("its state")
        return super().state_dict(*args, **kwargs)


def is_there_on_one_rank(local_rank: int, folder: str) -> None:
    """Rank 1 lacks an object each time; no rank waits for the other or gets out of step."""
    into, path = {"net": Gathered(1, 1)}, Path(folder, "gathered")
    idist.save_checkpoint(into, path, sharded=True)
    mine = Path(folder, f"disk{local_rank}")
    shutil.copytree(path, mine)
    with pytest.raises(ArgumentError, match="has shards: give"):
        idist.load_checkpoint(mine, into=None if local_rank else into)
    if local_rank:
        next(mine.glob("shards-*/.metadata")).write_bytes(b"damaged")
    with pytest.raises(PayloadError, match=r"\(rank 1 of 2\).*checksum mismatch in .*metadata"):
        idist.load_checkpoint(mine, into=into)
    if local_rank:
        (mine / "CURRENT").write_text("none")
    with pytest.raises(PayloadError, match=r"\(rank 1 of 2\).*invalid shard folder name"):
        idist.load_checkpoint(mine, into=into)
    if local_rank:
        (mine / "CURRENT").unlink()
    with pytest.raises(ArgumentError, match=r"has no checkpoint \(rank 1 of 2\)"):
        idist.load_checkpoint(mine, into=into)
    assert idist.all_reduce(1) == 2


def clips_by_the_largest(local_rank: int) -> None:
    """Rank 1's part of the last layer is empty."""
    alone, (model, _) = net(1, 0.5), sharded(1)
    for each in (alone, model):
        each(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.5, math.inf)
    torch.testing.assert_close(idist.clip_grad_norm_(model, 0.5, math.inf), wanted)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        shards: Any = one.grad
        torch.testing.assert_close(shards.full_tensor(), other.grad)
    model[0].bias.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        idist.clip_grad_norm_(model, 0.5, math.inf, error_if_nonfinite=True)


@alone_and_several
def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = idist.CheckpointManager(tmp_path / "run", keep=2, mode="min")
    assert (checkpoints.latest(), checkpoints.best()) == (None, None)
    losses = [3.0, 1.0, 2.0, math.nan, None, 1.0e-5, 4.0, math.inf]
    for at, loss in enumerate(losses[:5]):
        path = checkpoints.save({"at": at}, at, loss)
        assert checkpoints.latest() == path
    assert names(tmp_path) == ["step=1,score=1.0", "step=3,score=nan", "step=4"]
    best = checkpoints.best()
    assert best is not None
    assert idist.load_checkpoint(best, src=0) == {"at": 1}
    idist.barrier()
    if idist.get_rank() == 0:
        (tmp_path / "run" / "step=9").mkdir()  # shards of a killed job, incomplete
        (tmp_path / "run" / "step=old").touch()
    for at, loss in enumerate(losses[5:], start=5):
        checkpoints.save({"at": at}, at, loss)
    again = idist.CheckpointManager(str(tmp_path / "run"), keep=1, mode="min")
    again.save({"at": 7}, 7)
    assert names(tmp_path) == ["step=5,score=1e-05", "step=7", "step=old"]
    for number in (-1, 1.5, "1"):
        with pytest.raises(ArgumentError, match="step=.* should be a number, at least 0"):
            again.save({}, number)  # type: ignore[arg-type]
    with pytest.raises(PeerFailedError, match="rank 0 raised ValueError.*'good'"):
        again.save({}, 8, score="good")  # type: ignore[arg-type]
    assert again.latest() == tmp_path / "run" / "step=7"
    for options in ({"keep": 0}, {"keep": True}, {"mode": "best"}):
        with pytest.raises(ArgumentError, match="should be"):
            idist.CheckpointManager(tmp_path, **options)
    idist.barrier()


def names(folder: Path) -> list[str]:
    idist.barrier()
    return sorted(os.listdir(folder / "run"))
