"""The XLA model on torch_xla's CPU device: one replica, and two that are threads."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import unisono as idist
from tests.support.launched import with_model
from tests.support.tops import check, check_end, ends_on, few_on, job_of_program, told
from unisono.context import ContextState
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    PeerFailedError,
    UnsupportedOperation,
    WorkerFailedError,
)
from unisono.launchers.xla import functions as launcher
from unisono.model import fallback
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.models.xla.model import REPLICAS, XlaModel
from unisono.topology import ContextHint, LaunchPlan, RankInfo, Topology

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"
ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "src")
SIZES = (1, 2)
SHAPES = ((3,), (2, 3), (), (0, 2))
FLOATS = (torch.float16, torch.float32, torch.float64)
BITWISE = (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
ODD = (-0.0, float("nan"), float("inf"), 1e-310, 2.5, -1.0)


@pytest.fixture(autouse=True, scope="module")
def _torch_xla() -> None:
    if importlib.util.find_spec("torch_xla") is not None:
        return
    text = "torch_xla isn't installed: pip install torch==2.9.0 torch_xla==2.9.0"
    if "xla" in os.environ.get("UNISONO_REQUIRE", ""):
        pytest.fail(text)
    pytest.skip(text)


def launch(entry: Callable[[XlaModel], Any], n: int, **options: Any) -> list[Any]:
    plan = LaunchPlan(n, backend="xla-cpu")
    run = partial(with_model, XlaModel, "xla-cpu", entry, options)
    return launcher.launch(run, plan, environ=XlaModel.worker_environ(plan))


def sample(dtype: torch.dtype, rank: int, shape: tuple[int, ...]) -> Tensor:
    """Give numbers that differ by rank, among them the greatest that the dtype holds exactly."""
    numbers = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int64) * 7 + 3 * rank + 1
    if dtype is torch.bool:
        numbers = numbers % 2
    elif dtype is torch.int64:
        numbers[0] = 2**53 + 1 + rank
    elif dtype is torch.float64:
        return (numbers.double() / 3)[: torch.Size(shape).numel()].reshape(shape)
    return numbers[: torch.Size(shape).numel()].reshape(shape).to(dtype)


def is_same(got: Tensor | None, want: Tensor) -> bool:
    """Compare bit by bit."""
    if got is None or (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    flat = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, want)]
    return torch.equal(*flat)


class Checks:
    """What one replica found wrong."""

    def __init__(self, model: XlaModel) -> None:
        self.model = model
        self.rank, self.n = model.topology.rank, model.topology.world_size
        self.wrong: list[str] = []

    def check(self, what: str, got: Tensor | None, want: Tensor) -> None:
        if not is_same(got, want):
            self.wrong.append(f"rank {self.rank} of {self.n}: {what}: {got}, not {want}")

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.model.transport_device, copy=True)


def movements(model: XlaModel) -> list[str]:
    c = Checks(model)
    for dtype in sorted(model.dtypes, key=str):
        for shape in SHAPES:
            rows = [sample(dtype, rank, shape) for rank in range(c.n)]
            grids = [
                torch.stack([sample(dtype, 5 * rank + i, shape) for i in range(c.n)])
                for rank in range(c.n)
            ]
            own, grid, what = rows[c.rank], grids[c.rank], f"{dtype} {shape}"
            everything = torch.stack(rows)
            c.check(f"all_gather {what}", model.all_gather(c.place(own)), everything)
            received = torch.stack([sent[c.rank] for sent in grids])
            c.check(f"all_to_all {what}", model.all_to_all(c.place(grid)), received)
            for root in range(c.n):
                got = model.broadcast(c.place(own), root)
                c.check(f"broadcast {what} from {root}", got, rows[root])
                into = c.place(torch.empty_like(own))
                sent = c.place(grids[root]) if c.rank == root else None
                c.check(f"scatter {what}", model.scatter(sent, into, root), grids[root][c.rank])
    for dtype in FLOATS:
        rows = [torch.tensor(ODD).roll(rank).to(dtype) for rank in range(c.n)]
        c.check("odd floats", model.all_gather(c.place(rows[c.rank])), torch.stack(rows))
        c.check("odd floats", model.broadcast(c.place(rows[c.rank]), c.n - 1), rows[c.n - 1])
    return c.wrong


def reductions(model: XlaModel) -> list[str]:
    c = Checks(model)
    for dtype in sorted(model.dtypes, key=str):
        for op in ReduceOp:
            is_of_floats = op in (ReduceOp.SUM, ReduceOp.PRODUCT)
            if op is ReduceOp.AVERAGE or (dtype.is_floating_point and not is_of_floats):
                continue
            for shape in SHAPES:
                rows = [sample(dtype, rank, shape) for rank in range(c.n)]
                what, want = f"{op.name} of {dtype} {shape}", fold_tensors(op, rows)
                c.check(f"all_reduce {what}", model.all_reduce(c.place(rows[c.rank]), op), want)
                for root in range(c.n):
                    total = model.reduce(c.place(rows[c.rank]), root, op)
                    if c.rank == root:
                        c.check(f"reduce {what}", total, want)
                    elif total is not None:
                        c.wrong.append(f"reduce {what} to {root} gave something on {c.rank}")
                grids = [torch.stack([row.add(i).to(dtype) for i in range(c.n)]) for row in rows]
                got = model.reduce_scatter(c.place(grids[c.rank]), op)
                c.check(f"reduce_scatter {what}", got, fold_tensors(op, grids)[c.rank])
    return c.wrong


@pytest.mark.parametrize("entry", [movements, reductions])
@pytest.mark.parametrize("n", SIZES)
def test_collectives_give_what_the_oracle_gives(
    entry: Callable[[XlaModel], list[str]], n: int
) -> None:
    assert [text for wrong in launch(entry, n) for text in wrong] == []


def facts(model: XlaModel) -> tuple[Topology, str, str, bool]:
    return model.topology, model.backend, str(model.device), model.is_alive()


@pytest.mark.parametrize("n", SIZES)
def test_rank_and_world_size_are_the_runtimes(n: int) -> None:
    assert launch(facts, n) == [
        (Topology(rank, n, rank, n, 0, 1), "xla-cpu", f"xla:{rank}", True) for rank in range(n)
    ]


def own_ranks(model: XlaModel) -> list[object]:
    """Ask from a replica's thread again and again, and from one that is none."""
    import threading

    adopted = [XlaModel.from_context(ContextHint()) for _ in range(20)]
    foreign: list[object] = []
    thread = threading.Thread(target=lambda: foreign.append(XlaModel.from_context(ContextHint())))
    thread.start()
    thread.join()
    ranks = {one.topology.rank for one in adopted if one is not None}
    return [ranks == {model.topology.rank}, len(adopted), foreign[0]]


