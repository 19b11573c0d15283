"""Loaders and samplers whose replicas share one dataset."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

import unisono as idist
from tests.support.worlds import several, several_here
from unisono import ReplicaLoader
from unisono.errors import ArgumentError, CollectiveMismatchError, ContextError
from unisono.training.loader import moved


@several
def test_loaders_share_the_dataset() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    data: Any = list(range(6 * size + 1))
    loader = idist.auto_dataloader(data, batch_size=2 * size, shuffle=False)
    assert loader.batch_size == 2
    assert [i for rows in loader for i in rows.tolist()][:3] == [rank, rank + size, rank + 2 * size]
    everything = idist.all_gather([i for rows in loader for i in rows.tolist()])
    assert {i for part in everything for i in part} == set(data)
    with pytest.warns(UserWarning, match=f"each loads batches of 1, {size} together"):
        assert idist.auto_dataloader(data, batch_size=1).batch_size == 1
    with pytest.warns(UserWarning, match="each loads batches of 1"):
        idist.auto_dataloader(data, batch_size=size + 1)
    plain = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    dealt = [rows.tolist() for rows in idist.auto_dataloader(data, batch_sampler=plain)]
    assert dealt[0] == [2 * rank, 2 * rank + 1]
    with pytest.warns(UserWarning, match=f"over {size + 1} replicas, so its batches aren't dealt"):
        batches = BatchSampler(DistributedSampler(data, size + 1, rank), 2, False)
        idist.auto_dataloader(data, batch_sampler=batches)
    with pytest.warns(UserWarning, match="a list_iterator, has no length, so its batches aren't"):
        idist.auto_dataloader(data, batch_sampler=iter([[0, 1], [2]]))
    good = BatchSampler(idist.DistributedProxySampler(SequentialSampler(data)), 2, False)
    idist.auto_dataloader(data, batch_sampler=good)
    assert [i.item() for i in idist.auto_dataloader(data, sampler=[3] * size)] == [3]
    own: Any = DistributedSampler(data, size, rank)
    assert idist.auto_dataloader(data, batch_size=size, sampler=own).sampler is own
    wrong: Any = DistributedSampler(data, size + 1, rank)
    with pytest.warns(UserWarning, match=f"for rank {rank} of {size + 1}"):
        idist.auto_dataloader(data, batch_size=size, sampler=wrong)


def test_a_loader_alone_orders_as_several_replicas_do() -> None:
    data = list(range(20))
    orders = epochs(0, data)
    assert orders[0] == orders[1] == orders[3] != orders[2] == orders[4]
    assert sorted(orders[0]) == sorted(orders[2]) == data
    together = idist.spawn("threads", epochs, args=(data,), nproc_per_node=2)
    pairs = (zip(*parts, strict=True) for parts in zip(*together, strict=True))
    assert [[i for pair in epoch for i in pair] for epoch in pairs] == orders
    assert isinstance(idist.auto_dataloader(data).sampler, RandomSampler)
    in_order = idist.auto_dataloader(data, batch_size=4, shuffle=False)
    in_order.sampler.set_epoch(3)
    assert [i for rows in in_order for i in rows.tolist()] == data
    divided = idist.spawn("threads", made_again, args=(in_order,), nproc_per_node=2)
    assert divided == [data[::2], data[1::2]]
    own = RandomSampler(data)
    assert idist.auto_dataloader(data, batch_size=4, sampler=own).sampler is own
    rows: Any = data
    for unbatched in (rows, DataLoader(rows, batch_size=None, shuffle=True)):
        assert list(idist.auto_dataloader(unbatched, batch_size=None)) == orders[0]
    with pytest.warns(UserWarning, match="for rank 1 of 2, but this is rank 0 of 1"):
        idist.auto_dataloader(data, sampler=DistributedSampler(rows, 2, 1))
    seeded = epochs(0, data, 7)
    assert sorted(seeded[0]) == data
    assert seeded[0] not in (orders[0], epochs(0, data, 8)[0])
    together = idist.spawn("threads", epochs, args=(data, 7), nproc_per_node=2)
    assert [
        i for pair in zip(*(part[0] for part in together), strict=True) for i in pair
    ] == seeded[0]


def made_again(_local_rank: int, loader: Any) -> list[int]:
    return [i for rows in idist.auto_dataloader(loader) for i in rows.tolist()]


def epochs(_local_rank: int, data: Any, seed: int | None = None) -> list[list[int]]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = idist.auto_dataloader(data, batch_size=4, generator=generator)
    orders = []
    for epoch in (0, 0, 1):
        loader.sampler.set_epoch(epoch)
        orders.append([i for rows in loader for i in rows.tolist()])
    plain: Any = DataLoader(data, batch_size=4, shuffle=True)  # it has no epochs
    loader = idist.auto_dataloader(plain, generator=generator)
    return [*orders, *([i for rows in loader for i in rows.tolist()] for _ in range(2))]


class Counting(Dataset[int]):
    """A dataset or a sampler, with another order in each epoch."""

    def __init__(self) -> None:
        self.number = 0

    def set_epoch(self, epoch: int) -> None:
        self.number = epoch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return 10 * self.number + index


class Turning(Counting, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([self.number % 2, 1 - self.number % 2])


def seen(loader: Any, epoch: int) -> list[int]:
    loader.set_epoch(epoch)
    return [rows.item() for rows in loader]


@several_here
def test_a_data_set_and_a_sampler_within_others_learn_of_the_epoch() -> None:
    data: Any = ConcatDataset([Subset(Counting(), [0, 1])])
    loader = idist.auto_dataloader(data, sampler=Turning(), per_replica=True)
    for epoch, order in ((1, [11, 10]), (2, [20, 21])):
        assert [part[0] for part in idist.all_gather(seen(loader, epoch))[:2]] == order
    position = loader.state_dict()
    loader.set_epoch(7)
    loader.load_state_dict(position)
    assert {rows.item() // 10 for rows in loader} == {3}


def test_persistent_workers_learn_of_the_epoch() -> None:
    workers: Any = {"num_workers": 1, "persistent_workers": True}
    loader = idist.auto_dataloader(Counting(), sampler=Turning(), **workers)
    assert [seen(loader, epoch) for epoch in (1, 2)] == [[11, 10], [20, 21]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_an_iterable_data_set_is_told_that_every_rank_reads_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for data in (Stream(), idist.shard(Stream())):
        work: Any = lambda local_rank, data=data: idist.auto_dataloader(data)  # noqa: E731
        idist.spawn("threads", work, nproc_per_node=2)
    said = "a Stream is iterable, so every rank reads all of it, unless .* part: idist.shard"
    (record,) = caplog.records
    assert re.search(said, record.getMessage())
    assert record.levelname == "WARNING"


@several_here
def test_shard_gives_each_rank_and_worker_its_part() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    for workers in (0, 2) if idist.backend() == "gloo" else (0,):  # threads shouldn't fork
        whole = idist.shard(range(7))
        loader = idist.auto_dataloader(whole, num_workers=workers, per_replica=True)
        assert sorted(rows.item() for rows in loader) == [*range(rank, 7, size)]
    loader = idist.auto_dataloader(idist.shard(Turning()))
    assert idist.all_gather(seen(loader, 1))[:2] == [[1], [0]]


@several
def test_the_proxy_deals_out_any_sampler() -> None:
    data: Any = list(range(11))
    weighted = WeightedRandomSampler([1.0] * 9 + [0.0, 0.0], 20)
    for sampler in (RandomSampler(data), weighted):
        proxy = idist.DistributedProxySampler(sampler)
        epochs = []
        for epoch in (0, 1, 0):
            proxy.set_epoch(epoch)
            parts = idist.all_gather(list(proxy))
            assert len({len(part) for part in parts}) == 1
            epochs.append([i for row in zip(*parts, strict=True) for i in row][: len(sampler)])
        assert epochs[0] == epochs[2] != epochs[1]
        if isinstance(sampler, RandomSampler):
            assert sorted(epochs[0]) == data


class Drawn(Sampler[int]):
    """A sampler that draws with a given function."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class Buckets:
    """A batch sampler with random batches, and one more of them in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.count = 4 + epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample([[i, i + 1] for i in range(self.count)], self.count))


@several_here
def test_batches_of_a_batch_sampler_are_dealt_to_ranks_and_resumed() -> None:
    size = idist.get_world_size()
    for epoch in (1, 2):
        loader = idist.auto_dataloader([*range(9)], batch_sampler=Buckets())
        loader.set_epoch(epoch)
        mine = [rows.tolist() for rows in loader]
        everything = [first for part in idist.all_gather(mine) for first, _ in part]
        assert set(everything) == {*range(4 + epoch)}
        assert len(everything) == len(loader) * size < 4 + epoch + size
        loader.set_epoch(epoch)
        next(iter(loader))
        again = idist.auto_dataloader([*range(9)], batch_sampler=Buckets())
        again.load_state_dict(loader.state_dict())
        assert [rows.tolist() for rows in again] == mine[1:]


@several_here
def test_a_sampler_that_draws_elsewhere_is_seeded_or_refused() -> None:
    for draw in (
        lambda: random.sample(range(12), 12),
        lambda: numpy.random.permutation(12).tolist(),
    ):
        loader = idist.auto_dataloader([*range(12)], batch_size=12, sampler=Drawn(draw))
        parts = idist.all_gather([i for rows in loader for i in rows.tolist()])
        assert sorted(i for part in parts for i in part) == [*range(12)]
    own = RandomSampler(range(12), generator=torch.Generator().manual_seed(idist.get_rank()))
    unseeded = Drawn(lambda: numpy.random.default_rng().permutation(12).tolist())
    for sampler in (own, unseeded):
        loader = idist.auto_dataloader([*range(12)], batch_size=12, sampler=sampler)
        name = type(sampler).__name__
        with pytest.raises(CollectiveMismatchError, match=f"a {name}, draws other indices on"):
            list(loader)


class Drawing(Dataset[list[float]]):
    """A dataset with random samples, as under augmentation."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> list[float]:
        return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


