"""What averaging gradients costs, ours and others': 161 of a ResNet-50, and steps of training.

First the gradients, 25.6 million float32: `unisono.all_reduce_grads` beside gloo on one flat buffer
that is there already, without any copy; beside gloo on the buckets that ``DistributedDataParallel``
would make of them; and beside ``mmengine.dist.all_reduce_params(coalesce=True)`` where mmengine is
installed. Then steps (forward, backward, SGD) of three models under ``DistributedDataParallel``:
over gloo with bucket views; with the hook of `auto_model`; over torch's backend "unisono" where
there is one; and without any communication, which is what the others come from. All take turns in
the same processes, and a time is that of the slowest rank.

    python benchmarks/gradients.py [--ranks 2 4] [--rounds 15] [--models MLP conv tiny]
                                   [--json | --markdown]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import Timing, Work, interleave, parser, ratio_report, short
from tensors import slowest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono

FLAT, BUCKETS, MMENGINE = "one flat gloo call", "DDP's buckets over gloo", "mmengine"
GRADIENTS = {FLAT: (3, 2), BUCKETS: (4.5, 3), MMENGINE: (5, 4)}
"""How many times faster than each with 2 and with 4 ranks."""
GLOO, HOOK, BACKEND = "DDP over gloo", "DDP, our hook", "DDP, our backend"
ALONE = "no communication"
STEPS = {HOOK: (1.3, 1.2), BACKEND: (1.2, 1.2)}
"""How many times faster than DDP over gloo a step of the MLP is with each."""
MIB = 2**20
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB  # torch's
COPY = "copy"
BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
Found = Mapping[str, Mapping[str, Timing]]
"""Timings by way, for each work."""


def shapes() -> list[tuple[int, ...]]:
    """List the shapes of a ResNet-50's parameters."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, count in BLOCKS:
        for i in range(count):
            found += [(planes, width, 1, 1), (planes,), (planes,)]
            found += [(planes, planes, 3, 3), (planes,), (planes,)]
            found += [(4 * planes, planes, 1, 1), (4 * planes,), (4 * planes,)]
            if i == 0:
                found += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*found, (1000, width), (1000,)]


def _mlp() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(2048, 2048), nn.ReLU()] * 6
    return nn.Sequential(*layers, nn.Linear(2048, 8)), torch.ones(1, 2048)


def _conv() -> tuple[nn.Module, Tensor]:
    sizes = ((3, 32), (32, 64), (64, 128), (128, 256))
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        for i, o in sizes
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(1024, 10)), torch.ones(4, 3, 32, 32)


def _tiny() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)), torch.ones(8, 32)


MODELS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Tensor]], int]] = {
    "MLP": ("MLP of 25 M parameters", _mlp, 1),
    "conv": ("conv net of 0.4 M parameters", _conv, 5),
    "tiny": ("net of 1386 parameters", _tiny, 20),
}
"""For each its name, what makes it and its input, and steps in a turn."""


def in_buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split gradients as ``DistributedDataParallel`` does: from the last on, one short at first."""
    made: list[list[Tensor]] = [[]]
    limit = FIRST_BUCKET_BYTES
    for gradient in reversed(gradients):
        made[-1].append(gradient)
        if sum(tensor.nbytes for tensor in made[-1]) >= limit:
            made.append([])
            limit = BUCKET_BYTES
    return [bucket for bucket in made if bucket]


def bucketwise(buckets: Sequence[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]) -> None:
    """Average buckets over gloo, all under way at once, as ``DistributedDataParallel`` does."""
    under_way = []
    for flat, views, gradients in buckets:
        torch._foreach_copy_(list(views), list(gradients))
        flat.div_(dist.get_world_size())
        under_way.append(dist.all_reduce(flat, async_op=True))
    for work, (_, views, gradients) in zip(under_way, buckets, strict=True):
        work.wait()
        torch._foreach_copy_(list(gradients), list(views))


def with_flat(bucket: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Give a flat buffer for a bucket, its views for the gradients, and these as [numel]."""
    gradients = [gradient.view(-1) for gradient in bucket]
    flat = torch.cat(gradients)
    return flat, list(torch.split(flat, [len(gradient) for gradient in gradients])), gradients


def mmengine() -> Any:
    """Give mmengine.dist, None if it isn't installed."""
    found = importlib.util.find_spec("mmengine")
    return None if found is None else importlib.import_module("mmengine.dist")


