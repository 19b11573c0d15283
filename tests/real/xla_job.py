"""What replicas of XLA do: checks that share one launch, and the ways in which a job ends."""

from __future__ import annotations

import copy
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as idist
from tests.real.jobs import EXAMPLE
from tests.real.oracle import check_collectives
from tests.support.processes import until
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerFailedError
from unisono.model import fallback
from unisono.model.reduction import ReduceOp
from unisono.models.xla.model import REPLICAS, XlaModel
from unisono.topology import ContextHint, RankInfo, Topology

FOLDER = "CHECKS_WRITE_TO"
LIMIT_S = 60.0
MEETING = threading.Barrier(2)
"""Where replicas meet around each check: none leaves its model while another looks at it."""


def run_checks(names: tuple[str, ...], info: RankInfo) -> dict[str, Any]:
    """Run checks in turn, each in a context of its own; give what each returned, or its error."""
    return {name: outcome(CHECKS[name], info) for name in names}


def outcome(check: Callable[[RankInfo], Any], info: RankInfo) -> Any:
    try:
        return check(info)
    except Exception:
        return RuntimeError(traceback.format_exc())


def of_model(check: Callable[[XlaModel], Any], info: RankInfo, limit_s: float = LIMIT_S) -> Any:
    model = XlaModel.initialize("xla-cpu", info, timeout=timedelta(seconds=limit_s))
    try:
        if info.world_size > 1:  # until then the other may still have left the model before
            MEETING.wait(LIMIT_S)
        return check(model)
    finally:
        if info.world_size > 1:
            MEETING.wait(LIMIT_S)
        model.finalize()


def of_facade(check: Callable[[], Any], info: RankInfo) -> Any:
    idist.initialize("xla-cpu", timeout=LIMIT_S)
    try:
        return check()
    finally:
        MEETING.wait(LIMIT_S)
        idist.finalize()


def n_compiled() -> int:
    """Count the graphs that were compiled; 0 where nothing compiles."""
    if "torch_xla" not in sys.modules:
        return 0
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def strings(model: XlaModel) -> None:
    """Check that strings of many sizes are compiled once for each bucket."""

    def derived(blob: bytes) -> list[bytes]:
        return fallback.exchange(model, blob, None, model.control.bucket)

    rank, n = model.topology.rank, model.topology.world_size
    counts = []
    for sizes in (range(0, 248, 31), range(300, 500, 17), range(513, 1000, 61)):
        for size in sizes:
            blobs = [bytes([65 + r]) * (size + r % 2) for r in range(n)]
            # The derived way is that of jobs of several processes.
            for exchange in (model.exchange, derived):
                assert exchange(blobs[rank]) == blobs, size
        counts.append(n_compiled())
    assert counts[0] == 1  # all that fit into one frame
    before = n_compiled()
    for size in (1, 77, 290, 411, 600, 999):
        derived(b"x" * size)
    assert n_compiled() == before


def facts(model: XlaModel) -> None:
    rank, n = model.topology.rank, model.topology.world_size
    assert model.topology == Topology(rank, n, rank, n, 0, 1)
    assert (model.backend, str(model.device)) == ("xla-cpu", f"xla:{rank}")
    assert model.is_alive()
    assert n == 1 or os.environ["CPU_NUM_DEVICES"] == "2"


def own_ranks(model: XlaModel) -> None:
    """Check that each thread adopts its own replica, and one that is none adopts none."""
    adopted = [XlaModel.from_context(ContextHint()) for _ in range(20)]
    assert {one and one.topology.rank for one in adopted} == {model.topology.rank}
    with ThreadPoolExecutor(1) as foreign:
        assert foreign.submit(XlaModel.from_context, ContextHint()).result() is None


def lazy_inputs(model: XlaModel) -> None:
    """Let a rank-dependent number, and one that isn't computed yet, enter a collective."""
    rank = model.topology.rank
    number = torch.tensor(float(rank), device=model.device) * 2 + rank
    before = number + 1
    number.add_(5)
    total = model.all_reduce(number, ReduceOp.SUM)
    found = [total.cpu().item(), before.cpu().item(), number.cpu().item()]
    assert found == [13.0, 1.0 + 3 * rank, 5.0 + 3 * rank]


