"""Checkpoints have the same keys for any wrapper of a model and any number of ranks."""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import unisono as idist
from tests.support.worlds import REAL, SERIAL, alone_and_several, run, run_all
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PayloadError,
    PeerFailedError,
    UnsupportedOperation,
)

WAYS = [SERIAL, pytest.param("threads", 2, id="threads-2"), pytest.param("gloo", 2, id="gloo-2")]
FIRST_STEP = torch.ones(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.module = nn.Linear(8, 2)  # a name that wrappers use, too

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(self.body(rows))
        return out


def plain_net(value: float) -> Net:
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)
    return net


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


KEYS = list(plain_net(0.0).state_dict())


def saves(local_rank: int, path: str) -> None:
    """Train one step, so that the optimizer has a state, and save model and optimizer."""
    model = idist.auto_model(plain_net(0.5))
    optimizer = idist.auto_optim(momentum(model))
    model(FIRST_STEP).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idist.save_checkpoint({"model": model, "optimizer": optimizer, "epoch": 3}, path)
        idist.save_checkpoint(model, f"{path}.model")
        idist.save_checkpoint([idist.unwrap_model(model).state_dict()], f"{path}.plain")


def loads(local_rank: int, path: str) -> None:
    model = idist.auto_model(plain_net(0.0))
    optimizer = idist.auto_optim(momentum(model))
    into = {"model": model, "optimizer": optimizer, "epoch": 0}
    assert idist.load_checkpoint(path, into=into) is into
    assert into["epoch"] == 3
    assert len(optimizer.state_dict()["state"]) == 6
    again = idist.auto_model(plain_net(0.0))
    assert idist.load_checkpoint(f"{path}.model", into=again) is again
    for name, item in torch.load(path, weights_only=True)["model"].items():
        for each in (model, again):
            assert torch.equal(item, idist.unwrap_model(each).state_dict()[name])


def _numbers(net: nn.Module) -> list[float]:
    return [float(item.double().sum()) for item in net.state_dict().values()]


