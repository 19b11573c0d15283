"""Evaluation of every sample once and in order, seeds, random states, and batch sizes."""

from __future__ import annotations

import io
import logging
import mmap
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

import unisono as idist
from tests.support.worlds import REAL, alone_and_several, run, several
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    EnvironmentDetectionError,
    PayloadError,
    PeerFailedError,
)

SIZES = [("threads", 2), ("threads", 3), ("threads", 5), ("gloo", 2)]


@pytest.mark.parametrize(("backend", "size"), [*SIZES, *REAL])
def test_1797_digits_come_back_once_each_and_in_order(backend: str, size: int) -> None:
    labels = load_digits().target.tolist()
    for gathered, as_tensor, padded in run(backend, size, evaluate, labels):
        assert gathered == [None if i % 10 == 3 else (i, label) for i, label in enumerate(labels)]
        assert as_tensor.tolist() == labels
        assert padded == labels


def evaluate(local_rank: int, labels: list[int]) -> tuple[Any, Any, Any]:
    data: Any = list(enumerate(labels))
    loader: Any = DataLoader(data, batch_size=64, sampler=idist.EvaluationSampler(data))
    part, numbers = [], []
    for places, values in loader:
        rows = zip(places.tolist(), values.tolist(), strict=True)
        part += [None if i % 10 == 3 else (i, value) for i, value in rows]
        numbers.append(values)
    counts = idist.all_gather(len(part))
    assert sum(counts) == len(labels)
    assert max(counts) - min(counts) <= 1
    gathered = idist.gather_results(part, len(labels))
    as_tensor = idist.gather_results(torch.cat(numbers), len(labels))
    padding: Any = DistributedSampler(data, idist.get_world_size(), idist.get_rank(), shuffle=False)
    padded = idist.gather_results([labels[i] for i in padding], len(labels), dst=1)
    assert (padded is None) == (idist.get_rank() != 1)
    return gathered, as_tensor, idist.broadcast(padded, src=1)


@several
def test_results_that_are_missing_are_named() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    for dst in (None, 0):
        with pytest.raises(CollectiveMismatchError, match=r"ranks \[1\] have too few"):
            idist.gather_results([0] * (3 - (rank == 1)), 3 * size, dst=dst)
    unlike: list[Any] = [torch.ones(1, 2 + rank), [1] if rank else torch.ones(1)]
    unlike.append(torch.ones(1, dtype=torch.float64 if rank else torch.int64))
    for part in unlike:
        for dst in (None, 0):
            with pytest.raises(CollectiveMismatchError, match=r"gather_results.*rank 1: "):
                idist.gather_results(part, size, dst=dst)
    empty = torch.tensor([5] if rank == 0 else [])  # an empty one has the dtype float32
    assert idist.gather_results(empty, 1).tolist() == [5]
    assert idist.gather_results([], 0) == []
    assert len(idist.gather_results(torch.ones(1, 2) if rank == 0 else torch.ones(0, 2), 1)) == 1


@alone_and_several
def test_seeds_and_measures() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    assert len(set(idist.all_gather(idist.sync_random_seed()))) == 1
    assert idist.sync_random_seed(rank) == 0
    assert set(idist.all_gather(idist.seed_everything(11))) == {11}
    own = [torch.rand(1, generator=idist.rank_generator(seed)).item() for seed in (11, 11, None)]
    assert own[0] == own[1] != own[2]
    assert len({*idist.all_gather(own[0]), *idist.all_gather(own[2])}) == 2 * size
    if idist.model_name() != "threads":  # threads share the generators
        idist.seed_everything(11)
        drawn = (torch.rand(1).item(), random.random(), float(numpy.random.rand()))
        assert len(set(idist.all_gather(drawn))) == 1
        idist.seed_everything(11, per_rank=True)
        assert torch.rand(1).item() == own[0]
        assert len(set(idist.all_gather(torch.rand(1).item()))) == size
        state = idist.get_rng_state()
        first = torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist()
        idist.set_rng_state(state)
        again = torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist()
        assert first == again
    value = torch.tensor([rank, 2])
    assert idist.reduce_sum(value).tolist() == [sum(range(size)), 2 * size]
    assert value.tolist() == [rank, 2]
    torch.testing.assert_close(idist.reduce_mean(value), torch.tensor([(size - 1) / 2, 2.0]))
    assert idist.reduce_mean(1.5, nprocs=3) == size * 0.5
    ordered = {"b": rank, "a": torch.tensor(2)} if rank else {"a": torch.tensor(2), "b": rank}
    means = idist.reduce_dict(ordered)
    assert (means["b"], means["a"].item()) == ((size - 1) / 2, 2.0)
    assert idist.get_dist_info() == (rank, size)