def test_each_thread_adopts_its_own_replica_and_others_none() -> None:
    assert launch(own_ranks, 2) == [[True, 20, None]] * 2


def lazy_inputs(model: XlaModel) -> list[list[float]]:
    """Let a rank-dependent number, and one that isn't computed yet, enter a collective."""
    rank = model.topology.rank
    number = torch.tensor(float(rank), device=model.device) * 2 + rank
    before = number + 1
    number.add_(5)
    total = model.all_reduce(number, ReduceOp.SUM)
    return [total.cpu().tolist(), before.cpu().tolist(), number.cpu().tolist()]


def test_what_is_not_computed_yet_enters_with_its_value() -> None:
    assert launch(lazy_inputs, 2) == [[13.0, 1.0, 5.0], [13.0, 4.0, 8.0]]


def strings(model: XlaModel) -> tuple[list[str], int, int]:
    import torch_xla.debug.metrics as metrics

    def n_compiled() -> int:
        data = metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    def derived(blob: bytes) -> list[bytes]:
        return fallback.exchange(model, blob, None, model.control.bucket)

    rank, n = model.topology.rank, model.topology.world_size
    wrong, counts = [], []
    for sizes in (range(0, 248, 31), range(300, 500, 17), range(513, 1000, 61)):
        for size in sizes:
            blobs = [bytes([65 + r]) * (size + r % 2) for r in range(n)]
            # The derived way is that of jobs of several processes.
            for exchange in (model.exchange, derived):
                if exchange(blobs[rank]) != blobs:
                    wrong.append(f"{size} bytes on rank {rank}")
        counts.append(n_compiled())
    before = n_compiled()
    for size in (1, 77, 290, 411, 600, 999):
        derived(b"x" * size)
    return wrong, counts[0], n_compiled() - before


