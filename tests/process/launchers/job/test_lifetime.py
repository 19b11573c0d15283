"""A rank is what a fresh process would be, from its start to its end, and nothing of it is lost."""

from __future__ import annotations

import atexit
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.processes import Pipe, python, run_python, say, until
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError

METHODS = ["forkserver", "spawn", "fork"]


LIMIT_S = 100.0


def write_after(released: Path, file: Path) -> None:
    until(released.exists, LIMIT_S)
    file.write_text("whole")


LEAVING: list[Callable[..., object]] = [  # by rank
    lambda *args: threading.Thread(target=write_after, args=args).start(),
    lambda *args: ThreadPoolExecutor(1).submit(write_after, *args),
    lambda *args: atexit.register(write_after, *args),
]


@pytest.mark.parametrize("method", METHODS)
def test_what_a_function_left_behind_is_done_before_its_result_counts(
    method: Any, tmp_path: Path
) -> None:
    released = tmp_path / "released"

    def fn(local_rank: int, path: str) -> str:
        LEAVING[local_rank](released, tmp_path / str(local_rank))
        say(path, "returns")
        return "done"

    with Pipe(tmp_path) as pipe:
        options: Any = {"nproc_per_node": 3, "start_method": method, "join": False}
        job = unisono.spawn("gloo", fn, (pipe.path,), **options)
        assert pipe.read(3) == ["returns"] * 3
        with pytest.raises(LaunchError, match=r"ranks \[0, 1, 2\] haven't finished"):
            job.join(timeout=0.5)
        assert not [file for file in tmp_path.iterdir() if file.name.isdigit()]
        released.touch()
        assert job.join() == ["done"] * 3
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["whole"] * 3


def test_a_pool_ends_when_all_that_its_calls_left_behind_has_ended(tmp_path: Path) -> None:
    released, files = tmp_path / "released", [tmp_path / str(rank) for rank in range(3)]
    pool = WorkerPool("gloo", 3)

    def leave(local_rank: int) -> None:
        LEAVING[local_rank](released, files[local_rank])

    assert pool.run(leave) == [None] * 3
    assert pool.run(lambda local_rank: files[local_rank].exists()) == [False] * 3  # it went on
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    released.touch()
    closing.join()
    assert [file.read_text() for file in files] == ["whole"] * 3


def test_a_rank_that_is_cut_off_at_its_end_is_a_failure() -> None:
    def fn(local_rank: int) -> int:
        if local_rank == 1:
            atexit.register(os._exit, 3)
        return local_rank

    with pytest.raises(WorkerFailedError, match="rank 1 of 2 ended with exit code 3") as caught:
        unisono.spawn("gloo", fn, nproc_per_node=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    pool = WorkerPool("gloo", 2)
    pool.run(fn)
    with pytest.raises(WorkerFailedError, match="rank 1 of 2 ended with exit code 3"):
        pool.close()


def test_the_end_of_a_pool_keeps_to_the_deadline_of_its_block() -> None:
    pool = WorkerPool("gloo", 2)
    pool.run(lambda local_rank: threading.Thread(target=threading.Event().wait).start())
    with (
        pytest.raises(CollectiveTimeoutError, match="still had threads"),
        unisono.deadline(0.5),
    ):
        pool.close()


def test_a_thread_that_is_left_behind_has_the_context(tmp_path: Path) -> None:
    def fn(local_rank: int, path: str) -> None:
        def late() -> None:
            threading.main_thread().join()  # it is over once nothing but threads is left
            say(path, unisono.all_reduce(local_rank + 1))

        threading.Thread(target=late).start()

    with Pipe(tmp_path) as pipe:
        unisono.spawn("gloo", fn, (pipe.path,), nproc_per_node=2)
        assert pipe.read(2) == ["3", "3"]


@pytest.mark.filterwarnings("default")  # torch's own
def test_an_asynchronous_checkpoint_is_whole(tmp_path: Path) -> None:
    def fn(local_rank: int) -> None:
        checkpoint: Any = pytest.importorskip("torch.distributed.checkpoint")
        checkpoint.async_save({"w": torch.ones(100_000)}, checkpoint_id=tmp_path / "saved")

    unisono.spawn("gloo", fn, nproc_per_node=2)
    assert (tmp_path / "saved" / ".metadata").exists()


def test_a_rank_that_takes_long_to_end_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("UNISONO_WARN_AFTER_S", "0.01")
    released = tmp_path / "released"

    def fn(local_rank: int) -> None:
        args = (released, tmp_path / "file")
        threading.Thread(target=write_after, args=args, name="the-upload").start()

    job = unisono.spawn("gloo", fn, join=False)
    said = ""
    while "the-upload" not in said:
        with pytest.raises(LaunchError, match="haven't finished"):
            job.join(timeout=0.1)
        said += capfd.readouterr().err
    assert "the function of rank 0 has returned" in said
    released.touch()
    job.join()


def leave_by(how: str) -> Any:
    """Fork; the child leaves the function. Give how it ended, and what its rank can still do."""
    pid = os.fork()
    if pid == 0:
        if how == "exits":
            sys.exit(5)
        if how == "raises":
            raise ValueError("in the child")
        if how == "says":
            sys.exit("a word")
        return "the child's"
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), unisono.all_reduce(1)


CODES = {"exits": 5, "raises": 1, "says": 1, "returns": 0}


