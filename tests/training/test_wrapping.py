"""Wrappers of models and optimizers: their averages, options, copies and errors."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import unisono as idist
from tests.support.worlds import REAL, alone_and_several, run, run_all, several, several_here
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    ContextError,
    PayloadError,
    RegistrationError,
    UnsupportedOperation,
)
from unisono.model.training import TrainingHooks
from unisono.models.threads import ThreadsModel
from unisono.registry import unregister_model


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_drawn_weights(net: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(net.parameters()):
        parameter.data.copy_(drawn(seed, *parameter.shape))
    return net


class Branches(nn.Module):
    """A model that uses one branch on rank 0 only, and one on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1)
        self.sometimes = nn.Linear(2, 1)
        self.never = nn.Linear(2, 1)
        self.frozen = nn.Linear(2, 1).requires_grad_(False)
        self.narrow = nn.Linear(2, 1).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x) + self.frozen(x) + self.narrow(x.to(torch.bfloat16)).float()
        return y + self.sometimes(x) if idist.get_rank() == 0 else y


@several
@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-6])
def test_the_facade_averages_whatever_has_a_gradient_somewhere(bucket_cap_mb: float) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    model = idist.auto_model(Branches(), wrapper=idist.Replicated, bucket_cap_mb=bucket_cap_mb)
    net: Any = idist.unwrap_model(model)
    mean = sum(range(1, size + 1)) / size
    for _ in range(2):
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert net.always.weight.grad.tolist() == [[mean, mean]]
        assert net.narrow.weight.grad.tolist() == [[mean, mean]]
        torch.testing.assert_close(net.sometimes.weight.grad, torch.full((1, 2), 1 / size))
        assert net.never.weight.grad is None
        assert net.frozen.weight.grad is None
        model.zero_grad()
    with idist.no_sync(model):
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert net.always.weight.grad.tolist() == [[rank + 1.0] * 2]
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        torch.testing.assert_close(average(torch.ones(1, 2)), model(torch.ones(1, 2)))
    copied: Any = copy.deepcopy(model)  # a copy averages, too, like that of torch's wrapper
    copied(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert copied.module.always.weight.grad.tolist() == [[mean, mean]]
    assert net.always.weight.grad.tolist() == [[rank + 1.0] * 2]
    with pytest.raises(ArgumentError, match=r"use its \.module"):
        pickle.dumps(model)


class Checkpointed(nn.Module):
    """A model that uses a layer within a checkpoint, and a layer outside of it."""

    def __init__(self, is_reentrant: bool, is_last: bool) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.is_reentrant, self.is_last = is_reentrant, is_last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.shared, x, use_reentrant=self.is_reentrant)
        if self.is_last:
            x = checkpoint(self.last, self.shared(x), use_reentrant=self.is_reentrant)
        else:
            x = self.last(torch.tanh(self.shared(x)))
        return x.sum()


@several
@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-6])
def test_a_parameter_may_get_its_gradient_in_several_parts(bucket_cap_mb: float) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    cases = [*itertools.product((False, True), (False, True), [False]), (True, False, True)]
    for is_reentrant, is_last, on_rank_0_alone in cases:
        modes = [is_reentrant and not (on_rank_0_alone and r) for r in range(size)]
        nets = [with_drawn_weights(Checkpointed(mode, is_last)) for mode in [modes[rank], *modes]]
        net, *made = nets
        model = idist.auto_model(net, wrapper=idist.Replicated, bucket_cap_mb=bucket_cap_mb)
        for step in range(3):
            xs = [drawn(10 * step + other, 4, 3).requires_grad_() for other in range(size)]
            with idist.no_sync(model) if step == 1 else nullcontext():
                model(xs[rank]).backward()
            for each, x in zip(made, xs, strict=True):
                each(x).backward()
            if step == 1:
                continue
            rows = zip(*map(grads, made), strict=True)
            all_rows = [torch.stack(row).mean(0) for row in rows]
            torch.testing.assert_close(grads(net), all_rows, rtol=1e-5, atol=1e-6)
            for each in nets:
                each.zero_grad()


