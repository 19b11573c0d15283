"""The native model: every backend that torch knows, its options, and devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

import unisono as idist
from unisono import registry
from unisono.accelerators import accelerator
from unisono.context import communicator
from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    CollectiveError,
    ContextError,
)
from unisono.models.native import model as native, process_group as setup
from unisono.models.native.model import NativeModel
from unisono.topology import EVERYBODY, ContextHint, RankInfo, Topology


def _in_two_processes(fn: Callable[[int], None]) -> None:
    """Run ``fn(rank)`` in two processes in which nothing is initialised."""
    jobs = [idist.spawn("gloo", _alone, (fn, rank), join=False) for rank in range(2)]
    for job in jobs:
        job.join(60)


def _alone(_: int, fn: Callable[[int], None], rank: int) -> None:
    idist.finalize()
    fn(rank)


def test_a_group_is_made_from_init_method_rank_and_world_size(tmp_path: Path) -> None:
    """Its operations have the job's timeout, and not what set-up had left of it.

    Those of gloo's default group have more: our own calls tell first who is in one of torch's.
    """

    def fn(rank: int) -> None:
        dist.Backend.register_backend("tworings", ProcessGroupGloo, devices=["cpu"])
        assert "tworings" in idist.available_backends()
        for backend, timeout in (("gloo", None), ("gloo", 20), ("cpu:gloo", 20), ("tworings", 20)):
            url = f"file://{tmp_path}/{backend} {timeout}"
            idist.initialize(backend, rank=rank, world_size=2, timeout=timeout, init_method=url)
            assert idist.backend() == backend
            place = idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes()
            assert place == (rank, 2, 1)
            total = idist.all_reduce(torch.full((2,), 2, dtype=torch.int16))
            assert total.tolist() == [4, 4]
            assert idist.all_gather("é" * rank) == ["", "é"]
            limit = timedelta(seconds=timeout) if timeout else dist.default_pg_timeout
            cpu, group = torch.device("cpu"), idist.new_group([0, 1]).handle
            assert setup.timeout_of(group, cpu) == limit
            allowed = setup.timeout_of(dist.group.WORLD, cpu)
            assert allowed is not None
            assert (allowed > limit) == ("gloo" in backend)
            idist.finalize()

    _in_two_processes(fn)


def test_a_backend_for_devices_that_are_elsewhere_is_not_listed_and_not_refused() -> None:
    def fn(_: int) -> None:
        kind = accelerator()
        name = "cuda" if kind is None or kind.type != "cuda" else "xpu"
        dist.Backend.register_backend("faraway", lambda *_: None, devices=[name])
        assert "faraway" not in idist.available_backends()
        assert registry.find_model("faraway").name == "native-dist"
        reasons = registry.availability()
        assert f"it needs a device of type {name}, and torch finds none" in str(reasons["faraway"])
        assert reasons["gloo"] is None

    idist.spawn("gloo", fn, nproc_per_node=1)


def test_one_process_without_an_environment_is_a_world_of_one() -> None:
    idist.initialize()
    idist.sync()  # which keeps it
    facts = idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.get_nnodes()
    assert facts == (0, 1, 0, 1)
    assert (idist.backend(), idist.model_name()) == ("gloo", "native-dist")
    assert idist.is_distributed()
    idist.finalize()
    assert idist.model_name() == "serial"


def test_the_device_can_be_chosen() -> None:
    idist.initialize("gloo", device="cpu")
    assert idist.device() == torch.device("cpu")
    idist.finalize()
    for wrong in (3, "nowhere", True):
        with pytest.raises(ArgumentError, match="device"):
            idist.initialize("gloo", device=wrong)


def test_backends_of_several_devices_are_read_by_pairs() -> None:
    assert setup.backends_by_device("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    for wrong in ("cpu:", ":gloo", "cpu:gloo,cpu:gloo", "cpu:gloo:nccl", "cpu:gloo,nccl"):
        with pytest.raises(ArgumentError, match="device:backend"):
            setup.backends_by_device(wrong)


def test_each_local_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of accelerators that there are not: nothing is computed on them."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)

    def choose(backend: str, local_rank: int, count: int, device: int | None = None) -> str:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        info = RankInfo(4 + local_rank, 8, local_rank=local_rank)
        return str(setup.choose_device(backend, info, device))

    assert choose("nccl", 2, count=4) == "cuda:2"
    assert choose("cpu:gloo,cuda:nccl", 2, count=4) == "cuda:2"
    assert choose("nccl", 2, count=4, device=3) == "cuda:3"
    assert choose("gloo", 2, count=4) == "cpu"
    assert choose("nccl", 3, count=1) == "cuda:0"  # the others are masked
    assert chosen == [2, 2, 3, 0]
    with pytest.raises(BackendUnavailableError, match="local rank 2 has no cuda device"):
        choose("nccl", 2, count=2)


def test_an_adopted_group_is_on_the_devices_that_its_backend_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("cpu:gloo,cuda:gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    try:
        model = NativeModel.from_context(ContextHint())
        assert model is not None
        devices = model.device, model.transport_device
        assert devices == (torch.device("cuda", 3), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_a_subclass_overrides_facts_by_properties(tmp_path: Path) -> None:
    """Each builds on that of the base class, and `initialize` changes the topology later."""

    class Elsewhere(NativeModel):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("meta", super().device.index)

        @property
        def topology(self) -> Topology:
            return replace(super().topology, node_rank=0, nnodes=7)

    def fn(rank: int) -> None:
        url = f"file://{tmp_path}/store"
        model = Elsewhere.initialize("gloo", RankInfo(rank, 2), init_method=url)
        assert model.topology == Topology(rank, 2, rank, 2, 0, 7)
        devices = model.device, model.transport_device
        assert devices == (torch.device("meta"), torch.device("cpu"))
        assert NativeModel(Topology(rank, 2), None, False).device == torch.device("cpu")
        model.finalize()

    _in_two_processes(fn)


def test_an_adopted_group_of_gloo_leaves_the_accelerator_uninitialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.delattr(torch.accelerator, "current_device_index")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    try:
        model = NativeModel.from_context(ContextHint())
        assert model is not None
        assert model.device == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_ranks_without_an_address_are_told_what_to_set() -> None:
    with pytest.raises(ContextError, match="MASTER_ADDR"):
        idist.initialize("gloo", rank=0, world_size=2)
    assert idist.model_name() == "serial"


def test_those_who_came_name_all_who_did_not() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def fn(rank: int) -> None:
        words = r"^ranks 1, 3 of 4 did not reach [\s\S]*init_method="
        with pytest.raises(ContextError, match=words):
            idist.initialize("gloo", rank=2 * rank, world_size=4, timeout=2, init_method=url)

    _in_two_processes(fn)


def test_ranks_whose_agents_have_counted_other_numbers_of_restarts_meet() -> None:
    """As after a failure that only one of two nodes has noticed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def fn(rank: int) -> None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
        idist.initialize("gloo", rank=rank, world_size=2, timeout=10, init_method=url)
        assert idist.all_gather(rank) == [0, 1]
        idist.finalize()

    _in_two_processes(fn)


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("the ring")


def test_ranks_gather_over_rank_0_until_they_are_connected() -> None:
    """Before a control plane is there, with a root that lies, and after it is there."""

    def fn(_: int) -> None:
        ranks = list(range(8))
        rank = idist.get_rank()
        model: Any = communicator().model
        fresh = NativeModel(model.topology, torch.device("cpu"), is_owner=False)
        vars(native)["_all_gather"] = _refuse
        assert fresh.all_gather(torch.tensor([rank])).flatten().tolist() == ranks
        whole = dist.broadcast

        def lie(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if rank == 0:
                rows.fill_(-1)
            return whole(rows, *args, **kwargs)

        vars(dist)["broadcast"] = lie
        rows = fresh.all_gather(torch.tensor([rank])).flatten().tolist()
        assert rows == [rank if at == rank else -1 for at in ranks]  # a rank knows its own
        fresh.control.hubs[EVERYBODY] = None
        with pytest.raises(CollectiveError, match="the ring"):
            fresh.all_gather(torch.tensor([rank]))

    idist.spawn("gloo", fn, nproc_per_node=8)