def test_strings_of_many_sizes_are_compiled_once_for_each_bucket() -> None:
    for wrong, n_small, n_more in launch(strings, 2):
        assert wrong == []
        assert n_small == 1  # all that fit into one frame
        assert n_more == 0


def n_compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def texts(_local_rank: int) -> list[object]:
    rank, n = idist.get_rank(), idist.get_world_size()
    idist.all_reduce(torch.ones(2048))  # the runtime is up, and its first graphs are compiled
    counts, wrong = [n_compiled()], []
    for size in (0, 1, 7, 100, 255, 256, 257, 5000, 70_000):
        rows = [chr(97 + other) * (size + other) for other in range(n)]
        if idist.all_gather(rows[rank]) != rows:
            wrong.append(("all_gather", size))
        if idist.broadcast(rows[rank] if rank == n - 1 else None, src=n - 1) != rows[n - 1]:
            wrong.append(("broadcast", size))
        if idist.all_reduce({"size": size + rank, "x": 0.5}) != {"size": 2 * size + 1, "x": 1.0}:
            wrong.append(("all_reduce", size))
        counts.append(n_compiled())
    idist.barrier()
    return [wrong, counts[-1] - counts[0], rank]


def test_strings_and_numbers_of_any_length_compile_nothing() -> None:
    assert idist.spawn("xla-cpu", texts, nproc_per_node=2) == [[[], 0, 0], [[], 0, 1]]


def steps(_local_rank: int) -> list[Any]:
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


def test_graphs_do_not_grow_from_step_to_step() -> None:
    (more, weight), (_, other) = idist.spawn("xla-cpu", steps, nproc_per_node=2)
    assert more == 0
    assert torch.equal(weight, other)
    (_, wanted), _ = idist.spawn("gloo", on_cpu, (steps,), nproc_per_node=2)
    assert torch.allclose(weight, wanted, atol=1e-5)