def grads(net: nn.Module) -> list[Tensor]:
    return [item.grad for item in net.parameters() if item.grad is not None]


@pytest.mark.parametrize(("backend", "size"), [("threads", 3), ("gloo", 2)])
def test_a_plain_module_outlives_its_wrapper(backend: str, size: int) -> None:
    for net in run(backend, size, outlives):
        net(torch.ones(1, 2)).sum().backward()  # in the parent process, which has no ranks


def outlives(local_rank: int) -> nn.Module:
    rank, size = idist.get_rank(), idist.get_world_size()
    net = nn.Linear(2, 1)
    model = idist.auto_model(net, wrapper=idist.Replicated)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[mean] * 2]
    known = weakref.ref(model)
    del model
    assert known() is None
    if rank == 0:  # on one rank only, without the wrapper
        net(torch.ones(1, 2)).sum().backward()
        assert net.weight.grad.tolist() == [[mean + 1] * 2]
    idist.barrier()
    return net if rank == 0 else nn.Linear(2, 1)


def test_a_plain_module_outlives_the_context() -> None:
    for model in run("threads", 2, kept_wrappers):
        net = idist.unwrap_model(model)
        net(torch.ones(1, 2)).sum().backward()
        assert idist.auto_model(net) is net  # as the error below advises
        with pytest.raises(ContextError, match="other than the active .* call auto_model again"):
            model(torch.ones(1, 2))


def kept_wrappers(local_rank: int) -> Any:
    return idist.auto_model(nn.Linear(2, 1), wrapper=idist.Replicated)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(4)])

    def forward(self, factors: list[int]) -> Tensor:
        """Use the parameters whose factor isn't 0."""
        used = [p * x for p, x in zip(self.parts, factors, strict=True) if x]
        return torch.cat(used).sum()


def drawn_factors(draw: random.Random) -> list[int]:
    factors = [draw.choice((0, draw.randint(1, 9))) for _ in range(4)]
    factors[draw.randrange(4)] = draw.randint(1, 9)
    return factors


@several
@pytest.mark.parametrize("wrapper", ["ddp", idist.Replicated])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_accumulate_as_under_torch_s_wrapper(wrapper: Any, seed: int) -> None:
    """A gradient that isn't zeroed is averaged again, also on ranks without a new one."""
    rank, size, draw = idist.get_rank(), idist.get_world_size(), random.Random(seed)
    for _ in range(20):
        net = Scales()
        model = idist.auto_model(net, wrapper=wrapper, find_unused_parameters=True)
        known: list[list[float | None]] = [[None] * 4 for _ in range(size)]  # gradients by rank
        was_kept, touched = False, set[int]()
        for _ in range(6):
            if not was_kept and draw.random() < 0.7:  # torch fails if accumulated gradients go
                is_none = draw.random() < 0.5
                model.zero_grad(set_to_none=is_none)
                known = [[None if is_none or x is None else 0.0 for x in row] for row in known]
            factors = [drawn_factors(draw) for _ in range(size)]
            was_kept = draw.random() < 0.3
            with idist.no_sync(model) if was_kept else nullcontext():
                model(factors[rank]).backward()
            for row, used in zip(known, factors, strict=True):
                for i in (i for i, factor in enumerate(used) if factor):
                    row[i] = (row[i] or 0.0) + used[i]
                    touched.add(i)
            if not was_kept:
                for i in touched:
                    mean = sum(row[i] or 0.0 for row in known) / size
                    for row in known:
                        row[i] = mean
                touched.clear()
            found = [None if p.grad is None else round(p.grad.item(), 3) for p in net.parts]
            assert found == [None if x is None else round(x, 3) for x in known[rank]]


