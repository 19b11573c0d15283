"""Checkpoints have the same keys, whatever wraps a model and however many ranks train it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worlds import REAL, SERIAL, run, run_all

import unisono as idist
from unisono.errors import PayloadError

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


def saves(local_rank: int, path: str, wrapper: str = "ddp") -> None:
    """Train one step, so that the optimizer has a state as well, and save all there is."""
    model = idist.auto_model(plain_net(0.5), wrapper=wrapper)
    optimizer = idist.auto_optim(momentum(model))
    model(FIRST_STEP).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idist.save_checkpoint({"model": model, "optimizer": optimizer, "epoch": 3}, path)
        idist.save_checkpoint(model, f"{path}.model")
        idist.save_checkpoint([idist.unwrap_model(model).state_dict()], f"{path}.plain")


def loads(local_rank: int, path: str) -> list[float]:
    model = idist.auto_model(plain_net(0.0))
    optimizer = idist.auto_optim(momentum(model))
    into = {"model": model, "optimizer": optimizer, "epoch": 0}
    assert idist.load_checkpoint(path, into=into) is into
    assert into["epoch"] == 3
    assert len(optimizer.state_dict()["state"]) == 6
    again = idist.auto_model(plain_net(0.0))
    assert idist.load_checkpoint(f"{path}.model", into=again) is again
    for name, item in idist.unwrap_model(again).state_dict().items():
        assert torch.equal(item, idist.unwrap_model(model).state_dict()[name])
    return _numbers(idist.unwrap_model(model))


def _numbers(net: nn.Module) -> list[float]:
    return [float(item.double().sum()) for item in net.state_dict().values()]


@pytest.mark.parametrize(("backend", "size"), WAYS)
def test_a_checkpoint_loads_under_any_number_of_ranks(
    backend: str, size: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "x.pt")
    run(backend, size, saves, path)
    _by_torch_alone(path)
    wanted = loads(0, path)
    reader, readers = ("gloo", 2) if backend == "serial" else ("threads", 3)
    assert run(reader, readers, loads, path) == [wanted] * readers


def _by_torch_alone(path: str) -> None:
    found = torch.load(path, weights_only=True)
    assert list(found["model"]) == KEYS
    assert list(torch.load(f"{path}.model", weights_only=True)) == KEYS
    assert list(torch.load(f"{path}.plain", weights_only=True)[0]) == KEYS
    net = plain_net(0.0)
    net.load_state_dict(found["model"])
    assert found["model"]._metadata.keys() == net.state_dict()._metadata.keys()  # type: ignore[attr-defined]
    momentum(net).load_state_dict(found["optimizer"])


@pytest.mark.parametrize(("backend", "size"), REAL)
def test_on_real_libraries(backend: str, size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    run_all(backend, size, (saves, path), (loads, path))
    _by_torch_alone(path)
    loads(0, path)


def test_shards_have_the_same_keys_and_fill_a_model_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "shards")
    run("gloo", 2, saves_shards, path)
    whole = plain_net(0.0)
    idist.load_checkpoint(path, into={"model": whole})
    assert all(bool((item == 0.25).all()) for item in whole.parameters())


def saves_shards(local_rank: int, path: str) -> None:
    model = idist.auto_model(plain_net(0.25), wrapper="fsdp")
    idist.save_checkpoint({"model": model}, path)
    again = idist.auto_model(plain_net(0.0), wrapper="fsdp")
    idist.load_checkpoint(path, into={"model": again})
    assert list(again.state_dict()) == KEYS
    assert all(bool((item.full_tensor() == 0.25).all()) for item in again.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_the_state_dict_of_a_wrapper_is_warned_of_once(backend: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    assert sorted(run(backend, 2, saves_the_wrappers, path)) == [0, 1]
    net = plain_net(0.0)
    idist.load_checkpoint(path, into=[net])  # it is clear what the prefix is
    assert _numbers(net) == _numbers(plain_net(0.5))
    other = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(PayloadError, match=r"(?s)x\.pt can't be read .*doesn't fit.*0\.weight"):
        idist.load_checkpoint(path, into=[other])


def saves_the_wrappers(local_rank: int, path: str) -> int:
    state = idist.auto_model(plain_net(0.5)).state_dict()
    if idist.model_name() != "threads":  # they have the filters of the test run, which are the same
        warnings.simplefilter("error")
    try:
        idist.save_checkpoint([state], path, rank=1)
    except UserWarning as error:
        assert "unwrap_model(model).state_dict()" in str(error)
        return 1
    return 0


class Kept(nn.Module):
    """Somebody's own wrapper."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def test_wrappers_within_others_leave_no_trace(tmp_path: Path) -> None:
    run("threads", 2, nests, str(tmp_path))


def nests(local_rank: int, folder: str) -> None:
    parts = nn.ModuleDict({"g": idist.auto_model(plain_net(1.0)), "d": plain_net(2.0)})
    mine = idist.auto_model(plain_net(3.0), wrapper=Kept)
    assert idist.unwrap_model(mine) is mine.net
    assert idist.unwrap_model(nn.DataParallel(parts)) is parts
    idist.save_checkpoint({"parts": parts, "mine": [mine]}, Path(folder, "x.pt"))
    found = idist.load_checkpoint(Path(folder, "x.pt"))
    assert list(found["parts"]) == [f"{part}.{key}" for part in "gd" for key in KEYS]
    assert list(found["mine"][0]) == KEYS
    into = nn.ModuleDict({"g": plain_net(0.0), "d": idist.auto_model(plain_net(0.0))})
    idist.load_checkpoint(Path(folder, "x.pt"), into={"parts": into})
    assert _numbers(into["g"]) == _numbers(plain_net(1.0))
    assert _numbers(idist.unwrap_model(into["d"])) == _numbers(plain_net(2.0))


def test_a_compiled_module_has_the_keys_of_its_own() -> None:
    net = plain_net(1.0)
    compiled: Any = torch.compile(net, backend="eager")
    assert idist.unwrap_model(nn.DataParallel(compiled)) is net


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    idist.save_checkpoint({"model": plain_net(1.0), "epoch": 1}, path)
    with pytest.raises(PayloadError, match="the checkpoint has no 'optimizer'"):
        idist.load_checkpoint(path, into={"optimizer": momentum(plain_net(0.0))})
    with pytest.raises(PayloadError, match="has no state of a module: a int was saved"):
        idist.load_checkpoint(path, into={"epoch": plain_net(0.0)})
    with pytest.raises(PayloadError, match=r"\['model'\] doesn't fit"):
        idist.load_checkpoint(path, into={"model": momentum(plain_net(0.0))})
    with pytest.raises(PayloadError, match="has no 2 values"):
        idist.load_checkpoint(path, into=[plain_net(0.0), {}])