def auto_trained(_local_rank: int) -> list[float]:
    """Train through auto_model, whose hooks run inside of backward."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(shape, generator=generator) for shape in ((8, 4), (8,), (1, 8), (1,))]
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(weight)
    model = idist.auto_model(module)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(6):
        rows = torch.arange(20.0).reshape(5, 4) / 20 + idist.get_rank() + step % 3
        loss = model(rows.to(idist.device())).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    numbers: list[float] = flat.detach().cpu().tolist()
    return numbers


def test_auto_model_averages_in_the_replica_that_runs_backward() -> None:
    one, other = idist.spawn("xla-cpu", auto_trained, nproc_per_node=2)
    assert one == other
    wanted, _ = idist.spawn("threads", auto_trained, nproc_per_node=2)
    assert one == pytest.approx(wanted, abs=1e-5)


def on_cpu(local_rank: int, fn: Callable[[int], Any]) -> Any:
    """Run where nothing compiles."""
    globals()["n_compiled"] = lambda: 0
    return fn(local_rank)


def test_the_digits_example_learns_the_same_parameters() -> None:
    example = runpy.run_path(str(EXAMPLE))
    found = {}
    for backend in ("xla-cpu", "threads"):
        arguments = (example["load"](), 3, 0)
        rows = idist.spawn(backend, example["train"], arguments, nproc_per_node=2)
        found[backend] = [torch.tensor(row["parameters"]) for row in rows]
        assert rows[0]["backend"] == backend
        assert rows[0]["accuracy"] > 0.85
    assert torch.equal(*found["xla-cpu"])
    assert torch.allclose(found["xla-cpu"][0], found["threads"][0], rtol=0, atol=1e-5)


def in_groups(model: XlaModel) -> list[str]:
    c = Checks(model)
    for ranks in ((0, 2), (1, 2), (1,), (0, 1, 2)):
        group = model.new_group(ranks)
        if c.rank not in ranks:
            continue
        rows = [sample(torch.float32, rank, (2, 2)) for rank in ranks]
        own = rows[ranks.index(c.rank)]
        c.check(f"all_gather {ranks}", model.all_gather(c.place(own), group), torch.stack(rows))
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            total = model.all_reduce(c.place(own), op, group)
            c.check(f"all_reduce {ranks}", total, fold_tensors(op, rows))
        got = model.broadcast(c.place(own), ranks[-1], group)
        c.check(f"broadcast {ranks}", got, rows[-1])
        if model.exchange(b"%d" % c.rank, group) != [b"%d" % rank for rank in ranks]:
            c.wrong.append(f"exchange {ranks}")
    return c.wrong


def test_groups_need_their_members_alone() -> None:
    assert launch(in_groups, 3) == [[], [], []]


def eager(model: XlaModel) -> list[object]:
    context = ContextState(model)
    handle = context.start(lambda: model.all_reduce(torch.ones(2), ReduceOp.SUM))
    broken = context.start(lambda: 1 // 0)
    try:
        broken.wait()
    except ZeroDivisionError:
        return [handle.is_completed(), handle.wait().tolist(), broken.is_completed()]
    return []


def test_start_computes_at_once_and_keeps_errors_for_wait() -> None:
    assert launch(eager, 2) == [[True, [2.0, 2.0], True]] * 2


def tensors(model: XlaModel) -> dict[str, Tensor]:
    on_device = torch.full((2,), model.topology.rank, device=model.device)
    return {"x": on_device, "leaf": on_device.float().requires_grad_()}


def test_results_on_xla_devices_arrive_on_the_cpu() -> None:
    rows = launch(tensors, 2)
    assert [row["x"].tolist() for row in rows] == [[0, 0], [1, 1]]
    assert all(row[key].device.type == "cpu" for row in rows for key in row)
    assert rows[0]["leaf"].requires_grad
    assert "torch_xla" not in sys.modules


def one_raises(model: XlaModel) -> None:
    if model.topology.rank == 1:
        raise KeyError("only here")
    model.all_reduce(torch.ones(2), ReduceOp.SUM)


def test_a_failing_replica_is_named_with_its_own_traceback() -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 of 2 raised KeyError") as caught:
        launch(one_raises, 2)
    assert caught.value.rank == 1
    assert "in one_raises" in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)


def one_aborts(seen: Path, model: XlaModel) -> None:
    if model.topology.rank == 1:
        model.abort()
        while not seen.exists():
            time.sleep(0.01)
        raise OSError("the cause")
    try:
        model.exchange(b"")
    finally:
        seen.touch()


def test_the_cause_is_reported_and_not_what_it_caused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="the cause") as caught:
        launch(functools.partial(one_aborts, tmp_path / "seen"), 2)
    assert caught.value.rank == 1


def one_kills_all(model: XlaModel) -> None:
    if model.topology.rank == 1:
        sys.stderr.write("my last words\n")
        os.abort()
    model.exchange(b"")


@pytest.mark.parametrize("n", SIZES)
def test_a_dead_process_is_reported_with_what_it_printed(n: int) -> None:
    entry = one_kills_all if n > 1 else (lambda model: os.abort())
    with pytest.raises(WorkerFailedError, match="ended") as caught:
        launch(entry, n)
    assert "Fatal Python error: Aborted" in str(caught.value)
    assert n == 1 or "my last words" in str(caught.value)


def alone_in_a_graph(model: XlaModel) -> None:
    import torch_xla.core.xla_model as xm

    if model.topology.rank == 0:
        xm.all_reduce("sum", torch.ones(2, device=model.device)).cpu()
    time.sleep(60)


def test_a_graph_without_all_replicas_ends_the_job_in_the_end() -> None:
    with pytest.raises(WorkerFailedError, match="only 1 of 2 replicas") as caught:
        launch(alone_in_a_graph, 2)
    text = str(caught.value)
    assert "rank 0 was in alone_in_a_graph" in text
    assert "rank 1 was in alone_in_a_graph" in text
    assert "rank 1: Thread" in text


def disagree(model: XlaModel) -> str:
    try:
        model.all_gather(torch.ones(2 + model.topology.rank))
    except CollectiveMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_learn_it_instead_of_hanging() -> None:
    first, second = launch(disagree, 2)
    assert first == second
    assert "rank 0: all_gather torch.float32 [2]; rank 1: all_gather torch.float32 [3]" in first


def come_late(model: XlaModel) -> str:
    while model.topology.rank == 1 and not REPLICAS.has_left(0):
        time.sleep(0.01)
    try:
        model.all_reduce(torch.ones(2), ReduceOp.SUM)
    except (CollectiveTimeoutError, PeerFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def come_late_for_a_block(model: XlaModel) -> str:
    with idist.deadline(0.5):
        return come_late(model)


@pytest.mark.parametrize("way", ["timeout", "deadline"])
def test_who_waits_too_long_says_for_whom(way: str) -> None:
    if way == "timeout":
        first, second = launch(come_late, 2, timeout=timedelta(seconds=0.5))
    else:
        first, second = launch(come_late_for_a_block, 2)
    said = r"CollectiveTimeoutError: rank 1 never came: rank 0 waited 0\.\d+ s in all_reduce SUM"
    assert re.match(said, first)
    assert second.startswith("PeerFailedError: rank 1 waited in all_reduce SUM")


def leave_early(model: XlaModel) -> str:
    if model.topology.rank == 0:
        model.finalize()
        return str((model.is_alive(), XlaModel.from_context(ContextHint())))
    try:
        model.exchange(b"")
    except PeerFailedError as error:
        return str(error)
    return ""


def test_a_finalized_replica_is_found_no_more_and_not_waited_for() -> None:
    first, second = launch(leave_early, 2)
    assert first == "(False, None)"
    assert "rank 0 has finalized its context" in second


def test_the_parent_stays_as_it_was() -> None:
    before = dict(os.environ)
    assert launch(lambda model: os.environ["CPU_NUM_DEVICES"], 2) == ["2", "2"]
    assert dict(os.environ) == before
    assert "torch_xla" not in sys.modules


def run_script(code: str, first: Path | None = None, **variables: str) -> str:
    path = os.pathsep.join([*([str(first)] if first else []), SOURCE, str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PJRT_DEVICE": "CPU", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # its stacks; a fork of it ends, too
        output, errors = process.communicate()
        errors += "\nIt didn't end by itself."
    assert process.returncode == 0, errors
    lines = output.splitlines(keepends=True)  # gloo's own, of C++, come when they like
    return "".join(line for line in lines if not line.startswith("[Gloo]"))


def test_probing_imports_nothing_and_never_initialises_the_runtime() -> None:
    out = run_script(
        "import sys\n"
        "from unisono.models.xla.model import XlaModel\n"
        "from unisono.topology import ContextHint\n"
        "print(XlaModel.from_context(ContextHint()), XlaModel.why_unavailable('xla-cpu'))\n"
        "print('torch_xla' in sys.modules)\n"
        "import torch_xla\n"
        "print(XlaModel.from_context(ContextHint()))\n"
        "print(torch_xla._XLAC._xla_runtime_is_initialized())\n"
        "torch_xla.device()\n"
        "print(XlaModel.from_context(ContextHint()).topology.world_size)\n"
    )
    assert out.splitlines() == ["None None", "False", "None", "False", "1"]


def adopted_in_users_own_launch(_index: int) -> None:
    import torch_xla.runtime as xr

    model = XlaModel.from_context(ContextHint())
    assert model is not None
    assert model.topology.rank == xr.global_ordinal()
    total = model.all_reduce(torch.ones(2), ReduceOp.SUM)
    model.finalize()
    assert XlaModel.from_context(ContextHint()) is not None  # it was the user's, and still is
    sys.stdout.write(f"<{total.tolist()}>")


def test_the_users_own_launch_is_adopted() -> None:
    code = (
        "import torch_xla; from tests.real import test_xla\n"
        "torch_xla.launch(test_xla.adopted_in_users_own_launch, start_method='fork')\n"
    )
    assert run_script(code, CPU_NUM_DEVICES="2") == "<[2.0, 2.0]>" * 2


def facts_in_users_launch() -> tuple[Any, ...]:
    import torch_xla.runtime as xr

    rank, n = xr.global_ordinal(), xr.world_size()
    facts = (idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), str(idist.device()))
    assert facts == (rank, n, rank, f"xla:{rank}")
    assert (idist.model_name(), idist.backend()) == ("xla-dist", "xla-cpu")
    assert idist.all_gather(f"rank {rank}") == [f"rank {other}" for other in range(n)]
    ones = torch.full((3,), rank + 1.0, device=idist.device())
    return idist.all_reduce(ones).tolist(), idist.all_reduce(rank)


GROUP_MADE = threading.Event()


def users_facade(_index: int, how: str) -> None:
    """Use the facade in replicas that the program made itself, in one of the ways to do so."""
    if how == "process group":
        import torch.distributed as dist
        import torch_xla.distributed.xla_backend  # noqa: F401 - it registers the backend
        import torch_xla.runtime as xr

        # Replicas that are threads share what torch knows of process groups: one makes it for all.
        if xr.global_ordinal() == 0:
            dist.init_process_group("xla", init_method="xla://")
            GROUP_MADE.set()
        assert GROUP_MADE.wait(60)
        assert dist.get_backend() == "xla"
    if how == "initialize":
        for _ in range(3):  # a rank that is back early isn't taken for one that is gone
            idist.initialize("xla-cpu", timeout=60)
            assert facts_in_users_launch() == ([3.0] * 3, 1)
            idist.finalize()
            assert not idist.is_distributed()
        idist.initialize("xla-cpu")
        with pytest.raises(idist.errors.AlreadyInitializedError):
            idist.initialize("xla-cpu")
    with pytest.raises(idist.errors.AlreadyInitializedError, match="xla-dist"):
        idist.initialize("gloo")
    for _ in range(20):
        result = facts_in_users_launch()
    sys.stdout.write(f"<{result}>")


@pytest.mark.parametrize("how", ["adopt", "initialize", "process group"])
def test_the_facade_finds_the_replicas_of_xmp_spawn(how: str) -> None:
    code = (
        "import torch_xla.distributed.xla_multiprocessing as xmp\n"
        "from tests.real import test_xla\n"
        f"xmp.spawn(test_xla.users_facade, args=({how!r},), start_method='fork')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    out = run_script(code, CPU_NUM_DEVICES="2", MASTER_PORT=port, TORCH_DIST_INIT_BARRIER="0")
    assert out == "<([3.0, 3.0, 3.0], 1)>" * 2


def test_initialize_alone_needs_no_launcher() -> None:
    out = run_script(
        "import torch\n"
        "from unisono.models.xla.model import XlaModel\n"
        "from unisono.model.reduction import ReduceOp\n"
        "from unisono.topology import RankInfo\n"
        "from unisono.errors import ContextError\n"
        "try: XlaModel.initialize('xla-cpu', RankInfo(1, 2))\n"
        "except ContextError as error: print('rank 1 of 2' in str(error))\n"
        "model = XlaModel.initialize('xla-cpu', RankInfo(0, 1))\n"
        "print(model.topology.world_size, model.all_reduce(torch.ones(1), ReduceOp.SUM).item())\n"
    )
    assert out.splitlines() == ["True", "1 1.0"]


def sleep_on(model: XlaModel) -> None:
    Path(os.environ["TOLD"]).joinpath(str(model.topology.rank)).write_text(str(os.getpid()))
    time.sleep(60)


def test_the_replicas_die_with_the_parent(tmp_path: Path) -> None:
    code = "from tests.real import test_xla; test_xla.launch(test_xla.sleep_on, 2)"
    path = os.pathsep.join([SOURCE, str(ROOT)])
    variables = {**os.environ, "PYTHONPATH": path, "TOLD": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=variables)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    replicas = psutil.Process(parent.pid).children(recursive=True)
    assert len(replicas) == 2  # the fresh process and its fork
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(replicas, timeout=10)
    assert alive == []


def test_bad_requests_are_refused_before_anything_starts() -> None:
    with pytest.raises(UnsupportedOperation, match="2 nodes"):
        XlaModel.worker_environ(LaunchPlan(2, nnodes=2, backend="xla-cpu"))
    with pytest.raises(ArgumentError, match="start_method"):
        launcher.launch(str, LaunchPlan(1, start_method="spawn"), environ={})


def ask_for_too_many(info: RankInfo) -> None:
    raise AssertionError("never called")


def test_a_number_of_replicas_that_the_runtime_lacks_is_named() -> None:
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    with pytest.raises(WorkerFailedError, match="has 2 devices on this node: ask for 2"):
        launcher.launch(ask_for_too_many, LaunchPlan(3), environ=env)


def test_the_reason_says_what_is_missing_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert XlaModel.why_unavailable("xla-cpu") is None
    assert "nccl" in str(XlaModel.why_unavailable("xla-cuda"))
    assert "TPU" in str(XlaModel.why_unavailable("xla-tpu")) or "libtpu" in str(
        XlaModel.why_unavailable("xla-tpu")
    )
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    reason = str(XlaModel.why_unavailable("xla-cpu"))
    assert "this is torch 2.13.0" in reason
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in reason


TRY_IT = """
import sys, warnings
import unisono as idist
from unisono import registry
reason = registry.availability()['xla-cpu']
print(reason)
print('xla-cpu' in idist.available_backends(), 'gloo' in idist.available_backends())
print(any(name.split('.')[0] == 'torch_xla' for name in sys.modules))
for call in (lambda: idist.initialize('xla-cpu'), lambda: idist.spawn('xla-cpu', print)):
    try:
        call()
    except idist.errors.BackendUnavailableError as error:
        print(type(error.__cause__).__name__, str(error).replace(chr(10), ' '))
    except idist.errors.WorkerFailedError as error:
        print(type(error.__cause__).__name__, str(error).splitlines()[0])