class Shuffled(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter([torch.rand(()).item(), random.random()])


@pytest.mark.ranks(2, on="gloo")
def test_data_sets_draw_by_rank_and_the_program_and_streams_draw_alike() -> None:
    for workers in (0, 1):
        idist.seed_everything(7)
        loader = idist.auto_dataloader(Drawing(), num_workers=workers, per_replica=True)
        drawn = [float(column) for _ in range(2) for columns in loader for column in columns]
        assert len(set(sum(idist.all_gather(drawn), []))) == 2 * 2 * 8 * 3
        stream = list(idist.auto_dataloader(Shuffled(), num_workers=workers, per_replica=True))
        idist.assert_equal([stream, torch.rand(2), random.random(), float(numpy.random.rand())])


class Asking(Dataset[str]):
    """A dataset that returns a DataLoader worker's rank, and whether it may call collectives."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        with pytest.raises(ContextError, match=f"of rank|by rank {idist.get_rank()}, whose"):
            idist.barrier()
        where = f"{idist.get_rank()} of {idist.get_world_size()}, {idist.get_local_rank()}"
        return f"{where} {idist.model_name()} {idist.backend()} {idist.is_distributed()}"


@pytest.mark.ranks(2, on=("gloo", "threads"))
def test_workers_of_a_loader_know_their_rank() -> None:
    rank, model = idist.get_rank(), f"{idist.model_name()} {idist.backend()} True"
    for method in ("fork", "forkserver", "spawn"):
        loader = DataLoader(Asking(), num_workers=1, multiprocessing_context=method)
        assert list(loader) == [[f"{rank} of 2, {rank} {model}"]], method


def has_had_its_own(path: str, queue: Any) -> None:
    idist.initialize("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    idist.finalize()
    queue.put(f"{idist.get_rank()} of {idist.get_world_size()}")


@pytest.mark.ranks(2, on="gloo")
def test_a_child_whose_own_job_is_over_is_nobody_s_rank(tmp_path: Path) -> None:
    spawning = multiprocessing.get_context("spawn")
    queue = spawning.SimpleQueue()
    path = str(tmp_path / f"store of {idist.get_rank()}'s child")
    child = spawning.Process(target=has_had_its_own, args=(path, queue))
    child.start()
    assert queue.get() == "0 of 1"
    child.join()


def test_the_proxy_leaves_the_generators_alone() -> None:
    proxy = idist.DistributedProxySampler(RandomSampler(range(9)), 2, 0)
    state = idist.get_rng_state()
    first = list(proxy)
    after = idist.get_rng_state()
    assert torch.equal(after.pop("torch"), state.pop("torch"))
    assert after == state
    torch.rand(3)
    assert list(proxy) == first


def test_bad_samplers_and_sizes_are_refused_alone_too() -> None:
    data: Any = [1, 2]
    samplers: list[Any] = [data, DistributedSampler(data, 1, 0)]
    for wrong in samplers:
        with pytest.raises(ArgumentError):
            idist.DistributedProxySampler(wrong)
    for size in (0, -1, "4", True):
        with pytest.raises(ArgumentError, match="batch_size"):
            idist.auto_dataloader(data, batch_size=size)


@pytest.mark.ranks(2, on="threads")
def test_a_ready_loader_is_made_again_for_each_rank() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    data: Any = list(range(6 * size))
    plain = DataLoader(data, batch_size=2 * size, collate_fn=tuple, drop_last=True)
    loader = idist.auto_dataloader(plain)
    assert (loader.batch_size, loader.drop_last) == (2, True)
    assert next(iter(loader)) == (rank, rank + size)
    assert idist.auto_dataloader(plain, per_replica=True).batch_size == 2 * size
    assert idist.auto_dataloader(data, batch_size=1, per_replica=True).batch_size == 1
    assert idist.auto_dataloader(plain, batch_size=size).batch_size == 1
    shuffled = idist.auto_dataloader(DataLoader(data, batch_size=size, shuffle=True))
    ours = idist.auto_dataloader(data, batch_size=size)
    assert [rows.tolist() for rows in shuffled] == [rows.tolist() for rows in ours]
    weighted = DataLoader(data, size, sampler=WeightedRandomSampler([1.0] * 4, 4))
    assert isinstance(idist.auto_dataloader(weighted).sampler, idist.DistributedProxySampler)
    mine = BatchSampler(idist.DistributedProxySampler(SequentialSampler(data)), 3, False)
    own = type("OwnBatches", (BatchSampler,), {})(mine.sampler, 3, False)
    assert idist.auto_dataloader(DataLoader(data, batch_sampler=own)).batch_sampler is own
    assert idist.auto_dataloader(plain, batch_sampler=mine).batch_sampler is mine
    assert idist.auto_dataloader(plain, shuffle=True).sampler.shuffle
    whole = idist.auto_dataloader(DataLoader(data, batch_size=None))
    assert list(whole) == data[rank::size]
    for is_per_replica in (False, True):
        again = idist.auto_dataloader(loader, per_replica=is_per_replica)
        assert (again.batch_size, again.sampler) == (2, loader.sampler)
    with_workers = idist.auto_dataloader(data, num_workers=size, per_replica=True)
    assert idist.auto_dataloader(with_workers, shuffle=False).num_workers == size
    with pytest.raises(ArgumentError, match="cannot recreate"):
        idist.auto_dataloader(type("OwnLoader", (DataLoader,), {})(data))


@pytest.mark.ranks(1, 2, on="threads")
def test_a_ready_loader_keeps_what_its_batch_sampler_says() -> None:
    size = idist.get_world_size()
    data: Any = list(range(6 * size + 1))

    def made(sampler: Any, **options: Any) -> Any:
        batches = BatchSampler(sampler, 2 * size, drop_last=True)
        return idist.auto_dataloader(DataLoader(data, batch_sampler=batches), **options)

    shuffled = made(RandomSampler(data))
    ours = idist.auto_dataloader(data, batch_size=2 * size, drop_last=True)
    assert (shuffled.batch_size, shuffled.drop_last) == (2, True)
    assert [rows.tolist() for rows in shuffled] == [rows.tolist() for rows in ours]
    whole = made(SequentialSampler(data), per_replica=True)
    assert (whole.batch_size, whole.drop_last) == (2 * size, True)
    assert idist.evaluate(lambda rows: [len(rows)] * len(rows), whole)[0] == 2 * size
    weighted = WeightedRandomSampler([0.0] * 6 * size + [1.0], 4 * size)
    assert [rows.tolist() for rows in made(weighted)] == [[6 * size] * 2] * 2
    unlike: Any = BatchSampler(range(4), 2, False)  # a range is no Sampler
    kept = DataLoader(data, batch_sampler=unlike)
    dealt: Any = idist.auto_dataloader(kept).batch_sampler
    assert (dealt if size == 1 else dealt.sampler) is unlike


@pytest.mark.ranks(1, 2, on="threads")
def test_a_loader_of_a_distributed_sampler_has_one_ranks_counts_already() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    data: Any = list(range(8 * size))
    samplers: tuple[Any, Any] = DistributedSampler(data, size, rank), idist.EvaluationSampler(data)
    for own in samplers:
        batches = BatchSampler(own, 4, False)
        theirs: list[DataLoader[Any]] = [
            DataLoader(data, 4, sampler=own, num_workers=size),
            DataLoader(data, batch_sampler=batches, num_workers=size),
        ]
        for loader in theirs:
            for is_per_replica in (False, True):
                made = idist.auto_dataloader(loader, per_replica=is_per_replica)
                assert (made.batch_size, made.num_workers) == (4, size)
                assert made.sampler is own
        given = idist.auto_dataloader(theirs[0], batch_size=4 * size, num_workers=size)
        assert (given.batch_size, given.num_workers) == (4, 1)  # arguments count as always
    unbatched: DataLoader[Any] = DataLoader(data, None, sampler=samplers[0], num_workers=size)
    assert idist.auto_dataloader(unbatched).num_workers == size


class Pair(NamedTuple):
    x: Any
    y: Any


def test_everything_in_a_batch_is_moved() -> None:
    meta, row = torch.device("meta"), torch.ones(2)
    packed = pack_sequence([torch.ones(2, 3)])
    batch: dict[str, Any] = {"a": [row, "text", 3], "b": Pair(row, (row, None)), "c": packed}
    made = moved(OrderedDict(batch), meta)
    assert type(made) is OrderedDict
    tensors = [made["a"][0], made["b"].x, made["b"].y[0], made["c"].data]
    assert {item.device for item in tensors} == {meta}
    assert (made["a"][1:], made["b"].y[1]) == (["text", 3], None)
    assert made["c"].batch_sizes.device.type == "cpu"  # its own `to` leaves it there
    assert batch["a"][0] is row
    assert moved(batch["a"][1:], meta) == ["text", 3]


def test_what_has_nothing_to_move_stays_the_same_object() -> None:
    cpu, row = torch.device("cpu"), torch.ones(2)
    made = Made(row, factor=2)
    made.sum += 1
    for batch in ({"a": [row, "text"]}, [row, 3], Pair(row, (row, None)), made, Frozen(row), "a"):
        assert moved(batch, cpu) is batch
    there = moved({"made": made, "frozen": Frozen(row), "other": [1]}, torch.device("meta"))
    assert there["made"].x.device.type == there["frozen"].x.device.type == "meta"
    assert there["made"].sum.device.type == "meta"
    assert there["made"].notes is made.notes
    assert made.x is row


@dataclass
class Made:
    x: Any
    factor: InitVar[int]
    sum: Any = field(init=False)
    notes: list[str] = field(init=False, default_factory=list)

    def __post_init__(self, factor: int) -> None:
        self.sum = self.x.sum() * factor


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


def test_batches_come_on_the_device() -> None:
    data: Any = [{"x": torch.ones(2)} for _ in range(3)]
    loader = ReplicaLoader(data, torch.device("meta"), batch_size=2)
    assert [batch["x"].device.type for batch in loader] == ["meta", "meta"]
    assert [batch["x"].device.type for batch in ReplicaLoader(data)] == ["cpu"] * 3