@several
@pytest.mark.parametrize("wrapper", ["ddp", idist.Replicated])
def test_every_backward_outside_of_no_sync_is_averaged(wrapper: Any) -> None:
    """The forward may be the wrapper's in no_sync, the inner module's, or an earlier one."""
    rank, size = idist.get_rank(), idist.get_world_size()
    net = nn.Linear(1, 1, bias=False)
    model = idist.auto_model(net, wrapper=wrapper)
    mean = (size + 1) / 2
    x = torch.tensor([[rank + 1.0]])

    def grad() -> float:
        assert net.weight.grad is not None
        found = net.weight.grad.item()
        model.zero_grad()
        return found

    with idist.no_sync(model):
        losses = [model(x).sum() for _ in range(2)]
    sum(losses).backward()
    assert grad() == pytest.approx(2 * mean)
    net(x).sum().backward()
    assert grad() == pytest.approx(mean)
    first, second = model(x).sum(), model(x).sum()
    first.backward()
    assert grad() == pytest.approx(mean)
    second.backward()
    assert grad() == pytest.approx(mean)
    with idist.no_sync(model):
        net(x).sum().backward()
    assert grad() == rank + 1.0


@pytest.mark.ranks(2, on=("threads", "gloo"))
def test_no_sync_and_join_see_the_wrapper_in_a_compiled_model() -> None:
    rank, net = idist.get_rank(), nn.Linear(1, 1, bias=False)
    model = idist.auto_model(net)
    compiled: Any = torch.compile(model, backend="eager")
    with idist.no_sync(compiled):
        net(torch.tensor([[rank + 1.0]])).sum().backward()
    assert net.weight.grad == rank + 1.0
    with idist.join(compiled):
        for _ in range(rank + 1):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
    assert net.weight.grad == 1 / (2 if rank else 1)


def test_a_wrapper_s_own_no_sync_is_used() -> None:
    calls = []

    class Own(nn.Identity):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            calls.append("begin")
            yield
            calls.append("end")

    with idist.no_sync(Own()):
        assert calls == ["begin"]
    assert calls == ["begin", "end"]


class InParts(nn.Sequential):
    """A model that recomputes each part in backward."""

    def __init__(self, parts: list[nn.Linear], is_reentrant: bool) -> None:
        super().__init__(*parts)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = checkpoint(part, x, use_reentrant=self.is_reentrant)
        return x


@pytest.mark.ranks(2, on="gloo")
def test_what_torch_averages_is_averaged_once() -> None:
    calls: list[str] = []
    remove = idist.add_hook(after=lambda record: calls.append(record.name))
    options: list[Any] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]
    for is_reentrant, kwargs in itertools.product((False, True), options):
        if is_reentrant and "find_unused_parameters" in kwargs:
            continue  # torch doesn't support both
        parts = [nn.Linear(2, 2) for _ in range(3)]
        model = idist.auto_model(InParts(parts, is_reentrant), **kwargs)
        for _ in range(3):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    remove()
    assert "gradients" in calls
    assert "all_reduce_grads" not in calls


@several_here
@pytest.mark.parametrize("wrapper", ["ddp", idist.Replicated])
def test_ranks_that_train_another_model_are_told_at_once(wrapper: Any) -> None:
    """The other model may have the same size, and a rank may call another collective."""
    rank = idist.get_rank()

    def made(which: int) -> nn.Module:
        return [idist.auto_model(nn.Linear(2, n), wrapper=wrapper) for n in (2, 2, 300)][which]

    for other in (1, 2):
        model = made(0 if rank == 0 else other)
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(CollectiveMismatchError, match="gradients of backward of Linear") as why:
            loss.backward()
        line = f"test_wrapping.py:{why.traceback[0].lineno + 1}"
        assert len(set(re.findall(r"\(model \d+\)", str(why.value)))) == 2
        assert str(why.value).count(line) >= 2
    model = made(0)
    loss = model(torch.ones(1, 2)).sum()
    both = r"(?s)rank 0: barrier at .*rank 1: gradients"
    with pytest.raises(CollectiveMismatchError, match=both):
        idist.barrier() if rank == 0 else loss.backward()
    net = nn.Linear(1, 1)
    model = idist.auto_model(net, wrapper=wrapper)
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    assert net.weight.grad == (idist.get_world_size() + 1) / 2  # the ranks are still in step