@alone_and_several
def test_sums_and_means_are_right_or_refused() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    assert idist.reduce_mean(True) == 1.0
    assert idist.reduce_mean(rank == 0) == 1 / size
    assert type(idist.reduce_sum(True)) is int
    assert idist.reduce_sum(True) == size
    flags = torch.tensor([True, rank == 0])
    assert idist.reduce_sum(flags).tolist() == [size, 1]
    torch.testing.assert_close(idist.reduce_mean(flags), torch.tensor([1.0, 1 / size]))
    assert idist.reduce_dict({"ok": True, "flags": flags})["ok"] == 1.0
    large = {torch.uint8: 200, torch.int8: 100, torch.int32: 2**31 - 1, torch.int64: 2**62}
    for dtype, value in {**large, torch.uint64: 2**64 - 1}.items():
        tensor = torch.tensor([value], dtype=dtype)
        for mean in (idist.reduce_mean(tensor), idist.reduce_dict({"x": tensor})["x"]):
            assert mean.dtype is torch.float32
            torch.testing.assert_close(mean.item(), float(value), rtol=1e-6, atol=0)
        if size == 1 or dtype.itemsize == 8:  # sums of 64 bits wrap around
            assert torch.equal(idist.reduce_sum(tensor), tensor * size)
        else:
            for call in (idist.reduce_sum, lambda item: idist.reduce_dict({"x": item}, "sum")):
                with pytest.raises(PayloadError, match=rf"a sum of {dtype}\[1\] .* doesn't fit"):
                    call(tensor)
        part = torch.tensor([value // size, 3, 0], dtype=dtype)
        assert idist.reduce_sum(part).tolist() == [value // size * size, 3 * size, 0]
        assert idist.reduce_sum(part).dtype is dtype
    least = torch.tensor([-(2**62), -1, 2**40])
    if size == 2:
        assert idist.reduce_sum(least).tolist() == [-(2**63), -2, 2**41]
    for dtype, number in ((torch.float16, 4e4), (torch.float32, 4e4), (torch.bfloat16, 1e38)):
        tensor = torch.tensor([number], dtype=dtype)
        for mean in (idist.reduce_mean(tensor), idist.reduce_dict({"x": tensor})["x"]):
            assert mean.dtype is dtype
            torch.testing.assert_close(mean, tensor)
    assert idist.reduce_mean([2, {"a": torch.tensor(4.0)}], nprocs=2 * size) == [
        1.0,
        {"a": torch.tensor(2.0)},
    ]
    with pytest.raises(PayloadError):
        idist.reduce_mean("x")  # type: ignore[call-overload]


@alone_and_several
def test_a_function_runs_on_one_rank_for_all() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    value = idist.run_on_rank(lambda: {"who": idist.get_rank()}, rank=size - 1)
    assert value == {"who": size - 1}
    with pytest.raises(PeerFailedError, match="rank 0 raised ZeroDivisionError") as caught:
        idist.run_on_rank(lambda: 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == (rank == 0)


@pytest.mark.ranks(2, on="threads")
def test_a_job_prints_logs_and_shows_once() -> None:
    rank = idist.get_rank()
    once, everyone, bar = io.StringIO(), io.StringIO(), io.StringIO()
    idist.print("a", "b", sep="-", end="!", file=once, flush=True)
    assert once.getvalue() == ("[rank 0] a-b!" if rank == 0 else "")
    idist.print(1, all=True, file=everyone)
    assert everyone.getvalue() == f"[rank {rank}] 1\n"
    made = logging.LogRecord("n", logging.INFO, "f", 1, "hi", None, None)
    bad = logging.LogRecord("n", logging.ERROR, "f", 1, "hi", None, None)
    gate = idist.RankFilter(level=logging.ERROR)
    assert [bool(gate.filter(made)), bool(gate.filter(bad))] == [rank == 0, True]
    line = idist.RankFormatter("%(rank)s/%(world_size)s %(local_rank)s: %(message)s").format(made)
    assert line == f"{rank}/2 {rank}: hi"
    assert list(idist.progress(iter(range(20)), total=20, file=bar)) == list(range(20))
    assert bar.getvalue().count("\n") == (10 if rank == 0 else 0)
    assert ("20/20" in bar.getvalue()) == (rank == 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_a_log_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, log = Terminal(), io.StringIO()
    for item in idist.progress(range(7), label="epoch [2]", file=terminal):
        print(item, file=log)
    assert "epoch [2]" in terminal.getvalue()
    assert "7/7" in terminal.getvalue()
    assert log.getvalue().split() == list("0123456")
    for items, lines in ((range(3), ["x: 1/3", "x: 2/3", "x: 3/3"]), (iter("ab"), ["x: 2"])):
        log = io.StringIO()
        assert list(idist.progress(items, label="x", file=log))
        assert [line.partition(",")[0] for line in log.getvalue().splitlines()] == lines


def test_alone_nothing_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    idist.print("x", 1)
    assert capsys.readouterr().out == "x 1\n"
    assert idist.get_device_memory_gb() == 0.0
    before = idist.get_current_memory_gb()
    with mmap.mmap(-1, 2**26) as new:  # malloc might reuse memory of another test
        new.write(b"x" * 2**26)
        assert 0.05 < idist.get_current_memory_gb() - before < 0.5


def test_launchers_are_inferred_and_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idist.infer_launcher() == "none"
    idist.init_dist("none", "gloo", rank=0, world_size=1, timeout=None)
    idist.finalize()
    with pytest.raises(ArgumentError, match="are given together"):
        idist.init_dist("none", "gloo", rank=0)
    with pytest.raises(EnvironmentDetectionError, match="openmpi or mpich"):
        idist.init_dist("mpi", "gloo")
    known = r"'torchrun'\. Did you mean 'pytorch'\? Known: mpi, none, pytorch, slurm"
    with pytest.raises(ArgumentError, match=known):
        idist.init_dist("torchrun")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert idist.infer_launcher() == "mpi"
    idist.init_dist("mpi", "gloo")
    assert idist.get_dist_info() == (0, 1)
    assert idist.backend() == "gloo"
    idist.finalize()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert idist.infer_launcher() == "pytorch"


def test_bad_arguments_are_refused_alone_too() -> None:
    for seed in (-1, 2**32, 1.5, True):
        with pytest.raises(ArgumentError, match="seed="):
            idist.seed_everything(seed)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a list or a tensor"):
        idist.gather_results("abc", 3)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="below"):
        idist.EvaluationSampler([1], 2, 2)
    with pytest.raises(ArgumentError, match="dst=3"):
        idist.gather_results([1], 1, dst=3)
    with pytest.raises(ArgumentError, match="get_rng_state"):
        idist.set_rng_state({})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@alone_and_several
def test_results_are_of_all_samples_and_of_one_kind_or_refused() -> None:
    data: Any = [*range(10)]
    size = idist.get_world_size()
    every = [SubsetRandomSampler(data), RandomSampler(data), None]
    for sampler in every:
        loader = DataLoader(data, batch_size=2 * size, sampler=sampler)
        assert idist.evaluate(lambda batch: batch * 2, loader).tolist() == [2 * i for i in data]
    for some in (SubsetRandomSampler([7, 8, 9]), RandomSampler(data, num_samples=3)):
        with pytest.raises(ArgumentError, match=r"a \w+RandomSampler|a RandomSampler, draws 3"):
            idist.evaluate(lambda batch: batch, DataLoader(data, sampler=some))
    with pytest.raises(ArgumentError, match="no length, or is iterable"):
        idist.evaluate(lambda batch: batch, Stream())
    calls: list[int] = []

    def changing(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"x": batch, "late": batch} if len(calls) > 1 else {"x": batch}

    with pytest.raises(PeerFailedError, match=r"named \['late', 'x'\], earlier batches \['x'\]"):
        idist.evaluate(changing, data, batch_size=2 * size)
    for count in (2, 4):
        with pytest.raises(
            PeerFailedError, match=f"a batch of {count} samples gave a tuple of 2 tensors"
        ):
            idist.evaluate(
                lambda batch: (batch, batch), [*range(4 * size)], batch_size=count * size
            )


@pytest.mark.ranks(2, on="threads")
def test_a_batch_that_is_too_large_within_evaluate_or_a_section_is_halved() -> None:
    def check(size: int) -> bool:
        if size > 1 and idist.get_rank() == 0:
            raise MemoryError(f"no room for {size}")
        return True

    def evaluate(fn: Callable[[Any], object]) -> Any:
        return idist.evaluate(lambda rows: (fn(rows), rows)[1], [1, 2], batch_size=2)

    uses: list[Callable[[int], object]] = [
        lambda size: check(size) and evaluate(len),  # one rank has left, others evaluate
        lambda size: check(size) and evaluate(lambda _: idist.barrier()),
        lambda size: evaluate(lambda _: check(size)),
        lambda size: idist.run_on_rank(lambda: check(size)),
    ]
    for use in uses:
        found = idist.find_executable_batch_size(4)(lambda size, use=use: (use(size), size)[1])
        assert found() == 1


@pytest.mark.ranks(2, on=("threads", "gloo"))
def test_a_rank_out_of_memory_in_the_middle_of_a_step_halves_it_on_all() -> None:
    """On gloo, rank 0 has a result by then, which is freed like the objects of a failed step."""
    is_without_sync = idist.backend() == "gloo"
    before: list[weakref.ref[nn.Module]] = []
    freed: list[bool] = []

    @idist.find_executable_batch_size(32)
    def train(batch_size: int) -> tuple[int, nn.Module]:
        freed.extend(each() is None for each in before[-1:])
        model = idist.auto_model(nn.Linear(4, 1))
        before.append(weakref.ref(model))
        with idist.no_sync(model) if is_without_sync else nullcontext():
            x = torch.ones(batch_size, 4)
            if idist.get_rank() == 1 and batch_size > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            model(x).sum().backward()
        return batch_size, model

    assert (train()[0], freed) == (8, [True, True])


@pytest.mark.ranks(2, on="threads")
def test_each_rank_raises_its_own_error_with_its_own_cause() -> None:
    rank, cause = idist.get_rank(), KeyError("the cause")

    @idist.find_executable_batch_size(4)
    def train(batch_size: int, failing: int) -> None:
        if rank < failing:
            raise ValueError(f"of rank {rank}") from cause

    with pytest.raises(ValueError, match=f"of rank {rank}") as caught:
        train(2)
    assert caught.value.__cause__ is cause
    with pytest.raises(PeerFailedError if rank else ValueError, match="of rank 0"):
        train(1)


@dataclass
class Counts:
    seen: int = field(init=False, default=0)
    unset: int = field(init=False)
    parts: list[Any] = field(default_factory=list)


@pytest.mark.ranks(2, on="threads")
def test_all_fields_of_dataclasses_are_compared_and_modules_within_them() -> None:
    rank, net = idist.get_rank(), nn.Linear(1, 1)
    idist.broadcast_params(net)
    tree = {"a": (Counts(parts=[net]), 1)}
    idist.assert_equal(tree)
    for parameter in net.parameters():
        parameter.data.fill_(rank)
    with pytest.raises(CollectiveMismatchError, match=r"2 of 4 .*'\.parts'\}\[0\]\{'weight'\}"):
        idist.assert_equal(tree)
    counts = Counts()
    counts.seen = rank
    with pytest.raises(CollectiveMismatchError, match=r"1 of .*\{'\.seen'\}"):
        idist.assert_equal(counts)
    counts.parts.append(counts)
    with pytest.raises(PayloadError, match="contains itself"):
        idist.assert_equal(counts)


@pytest.mark.ranks(2, on="threads")
def test_long_ints_and_views_of_what_they_show_are_compared() -> None:
    rank = idist.get_rank()
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    shown = [numbers.conj(), numbers.conj().imag]
    idist.assert_equal([2**70, *(shown if rank else [item.clone() for item in shown])])
    idist.assert_equal([item.resolve_conj().resolve_neg() if rank else item for item in shown])
    for unlike in (2**70 + rank, numbers.conj() if rank else numbers):
        with pytest.raises(CollectiveMismatchError):
            idist.assert_equal(unlike)