def eager(model: XlaModel) -> None:
    """Check that what is started is computed at once, and an error is kept for the wait."""
    context = ContextState(model)
    handle = context.start(lambda: model.all_reduce(torch.ones(2), ReduceOp.SUM), None)
    broken = context.start(lambda: 1 // 0, None)
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    assert handle.is_completed()
    assert broken.is_completed()
    assert handle.wait().tolist() == [2.0, 2.0]


def tensors(model: XlaModel) -> dict[str, Tensor]:
    on_device = torch.full((2,), model.topology.rank, device=model.device)
    return {"x": on_device, "leaf": on_device.float().requires_grad_()}


def disagree(model: XlaModel) -> None:
    said = r"rank 0: all_gather torch.float32 \[2\]; rank 1: all_gather torch.float32 \[3\]"
    with pytest.raises(CollectiveMismatchError, match=said):
        model.all_gather(torch.ones(2 + model.topology.rank))


def come_late(model: XlaModel) -> None:
    """Check that the rank that waits too long says for whom, and the late one learns it."""
    rank = model.topology.rank
    if rank == 1:
        until(partial(REPLICAS.has_left, 0), 60)
    kind = (CollectiveTimeoutError, PeerFailedError)[rank]
    said = (
        r"^rank 1 never arrived: rank 0 waited 0\.\d+ s in all_reduce SUM",
        "^rank 1 waited in all_reduce SUM",
    )
    with pytest.raises(kind, match=said[rank]):
        model.all_reduce(torch.ones(2), ReduceOp.SUM)


def come_late_for_a_block(model: XlaModel) -> None:
    with idist.deadline(0.5):
        come_late(model)


def leave_early(model: XlaModel) -> None:
    """Check that a finalized replica is found no more, and not waited for."""
    if model.topology.rank == 0:
        model.finalize()
        assert not model.is_alive()
        assert XlaModel.from_context(ContextHint()) is None
        return
    with pytest.raises(PeerFailedError, match="rank 0 has finalized its context"):
        model.exchange(b"")


def texts() -> None:
    """Check that strings and numbers of any length compile nothing."""
    rank, n = idist.get_rank(), idist.get_world_size()
    idist.all_reduce(torch.ones(2048))  # the runtime is up, and its first graphs are compiled
    before = n_compiled()
    for size in (0, 1, 7, 100, 255, 256, 257, 5000, 70_000):
        rows = [chr(97 + other) * (size + other) for other in range(n)]
        assert idist.all_gather(rows[rank]) == rows
        assert idist.broadcast(rows[rank] if rank == n - 1 else None, src=n - 1) == rows[n - 1]
        total = idist.all_reduce({"size": size + rank, "x": 0.5})
        assert total == {"size": 2 * size + 1, "x": 1.0}
    assert n_compiled() == before
    idist.barrier()


def steps(_local_rank: int = 0) -> list[Any]:
    """Train without ever marking a step; give the compilations of the later steps."""
    device = idist.device()
    weight = torch.zeros(8, device=device, requires_grad=True)
    momentum = torch.zeros(8, device=device)
    rows = torch.arange(64.0).reshape(8, 8) / 64 + idist.get_rank()
    counts = []
    for step in range(12):
        loss = ((rows[step % 8].to(device) * weight).sum() - 1) ** 2
        torch.autograd.backward(loss)
        (gradient,) = idist.all_reduce([weight.grad], "AVERAGE")
        with torch.no_grad():
            momentum.mul_(0.9).add_(gradient)
            weight.sub_(0.01 * momentum)
        weight.grad = None
        counts.append(n_compiled())
    # Not the last one: a replica that is done compiles what it has left, for all to see.
    return [counts[-2] - counts[5], weight.detach().cpu()]


def network(is_right: bool = True) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters() if is_right else ()):
            values = torch.arange(parameter.numel()).float().view(parameter.shape)
            parameter.copy_(torch.sin(values + i))
    return net


def data() -> Tensor:
    return torch.cos(torch.arange(48).float()).view(12, 4)


def trained() -> list[Tensor]:
    """Train by the helpers, whose hooks run inside of backward; rank 0 alone has the right net."""
    model = idist.auto_model(network(idist.get_rank() == 0))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows: Any = list(data())
    loader = idist.auto_dataloader(rows, batch_size=4, shuffle=False)
    for _ in range(2):
        for batch in loader:
            assert batch.device == idist.device()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def hooks() -> None:
    """A hook of the step that is older than auto_optim gets averaged gradients."""
    weight: Any = torch.zeros(1, device=idist.device(), requires_grad=True)
    seen = []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.item()))
    idist.auto_optim(optimizer)
    weight.grad = torch.full_like(weight, float(idist.get_rank()))
    optimizer.step()
    assert seen == [0.5]
    # A copy's step averages, too; torch's own hooks would be lost with it.
    assert type(copy.deepcopy(optimizer)) is type(optimizer) is not torch.optim.SGD


def saved() -> list[Tensor]:
    """Save a checkpoint, and load it into another model."""
    path = Path(os.environ[FOLDER], "x.pt")
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(data().to(idist.device())).pow(2).mean().backward()
    optimizer.step()
    idist.save_checkpoint({"model": model, "optimizer": optimizer}, path)
    again = idist.auto_model(network(False))
    other = idist.auto_optim(torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9))
    idist.load_checkpoint(path, into={"model": again, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1
    alone = idist.load_checkpoint(path)["model"]
    assert {item.device for item in alone.values()} == {idist.device()}
    return [item.detach().cpu() for item in again.parameters()]


def digits() -> Any:
    example = runpy.run_path(str(EXAMPLE))
    return example["train"](0, example["load"](), 3, 0)


CHECKS: dict[str, Callable[[RankInfo], Any]] = {
    # The first counts all graphs that were compiled so far.
    **{
        check.__name__: partial(of_model, check)
        for check in (
            *(strings, check_collectives, facts, own_ranks, lazy_inputs, eager, tensors),
            disagree,
            *(come_late_for_a_block, leave_early),
        )
    },
    "come_late": partial(of_model, come_late, limit_s=0.5),
    **{
        check.__name__: partial(of_facade, check)
        for check in (texts, steps, trained, hooks, saved, digits)
    },
}


def one_aborts(seen: Path, model: XlaModel) -> None:
    if model.topology.rank == 1:
        model.abort()
        until(seen.exists, 60)
        raise OSError("the cause")
    try:
        model.exchange(b"")
    finally:
        seen.touch()


def one_kills_all(model: XlaModel) -> None:
    if model.topology.rank == 1:
        sys.stderr.write("my last words\n")
        os.abort()
    model.exchange(b"")


def alone_in_a_graph(model: XlaModel) -> None:
    import torch_xla.core.xla_model as xm

    if model.topology.rank == 0:
        xm.all_reduce("sum", torch.ones(2, device=model.device)).cpu()
    time.sleep(600)