@pytest.mark.parametrize(("backend", "size"), [*WAYS, *REAL])
def test_a_checkpoint_loads_under_any_number_of_ranks(
    backend: str, size: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "x.pt")
    run_all(backend, size, (saves, path), (loads, path))
    loads(0, path)
    reader, readers = ("gloo", 2) if backend == "serial" else ("threads", 3)
    run(reader, readers, loads, path)
    loaded = torch.load(path, weights_only=True)
    assert list(loaded["model"]) == KEYS
    assert list(torch.load(f"{path}.model", weights_only=True)) == KEYS
    assert list(torch.load(f"{path}.plain", weights_only=True)[0]) == KEYS
    net = plain_net(0.0)
    net.load_state_dict(loaded["model"])
    assert loaded["model"]._metadata.keys() == net.state_dict()._metadata.keys()  # type: ignore[attr-defined]
    momentum(net).load_state_dict(loaded["optimizer"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what one job saved whose two ranks shard models and optimizers."""
    folder = tmp_path_factory.mktemp("saved")
    run_all(
        "gloo",
        2,
        (saves_shards, str(folder / "state")),
        (stops_and_goes_on, str(folder)),
        (goes_on_sharded, str(folder)),
        (gathers_its_state, str(folder / "gathered.pt")),
        (saves_by_rank, str(folder)),
    )
    return folder


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def test_training_goes_on_from_shards_as_if_it_had_not_stopped(saved: Path) -> None:
    """A single process, too, can load the shards of two ranks."""
    torch.manual_seed(0)
    alone, net = Net(), plain_net(0.0)
    step(alone, momentum(alone))
    optimizer = momentum(net)
    idist.load_checkpoint(saved / "0", into={"model": net, "optimizer": optimizer})
    torch.testing.assert_close(net.state_dict(), alone.state_dict())
    assert [bool(item["momentum_buffer"].any()) for item in optimizer.state.values()] == [True] * 6


def stops_and_goes_on(local_rank: int, folder: str) -> None:
    for number, make in enumerate((momentum, adamw)):
        path = Path(folder, str(number))
        torch.manual_seed(0)
        model = idist.auto_model(Net(), wrapper="fsdp")
        optimizer = make(model)
        step(model, optimizer)
        idist.save_checkpoint({"model": model, "optimizer": optimizer}, path)
        again = idist.auto_model(plain_net(0.0), wrapper="fsdp")
        other = make(again)
        grads = [torch.ones_like(item) for item in again.parameters()]
        for item, grad in zip(again.parameters(), grads, strict=True):
            item.grad = grad
        idist.load_checkpoint(path, into={"model": again, "optimizer": other})
        assert list(again.state_dict()) == KEYS
        assert all(a.grad is b for a, b in zip(again.parameters(), grads, strict=True))
        assert other.param_groups[0]["lr"] == 0.1
        for net, its in ((model, optimizer), (again, other)):
            step(net, its)
        for a, b in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]


def uneven_net(value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))  # the last bias has one element
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) * value)
    return net


def adds_a_tensor(path: Path) -> None:
    state = torch.load(path)["optimizer"]
    next(iter(state["state"].values()))["odd"] = torch.ones(5)
    torch.save(state, path)


def goes_on_sharded(local_rank: int, folder: str) -> None:
    """Load a file of full tensors into a sharded model and its optimizer."""
    for number, make in enumerate((momentum, adamw)):
        path = Path(folder, f"{number}.pt")
        model = idist.auto_model(uneven_net(0.1))
        optimizer = make(model)
        step(model, optimizer)
        weight = {"w": idist.unwrap_model(model)[0].weight.detach()}  # type: ignore[index]
        idist.save_checkpoint({"model": model, "optimizer": optimizer, "tensors": weight}, path)
        again = idist.auto_model(uneven_net(0.0), wrapper="fsdp")
        other = make(again)
        there = {"w": torch.zeros_like(again[0].weight.detach())}  # type: ignore[index]
        idist.load_checkpoint(path, into={"model": again, "optimizer": other, "tensors": there})
        assert torch.equal(there["w"].full_tensor(), weight["w"])  # type: ignore[attr-defined]
        for net, its in ((model, optimizer), (again, other)):
            step(net, its)
        for a, b in zip(model.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(a, b.full_tensor())  # type: ignore[attr-defined]
        idist.run_on_rank(partial(adds_a_tensor, path))
        with pytest.raises(PayloadError, match=r"\['odd'\] does not fit: a whole tensor"):
            idist.load_checkpoint(path, into=other)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(FIRST_STEP).square().sum().backward()
    optimizer.step()


def test_without_pickle_shards_are_read_and_not_written(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_NO_PICKLE", "1")
    run("gloo", 2, without_pickle, str(saved / "state"))


def without_pickle(local_rank: int, path: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pickle, "loads", refuses_all)
        patched.setattr(distributed_c10d, "_unpickler", refuses_all)
        loads_shards(local_rank, path)
        with pytest.raises(PayloadError, match="UNISONO_NO_PICKLE"):
            saves_shards(local_rank, path)
        idist.save_checkpoint({"w": 1}, path + ".pt")
        for name in (path, path + ".pt"):
            with pytest.raises(PayloadError, match="UNISONO_NO_PICKLE"):
                idist.load_checkpoint(name, into={"w": 0}, weights_only=False)
    assert idist.all_gather(local_rank) == [0, 1]


def refuses_all(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a pickle was loaded")


def test_shards_are_read_by_others_or_by_none(saved: Path) -> None:
    path, net = str(saved / "state"), plain_net(0.0)
    run_all("gloo", 2, (loads_shards, path), (one_asks_for_more, path))
    idist.load_checkpoint(path, into=net.state_dict())
    assert _numbers(net) == _numbers(plain_net(2.0))
    assert len(list(Path(path).glob("shards-*"))) == 1  # older shards are gone


def one_asks_for_more(local_rank: int, path: str) -> None:
    state = idist.auto_model(plain_net(0.0), wrapper="fsdp").state_dict()
    if local_rank == 1:
        state["more"] = torch.zeros(1)
    with pytest.raises(PayloadError, match=r"(?s)can't be read \(rank 1 of 2\): .*more"):
        idist.load_checkpoint(path, into=state)
    with pytest.raises(PayloadError, match="can't be pickled"):
        idist.save_checkpoint({"f": lambda: 0}, path, sharded=True)
    one = Path(path, "one.pt")
    for what in (state, {"net": state if local_rank else {}}):  # also if one rank alone has shards
        with pytest.raises(PayloadError, match="sharded=False would write one rank's part"):
            idist.save_checkpoint(what, one, sharded=False)
    assert not one.exists()
    assert idist.all_gather(local_rank) == [0, 1]


def saves_shards(local_rank: int, path: str) -> None:
    for value in (1.0, 2.0):
        model = idist.auto_model(plain_net(value), wrapper="fsdp")
        idist.save_checkpoint(model.state_dict(), path)


def loads_shards(local_rank: int, path: str) -> None:
    model = idist.auto_model(plain_net(0.0), wrapper="fsdp")
    state = model.state_dict()
    assert idist.load_checkpoint(path, into=state) is state
    model.load_state_dict(state)
    assert all(bool((item.full_tensor() == 2.0).all()) for item in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.ranks(2, on="threads")
def test_shards_need_a_group_of_torch(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperation, match="sharded checkpoints.*without sharded tensors"):
        idist.save_checkpoint({"w": torch.ones(1)}, tmp_path / "x", sharded=True)


def test_an_optimizer_gets_the_states_that_shards_have(tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    optimizer = momentum(net)
    step(net, optimizer)
    frozen = nn.Linear(4, 1)
    frozen.bias.requires_grad_(False)
    half = momentum(frozen)
    step(frozen, half)
    idist.save_checkpoint(half, tmp_path / "y", sharded=True)
    idist.load_checkpoint(tmp_path / "y", into=optimizer)
    assert list(optimizer.state) == [net.weight]  # only this one had a state when it was saved
    idist.save_checkpoint({"optimizer": 1}, tmp_path / "x", sharded=True)
    with pytest.raises(PayloadError, match="optimizer was saved as a value"):
        idist.load_checkpoint(tmp_path / "x", into={"optimizer": optimizer})
    fast, slow = (torch.optim.Adam(net.parameters(), lr=torch.tensor(rate)) for rate in (0.5, 0.25))
    idist.save_checkpoint(fast, tmp_path / "rate", sharded=True)
    idist.load_checkpoint(tmp_path / "rate", into=slow)
    assert slow.param_groups[0]["lr"] == 0.5
    scheduler, other = (torch.optim.lr_scheduler.MultiStepLR(half, [count]) for count in (30, 40))
    idist.save_checkpoint({"scheduler": scheduler}, tmp_path / "z", sharded=True)
    with pytest.raises(PayloadError, match="MultiStepLR has no state for scheduler.milestones.30"):
        idist.load_checkpoint(tmp_path / "z", into={"scheduler": other})
    other = torch.optim.lr_scheduler.MultiStepLR(half, [30])
    idist.load_checkpoint(tmp_path / "z", into={"scheduler": other})
    assert list(other.milestones) == [30]  # the key is no string


def test_shards_of_what_has_no_names_are_refused(tmp_path: Path) -> None:
    net = plain_net(1.0)
    for what in ([net], 3):
        with pytest.raises(PayloadError, match="shards need a dict or one module"):
            idist.save_checkpoint(what, tmp_path / "x", sharded=True)
    with pytest.raises(PayloadError, match="shards hold no tuple of modules"):
        idist.save_checkpoint({"stages": (net, 1)}, tmp_path / "x", sharded=True)
    assert not (tmp_path / "x").exists()
    idist.save_checkpoint({"stages": [net, 1]}, tmp_path / "x", sharded=True)
    with pytest.raises(PayloadError, match="shards need a dict or one module"):
        idist.load_checkpoint(tmp_path / "x", into=[net])
    into: dict[str, list[Any]] = {"stages": [plain_net(0.0), 0]}
    idist.load_checkpoint(tmp_path / "x", into=into)
    assert _numbers(into["stages"][0]) == _numbers(net)
    assert into["stages"][1] == 1


def test_lists_and_tuples_are_loaded_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    one, two = plain_net(1.0), plain_net(2.0)
    saved = {"stages": [[one, 1], ("two", two)], "odd": OrderedDict(net=one), "end": (two, 5)}
    idist.save_checkpoint(saved, path)
    nets = [plain_net(0.0) for _ in range(4)]
    loaded = idist.load_checkpoint(path)["odd"]
    assert type(loaded) is OrderedDict
    assert list(loaded["net"]) == KEYS
    odd, stages = OrderedDict(net=nets[2]), [[nets[0], 0], ("", nets[1])]
    into = {"stages": stages, "odd": odd, "end": (nets[3], 0)}
    idist.load_checkpoint(path, into=into)
    assert [_numbers(net) for net in nets] == [_numbers(net) for net in (one, two, one, two)]
    assert into["stages"] is stages
    assert stages == [[nets[0], 1], ("two", nets[1])]
    assert into["end"] == (nets[3], 5)
    idist.save_checkpoint([one, 5], path)
    target = [nets[3], 0]
    assert idist.load_checkpoint(path, into=target) is target
    assert target == [nets[3], 5]
    assert idist.load_checkpoint(path, into=(nets[3], 0)) == (nets[3], 5)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    path, net = tmp_path / "x.pt", plain_net(0.0)
    unlike = r"\['w'\] does not fit: a tensor of shape \(3,\)"
    idist.save_checkpoint({"model": plain_net(1.0), "epoch": 1, "w": torch.ones(3)}, path)
    refused: list[tuple[Any, str]] = [
        ({"w": torch.zeros(4)}, unlike),
        ({"w": torch.zeros(3, dtype=torch.float64)}, unlike),
        ({"w": torch.zeros(1, 3)}, unlike),
        ({"epoch": torch.zeros(1)}, "has no tensor: a value of type int was saved"),
        ({"optimizer": momentum(net)}, "the checkpoint has no 'optimizer'"),
        ({"epoch": net}, "no state of a module: a value of type int was saved"),
        ({"model": momentum(net)}, r"\['model'\] does not fit"),
        ([net, {}], "should have 2 values"),
    ]
    for into, text in refused:
        with pytest.raises(PayloadError, match=text):
            idist.load_checkpoint(path, into=into)
    there = torch.zeros(3)
    idist.load_checkpoint(path, into={"w": there})
    assert there.tolist() == [1.0] * 3


def test_what_contains_itself_is_refused(tmp_path: Path) -> None:
    knot: dict[str, Any] = {"net": plain_net(1.0)}
    knot["self"] = [knot]
    with pytest.raises(PayloadError, match="contains itself"):
        idist.save_checkpoint(knot, tmp_path / "x.pt")
    idist.save_checkpoint({"net": plain_net(1.0), "self": [{}]}, tmp_path / "x.pt")
    knot["self"] = [{"net": knot}]
    with pytest.raises(PayloadError, match="has no 'net'"):
        idist.load_checkpoint(tmp_path / "x.pt", into=knot)


class Refuses:
    """An object that has a state on some ranks only."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def state_dict(self) -> dict[str, int]:
        if idist.get_rank() not in self.ranks:
            raise RuntimeError("the state isn't here")
        return {"seen": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class RefusingOptimizer(Refuses, torch.optim.Optimizer):
    """An optimizer with a state on some ranks only, like one whose parts were gathered."""

    param_groups: list[dict[str, Any]] = []


class RefusingNet(nn.Linear):
    def __init__(self, *ranks: int) -> None:
        super().__init__(1, 1)
        self.ranks = ranks

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        Refuses(*self.ranks).state_dict()
        return super().state_dict(*args, **kwargs)


@pytest.mark.ranks(2, on=("threads", "gloo"))
def test_a_state_that_cannot_be_had_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    idist.save_checkpoint({"one": RefusingOptimizer(1)}, path, rank=1)
    for what in (Refuses(0), RefusingOptimizer(1), RefusingNet(0), RefusingNet(1)):
        with pytest.raises(PeerFailedError, match="RuntimeError: the state isn't here") as caught:
            idist.save_checkpoint({"one": what}, path)
        is_here = idist.get_rank() not in what.ranks
        assert isinstance(caught.value.__cause__, RuntimeError) == is_here
    if idist.backend() == "gloo":
        with pytest.raises(PeerFailedError, match="rank 0 raised RuntimeError"):
            idist.save_checkpoint({"one": RefusingOptimizer(1)}, tmp_path / "shards", sharded=True)
    assert idist.load_checkpoint(path) == {"one": {"seen": 3}}


class Meter:
    """An object whose state differs between ranks."""

    def __init__(self, count: int = 0) -> None:
        self.state: Any = {"count": count, "seen": {"é", 2**70}, "mean": torch.ones(count % 4)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = {key: state[key] for key in self.state}


@alone_and_several
def test_a_state_that_differs_is_refused_or_kept_by_rank(tmp_path: Path) -> None:
    """Both in a file and, on backends that have them, in shards."""
    rank, size = idist.get_rank(), idist.get_world_size()
    mine = Meter(10 + rank)
    one, alike = Meter(), {"all": [Meter(3)], "one": Meter(rank) if rank == size - 1 else None}
    for sharded in (False, True) if idist.backend() in ("serial", "gloo") else (False,):
        path = tmp_path / ("shards" if sharded else "x.pt")
        save = partial(idist.save_checkpoint, path=path, sharded=sharded)
        save(alike, rank=size - 1)
        if size > 1:
            with pytest.raises(CollectiveMismatchError, match=r"'m'\}\{0\}\{'count'\} .*ByRank"):
                save({"m": [mine], **alike})
            with pytest.raises(CollectiveMismatchError, match=r"'m'\} in .* on ranks \[0\]: wrap"):
                save({"m": idist.ByRank(mine) if rank else mine})
        generator = torch.Generator().manual_seed(rank)
        state = {"m": idist.ByRank(mine), "g": [idist.ByRank(generator)], "epoch": 3}
        save(state)
        drawn = torch.rand(1, generator=generator)
        into = {"m": idist.ByRank(one), "g": [idist.ByRank(generator)], "epoch": 0}
        idist.load_checkpoint(path, into=into)
        idist.assert_equal(into)
        assert (one.state["count"], one.state["mean"].shape) == (10 + rank, ((10 + rank) % 4,))
        assert torch.equal(torch.rand(1, generator=generator), drawn)
        with pytest.raises(PayloadError, match=r"\['m'\] was saved by rank: load it into ByRank"):
            idist.load_checkpoint(path, into={"m": one})
        with pytest.raises(PayloadError, match=r"\['epoch'\] was not saved by rank"):
            idist.load_checkpoint(path, into={"epoch": idist.ByRank(one)})
        idist.barrier()
    with pytest.raises(ArgumentError, match="ByRank accepts an object with a state dict"):
        idist.ByRank(3)


def test_a_state_by_rank_is_refused_on_another_number_of_ranks(saved: Path) -> None:
    for name in ("split.pt", "split"):
        with pytest.raises(
            PayloadError, match="by rank, on 2 ranks, and can't be loaded on 1: leave"
        ):
            idist.load_checkpoint(saved / name, into={"m": idist.ByRank(Meter())})


def saves_by_rank(local_rank: int, folder: str) -> None:
    for name in ("split.pt", "split"):
        state = {"m": idist.ByRank(Meter(local_rank))}
        idist.save_checkpoint(state, Path(folder, name), sharded="." not in name)


def test_the_state_of_an_optimizer_gathered_on_the_writer_is_saved(saved: Path) -> None:
    assert len(idist.load_checkpoint(saved / "gathered.pt")["state"]) == 6


def gathers_its_state(local_rank: int, path: str) -> None:
    net = plain_net(0.5)
    optim = importlib.import_module("torch.distributed.optim")  # its import warns
    optimizer = optim.ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    step(net, optimizer)
    optimizer.consolidate_state_dict(to=0)
    idist.save_checkpoint(optimizer, path)


@pytest.mark.ranks(2, on=("threads", "gloo"))
def test_the_state_dict_of_a_wrapper_is_loaded_without_it(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    idist.save_checkpoint([idist.auto_model(plain_net(0.5)).state_dict()], path, rank=1)
    net = plain_net(0.0)
    idist.load_checkpoint(path, into=[net])  # all keys have the prefix of the wrapper
    assert _numbers(net) == _numbers(plain_net(0.5))
    other = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(PayloadError, match=r"(?s)x\.pt can't be read .*does not fit.*0\.weight"):
        idist.load_checkpoint(path, into=[other])


class Kept(nn.Module):
    """A user's wrapper, which may have parameters besides the module's."""

    def __init__(self, net: nn.Module, has_more: bool = False) -> None:
        super().__init__()
        self.net = net
        if has_more:
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.register_buffer("seen", torch.tensor(7))


@pytest.mark.ranks(2, on="threads")
def test_what_a_wrapper_has_of_its_own_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    mine = idist.auto_model(plain_net(1.0), wrapper=Kept, has_more=True)
    idist.save_checkpoint(mine, path)
    assert list(idist.load_checkpoint(path)) == ["scale", "seen", *(f"net.{key}" for key in KEYS)]
    again = idist.auto_model(plain_net(0.0), wrapper=Kept, has_more=True)
    with torch.no_grad():
        dict(again.named_parameters())["scale"].zero_()
    idist.load_checkpoint(path, into=again)
    assert _numbers(again) == _numbers(mine)
    assert _numbers(idist.unwrap_model(again)) == _numbers(plain_net(1.0))


@pytest.mark.parametrize("order", ["module._orig_mod.", "_orig_mod.module.", "module.module."])
def test_keys_that_others_wrote_from_within_several_wrappers(order: str, tmp_path: Path) -> None:
    state = {f"{order}{key}": item for key, item in plain_net(1.0).state_dict().items()}
    torch.save(state, tmp_path / "x.pt")
    net = plain_net(0.0)
    idist.load_checkpoint(tmp_path / "x.pt", into=net)
    assert _numbers(net) == _numbers(plain_net(1.0))
    compiled: Any = torch.compile(net, backend="eager")
    assert idist.unwrap_model(nn.DataParallel(compiled)) is net


def test_a_module_whose_only_part_is_called_module_keeps_its_keys(tmp_path: Path) -> None:
    outer = nn.Sequential(OrderedDict(module=nn.Linear(1, 1)))
    idist.save_checkpoint({"model": outer}, tmp_path / "x.pt")
    loaded = idist.load_checkpoint(tmp_path / "x.pt")
    assert list(loaded["model"]) == ["module.weight", "module.bias"]


@pytest.mark.ranks(2, on="threads")
def test_wrappers_within_others_leave_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    parts = nn.ModuleDict({"g": idist.auto_model(plain_net(1.0)), "d": plain_net(2.0)})
    mine = idist.auto_model(plain_net(3.0), wrapper=Kept)
    assert idist.unwrap_model(mine) is mine.net
    assert idist.unwrap_model(nn.DataParallel(parts)) is parts
    idist.save_checkpoint({"parts": parts, "mine": [mine]}, path)
    loaded = idist.load_checkpoint(path)
    assert list(loaded["parts"]) == [f"{part}.{key}" for part in "gd" for key in KEYS]
    assert list(loaded["mine"][0]) == KEYS
    into = nn.ModuleDict({"g": plain_net(0.0), "d": idist.auto_model(plain_net(0.0))})
    idist.load_checkpoint(path, into={"parts": into})
    assert _numbers(into["g"]) == _numbers(plain_net(1.0))
    assert _numbers(idist.unwrap_model(into["d"])) == _numbers(plain_net(2.0))


def test_checkpoints_of_the_first_version_are_read(tmp_path: Path) -> None:
    """A file, shards of full tensors, and shards of FSDP, written by two ranks with torch 2.6."""
    run_all("gloo", 2, *((reads_old, name) for name in ("file.pt", "shards", "fsdp")))
    net, optimizer = small_net()
    into = {"model": net, "optimizer": optimizer}
    for name in ("file.pt", "shards", "fsdp"):
        idist.load_checkpoint(OLD / name, into=into)
        assert_is_old(net, optimizer)


OLD = Path(__file__).parents[1] / "data" / "checkpoints"


def small_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=0.5)


def reads_old(local_rank: int, name: str) -> None:
    net, _ = small_net()
    model = idist.auto_model(net, wrapper="fsdp") if name == "fsdp" else idist.auto_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ranks: list[dict[str, int]] = []
    rows = torch.zeros(2)
    into = {
        "model": model,
        "optimizer": optimizer,
        "list": [rows, "", 0],
        "epoch": 0,
        "rank": idist.ByRank(dict, ranks.append),
    }
    idist.load_checkpoint(OLD / name, into=into)
    assert into["list"] == [rows, "é", 2**70]
    assert (rows.tolist(), into["epoch"], ranks) == ([1.0, 1.0], 3, [{"rank": local_rank}])
    assert_is_old(model, optimizer)


def assert_is_old(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare with a new model after the same single step of training."""
    torch.manual_seed(0)
    net, _ = small_net()
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.arange(8.0).reshape(4, 2)).square().sum().backward()
    adam.step()
    found = [_whole(item) for item in (*model.parameters(), *model.buffers())]
    torch.testing.assert_close(found, [*net.parameters(), *net.buffers()])
    assert optimizer.param_groups[0]["lr"] == 0.1
    for mine, state in zip(optimizer.state.values(), adam.state.values(), strict=True):
        torch.testing.assert_close({key: _whole(mine[key]) for key in state}, state)


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