warnings.simplefilter('error')
idist.initialize('gloo')
print(idist.all_reduce(2), idist.backend())
idist.finalize()
print(idist.get_rank(), idist.model_name())
"""


def installed() -> Path:
    distribution = importlib.metadata.distribution("torch_xla")
    return Path(str(distribution.locate_file("")))


def test_a_torch_xla_for_another_torch_is_unavailable_and_harms_nothing(tmp_path: Path) -> None:
    (copied,) = installed().glob("torch_xla-*.dist-info")
    other = tmp_path / "torch_xla-2.8.1.dist-info"
    shutil.copytree(copied, other)
    metadata = (other / "METADATA").read_text().replace("\nVersion: ", "\nVersion: 2.8.1+was.", 1)
    (other / "METADATA").write_text(metadata)
    lines = run_script(TRY_IT, first=tmp_path).splitlines()
    assert "works with torch 2.8.1 alone, and this is torch 2.9" in lines[0]
    assert "python -m pip install torch==2.8.1 torch_xla==2.8.1" in lines[0]
    assert lines[1:3] == ["False True", "False"]
    for line in lines[3:5]:
        assert line.startswith("NoneType backend 'xla-cpu' can't be used here: torch_xla 2.8.1")
    assert lines[-2:] == ["2 gloo", "0 serial"]


def test_a_torch_xla_whose_library_is_broken_is_unavailable(tmp_path: Path) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    for path in (installed() / "torch_xla").iterdir():
        (package / path.name).symlink_to(path)
    (extension,) = (installed()).glob("_XLAC.*.so")
    (tmp_path / extension.name).write_bytes(b"no library")
    lines = run_script(TRY_IT, first=tmp_path).splitlines()
    assert lines[:3] == ["None", "True True", "False"]  # only its import can tell
    assert lines[3].startswith("ImportError torch_xla can't be imported: ImportError")
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in lines[3]
    assert lines[4].startswith("ImportError XLA's runtime raised")
    assert lines[-2:] == ["2 gloo", "0 serial"]


def test_an_import_that_fails_is_a_backend_unavailable_error() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['torch_xla.runtime'] = None\n"
        "from unisono.errors import BackendUnavailableError\n"
        "from unisono.models.xla.model import XlaModel\n"
        "from unisono.topology import RankInfo\n"
        "try: XlaModel.initialize('xla-cpu', RankInfo(0, 1))\n"
        "except BackendUnavailableError as error: print(type(error.__cause__).__name__)\n"
    )
    assert run_script(code).strip() in ("ImportError", "ModuleNotFoundError")
    assert issubclass(ContextError, RuntimeError)


def test_a_torch_xla_that_lacks_something_is_left_out_with_one_warning() -> None:
    code = (
        "import sys, warnings\n"
        "import torch_xla, unisono as idist\n"
        "sys.modules['torch_xla.runtime'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    print([idist.get_rank() for _ in range(3)], idist.model_name())\n"
        "print([type(w.message).__name__ for w in caught if 'XLA is left out' in str(w.message)])\n"
        "idist.initialize('gloo')\n"
        "print(idist.all_reduce(2))\n"
        "idist.finalize()\n"
    )
    lines = run_script(code).splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("[0, 0, 0] serial", "['RuntimeWarning']", "2")


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", few_on("xla-cpu"))
def test_top_names_the_replica_that_hangs(kind: str) -> None:
    with job_of_program(kind, "xla-cpu"):
        check(kind, told())


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", ends_on("xla-cpu"))
def test_a_job_that_does_not_hang_names_the_replica_as_it_ends(kind: str) -> None:
    check_end(kind, "xla-cpu")
