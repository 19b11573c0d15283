"""What type checkers are told of the public API, and whether it is so.

mypy and pyright read each ``assert_type``, pytest runs it: what a checker is told must be what
comes. Where a call is wrong, both checkers must say so, or the comment that ignores it is an error.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import ast
import collections
import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, Union, get_args, get_origin

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import unisono as idist
from unisono import lifecycle, models, options
from unisono.errors import ArgumentError, PayloadError, PeerFailedError, WorkerFailedError
from unisono.model import reduction

if TYPE_CHECKING:
    from typing_extensions import TypedDict, assert_type

    class Report(TypedDict):
        loss: float

else:
    Report: TypeAlias = dict

    def assert_type(value: object, kind: object) -> None:
        assert fits(value, kind), f"{value!r} is told to be {kind}"


# To a type checker a float may be an int.
_NUMBERS: dict[object, tuple[type, ...]] = {
    **{bool: (bool,), int: (int,), float: (float, int), complex: (complex, float, int)},
    None: (type(None),),
}


def fits(value: Any, kind: Any) -> bool:
    """Tell whether a value is of a type, the elements of containers and handles included."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if kind in _NUMBERS:
        return type(value) in _NUMBERS[kind]
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if not isinstance(value, origin or kind):
        return False
    if origin is idist.Handle:
        return fits(value.wait(), inner[0])
    if origin is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(map(fits, value, inner))
    if origin in (list, tuple):
        return all(fits(item, inner[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return all(fits(key, inner[0]) and fits(value[key], inner[1]) for key in value)
    return True


@dataclass
class Loss:
    value: float
    seen: int


class Scores(NamedTuple):
    best: float
    counts: Tensor


class Level(enum.IntEnum):
    LOW = 1


THREE: Final = 3


def sums() -> None:
    number, weight = idist.get_rank(), nn.Parameter(torch.ones(2))
    assert_type(idist.all_reduce(weight), Tensor)
    assert_type(idist.all_reduce(THREE), int)
    assert_type(idist.all_reduce(Level.LOW), int)
    assert_type(idist.all_reduce(np.float32(1)), Any)
    assert_type(idist.reduce(Level.LOW), int | None)
    assert_type(idist.exact_sum(weight), Tensor)
    assert_type(idist.exact_sum({"a": torch.ones(2)}), dict[str, Tensor])
    assert_type(idist.all_reduce(number, "max"), int)
    assert_type(idist.all_reduce(True), bool)
    assert_type(idist.all_reduce(0.5, "MIN"), float)
    assert_type(idist.all_reduce(1j), complex)
    assert_type(idist.all_reduce(number, idist.ReduceOp.SUM), int)
    assert_type(idist.all_reduce(number, dist.ReduceOp.SUM), Any)
    assert_type(idist.all_reduce(weight, dist.ReduceOp.SUM), Tensor)
    assert_type(idist.all_reduce(torch.ones(2), group=[0]), Tensor)
    assert_type(idist.all_reduce(number, group=[0]), int)
    assert_type(idist.reduce(number), int | None)
    assert_type(idist.reduce(torch.ones(2), 0, "SUM", [0]), Tensor | None)
    assert_type(idist.reduce_scatter(torch.ones(6)), Tensor)
    # The mean of an int is a float, which no checker is told.
    assert_type(idist.all_reduce(number, "mean"), Any)
    assert_type(idist.all_reduce(0.5, dist.ReduceOp.AVG), Any)
    assert_type(idist.all_reduce(torch.ones(2), "mean"), Tensor)
    assert_type(idist.reduce(number, 0, "mean"), Any)


def sums_of_containers() -> None:
    counts: collections.OrderedDict[str, int] = collections.OrderedDict(seen=3)
    report: Report = {"loss": 0.5}
    losses: dict[str, float | Tensor] = {"a": 0.5, "b": torch.ones(2)}
    assert_type(idist.all_reduce({"seen": 3}), dict[str, int])
    assert_type(idist.all_reduce(counts, "MAX"), collections.OrderedDict[str, int])
    assert_type(idist.all_reduce([1, 2]), list[int])
    assert_type(idist.all_reduce((idist.get_rank(), torch.ones(2))), tuple[int, Tensor])
    assert_type(idist.all_reduce(Loss(0.5, 3)), Loss)
    assert_type(idist.all_reduce(Scores(0.5, torch.ones(2))), Scores)
    assert_type(idist.all_reduce(report), Report)
    assert_type(idist.reduce(Loss(0.5, 3)), Loss | None)
    assert_type(idist.reduce_sum(3), int)
    assert_type(idist.reduce_sum(True), int)
    assert_type(idist.reduce_sum(torch.ones(2)), Tensor)
    assert_type(idist.reduce_sum({"seen": 3}), Any)
    assert_type(idist.all_reduce({"seen": 3}, "mean"), Any)
    assert_type(idist.all_reduce(Loss(0.5, 3), "mean"), Any)
    assert_type(idist.all_reduce([torch.ones(2)], "mean"), Any)
    assert_type(idist.reduce_mean(3), float)
    assert_type(idist.reduce_mean(torch.tensor(3), 4), Tensor)
    assert_type(idist.reduce_mean([0.5, 1.5]), Any)
    assert_type(idist.reduce_dict({"loss": 0.5}), dict[str, float])
    assert_type(idist.reduce_dict({"seen": 3}), dict[str, float])
    assert_type(idist.reduce_dict({"seen": 3}, "SUM"), dict[str, int])
    assert_type(idist.reduce_dict({"loss": torch.ones(2)}), dict[str, Tensor])
    assert_type(idist.reduce_dict(losses), dict[str, float | Tensor])


def gathers() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    name, mine = f"rank {rank}", torch.ones(2)
    assert_type(idist.all_gather(name), list[str])
    assert_type(idist.all_gather(3), list[int])
    assert_type(idist.all_gather(None), list[None])
    assert_type(idist.all_gather({"a": 1}), list[dict[str, int]])
    assert_type(idist.all_gather(mine), Tensor)
    assert_type(idist.all_gather(mine, uneven=True), Any)
    assert_type(idist.all_gather(mine, [0]), Tensor)
    assert_type(idist.all_gather_tensors_with_shapes(mine, [[2]] * size), list[Tensor])
    assert_type(idist.gather(name), list[str] | None)
    assert_type(idist.gather(mine), Tensor | None)
    results = [f"sample {i}" for i in idist.EvaluationSampler(range(5))]
    assert_type(idist.gather_results(results, 5), list[str])
    assert_type(idist.shard(results), IterableDataset[str])
    assert_type(idist.gather_results(tuple(results), 5), list[str])
    assert_type(idist.gather_results(torch.arange(rank, 5, size), 5), Tensor)
    assert_type(idist.gather_results(results, 5, dst=0), Any)


def transfers() -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    words = [f"to {other}" for other in range(size)]
    anything: Any = "x" if rank == 0 else None
    assert_type(idist.broadcast(2**60), int)
    assert_type(idist.broadcast(torch.ones(2)), Tensor)
    assert_type(idist.broadcast({"seed": 1}, src=0), dict[str, int])
    assert_type(idist.broadcast(anything), Any)
    if rank == 0:
        assert_type(idist.broadcast("x"), str)
    else:
        assert_type(idist.broadcast(), Any)
    assert_type(idist.broadcast(None, safe_mode=True), Any)
    assert_type(idist.scatter(words), str)
    assert_type(idist.scatter(tuple(words)), str)
    assert_type(idist.scatter(torch.ones(size, 2)), Tensor)
    assert_type(idist.all_to_all(words), list[str])
    assert_type(idist.all_to_all(tuple(words), list(range(size))), list[str])
    assert_type(idist.all_to_all(torch.ones(size)), Tensor)
    if size > 1 and rank == 0:
        idist.send("x", 1)
    elif size > 1:
        assert_type(idist.recv(0), Any)
    idist.barrier()
    assert_type(idist.new_group([0], timeout=20), idist.Group)
    assert_type(idist.local_group(), idist.Group)


def in_place_and_in_the_background() -> None:
    weight, mine, size = nn.Parameter(torch.ones(2)), torch.ones(2), idist.get_world_size()
    assert_type(idist.all_reduce_(weight), nn.Parameter)
    assert_type(idist.all_reduce_(torch.ones(2), "mean"), Tensor)
    assert_type(idist.broadcast_(weight), nn.Parameter)
    # With async_op no checker knows whether it is a handle.
    assert_type(idist.all_reduce_(weight, async_op=True), Any)
    assert_type(idist.all_reduce(3, async_op=bool(size)), Any)
    assert_type(idist.all_gather(mine, uneven=True, async_op=True), Any)
    assert_type(idist.barrier(async_op=True), Any)
    handle = idist.all_gather("s", async_op=True)
    assert isinstance(handle, idist.Handle) and handle.wait() == ["s"] * size


def trained(local_rank: int, rate: float, name: str = "") -> str:
    return f"{name}{local_rank * rate}"


def tried(local_rank: int, *, rate: float) -> float:
    return rate


def anything(*args: Any) -> int:
    return len(args)


class Trainer:
    def fit(self, local_rank: int, steps: int) -> bytes:
        return bytes(steps)


def half(number: float) -> float:
    return number / 2


def test_calls_that_make_replicas() -> None:
    rate, numbers = {"rate": 0.5}, tuple(map(float, range(3)))
    dots: Callable[..., int] = anything
    options: dict[str, Any] = {"timeout": 20}  # as of a plug-in
    assert_type(idist.spawn("threads", anything), list[int])
    assert idist.spawn("threads", anything, **options) == [1]
    assert_type(idist.spawn("threads", trained, (3,), nproc_per_node=2), list[str])
    assert_type(idist.spawn("threads", trained, args=(0.5, "x"), timeout=20), list[str])
    assert_type(idist.spawn("threads", trained, [0.5]), list[str])
    assert_type(idist.spawn("threads", trained, (), rate), list[str])
    assert_type(idist.spawn("threads", tried, kwargs_dict=rate), list[float])
    assert_type(idist.spawn("threads", Trainer().fit, (3,)), list[bytes])
    assert_type(idist.spawn("threads", lambda local_rank: local_rank), list[int])
    assert_type(idist.spawn("threads", lambda local_rank, x: x, ("x",)), list[str])
    assert_type(idist.spawn("threads", anything, numbers), list[int])
    assert_type(idist.spawn("threads", dots, (1, "x")), list[int])
    assert_type(idist.spawn("threads", functools.partial(trained, rate=1)), list[str])
    assert_type(idist.spawn("gloo", trained, (0.5,), join=False).join(), list[str] | Any)
    with idist.WorkerPool("threads", 2, deadline_s=60, timeout=20) as pool:
        assert_type(pool.run(trained, 3), list[str])
        assert_type(pool.run(trained, rate=0.5, name="x"), list[str])
        assert_type(pool.run(tried, rate=0.5), list[float])
        assert_type(pool.run(Trainer().fit, 3), list[bytes])
        assert_type(pool.run(anything, 1, "x"), list[int])
        assert_type(pool.map(half, [1, 2]), list[float])
        assert_type(pool.map(abs, [-1, 2]), list[int])
    with idist.Parallel("threads", nproc_per_node=2, timeout=20) as parallel:
        assert_type(parallel.run(trained, 0.5, name="x"), list[str])


def sections() -> None:
    @idist.one_rank_only(with_barrier=True)
    def load(name: str, size: int = 1) -> bytes:
        return name.encode() * size

    @idist.master_only
    def save(name: str, *, size: int) -> int:
        return size

    assert_type(load("x", size=2), bytes | None)
    assert_type(save("x", size=2), int | None)
    assert_type(idist.run_on_rank(lambda: 3), int)
    assert_type(idist.shared(lambda: [3]), list[int])
    assert_type(idist.auto_dataloader([3]), idist.ReplicaLoader)
    assert_type(idist.shared_empty(2, 3, dtype=torch.int64), Tensor)
    assert_type(idist.shared_empty((2, 3)), Tensor)
    with pytest.raises(PeerFailedError, match="TypeError"):
        load(3, sise=2)  # type: ignore[call-arg, arg-type]


CHECKS = (sums, sums_of_containers, gathers, transfers, in_place_and_in_the_background, sections)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_comes_is_what_checkers_are_told(check: Callable[[], None]) -> None:
    def replica(local_rank: int) -> None:
        check()

    for size in (1, 2):
        idist.spawn("threads", replica, nproc_per_node=size)


def test_numbers_of_numpy_are_taken() -> None:
    for number in (np.float64(0.5), np.int64(3), np.float32(0.5)):
        assert type(idist.all_reduce(number)) in (int, float)
    truth: Any = np.True_  # which is no number to a type checker
    assert idist.all_reduce({"is_right": truth}) == {"is_right": True}
    assert idist.all_reduce(truth) is True


WRONG: tuple[tuple[type[Exception], str, Callable[[], object]], ...] = (
    (ArgumentError, "unknown reduction", lambda: idist.all_reduce(3, op="summ")),  # type: ignore[call-overload]
    (ArgumentError, "unknown reduction", lambda: idist.all_reduce_(torch.ones(1), "summ")),  # type: ignore[call-overload]
    (ArgumentError, "unknown reduction", lambda: idist.reduce(torch.ones(1), op=None)),  # type: ignore[call-overload]
    (TypeError, "grup", lambda: idist.all_reduce(3, grup=[0])),  # type: ignore[call-overload]
    (PayloadError, "a str can't be reduced", lambda: idist.all_reduce("text")),  # type: ignore[call-overload]
    (PayloadError, "a ndarray can't be reduced", lambda: idist.all_reduce(np.ones(3))),  # type: ignore[call-overload]
    (PayloadError, "takes a tensor", lambda: idist.broadcast_(3)),  # type: ignore[call-overload]
    (TypeError, "ned", lambda: idist.print("text", ned="")),  # type: ignore[call-arg]
    (ArgumentError, "timout", lambda: idist.spawn("threads", trained, (0.5,), timout=3)),  # type: ignore[call-overload]
    (ArgumentError, "timout", lambda: idist.initialize("gloo", timout=3)),  # type: ignore[call-arg]
    (ArgumentError, "timout", lambda: idist.Parallel("threads", nproc_per_node=2, timout=3)),  # type: ignore[call-arg]
    (ArgumentError, "timout", lambda: idist.WorkerPool("threads", timout=3)),  # type: ignore[call-arg]
    (ArgumentError, "timout", lambda: idist.new_group([0], timout=3)),  # type: ignore[call-arg]
    (ArgumentError, "start_method", lambda: idist.spawn("gloo", half, start_method="frok")),  # type: ignore[call-overload]
    (WorkerFailedError, "missing 1 required", lambda: idist.spawn("threads", trained)),  # type: ignore[arg-type]
    (WorkerFailedError, "takes from 2 to 3", lambda: idist.spawn("threads", trained, (1, "x", 2))),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("kind", "said", "call"), WRONG)
def test_what_is_wrong_is_an_error_for_checkers_too(
    kind: type[Exception], said: str, call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_a_wrong_argument_of_a_pool_is_an_error_for_checkers_too() -> None:
    with idist.WorkerPool("threads") as pool, pytest.raises(WorkerFailedError):
        pool.run(trained, rite=0.5)  # type: ignore[call-arg]


def _options_of_models() -> set[str]:
    """Read what the built-in models take, whether or not their libraries are here."""
    taken: set[str] = set()
    for path in Path(models.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "options":
                assert isinstance(node.value, ast.Call)
                taken |= ast.literal_eval(node.value.args[0])
    return taken


def test_checkers_know_every_option_that_is_taken() -> None:
    taken = _options_of_models()
    assert "timeout" in taken
    assert options.InitializeOptions.__optional_keys__ == taken | {"rank", "world_size"}
    assert options.SpawnOptions.__optional_keys__ == taken | lifecycle._LAUNCH_OPTIONS - {"join"}
    named = {*inspect.signature(idist.Parallel).parameters} - {"spawn_kwargs"}
    beside = options.ParallelOptions.__optional_keys__
    assert not named & beside
    wanted = options.SpawnOptions.__optional_keys__ | options.InitializeOptions.__optional_keys__
    assert wanted == beside | named - {"backend", "nproc_per_node"}


def test_checkers_know_every_name_of_an_operation_in_upper_and_in_lower_case() -> None:
    folds, means = get_args(reduction._FoldName), get_args(reduction._MeanName)
    average = idist.ReduceOp.AVERAGE
    assert {reduction.parse_op(name) for name in means} == {average}
    assert average not in {reduction.parse_op(name) for name in folds}
    names = {case for name in reduction._BY_NAME for case in (name.upper(), name.lower())}
    assert {*folds, *means} == names
