"""A rank is what a fresh process would be, from its start to its end, and nothing of it is lost."""

from __future__ import annotations

import atexit
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.processes import SOURCES, Pipe, run_python, say
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError

METHODS = ["forkserver", "spawn", "fork"]


def write_after(released: str, file: Path) -> None:
    with open(released) as stream:
        stream.read()
    file.write_text("whole")


def leave_a_thread(released: str, file: Path) -> None:
    threading.Thread(target=write_after, args=(released, file)).start()


def leave_an_executor(released: str, file: Path) -> None:
    ThreadPoolExecutor(1).submit(write_after, released, file)


def leave_an_exit_handler(released: str, file: Path) -> None:
    atexit.register(write_after, released, file)


LEAVING = [leave_a_thread, leave_an_executor, leave_an_exit_handler]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_function_left_behind_is_done_before_its_result_counts(
    leave: Callable[[str, Path], None], method: Any, tmp_path: Path
) -> None:
    released, file = str(tmp_path / "released"), tmp_path / "file"
    os.mkfifo(released)

    def fn(local_rank: int, path: str) -> str:
        leave(released, file)
        say(path, "returns")
        return "done"

    with Pipe(tmp_path) as pipe:
        job = unisono.spawn("gloo", fn, (pipe.path,), start_method=method, join=False)
        assert pipe.read(1) == ["returns"]
        with pytest.raises(LaunchError, match="haven't finished"):
            job.join(timeout=0.5)
        assert not file.exists()
        with open(released, "w") as stream:
            stream.write("go")
        assert job.join() == ["done"]
    assert file.read_text() == "whole"


@pytest.mark.parametrize("leave", LEAVING)
def test_a_pool_ends_when_all_that_its_calls_left_behind_has_ended(
    leave: Callable[[str, Path], None], tmp_path: Path
) -> None:
    released, file = str(tmp_path / "released"), tmp_path / "file"
    os.mkfifo(released)
    pool = WorkerPool("gloo", 1)
    assert pool.run(lambda local_rank: leave(released, file)) == [None]
    assert pool.run(lambda local_rank: file.exists()) == [False]  # the call itself doesn't wait
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    with open(released, "w") as stream:
        stream.write("go")
    closing.join()
    assert file.read_text() == "whole"


def end_by(code: int) -> None:
    atexit.register(os._exit, code)


def test_a_rank_that_is_cut_off_at_its_end_is_a_failure() -> None:
    def fn(local_rank: int) -> int:
        if local_rank == 1:
            end_by(3)
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
    released, file = str(tmp_path / "released"), tmp_path / "file"
    os.mkfifo(released)

    def fn(local_rank: int) -> None:
        thread = threading.Thread(target=write_after, args=(released, file), name="the-upload")
        thread.start()

    job = unisono.spawn("gloo", fn, join=False)
    said = ""
    while "the-upload" not in said:
        with pytest.raises(LaunchError, match="haven't finished"):
            job.join(timeout=0.1)
        said += capfd.readouterr().err
    assert "the function of rank 0 has returned" in said
    with open(released, "w") as stream:
        stream.write("go")
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


@pytest.mark.parametrize("method", METHODS)
def test_ranks_and_spawns_draw_different_numbers(method: Any) -> None:
    torch.manual_seed(1)
    drawn = [unisono.spawn("gloo", draw, nproc_per_node=2, start_method=method) for _ in range(2)]
    for numbers in zip(*(numbers for job in drawn for numbers in job), strict=True):
        assert len(set(numbers)) == 4, "two ranks, twice"


def test_a_seed_is_all_that_ranks_need_to_draw_the_same() -> None:
    def fn(local_rank: int) -> tuple[float, ...]:
        unisono.seed_everything(7)
        return draw(local_rank)

    first = unisono.spawn("gloo", fn, nproc_per_node=2)
    assert first[0] == first[1]
    assert unisono.spawn("gloo", fn) == first[:1]


SURROUNDINGS = """
import os, resource, unisono

def work(local_rank):
    umask = os.umask(0)
    os.umask(umask)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)
    return umask, os.sched_getaffinity(0), limits, os.nice(0), os.getcwd()

for method in METHODS:
    unisono.spawn("gloo", work, start_method=method)
os.umask(0o027)
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.nice(3)
resource.setrlimit(resource.RLIMIT_NOFILE, (900, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.chdir("/")
for method in METHODS:
    assert unisono.spawn("gloo", work, start_method=method) == [work(0)], method
    with unisono.WorkerPool("gloo", 1, start_method=method) as pool:
        assert pool.run(work) == [work(0)], method
print("as the parent's")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_later_rank_has_what_its_parent_has_by_then() -> None:
    assert run_python("-c", SURROUNDINGS.replace("METHODS", str(METHODS))) == "as the parent's"


LIMITED = """
import os, resource, unisono
from unisono.errors import WorkerFailedError

unisono.spawn("gloo", abs, start_method="fork")  # loads what the other user may not read
os.chdir("/")
os.setgid(65534)
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (COUNT, COUNT))
try:
    unisono.spawn("gloo", lambda local_rank: os.abort(), start_method="fork")