def averages() -> dict[str, Callable[[], object]]:
    """Give every way to average the gradients of a ResNet-50. Ours comes first."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes()]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    mine = [torch.randn(shape) for shape in shapes()]
    flat = torch.randn(sum(tensor.numel() for tensor in mine))
    buckets = [with_flat(bucket) for bucket in in_buckets(mine)]
    calls: dict[str, Callable[[], object]] = {
        "unisono": partial(unisono.all_reduce_grads, parameters),
        FLAT: partial(dist.all_reduce, flat),
        BUCKETS: partial(bucketwise, buckets),
    }
    peer = mmengine()
    if peer is not None:
        calls[MMENGINE] = partial(peer.all_reduce_params, mine, coalesce=True, op="mean")
    calls[COPY] = partial(torch.empty_like(flat).copy_, flat.clone())
    return calls


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    """Train for one step."""
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def steps(make: Callable[[], tuple[nn.Module, Tensor]]) -> dict[str, Callable[[], object]]:
    """Give a step of training for every way to average."""
    group = our_group()
    calls: dict[str, Callable[[], object]] = {}
    ways: dict[str, Callable[[nn.Module], nn.Module] | None] = {
        HOOK: partial(unisono.auto_model, gradient_as_bucket_view=True),
        BACKEND: partial(_ddp, process_group=group) if group is not None else None,
        GLOO: _ddp,
        ALONE: lambda model: model,
    }
    for name, wrap in ways.items():
        if wrap is not None:
            torch.manual_seed(0)
            model, inputs = make()
            wrapped = wrap(model)
            optimizer = torch.optim.SGD(wrapped.parameters(), 1e-6)
            calls[name] = partial(step, wrapped, optimizer, inputs)
    return calls


def _ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def our_group() -> Any:
    """Make a group of torch's backend "unisono", None where it isn't registered."""
    if "unisono" not in dist.Backend.backend_list:
        return None
    return dist.new_group(backend="unisono")


def measure(local_rank: int, rounds: int, models: Sequence[str]) -> Found:
    """Time the gradients, and steps of each model. Collective over all ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers'
    found: dict[str, Mapping[str, Timing]] = {"": interleave(rounds, averages(), 1)}
    for name in models:
        _, make, turns = MODELS[name]
        found[name] = interleave(rounds, steps(make), turns)
    return found


def of_gradients(timings: Mapping[str, Timing], ranks: int) -> list[Work]:
    """List the works of the 161 gradients: ours beside each other way."""
    copied = timings[COPY].median
    nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes())
    bound = (
        f"In the same rounds each rank copied {short(nbytes / copied / 1000)} GB/s, so to read all "
        f"gradients and to write their means takes {short(copied / 1000)} ms."
    )
    return [
        Work(
            f"161 gradients, beside {peer}",
            {"unisono": timings["unisono"], peer: timings[peer]},
            _goal(limits, ranks),
            bound=bound,
        )
        for peer, limits in GRADIENTS.items()
        if peer in timings
    ]


def of_steps(name: str, timings: Mapping[str, Timing], ranks: int) -> list[Work]:
    """List the works of a model's steps: each of our ways beside gloo."""
    text, alone = MODELS[name][0], timings[ALONE].median
    bound = (
        f"Without any communication a step took {short(alone / 1000)} ms, and over gloo "
        f"{timings[GLOO].median / alone:.2f} times that: so no way can be faster than this."
    )
    return [
        Work(
            f"step of the {text}, {mine}",
            {mine: timings[mine], GLOO: timings[GLOO], ALONE: timings[ALONE]},
            _goal(limits, ranks) if name == "MLP" else None,
            bound=bound,
            peer=GLOO,
        )
        for mine, limits in STEPS.items()
        if mine in timings
    ]


def _goal(limits: tuple[float, float], ranks: int) -> float | None:
    return {2: limits[0], 4: limits[1]}.get(ranks)


def main() -> int:
    """Measure and print."""
    made = parser("What averaging gradients costs, ours and others'.", 15)
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    arguments = made.parse_args()
    code = 0
    for ranks in arguments.ranks:
        options = (arguments.rounds, arguments.models)
        found = slowest(unisono.spawn("gloo", measure, options, nproc_per_node=ranks))
        works = of_gradients(found[""], ranks)
        for name in arguments.models:
            works += of_steps(name, found[name], ranks)
        about = {"torch": torch.__version__, "ranks": ranks, "rounds": arguments.rounds}
        code |= ratio_report("Gradients", works, about, how=arguments.how)
        print()
    return code


if __name__ == "__main__":
    sys.exit(main())
