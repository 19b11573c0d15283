"""Training support: loader positions, preemption, agreement of ranks."""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import unisono as idist
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PeerFailedError,
    UnsupportedOperation,
)
from unisono.testing.cases._law import law, raises, same


@law()
def a_position_is_followed_by_what_was_not_seen(rank: int, size: int) -> None:
    data = list(range(12 * size))

    def make() -> Any:
        return idist.auto_dataloader(data, batch_size=3 * size)

    loader = make()
    loader.set_epoch(1)
    whole = [rows.tolist() for rows in loader]
    same(sorted(i for part in idist.all_gather(whole) for rows in part for i in rows), data)
    loader.set_epoch(1)
    for _, _rows in zip(range(2), loader, strict=False):  # leaves the epoch after two batches
        pass
    state = loader.state_dict()
    same(idist.all_gather(state), [state] * size, "the position")
    again = make()
    again.load_state_dict(state)
    again.set_epoch(again.epoch)
    same([rows.tolist() for rows in again], whole[2:], f"the rest on rank {rank}")
    other = make()
    same([rows.tolist() for rows in other] == whole, False, "each pass has an order of its own")
    same([rows.tolist() for rows in other], whole, "the second pass has that of epoch 1")
    same(other.epoch, 0, "passes before training aren't epochs")