@pytest.mark.parametrize("backend", ["gloo", "threads"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_that_leaves_the_function_is_not_the_rank(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def fn(local_rank: int, how: str) -> Any:
        return leave_by(how)

    for how, code in CODES.items():
        assert unisono.spawn(backend, fn, (how,), nproc_per_node=2) == [(code, 2)] * 2
        said = capfd.readouterr().err
        assert said.count("ValueError: in the child") == (2 if how == "raises" else 0)
        assert said.count("a word") == (2 if how == "says" else 0)
        assert "_replica.py" not in said
    with WorkerPool(backend, 2) as pool:
        for how, code in CODES.items():
            assert pool.run(fn, how) == [(code, 2)] * 2


def draw(_: int) -> tuple[float, ...]:
    numpy: Any = pytest.importorskip("numpy")
    return float(torch.rand(1)), random.random(), float(numpy.random.rand())


def test_ranks_and_spawns_draw_different_numbers_unless_they_are_seeded() -> None:
    def seeded(local_rank: int) -> tuple[float, ...]:
        unisono.seed_everything(7)
        return draw(local_rank)

    torch.manual_seed(1)
    methods: tuple[Any, ...] = (*METHODS, "forkserver")
    jobs = [unisono.spawn("gloo", draw, nproc_per_node=2, start_method=each) for each in methods]
    for numbers in zip(*(numbers for job in jobs for numbers in job), strict=True):
        assert len(set(numbers)) == 8, "two ranks, four times"
    first, second = unisono.spawn("gloo", seeded, nproc_per_node=2)
    assert [first] == [second] == unisono.spawn("gloo", seeded)


# Each case is a fork of a program that has loaded torch, and has started no process yet.
CASES = """
import os, resource, sys, unisono
from unisono.errors import LaunchError

METHODS = ("forkserver", "spawn", "fork")

def run(fn, method="forkserver", size=1):
    return unisono.spawn("gloo", fn, nproc_per_node=size, start_method=method)

def add(local_rank):
    return unisono.all_reduce(1)

def state(local_rank):
    umask = os.umask(0)
    os.umask(umask)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)
    return umask, os.sched_getaffinity(0), limits, os.nice(0), os.getcwd()

def has_what_its_parent_has_by_then():
    run(state)
    os.umask(0o027)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir("/")
    for method in METHODS:
        assert run(state, method) == [state(0)], method
    with unisono.WorkerPool("gloo", 1) as pool:
        assert pool.run(state) == [state(0)]

def has_no_directory():
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    try:
        run(add)
    except LaunchError as error:
        return str(error)

def has_many_descriptors():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    for method in METHODS:
        assert run(add, method, 2) == [2, 2], method
    with unisono.WorkerPool("gloo", 2) as pool:
        assert pool.run(add) == [2, 2]

unisono.spawn  # with torch, which can't be imported where there is no directory
for number, case in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        with open(str(number), "w") as file:
            try:
                said = eval(case)
            except BaseException as error:
                said = repr(error)
            print(said, end="", file=file)
        sys.exit()
    os.wait()
"""
PARENTS = {
    "has_what_its_parent_has_by_then()": "None",
    "has_no_directory()": "the working directory has been removed: change to one that exists",
    "has_many_descriptors()": "None",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case gave."""
    folder = tmp_path_factory.mktemp("cases")
    done = python("-c", CASES, *PARENTS, cwd=folder, limit_s=2 * LIMIT_S)
    assert done.returncode == 0, done.stderr
    return {case: (folder / str(number)).read_text() for number, case in enumerate(PARENTS)}


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
@pytest.mark.parametrize("case", PARENTS)
def test_ranks_have_what_their_parent_has_and_need_nothing_more(
    case: str, said: dict[str, str]
) -> None:
    assert said[case] == PARENTS[case]


CLASSES = """
import dataclasses, multiprocessing, pickle, sys, unisono, torch, warnings
from torch.utils.data import DataLoader, Dataset

@dataclasses.dataclass
class Config:
    rate: float = 0.5

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index * index

def gather(items):
    return torch.tensor(items)

def answer(questions, answers):
    answers.put(questions.get())

def files():
    torch.save(Config(3), f"{FOLDER}/own")
    own = torch.load(f"{FOLDER}/own", weights_only=False)
    assert type(own) is Config and own == Config(3)
    return pickle.loads(pickle.dumps(Config(4))) == Config(4)

def loads(method):
    warnings.simplefilter("ignore")
    how = {"num_workers": 1, "multiprocessing_context": method}
    return sum(int(batch.sum()) for batch in DataLoader(Squares(), 4, collate_fn=gather, **how))

def talks(method):
    context = multiprocessing.get_context(method)
    questions, answers = context.Queue(), context.Queue()
    child = context.Process(target=answer, args=(questions, answers))
    child.start()
    questions.put(Config(5))
    found = answers.get()
    child.join()
    return found == Config(5)

def work(local_rank, *methods):
    return files(), [(loads(method), talks(method)) for method in methods]

def check(run, *methods):
    assert run(work, *methods) == [(True, [(140, True)] * len(methods))], run

def spawned(**options):
    return lambda fn, *args: unisono.spawn("gloo", fn, args, **options)

EVERY = "forkserver", "spawn", "fork"
check(spawned(start_method="forkserver"), *EVERY)
if IS_SCRIPT:
    check(spawned(start_method="spawn"), "spawn")
    check(spawned(launcher="torchrun"), "spawn")
else:
    with unisono.WorkerPool("gloo", 1) as pool:
        check(pool.run, *EVERY)
print("done")
"""


@pytest.mark.parametrize("is_script", [True, False])
def test_classes_of_the_script_can_be_pickled_in_a_rank(is_script: bool, tmp_path: Path) -> None:
    facts = f"FOLDER, IS_SCRIPT = {str(tmp_path)!r}, {is_script}\n"
    script = tmp_path / "script.py"  # without a main guard
    script.write_text(facts + CLASSES)
    assert run_python(*([str(script)] if is_script else ["-c", facts + CLASSES])) == "done"