@several_here
@pytest.mark.parametrize("widths", [(1, 3), (2, 2)], ids=["a GAN", "a mixture"])
def test_a_choice_by_a_rank_s_own_loss_ends_within_some_rounds(widths: tuple[int, int]) -> None:
    models = [idist.auto_model(nn.Linear(2, width)) for width in widths]

    def round_s(choice: int) -> float:
        begin = time.monotonic()
        models[choice](torch.ones(1, 2)).sum().backward()
        return time.monotonic() - begin

    slowest_s = max(round_s(turn % 2) for turn in range(10))
    begin = time.monotonic()
    with pytest.raises(
        CollectiveMismatchError, match=r"(?s)rank \d.*gradients.*rank \d.*gradients"
    ):
        round_s(int(idist.get_rank() == 0))
    assert time.monotonic() - begin < 500 * slowest_s  # usually about slowest_s


@pytest.mark.ranks(2, on="gloo")
def test_sparse_gradients_are_averaged_by_torch() -> None:
    net = nn.Embedding(3, 1, sparse=True)
    model = idist.auto_model(net)
    model(torch.tensor([idist.get_rank()])).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.to_dense().tolist() == [[0.5], [0.5], [0.0]]


@several
@pytest.mark.parametrize("is_training", [True, False])
def test_a_failed_backward_spoils_no_later_one(is_training: bool) -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 1)
    model: Any = idist.auto_model(nn.Sequential(first, last), wrapper=idist.Replicated)
    model.train(is_training)
    x = torch.full((1, 2), idist.get_rank() + 1.0)
    between = first(x)
    between.register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        last(between).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    grads = idist.all_gather([last.weight.grad, first.weight.grad])
    for row in grads:
        torch.testing.assert_close(row, grads[0])


@several_here
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_generic", [True, False])
def test_ranks_may_have_different_numbers_of_batches(is_generic: bool, is_training: bool) -> None:
    joins(0, is_generic, is_training)


def joins(local_rank: int, is_generic: bool, is_training: bool = True) -> None:
    rank = idist.get_rank()
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).train(is_training)
    wrapper: Any = idist.Replicated if is_generic else "ddp"
    model = idist.auto_model(net, wrapper=wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with idist.join(model):
        for i in range(2 + 2 * rank):
            model(drawn(i, 4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    idist.assert_equal(net.state_dict())


@alone_and_several
def test_batch_norm_over_uneven_batches() -> None:
    """Compare with torch's batch norm over the whole batch, in forward and backward."""
    rank, size = idist.get_rank(), idist.get_world_size()
    all_rows, weights = drawn(5, 2, 7 * size, 3, 2).double()
    all_rows += 1e4
    mine = slice(7 * rank - (rank > 0), 7 * rank + 6 if rank < size - 1 else None)
    for affine, momentum in ((True, 0.1), (False, None)):
        plain = nn.BatchNorm1d(3, affine=affine, momentum=momentum).double()
        ours: Any = idist.convert_sync_batchnorm(copy.deepcopy(plain), "unisono")
        x: Any = all_rows.clone().requires_grad_()
        part: Any = all_rows[mine].clone().requires_grad_()
        for _ in range(2):
            (plain(x) * weights).sum().backward()
            out = ours(part)
            (out * weights[mine]).sum().backward()
        torch.testing.assert_close(part.grad, x.grad[mine], rtol=1e-6, atol=1e-9)
        assert ours.running_mean is not None
        torch.testing.assert_close(ours.running_mean, plain.running_mean)
        torch.testing.assert_close(ours.running_var, plain.running_var)
        assert int(ours.num_batches_tracked) == 2
        if affine:
            grads = idist.all_reduce([ours.weight.grad, ours.bias.grad])
            torch.testing.assert_close(grads, [plain.weight.grad, plain.bias.grad])
        ours.eval()
        plain.eval()
        torch.testing.assert_close(ours(part), plain(x)[mine])


def test_conversion_keeps_parameters_and_takes_names() -> None:
    net: Any = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3)))
    before = {name: id(item) for name, item in net.named_parameters()}
    idist.convert_sync_batchnorm(net)
    assert {name: id(item) for name, item in net.named_parameters()} == before
    assert isinstance(net[0], idist.SyncBatchNorm)
    assert isinstance(net[1][0], idist.SyncBatchNorm)
    with pytest.raises(ArgumentError, match="Known: .*torch, unisono"):
        idist.convert_sync_batchnorm(net, "mmcv")
    with pytest.raises(UnsupportedOperation, match="unisono"):
        idist.convert_sync_batchnorm(net, "torch")
    shared = nn.Module()
    shared.first = nn.BatchNorm1d(2)
    shared.second = shared.first
    idist.convert_sync_batchnorm(shared)
    assert shared.second is shared.first
    norm = idist.SyncBatchNorm(1, track_running_stats=False).eval()
    if idist.get_rank() == 0:  # evaluation isn't collective
        torch.testing.assert_close(
            norm(torch.tensor([[1.0], [3.0]])), torch.tensor([[-1.0], [1.0]])
        )
    idist.register_sync_batchnorm("tests", lambda module: module, override=True)
    assert idist.convert_sync_batchnorm(net, "tests") is net
    with pytest.raises(RegistrationError, match="taken"):
        idist.register_sync_batchnorm("torch", lambda module: module)