@law()
def a_signal_to_one_rank_is_told_to_all_at_the_same_point(rank: int, size: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        raises(UnsupportedOperation, ["preemption_point", "threads"], idist.preemption_point)
        return
    with idist.preemptible(signal.SIGUSR1):
        same(idist.all_gather(idist.preemption_point()), [False] * size)
        if rank == size - 1:
            signal.raise_signal(signal.SIGUSR1)
        same(idist.preemption_point(), True)
        same(idist.preemption_point(), True)
        if rank != size - 1:  # if all ranks get the signal, it does no harm that some get it later
            signal.raise_signal(signal.SIGUSR1)
        idist.barrier()


@law()
def values_that_differ_are_named_with_their_ranks(rank: int, size: int) -> None:
    tree: Any = {"model": nn.Linear(2, 1), "steps": [3, "x", None], "weights": torch.ones(4)}
    with torch.no_grad():
        for parameter in tree["model"].parameters():
            parameter.fill_(0.5)
    idist.assert_equal(tree)
    idist.assert_equal([float("nan"), -0.0, {}, torch.tensor([float("nan")]), object()])
    numbers = [0, 8, 2**70] if rank else [2**70, 8, 0]  # collide, so their sets differ in order
    idist.assert_equal([set(numbers), frozenset([frozenset(numbers), "a"]), set(map(str, numbers))])
    same(idist.all_reduce(1), size)
    if size == 1:
        return
    last = rank == size - 1
    others, alone = str([*range(size - 1)]), str([size - 1])
    tree["steps"][0] += last
    parts = ["{'steps'}[0]", f"ranks {others}: 3", f"ranks {alone}: 4", "1 of"]
    raises(CollectiveMismatchError, parts, idist.assert_equal, tree)
    tree["steps"][0] = 3
    if last:
        tree["model"].weight.data[0, 1] = -0.5
    parts = ["{'model'}{'weight'}", "float32[1, 2]", f"ranks {alone}", "digest"]
    raises(CollectiveMismatchError, parts, idist.assert_equal, tree)
    zero = 0.0 if rank else -0.0
    raises(CollectiveMismatchError, ["ranks [0]: -0.0"], idist.assert_equal, zero)
    raises(CollectiveMismatchError, ["nothing"], idist.assert_equal, {str(last): 1})
    parts = [f"ranks {others}: set([0])", f"ranks {alone}: set([1])"]
    raises(CollectiveMismatchError, parts, idist.assert_equal, {int(last)})


@law()
def each_sample_is_evaluated_once_and_results_are_in_order(rank: int, size: int) -> None:
    for count in (0, 1, size, 4 * size + 1):
        data = [torch.tensor([float(i), 1.0]) for i in range(count)]
        calls: list[int] = []

        def double(batch: Tensor, calls: list[int] = calls) -> dict[str, Any]:
            calls.append(idist.all_reduce(1))  # all ranks call it equally often
            return {"twice": batch * 2, "names": [f"{row[0]:.0f}" for row in batch.tolist()]}

        made: Any = idist.evaluate(double, data, batch_size=2 * size)
        if not count:
            same(made, [])
            continue
        same(made["twice"].cpu(), torch.stack(data) * 2, f"{count} samples")
        same(made["names"], [str(i) for i in range(count)])
        same(set(calls), {size})
    numbers = list(range(3 * size))
    to_last = idist.evaluate(lambda rows: rows.tolist(), numbers, dst=size - 1)
    same(to_last, numbers if rank == size - 1 else None)
    loader = idist.auto_dataloader(numbers, batch_size=2 * size)
    sizes = idist.evaluate(lambda rows: [len(rows)] * len(rows), loader)
    same(sizes, [2] * 2 * size + [1] * size, "batches are those of the loader")
    raises(ArgumentError, ["shuffle"], idist.evaluate, len, [1], shuffle=True)
    raises(PeerFailedError, ["0 results"], idist.evaluate, lambda rows: [], [1, 2, 3])


@law()
def what_a_rank_raises_in_evaluate_is_told_while_others_wait_in_it(rank: int, size: int) -> None:
    numbers = list(range(2 * size))

    def fails(rows: Tensor) -> Tensor:
        if rank == size - 1:
            raise KeyError("mine")
        idist.all_reduce(1)  # other ranks wait here
        return rows

    raises(PeerFailedError, ["KeyError: 'mine'"], idist.evaluate, fails, numbers)
    same(idist.all_reduce(1), size, "ranks are in step")
    if size == 1:
        return
    for unlike in (torch.ones(1, 1 + (rank == 0)), [1] if rank else torch.ones(1)):
        result = {"a": [3], "x": unlike}
        call = partial(idist.evaluate, lambda rows, result=result: result)  # type: ignore[misc]
        raises(CollectiveMismatchError, ["differ in kind"], call, numbers, dst=0)


@law()
def a_rank_out_of_memory_halves_the_batch_on_all(rank: int, size: int) -> None:
    tried: list[int] = []

    @idist.find_executable_batch_size(4)  # small, as each failed try collects all garbage
    def train(batch_size: int, room: int) -> tuple[int, int]:
        tried.append(batch_size)
        total = idist.all_reduce(1)
        if rank == size - 1 and batch_size > room:
            raise MemoryError(f"no room for {batch_size}")
        return batch_size, total + idist.all_reduce(1)  # other ranks wait here

    same(idist.all_gather(train(1)), [(1, 2 * size)] * size)
    same(tried, [4, 2, 1])
    raises(MemoryError, ["a batch of 1"], train, 0)

    @idist.find_executable_batch_size(4)
    def fails(batch_size: int) -> None:
        if rank == size - 1:
            raise KeyError("mine")

    raises(KeyError if rank == size - 1 else PeerFailedError, ["mine"], fails)
    begin = 32 + (rank == size - 1)
    unlike = idist.find_executable_batch_size(begin)(lambda batch_size: batch_size)
    if size > 1:
        raises(CollectiveMismatchError, ["rank 0: ", "from 32", "from 33"], unlike)


@law()
def gradients_are_clipped_by_the_norm_of_their_mean(rank: int, size: int) -> None:
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1.0))
    mean = sum(range(1, size + 1)) / size
    for _ in range(2):
        x = torch.tensor([[3.0, 4.0]], device=idist.device()) * (rank + 1)
        model(x).sum().backward()
        norm = idist.clip_grad_norm_(model, 1.0)
        torch.testing.assert_close(norm.cpu(), torch.tensor(5 * mean))
        optimizer.step()
        optimizer.zero_grad()
    (weight,) = (item.detach().cpu() for item in idist.unwrap_model(model).parameters())
    # Each of two steps subtracts the mean gradient, a multiple of (3, 4) clipped to norm 1.
    torch.testing.assert_close(weight, torch.tensor([[1 - 2 * 0.6, 1 - 2 * 0.8]]))
    idist.assert_equal(weight)
    scaler = torch.amp.GradScaler(idist.device().type, enabled=False)
    raises(ArgumentError, ["optimizer"], idist.clip_grad_norm_, model, 1.0, scaler=scaler)
