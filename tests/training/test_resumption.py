"""A run that is interrupted within an epoch ends like one that isn't interrupted."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

import unisono as idist
from unisono.errors import ArgumentError, UnsupportedOperation, WorkerFailedError

GLOBAL_BATCH, EPOCHS, SAMPLES = 12, 3, 130  # 11 batches, of which the last is short


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def rows() -> Any:
    x = torch.sin(torch.arange(SAMPLES * 6.0)).view(SAMPLES, 6)
    return [(row, row.sum().view(1)) for row in x]


def everything() -> dict[str, Any]:
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = idist.auto_dataloader(rows(), batch_size=GLOBAL_BATCH)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def train(local_rank: int, path: str, signal_at: tuple[int, int] | None) -> Any:
    """Train; at an epoch and batch rank 0 sends SIGTERM to the last rank."""
    torch.set_num_threads(1)
    pids = idist.all_gather(os.getpid())
    state = everything()
    model, optimizer, loader = state["model"], state["optimizer"], state["loader"]
    if Path(path).exists():
        idist.load_checkpoint(path, into=state)
    assert idist.preemption_point() is False
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss: Any = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, step) == signal_at and idist.get_rank() == 0:
                os.kill(pids[-1], signal.SIGTERM)
            if idist.preemption_point():
                idist.save_checkpoint(state, path)
                return loader.state_dict()
        state["scheduler"].step()
    return [item.detach() for item in idist.unwrap_model(model).state_dict().values()]


def train_and_stop(local_rank: int, path: str, signal_at: tuple[int, int]) -> tuple[Any, Any]:
    return train(local_rank, path, None), train(local_rank, path, signal_at)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [item.contiguous().numpy().tobytes() for item in tensors]


def test_sigterm_to_one_rank_and_resumption_change_no_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "last.pt")
    both = idist.spawn("gloo", train_and_stop, args=(path, (1, 4)), nproc_per_node=2)
    undisturbed, stopped = zip(*both, strict=True)
    assert stopped[0] == stopped[1]
    assert stopped[0]["epoch"] == 1
    assert 4 < stopped[0]["batches"] < 11
    resumed = idist.spawn("gloo", train, args=(path, None), nproc_per_node=2)
    assert [bits(each) for each in resumed] == [bits(each) for each in undisturbed]
    saved = bits(list(torch.load(path, weights_only=True)["model"].values()))
    for size in (1, 3, 4):
        assert idist.spawn("threads", loads, args=(path,), nproc_per_node=size) == [saved] * size


def loads(local_rank: int, path: str) -> list[bytes]:
    state = everything()
    idist.load_checkpoint(path, into=state)
    return bits(list(idist.unwrap_model(state["model"]).state_dict().values()))


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_a_block_puts_handlers_back_and_loses_no_signal(sent: signal.Signals) -> None:
    """A block for another signal records SIGTERM, too."""
    came: list[int] = []
    before = signal.signal(sent, lambda number, _: came.append(number))
    try:
        with idist.preemptible(signal.SIGUSR1):
            assert not idist.preemption_point()
            with idist.preemptible(signal.SIGUSR1):
                signal.raise_signal(sent)
            assert idist.preemption_point()
            assert idist.preemption_point()
            assert not came
        signal.raise_signal(sent)
        assert came == [sent]
        with idist.preemptible(signal.SIGUSR1):
            assert not idist.preemption_point()
            signal.raise_signal(sent)  # no preemption_point reports it
        assert came == [sent] * 2
    finally:
        signal.signal(sent, before)
    with pytest.raises(ArgumentError, match="can't be handled"), idist.preemptible(signal.SIGKILL):
        pass


def test_a_child_of_a_rank_dies_of_the_signal() -> None:
    with idist.preemptible():
        child = multiprocessing.get_context("fork").Process(
            target=signal.raise_signal, args=(signal.SIGTERM,)
        )
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        assert not idist.preemption_point()
        signal.raise_signal(signal.SIGTERM)
        assert idist.preemption_point()


def test_a_signal_to_the_process_reaches_ranks_that_are_threads() -> None:
    with pytest.raises(WorkerFailedError, match=r"ranks \[0, 1\] are threads"):
        idist.spawn("threads", points, nproc_per_node=2)
    with idist.preemptible(signal.SIGUSR1):
        told = idist.spawn("threads", points, nproc_per_node=2)
    assert told[0] == told[1] > 0


def points(local_rank: int) -> int:
    """Count the points until one reports the signal, which rank 0 sends after the third."""
    for count in range(1_000_000):
        if idist.preemption_point():
            return count
        if count == 2 and local_rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
    raise AssertionError("no preemption_point has reported the signal")


@pytest.mark.ranks(2, on="gloo")
def test_a_position_goes_on_with_the_rest() -> None:
    size = idist.get_world_size()
    data: Any = list(range(12 * size + 5))
    loader = idist.auto_dataloader(data, batch_size=2 * size)
    loader.set_epoch(3)
    whole = [rows.tolist() for rows in loader]
    assert loader.epoch == 4
    loader.set_epoch(3)
    for _, _rows in zip(range(4), loader, strict=False):
        pass
    state = loader.state_dict()
    for workers in (0, 1):
        again = idist.auto_dataloader(
            data, batch_size=2 * size, num_workers=workers, persistent_workers=bool(workers)
        )
        again.load_state_dict(state)
        assert again.state_dict() == state
        again.sampler.set_epoch(5)
        assert again.start_batch == 0
        again.load_state_dict(state)
        again.set_epoch(again.epoch)
        assert again.start_batch == 4
        assert len(again) == len(whole)
        assert [rows.tolist() for rows in again] == whole[4:]
        assert (again.epoch, again.start_batch) == (4, 0)
        again.sampler.set_epoch(3)
        assert [rows.tolist() for rows in again] == whole


@pytest.mark.ranks(1, on="serial")
@pytest.mark.ranks(2, on="gloo")
def test_what_is_drawn_goes_on_with_the_position() -> None:
    def go_on() -> Iterator[Any]:
        return ((rows.tolist(), torch.rand(()).item()) for rows in loader)

    loader = idist.auto_dataloader(Noisy(range(16)), batch_size=4)
    begun = go_on()
    next(begun)
    state, generators = loader.state_dict(), idist.get_rng_state()
    rest = list(begun)
    loader.load_state_dict(state)
    idist.set_rng_state(generators)
    assert list(go_on()) == rest


def test_a_position_goes_on_with_another_number_of_ranks() -> None:
    def see(local_rank: int, state: Any, count: int) -> Any:
        loader = idist.auto_dataloader(list(range(50)), batch_size=12)
        if state is not None:
            loader.load_state_dict(state)
        seen = [rows.tolist() for _, rows in zip(range(count), loader, strict=False)]
        return seen, loader.state_dict()

    whole = together(idist.spawn("threads", see, args=(None, 99), nproc_per_node=2))
    begun = idist.spawn("threads", see, args=(None, 2), nproc_per_node=2)
    for size in (1, 3, 4):
        rest = idist.spawn("threads", see, args=(begun[1][1], 99), nproc_per_node=size)
        assert (together(begun) + together(rest))[:50] == whole


def together(parts: list[Any]) -> list[int]:
    """Merge the samples that ranks have seen, in the order of the epoch."""
    mine = [[i for batch in seen for i in batch] for seen, _ in parts]
    return [i for row in zip(*mine, strict=True) for i in row][:50]


def test_positions_that_lead_nowhere_are_refused() -> None:
    data: Any = list(range(24))
    loader = idist.auto_dataloader(data, batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ArgumentError, match="invalid position"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(ArgumentError, match=r"for 24 samples, but the dataset has 3"):
        idist.auto_dataloader([1, 2, 3]).load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"are not whole batches of 3"):
        idist.auto_dataloader(data, batch_size=3).load_state_dict(state)
    halves = idist.auto_dataloader(data, batch_size=2)
    halves.load_state_dict(state)
    assert len(list(halves)) == 10
    drawn = idist.auto_dataloader(data, batch_size=4, sampler=RandomSampler(data))
    drawn.load_state_dict(drawn.state_dict())
    next(iter(drawn))
    with pytest.raises(UnsupportedOperation, match="draws another order each time"):
        drawn.state_dict()
    own = idist.auto_dataloader(data, batch_size=4, sampler=Own(data))
    with pytest.raises(UnsupportedOperation, match="a position of 2 ranks on 1"):
        own.load_state_dict({**state, "world_size": 2})


class Own(SequentialSampler):
    def set_epoch(self, epoch: int) -> None:
        pass


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("epoch", -1), ("order", "first"), ("batches", 1.5), ("is_dealt_in_turn", 1)],
        *[("batch_size", 0), ("world_size", None), ("samples", True)],
    ],
)
def test_a_position_with_a_wrong_value_is_refused_and_changes_nothing(key: str, value: Any) -> None:
    loader = idist.auto_dataloader(list(range(24)), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ArgumentError, match=f"{key}="):
        loader.load_state_dict({**state, key: value})
    assert loader.state_dict() == state


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_goes_on_after_an_error_of_the_data_set(workers: int) -> None:
    data: Any = OneIsBad(range(6))
    loader = idist.auto_dataloader(data, shuffle=False, num_workers=workers)
    batches = iter(loader)
    assert [next(batches).item(), next(batches).item()] == [0, 1]
    with pytest.raises(LookupError, match="a bad sample"):
        next(batches)
    state = loader.state_dict()
    assert [rows.item() for rows in batches] == [3, 4, 5]  # as torch's loader does
    assert loader.state_dict() == {**state, "epoch": 1, "order": 1, "batches": 0}
    again = idist.auto_dataloader(data, shuffle=False)
    again.load_state_dict(state)
    assert [rows.item() for rows in again] == [3, 4, 5]


class Noisy(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + torch.rand(())


class OneIsBad(list[int]):
    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            raise LookupError("a bad sample")
        return super().__getitem__(index)


def test_workers_start_with_the_iterator_and_end_with_the_loader() -> None:
    before = set(multiprocessing.active_children())
    loader = idist.auto_dataloader([1, 2, 3], num_workers=1, persistent_workers=True)
    batches = iter(loader)
    (worker,) = set(multiprocessing.active_children()) - before
    assert len(list(batches)) == len(list(loader)) == 3
    gc.disable()  # a cycle would keep the loader
    try:
        del batches, loader
        worker.join(30)
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_a_look_at_the_first_batch_keeps_the_position() -> None:
    loader = idist.auto_dataloader(list(range(10)), batch_size=2, shuffle=False)
    for _ in zip(range(2), loader, strict=False):
        pass
    state = loader.state_dict()
    loader.load_state_dict(state)
    abandoned = iter(loader)
    assert next(abandoned).tolist() == [4, 5]
    assert [rows.tolist() for rows in loader] == [[4, 5], [6, 7], [8, 9]]
    assert len(list(loader)) == 5
    assert next(abandoned).tolist() == [6, 7]  # this iterator no longer moves the position
    assert loader.state_dict()["batches"] == 0
    loader.load_state_dict(state)
    loader.set_epoch(7)
    assert len(list(loader)) == 5


def test_passes_before_training_cost_neither_an_epoch_nor_the_position() -> None:
    def made() -> Any:
        return idist.auto_dataloader(list(range(10)), batch_size=2)

    begun = made()
    next(iter(begun))
    state = begun.state_dict()
    loader = made()
    loader.load_state_dict(state)
    assert [len(list(loader)) for _ in range(2)] == [4, 5]
    next(iter(loader))
    assert loader.epoch == 0
    loader.set_epoch(0)
    assert list(map(Tensor.tolist, loader)) == list(map(Tensor.tolist, begun))[1:]
    assert loader.epoch == 1
    assert [loader.set_epoch(1), loader.epoch, len(list(loader))] == [None, 1, 5]


def test_to_ask_for_the_epoch_moves_nothing() -> None:
    data = list(range(10))
    asked, other = (idist.auto_dataloader(data, batch_size=2) for _ in range(2))
    assert len(list(asked)) == len(list(other)) == 5
    assert asked.state_dict()["epoch"] == 1
    assert asked.epoch == 0
    next(iter(asked))
    state = asked.state_dict()
    assert (state["epoch"], state["order"], state["batches"]) == (0, 1, 1)
    rest = [rows.tolist() for rows in other][1:]
    for loader in (asked, idist.auto_dataloader(data, batch_size=2)):
        loader.load_state_dict(state)
        assert loader.epoch == 0
        assert [rows.tolist() for rows in loader] == rest
        assert loader.epoch == 1


def test_batches_of_a_sampler_of_ones_own_are_resumed_only_if_they_come_again() -> None:
    data = list(range(12))
    loader = idist.auto_dataloader(data, batch_sampler=Drawn(SequentialSampler(data), 2, False))
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    with pytest.raises(UnsupportedOperation, match=r"a Drawn, .*set_epoch"):
        loader.state_dict()
    seeded = idist.auto_dataloader(data, batch_sampler=Seeded(SequentialSampler(data), 2, False))
    seeded.set_epoch(0)
    whole = [rows.tolist() for rows in seeded]
    seeded.set_epoch(0)
    next(iter(seeded))
    again = idist.auto_dataloader(data, batch_sampler=Seeded(SequentialSampler(data), 2, False))
    again.load_state_dict(seeded.state_dict())
    assert [rows.tolist() for rows in again] == whole[1:]


class Drawn(BatchSampler):
    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches), generator=self.generator)])


class Seeded(Drawn):
    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(epoch)