@alone_and_several
def test_what_auto_model_refuses() -> None:
    size = idist.get_world_size()
    for wrong in ("fsdpp", 3):
        with pytest.raises(ArgumentError, match="Known: ddp, fsdp"):
            idist.auto_model(nn.Linear(1, 1), wrapper=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Did you mean 'bucket_cap_mb'"):
        idist.auto_model(nn.Linear(1, 1), bucket_cap_mbb=3)
    with pytest.raises(ArgumentError, match="device_ids"):
        idist.auto_model(nn.Linear(1, 1), device_ids=[0])
    with pytest.raises(ArgumentError, match="needed, not a str"):
        idist.auto_model("net")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"2\.weight has no shape yet: run a batch"):
        idist.auto_model(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.LazyLinear(1)))
    with pytest.raises(ArgumentError, match="weight is on the meta device.*to_empty"):
        idist.auto_model(nn.Linear(1, 1, device="meta"))
    with pytest.raises(ArgumentError, match="needed, not a int"):
        idist.auto_optim(3)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="does not support options"):
        idist.auto_optim(optimizer, compression=1)
    if size == 1:
        return
    net = nn.Linear(2, 2)
    model = idist.auto_model(net)
    with pytest.raises(ArgumentError, match="wrapped already"):
        idist.auto_model(model)
    generic = idist.auto_model(nn.Linear(2, 2), wrapper=idist.Replicated)
    with pytest.raises(ArgumentError, match="already passed to auto_model"):
        idist.auto_model(idist.unwrap_model(generic))
    with pytest.raises(UnsupportedOperation, match="mixed_precision"):
        idist.auto_model(nn.Linear(2, 2), wrapper=idist.Replicated, mixed_precision=True)
    with pytest.raises(PayloadError, match="sparse"):
        idist.auto_model(nn.Embedding(2, 2, sparse=True), wrapper=idist.Replicated)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has"):
        idist.auto_model(nn.Linear(2, 2 + idist.get_rank()), wrapper=idist.Replicated)


@pytest.mark.ranks(2, on="threads")
def test_wrappers_that_the_model_lacks_and_registered_ones() -> None:
    with pytest.raises(UnsupportedOperation, match="wrapper 'fsdp'"):
        idist.auto_model(nn.Linear(2, 2), wrapper="fsdp")
    made = nn.Identity()
    idist.register_wrapper("mine", lambda module, flag: made if flag else module, override=True)
    assert idist.auto_model(nn.Linear(2, 2), wrapper="mine", flag=True) is not None
    with pytest.raises(RegistrationError, match="taken"):
        idist.register_wrapper("ddp", lambda module: module)


