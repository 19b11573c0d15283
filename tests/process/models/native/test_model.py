"""The native model: every backend that torch knows, its options, and devices."""

from __future__ import annotations

import socket
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
from unisono.errors import ArgumentError, BackendUnavailableError, ContextError
from unisono.models.native import process_group as setup
from unisono.topology import RankInfo

BACKENDS = ("gloo", "cpu:gloo", "tworings")


def _register(name: str) -> None:
    """Register a backend with torch, as an out-of-tree library does."""
    if name not in dist.Backend.backend_list:

        def make(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timeout
            return ProcessGroupGloo(store, rank, size, options)

        dist.Backend.register_backend(name, make, devices=["cpu"])


def _in_two_processes(fn: Any, *args: Any) -> list[Any]:
    """Run in two processes in which nothing is initialised."""
    jobs = [idist.spawn("gloo", _alone, (fn, rank, *args), join=False) for rank in range(2)]
    return [job.join(60)[0] for job in jobs]


def _alone(_: int, fn: Any, rank: int, *args: Any) -> Any:
    idist.finalize()
    return fn(rank, *args)


def _join(rank: int, backend: str, **options: Any) -> tuple[Any, ...]:
    if backend == "tworings":
        _register(backend)
    idist.initialize(backend, rank=rank, world_size=2, timeout=20, **options)
    try:
        place = idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes()
        total = idist.all_reduce(torch.full((2,), 2, dtype=torch.int16)).tolist()
        group = idist.new_group([0, 1])
        handle: Any = group.handle
        limit = setup.timeout_of(handle, torch.device("cpu"))
        return idist.backend(), place, total, idist.all_gather("é" * rank), limit
    finally:
        idist.finalize()


def test_a_group_is_made_from_init_method_rank_and_world_size(tmp_path: Path) -> None:
    limit = timedelta(seconds=20)
    assert _in_two_processes(_join_files, tmp_path) == [
        [(name, (rank, 2, 1), [4, 4], ["", "é"], limit) for name in BACKENDS] for rank in range(2)
    ]


def _join_files(rank: int, folder: Path) -> list[tuple[Any, ...]]:
    return [_join(rank, name, init_method=f"file://{folder}/{name}") for name in BACKENDS]


def _of_a_device_that_is_not_here(_: int) -> tuple[str, bool, str | None, str]:
    kind = accelerator()
    name = "cuda" if kind is None or kind.type != "cuda" else "xpu"
    dist.Backend.register_backend("faraway", lambda *_: None, devices=[name])
    known = registry.availability()["faraway"]
    return name, "faraway" in idist.available_backends(), known, registry.find_model("faraway").name


def test_a_backend_for_devices_that_are_elsewhere_is_not_listed_and_not_refused() -> None:
    (found,) = idist.spawn("gloo", _of_a_device_that_is_not_here, nproc_per_node=1)
    device, is_listed, reason, model = found
    assert (is_listed, model) == (False, "native-dist")
    assert f"it carries tensors on {device}, and torch sees no such device" in str(reason)
    assert registry.availability()["gloo"] is None


def test_a_backend_registered_with_torch_is_available() -> None:
    _register("tworings")
    assert "tworings" in idist.available_backends()


def test_a_store_of_the_users_own_is_passed_through() -> None:
    store = HashStore()
    idist.initialize("gloo", rank=0, world_size=1, store=store)
    assert idist.all_gather("x") == ["x"]
    idist.finalize()


def test_one_process_without_an_environment_is_a_world_of_one() -> None:
    idist.initialize()
    facts = idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.get_nnodes()
    assert facts == (0, 1, 0, 1)
    assert idist.model_name() == "native-dist"
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


class _FakeAccelerator:
    """A machine with some accelerators, for choosing among them: nothing is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.chosen: list[int] = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.chosen.append)


def test_each_local_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _FakeAccelerator(monkeypatch, count=4)
    info = RankInfo(6, 8, local_rank=2)
    assert setup.choose_device("nccl", info, None) == torch.device("cuda", 2)
    assert setup.choose_device("cpu:gloo,cuda:nccl", info, None) == torch.device("cuda", 2)
    assert setup.choose_device("nccl", info, 3) == torch.device("cuda", 3)
    assert machine.chosen == [2, 2, 3]
    assert setup.choose_device("gloo", info, None) == torch.device("cpu")


def test_a_masked_device_is_number_0_whatever_the_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = _FakeAccelerator(monkeypatch, count=1)
    assert setup.choose_device("nccl", RankInfo(3, 4, local_rank=3), None).index == 0
    assert machine.chosen == [0]


def test_more_local_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _FakeAccelerator(monkeypatch, count=2)
    with pytest.raises(BackendUnavailableError, match="local rank 2 has no cuda device"):
        setup.choose_device("nccl", RankInfo(2, 3, local_rank=2), None)


def test_ranks_without_an_address_are_told_what_to_set() -> None:
    with pytest.raises(ContextError, match="MASTER_ADDR"):
        idist.initialize("gloo", rank=0, world_size=2)
    assert idist.model_name() == "serial"


def test_those_who_came_name_all_who_did_not() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    for text in _in_two_processes(_wait_in_vain, url):
        assert text.startswith("ranks 1, 3 of 4 did not come to ")
        assert "init_method=" in text


def _wait_in_vain(rank: int, url: str) -> str:
    with pytest.raises(ContextError) as caught:
        idist.initialize("gloo", rank=2 * rank, world_size=4, timeout=2, init_method=url)
    return str(caught.value)


def test_operations_have_the_jobs_timeout_and_not_what_set_up_had_left(tmp_path: Path) -> None:
    found = [[dist.default_pg_timeout] * 2, [timedelta(seconds=7)] * 2]
    assert _in_two_processes(_limits, tmp_path) == [found] * 2


def _limits(rank: int, folder: Path) -> list[Any]:
    found = []
    for timeout in (None, 7):
        url = f"file://{folder}/{timeout}"
        idist.initialize("gloo", rank=rank, world_size=2, init_method=url, timeout=timeout)
        groups: list[Any] = [dist.group.WORLD, idist.new_group([0, 1]).handle]
        found.append([setup.timeout_of(group, torch.device("cpu")) for group in groups])
        idist.finalize()
    return found
