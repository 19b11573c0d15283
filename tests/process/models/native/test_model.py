"""The native model: every backend that torch knows, its options, and devices."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

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
from unisono.models.native import model as native
from unisono.models.native import process_group as setup
from unisono.models.native.model import NativeModel
from unisono.topology import EVERYBODY, RankInfo

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
    assert backend in idist.available_backends() or ":" in backend
    idist.initialize(backend, rank=rank, world_size=2, timeout=20, **options)
    try:
        place = idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes()
        total = idist.all_reduce(torch.full((2,), 2, dtype=torch.int16)).tolist()
        group: Any = idist.new_group([0, 1])
        limit = setup.timeout_of(group.handle, torch.device("cpu"))
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


def test_ranks_gather_over_rank_0_until_they_are_connected() -> None:
    found = idist.spawn("gloo", _gather_while_connecting, nproc_per_node=8)
    for rank, (told, lied, later) in enumerate(found):
        assert told == list(range(8))
        assert lied == [rank if at == rank else -1 for at in range(8)]  # a rank knows its own
        assert "the ring" in later


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("the ring")


def _gather_while_connecting(_local_rank: int) -> tuple[list[int], list[int], str]:
    """Gather before a control plane is there, with a root that lies, and after it is there."""
    rank = idist.get_rank()
    model: Any = communicator().model
    fresh = NativeModel(model.topology, torch.device("cpu"), is_owner=False)
    vars(native)["_all_gather"] = _refuse
    told = fresh.all_gather(torch.tensor([rank])).flatten().tolist()

    whole = dist.broadcast

    def lie(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            rows.fill_(-1)
        return whole(rows, *args, **kwargs)

    vars(dist)["broadcast"] = lie
    lied = fresh.all_gather(torch.tensor([rank])).flatten().tolist()
    fresh.control.hubs[EVERYBODY] = None
    with pytest.raises(CollectiveError) as caught:
        fresh.all_gather(torch.tensor([rank]))
    return told, lied, str(caught.value)