@pytest.mark.ranks(3, on="gloo")
def test_ddp_averages_in_shared_memory() -> None:
    """Compare with a wrapper over torch's own gloo group, in every mode."""
    rank = idist.get_rank()
    kinds: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {}),
        (torch.float32, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        (torch.bfloat16, {"static_graph": True}),
        (torch.float16, {"find_unused_parameters": True}),
    ]
    for dtype, options in kinds:
        net = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 2)).to(dtype)
        mine: Any = idist.auto_model(net, **options)
        theirs: Any = nn.parallel.DistributedDataParallel(copy.deepcopy(net), **options)
        for step in range(3):
            x = torch.full((2, 4), rank + step + 1.0, dtype=dtype)
            for model in (mine, theirs):
                with model.no_sync() if step == 1 else nullcontext():
                    model(x).sum().backward()
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            rounding = 1e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(one.grad, other.grad, rtol=rounding, atol=rounding)
    assert mine._comm_hooks[0][0].__name__ == "average"


@pytest.mark.ranks(2, on="gloo")
def test_torch_s_join_divides_by_those_who_have_inputs() -> None:
    found = []
    for divides_by_all in (True, False):
        layer = nn.Linear(2, 1, bias=False)
        model: Any = idist.auto_model(layer)
        slopes = []
        with model.join(divide_by_initial_world_size=divides_by_all):
            for _ in range(1 + 2 * idist.get_rank()):
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                assert layer.weight.grad is not None
                slopes.append(float(layer.weight.grad[0, 0]))
        found.append(slopes)
    assert found == [[[1.0], [1.0]], [[1.0, 0.5, 0.5], [1.0, 1.0, 1.0]]][idist.get_rank()]


@pytest.mark.ranks(2, on="gloo")
def test_ddp_with_its_hook_can_be_copied_and_saved() -> None:
    model: Any = idist.auto_model(nn.Linear(2, 1))
    for _ in range(2):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            made(torch.ones(1, 2)).sum().backward()
            model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()  # this registers the communication hook


@pytest.mark.ranks(2, on="gloo")
def test_backward_waits_for_what_runs_in_the_background() -> None:
    model = idist.auto_model(nn.Linear(50, 1))
    for step in range(20):
        running = idist.all_reduce(torch.full((5000,), float(step)), async_op=True)
        model.zero_grad()
        model(torch.full((1, 50), idist.get_rank() + 1.0)).sum().backward()
        assert torch.equal(running.wait(), torch.full((5000,), 2.0 * step))
        for parameter in model.parameters():
            expected = 1.0 if parameter.shape == (1,) else 1.5
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected))


