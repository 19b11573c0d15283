"""Watching names the rank that comes late, and nobody where all are alike."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as idist
from tests.support.processes import run_python
from tests.support.worlds import alone_and_several, run
from unisono.observe.waits import waits
from unisono.recording.records import CollectiveRecord

LATE_S = 0.2
STEPS = 3
BALANCED_RUNS = 20


def train(local_rank: int, slow: int | None, steps: int) -> tuple[Any, ...]:
    """Train a small net, one rank of which takes longer for its backward."""
    torch.manual_seed(0)
    model = idist.auto_model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 32)
    idist.barrier()  # else the others may come late to the first step
    with idist.watching() as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            outputs = model(inputs)
            if idist.get_rank() == slow:
                outputs.register_hook(lambda _: time.sleep(LATE_S))
            outputs.square().mean().backward()
            optimizer.step()
    return watch.slowest, watch.lost_s, watch.by_line, watch.last, str(watch)


@pytest.mark.parametrize(("size", "slow"), [(2, 0), (3, 2)])
def test_a_slow_backward_under_ddp_is_named_within_three_steps(size: int, slow: int) -> None:
    found = run("gloo", size, train, slow, STEPS)
    slowest, lost_s, by_line, last, text = found[0]
    assert {each[:2] for each in found} == {(slow, lost_s)}, text
    assert lost_s[slow] > (STEPS - 1) * LATE_S * 0.8
    assert last[slow] == STEPS
    assert list(by_line)[0].startswith(__file__)
    assert f"rank {slow} is slow" in text
    assert f"for rank {slow} in gradients at test_watching.py:" in text


@pytest.mark.timed  # a rank that another's load holds up is rightly named
def test_balanced_runs_name_nobody() -> None:
    def balanced(local_rank: int) -> list[Any]:
        return [train(local_rank, None, 10) for _ in range(BALANCED_RUNS)]

    assert not [each for each in run("gloo", 3, balanced)[0] if each[0] is not None]


@alone_and_several
def test_what_is_found_is_what_all_records_say() -> None:
    own: list[CollectiveRecord] = []
    rank = idist.get_rank()

    def keep(record: CollectiveRecord) -> None:
        if record.rank == rank:  # the hooks of threads are those of all of them
            own.append(record)

    group = idist.new_group(sorted({0, idist.get_world_size() - 1}))
    idist.barrier()
    remove = idist.add_hook(after=keep)
    with idist.watching() as watch:
        assert watch.slowest is None
        assert "nothing is known" in str(watch)
        for step in range(20):
            idist.all_reduce(torch.ones(step))
            if rank == step % idist.get_world_size():
                time.sleep(0.003)
            idist.all_gather(step)
            if rank in group.ranks:
                idist.barrier(group)
        made = [record._replace(ranks=tuple(record.ranks)) for record in own]
    remove()
    everything = [
        [CollectiveRecord._make(each) for each in of_rank]
        for of_rank in idist.all_gather([tuple(record) for record in made])
    ]
    found = waits(dict(enumerate(everything)))
    assert (watch.lost_s, watch.waited_s) == (found.lost_s, found.waited_s)
    assert (watch.last, watch.slowest) == (found.last, found.slowest)
    everywhere = idist.all_gather((watch.slowest, watch.lost_s, watch.last))
    assert everywhere.count(everywhere[0]) == len(everywhere) == len(watch.lost_s)
    assert list(watch.by_line.values()) == [
        sum(line.lost_s) for line in found.lines if any(line.lost_s)
    ]
    assert f"{found.calls} calls of" in str(watch)


def test_the_last_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MOST", "_MOST_OF_ALL"):
        with monkeypatch.context() as changed:
            changed.setattr(f"unisono.observe.watching.{name}", 5)
            changed.setattr("unisono.observe.watching._LEAST", 1)
            with idist.watching() as watch:
                for _ in range(8):
                    idist.barrier()
        assert str(watch).startswith("5 calls of 1 rank in")


@alone_and_several
def test_a_block_that_raises_leaves_no_hook_and_no_call() -> None:
    with pytest.raises(ValueError, match="in the block"), idist.watching() as watch:
        idist.barrier()
        raise ValueError("in the block")
    assert watch.lost_s == ()
    with idist.watching() as outer:
        with idist.watching() as inner:
            idist.barrier()
        idist.barrier()
    assert len(inner.lost_s) == len(outer.lost_s) == idist.get_world_size()


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed")
    with idist.watching() as watch:
        idist.barrier()
    watch.plot(tmp_path / "waits.png")
    assert (tmp_path / "waits.png").read_bytes().startswith(b"\x89PNG\r\n")


WITHOUT_MATPLOTLIB = """
import sys
import unisono as idist

from pathlib import Path
from unisono.cli.trace import trace

sys.modules["matplotlib"] = None
with idist.watching() as watch, idist.trace(sys.argv[1]) as folder:
    idist.barrier()
for draw in (watch.plot, lambda path: trace(folder, picture=Path(path))):
    try:
        draw("waits.png")
    except idist.errors.ArgumentError as error:
        print(error)
"""


def test_without_matplotlib_the_remedy_is_said(tmp_path: Path) -> None:
    told = run_python("-c", WITHOUT_MATPLOTLIB, str(tmp_path)).splitlines()
    for line, name in zip(told, ("plot()", "--picture"), strict=True):
        assert line.startswith(f"{name} needs matplotlib")
        assert "pip install matplotlib" in line