except WorkerFailedError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without processes")
def test_a_rank_that_aborts_where_threads_are_few_says_so(tmp_path: Path) -> None:
    few = run_python("-c", LIMITED.replace("COUNT", "12"), cwd=tmp_path)
    assert few.startswith("rank 0 of 1 was ended by SIGABRT; this user may have 12 processes and")
    many = run_python("-c", LIMITED.replace("COUNT", "9999"), cwd=tmp_path)
    assert many == "rank 0 of 1 was ended by SIGABRT"


GONE = """
import os, unisono

def work(local_rank):
    return os.path.exists("."), os.listdir(".")

spawn = unisono.spawn  # with torch, which can't be imported where there is no directory
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
for method in METHODS:
    assert spawn("gloo", work, start_method=method) == [(True, [])], method
print("done")
"""


def test_a_directory_that_is_gone_is_gone_in_the_ranks(tmp_path: Path) -> None:
    program = GONE.replace("METHODS", str(METHODS))
    assert run_python("-c", program, cwd=tmp_path) == "done"


CLOSED = """
import os, sys, unisono

def work(local_rank):
    print("out"), print("err", file=sys.stderr)
    streams = sys.stdout, sys.stderr
    sys.stderr = None
    for fd in range(3):
        os.fstat(fd)
    sys.stdout, sys.stderr = streams
    return unisono.all_reduce(1)

def spoil(local_rank):
    sys.stderr = None

file = open(FILE, "w")
file = os.fdopen(os.dup2(file.fileno(), 9), "w", buffering=1)
for fd in FDS:
    os.close(fd)
if 1 in FDS: sys.stdout = None
if 2 in FDS: sys.stderr = None
try:
    for method in METHODS:
        assert unisono.spawn("gloo", work, nproc_per_node=2, start_method=method) == [2, 2], method
        with unisono.WorkerPool("gloo", 2, start_method=method) as pool:
            assert pool.run(work) == [2, 2]
            pool.run(spoil)
            assert pool.run(work) == [2, 2]
    left = [fd for fd in FDS if os.path.exists(f"/proc/self/fd/{fd}")]
    print("done", left, file=file)
except BaseException as error:
    print(repr(error), file=file)
"""


@pytest.mark.parametrize("fds", [(0,), (1,), (2,), (0, 1, 2)])
def test_streams_that_are_closed_are_no_failure(fds: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "said"
    program = CLOSED.replace("FILE", repr(str(file)))
    program = program.replace("FDS", str(fds)).replace("METHODS", str(METHODS))
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": SOURCES},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert file.read_text() == "done []\n"


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

class NotUsed:
    pass

def gather(items):
    return torch.tensor(items)

def answer(questions, answers):
    answers.put(questions.get())

def files(local_rank, folder):
    torch.save(Config(3), f"{folder}/own")
    own = torch.load(f"{folder}/own", weights_only=False)
    other = torch.load(f"{folder}/other", weights_only=False)
    assert type(own) is Config and own == Config(3)
    assert pickle.loads(pickle.dumps(Config(4))) == Config(4)
    return type(other).__name__, type(pickle.loads(pickle.dumps(other))) is type(other)

def loads(local_rank, method):
    warnings.simplefilter("ignore")
    how = {"num_workers": 1, "multiprocessing_context": method}
    return sum(int(batch.sum()) for batch in DataLoader(Squares(), 4, collate_fn=gather, **how))

def talks(local_rank, method):
    context = multiprocessing.get_context(method)
    questions, answers = context.Queue(), context.Queue()
    child = context.Process(target=answer, args=(questions, answers))
    child.start()
    questions.put(Config(5))
    found = answers.get()
    child.join()
    return found == Config(5)

def check(run, *methods):
    assert run(files, FOLDER) == [("NotUsed", True)]
    for method in methods:
        assert run(loads, method) == [140], method
        assert run(talks, method) == [True], method

torch.save(NotUsed(), f"{FOLDER}/other")
"""
EVERY = '"forkserver", "spawn", "fork"'
SPAWNED = 'check(lambda fn, arg: unisono.spawn("gloo", fn, (arg,), {{}}, 1, {how}), {methods})'
WAYS = {
    "forkserver": SPAWNED.format(how='start_method="forkserver"', methods=EVERY),
    "spawn": SPAWNED.format(how='start_method="spawn"', methods='"spawn"'),
    "pool": f'with unisono.WorkerPool("gloo", 1) as pool: check(pool.run, {EVERY})',
    "torchrun": SPAWNED.format(how='launcher="torchrun"', methods='"spawn"'),
}


@pytest.mark.parametrize(
    ("way", "how"),
    [
        *(("forkserver", "-c"), ("forkserver", "script"), ("spawn", "script")),
        *(("pool", "-c"), ("torchrun", "script")),
    ],
)
def test_classes_of_the_script_can_be_pickled_in_a_rank(way: str, how: str, tmp_path: Path) -> None:
    program = CLASSES.replace("FOLDER", repr(str(tmp_path))) + WAYS[way] + '\nprint("done")\n'
    script = tmp_path / "script.py"  # without a main guard
    script.write_text(program)
    assert run_python(*(["-c", program] if how == "-c" else [str(script)])) == "done"