@pytest.mark.ranks(2, on="gloo")
def test_a_hook_of_the_user_stays() -> None:
    model: Any = idist.auto_model(nn.Linear(1, 1, bias=False))

    def twice(state: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    twice.__annotations__.clear()
    model.register_comm_hook(None, twice)
    model(torch.ones(1, 1)).sum().backward()
    assert [float(parameter.grad) for parameter in model.parameters()] == [2.0]


@pytest.mark.ranks(2, on="gloo")
def test_fsdp_shards_and_trains_as_one_process() -> None:
    net = with_drawn_weights(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    model: Any = idist.auto_model(copy.deepcopy(net), wrapper="fsdp")
    with pytest.raises(ArgumentError, match="wrapped already"):
        idist.auto_model(model)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    rank = idist.get_rank()
    for i in range(3):
        batch = drawn(i, 6, 4)
        net(batch).pow(2).mean().backward()
        parts = batch[3 * rank : 3 * rank + 3]
        with idist.no_sync(model):
            (model(parts[:1]).pow(2).sum() / 6).backward()
        (model(parts[1:]).pow(2).sum() / 6).backward()
        for optimizer in (plain, ours):
            optimizer.step()
            optimizer.zero_grad()
    state = {name: item.full_tensor() for name, item in model.state_dict().items()}
    torch.testing.assert_close(state, dict(net.state_dict()), rtol=1e-5, atol=1e-6)


class Averaging(ThreadsModel, TrainingHooks):
    """A model whose optimizers average gradients in their step."""

    name = "averaging"
    backends = ("averaging",)

    def wrap_optimizer(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        return optimizer

    def settle_gradients(self, optimizer: Optimizer) -> Callable[[], None]:
        number = optimizer.param_groups[0]["number"]
        assert idist.all_gather(number) == [number] * idist.get_world_size()
        return lambda: None


class Lazy(ThreadsModel, TrainingHooks):
    """A model whose backward can't average, as that of XLA."""

    name = "lazy"
    backends = ("lazy",)
    averages_in_step = True


def test_a_step_averages_only_in_the_context_of_its_optimizer() -> None:
    idist.register_model(Lazy)
    made: list[Optimizer] = []
    try:
        run("lazy", 2, averages_in_step, made)
        with pytest.raises(ContextError, match=r"other than the active one \(serial\).*auto_optim"):
            made[0].step()
        run("lazy", 2, averages_in_step, made)  # made again, in the new context
    finally:
        unregister_model(Lazy)


def averages_in_step(local_rank: int, made: list[Optimizer]) -> None:
    if local_rank == 0 and not made:
        made.append(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer = idist.auto_optim(plain if local_rank else made[0])
    assert type(optimizer).__base__ is torch.optim.SGD
    (parameter,) = optimizer.param_groups[0]["params"]
    before = parameter.item()
    for _ in range(2):
        parameter.grad = torch.full((1,), float(local_rank))
        optimizer.step()
    assert parameter.item() == before - 1.0


def test_gradients_are_averaged_in_the_order_of_the_optimizers() -> None:
    idist.register_model(Averaging)
    try:
        run("averaging", 2, averages)
    finally:
        unregister_model(Averaging)


def averages(local_rank: int) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizers = []
    for number in range(20):
        groups: Any = [{"params": [parameter], "number": number}]
        optimizers.append(idist.auto_optim(torch.optim.SGD(groups, lr=1.0)))
    idist.clip_grad_norm_([parameter], 1.0)
    assert len(optimizers) == 20


@pytest.mark.ranks(2, on="gloo")
def test_a_scaler_of_sharded_gradients_is_refused() -> None:
    model = idist.auto_model(nn.Linear(4, 8), wrapper="fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(drawn(0, 6, 4)).sum().backward()
    grads = [item.grad.full_tensor() for item in model.parameters()]  # type: ignore[union-attr]
    norm = idist.clip_grad_norm_(model, 0.5)
    expected = torch.cat([item.reshape(-1) for item in grads]).norm()
    torch.testing.assert_close(norm, expected)
    with pytest.raises(UnsupportedOperation, match="GradScaler over sharded gradients"):
        scaler: Any = torch.amp.GradScaler("cpu")
        idist.clip_grad_norm_(model, 0.5, optimizer=optimizer, scaler=scaler)


@pytest.mark.parametrize(("backend", "size"), REAL)
def test_on_real_libraries(backend: str, size: int) -> None:
    run_all(backend, size, (joins, True), (outlives,))


@pytest.mark.real
def test_horovod_has_its_own_optimizer() -> None:
    run_all("horovod", 2, (horovod_optimizer,))


def horovod_optimizer(local_rank: int) -> None:
    rank = idist.get_rank()
    for has_model, options in ((False, {}), (True, {"backward_passes_per_step": 1})):
        net = nn.Linear(2, 1)
        idist.broadcast_params(net)
        model = idist.auto_model(net) if has_model else net
        optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=1.0), **options)
        assert type(optimizer).__module__ == "horovod.torch.optimizer"
        before = net.weight.detach().clone()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(before - net.weight.detach(), torch.full((1, 2), 1.5))
    net = nn.Linear(2, 1)
    averaged = idist.auto_model(net)
    plain = torch.optim.SGD(averaged.parameters(), lr=1.0)
    assert idist.auto_optim(plain) is plain
