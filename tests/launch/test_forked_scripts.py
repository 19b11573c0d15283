"""A script whose ranks are forks sees and does what it would in interpreters of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import zipapp
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from tests.support import sees
from tests.support.command import LIMIT_S, UNISONO, Done, nobody_is_left, run, started
from tests.support.processes import MARK, SOURCES, gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no rank is a fork")
Rows: TypeAlias = "dict[str, Any]"
WAYS = ("fork", "fresh")
LAUNCHERS = ("processes", "torchrun")
# Rows that tell a fork from a new interpreter, and why they may.
NOT_EQUAL = {
    "rank's own: hash secret": "all ranks of a start have one",
    "rank's own: place of an object in memory": "forks have the layout of the server",
    "sys: modules at start, standard library": "torch has loaded about 220",
    "sys: meta_path": "a finder reveals torch",
    "gc: frozen objects at start": "forks would copy the objects of torch's modules",
    "atexit: handlers at start": "those of modules that torch loads",
    "proc: environ is that of os.environ": "it is the server's",
    "signals: as the kernel has them": "the C library's own signal 33, once a thread has begun",
}
# Each job has its own.
OF_A_JOB = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "UNISONO_PRIVATE_STORE", MARK)
OF_AN_AGENT = ("TORCHELASTIC_ERROR_FILE",)
IN_C = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "latin-1:replace"}
OPTIMIZED = {"PYTHONWARNINGS": "error::DeprecationWarning", "PYTHONOPTIMIZE": "2"}
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "script": (["sees.py", "a", "--b=1"], {}),
    "module, hash seed": (["-m", "sees", "--short", "a"], {"PYTHONHASHSEED": "0"}),
    "folder, flags": (["folder", "--short", "a"], OPTIMIZED),
    "archive, OpenMP": (
        ["sees.pyz", "--short", "a"],
        {"OMP_NUM_THREADS": "3", "TORCH_LOGS": "+dynamo"},
    ),
    "other path, C's encoding": (["./folder/../sees.py", "--short"], IN_C),
    "below torch's agent": (["sees.py"], {"UNISONO_RUN_LAUNCHER": "torchrun"}),
}
# Libraries read these while they are loaded.
AT_LOAD = (
    *("OMP_NUM_THREADS=3", "OMP_DYNAMIC=true", "MKL_NUM_THREADS=1", "TORCH_LOGS=+dynamo"),
    *("PYTORCH_JIT=0", "TORCH_SHOW_CPP_STACKTRACES=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "FX_PATCH_GETITEM=1",
)
LATER = "CUDA_VISIBLE_DEVICES=1"
# A new interpreter has the rank's variables from its start.
KIND = """
import os, sys
with open("/proc/self/environ", "rb") as file:
    names = [item.partition(b"=")[0] for item in file.read().split(b"\\0")]
kind = "NEW" if b"RANK" in names else "FORK"
print(kind, sys.modules.get("torch"))
"""
WAITS = """
import os, signal
print("READY", os.getpid(), os.getppid(), flush=True)
while True:
    signal.pause()
"""
SAVES = """
import signal, sys

def save(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the wrapper passes on its own, too
    print("SAVED", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print("READY", flush=True)
while True:
    signal.pause()
"""
FAILS_ONCE = """
import os, sys
print("SERVER", os.getppid(), flush=True)
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
sys.exit(3 if (attempt, rank) == ("0", "1") else 0)
"""
LEAVES = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
daemon = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print("LEFT", child.pid, daemon.pid)
"""
TOO_LATE = """
import os
print("begun", flush=True)
os.environ["NCCL_DEBUG"] = "INFO"
os.environ["OMP_NUM_THREADS"] = "3"
import torch
"""
WRITES = """
import sys
sys.stdout.write(("x" * 99 + "\\n") * 100_000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the script that looks, in all forms that Python runs."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copy(sees.__file__, folder)
    (folder / "folder").mkdir()
    shutil.copy(sees.__file__, folder / "folder" / "__main__.py")
    zipapp.create_archive(folder / "folder", folder / "sees.pyz")
    (folder / "user").mkdir()
    customization = "import os, sys\nsys._customized_in = os.getpid()\n"
    (folder / "user" / "sitecustomize.py").write_text(customization)
    return folder


def words(*more: str, n: int = 1, way: str = "fork") -> list[str]:
    fresh = ["--fresh"] if way == "fresh" else []
    return [*UNISONO, "run", *fresh, "-n", str(n), *more]


def run_in(folder: Path, *more: str, n: int = 1, way: str = "fork", **variables: str) -> Done:
    return run(["env", "-C", str(folder), *words(*more, n=n, way=way)], **variables)


def run_script(folder: Path, text: str, *options: str, **how: Any) -> Done:
    """Run a script in a folder that isn't the launcher's."""
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts" / "train.py").write_text(text)
    return run_in(folder, *options, "scripts/train.py", **how)


def seen(
    folder: Path, logs: Path, way: str, script: Sequence[str], n: int = 2, **variables: str
) -> list[Rows]:
    """Return what each rank of a script sees."""
    path = f"{SOURCES}:{folder / 'user'}"
    done = run_in(
        folder, "--log-dir", str(logs), *script, n=n, way=way, PYTHONPATH=path, **variables
    )
    assert done.code == 0, done.err
    assert "unisono run" not in done.err
    found: list[Rows] = [json.loads((logs / f"rank{rank}.out").read_text()) for rank in range(n)]
    for rows in found:
        assert len(rows) > 116
        for name in OF_A_JOB:
            del rows["environment: names and values"][name]
        for name in OF_AN_AGENT:
            rows["environment: names and values"].pop(name, None)
    return found


def differing(one: Rows, other: Rows) -> set[str]:
    names = {name for name in one.keys() | other.keys() if not name.startswith("rank's own: ")}
    return {name for name in names if one.get(name) != other.get(name)}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Undo what ``nohup`` and "&" did: torch's agent does so for new interpreters alone."""
    ignored = (signal.SIGHUP, signal.SIGQUIT)
    before = [signal.signal(number, signal.SIG_DFL) for number in ignored]
    yield
    for number, handler in zip(ignored, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("case", CASES)
def test_a_fork_sees_what_a_new_interpreter_does(case: str, folder: Path, tmp_path: Path) -> None:
    script, variables = CASES[case]
    how: dict[str, Any] = {**variables}
    forks, fresh = [seen(folder, tmp_path / way, way, script, **how) for way in WAYS]
    told = set.union(*map(differing, forks, fresh))
    own = [name for name in forks[0] if name.startswith("rank's own: ")]
    told |= {name for name in own if forks[0][name] == forks[1][name]}
    if "PYTHONHASHSEED" in variables:
        told -= {"rank's own: hash secret"}
    new = {name: (forks[0].get(name), fresh[0].get(name)) for name in told - NOT_EQUAL.keys()}
    assert not new
    assert "proc: environ is that of os.environ" in told  # else it was no fork
    assert all(rows["site: user's customization ran, in this process"] for rows in forks)


def test_variables_that_a_script_sets_first_have_their_effect(folder: Path, tmp_path: Path) -> None:
    """Each rank sets another one."""
    script = ["sees.py", "--short", *AT_LOAD, LATER]
    forks, fresh = [seen(folder, tmp_path / way, way, script, n=len(script) - 2) for way in WAYS]
    *of_forks, later = map(differing, forks, fresh)
    assert of_forks == [set()] * len(AT_LOAD)
    assert "proc: environ is that of os.environ" in later  # it is the fork that it was
    assert not later - NOT_EQUAL.keys()


def test_a_variable_that_is_set_too_late_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path, TOO_LATE, n=2)
    assert done.code == 0, done.err
    assert done.out.count("begun\n") == 2
    lines = done.err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "OMP_NUM_THREADS" in line
        assert "--fresh" in line
        assert "NCCL" not in line
    assert run_script(tmp_path, TOO_LATE, way="fresh").err == ""


def printed(logs: Path) -> dict[str, str]:
    """Return the content of log files, without addresses."""
    return {file.name: re.sub("0x[0-9a-f]+", "0x", file.read_text()) for file in logs.glob("rank*")}


@pytest.mark.fast
def test_scripts_that_pass_end_as_in_new_interpreters(folder: Path, tmp_path: Path) -> None:
    """Each rank ends in another way."""
    ends = {}
    for way in WAYS:
        (tmp_path / way).mkdir()
        end = (str(folder / "sees.py"), "--end", "PASSING")
        done = run_in(tmp_path / way, "--log-dir", ".", *end, n=len(sees.PASSING), way=way)
        assert done.code == 0, done.err
        assert [file.read_text() for file in (tmp_path / way).glob("left*")] == ["whole"] * 2
        ends[way] = printed(tmp_path / way)
    assert ends["fork"] == ends["fresh"]
    for rank, kind in enumerate(sees.PASSING):
        assert ends["fork"][f"rank{rank}.out"].startswith(f"=== {kind}\n")


def test_scripts_that_fail_end_as_in_new_interpreters(folder: Path, tmp_path: Path) -> None:
    """Each attempt fails in another way."""
    ends = {}
    restarts = str(len(sees.FAILING) - 1)
    for way in WAYS:
        options = ("--max-restarts", restarts, "--log-dir", str(tmp_path / way))
        done = run_in(folder, *options, "sees.py", "--end", "FAILING", way=way)
        assert done.code == 3, done.err
        errors = re.sub(r"process \d+", "process", done.err).replace(str(tmp_path / way), "")
        assert errors.count("error: rank 0 of 1") == len(sees.FAILING)
        ends[way] = {**printed(tmp_path / way), "launcher": errors}
    assert ends["fork"] == ends["fresh"]
    assert re.findall("=== (.*)", ends["fork"]["rank0.out"]) == [*sees.FAILING]


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--fresh"], {}),
        ([], {"UNISONO_RUN_FRESH": "1"}),
        ([], {"COVERAGE_PROCESS_START": "coverage.ini"}),
        (["--no-python", "env", sys.executable], {}),
    ],
    ids=["option", "variable", "coverage", "program"],
)
def test_some_starts_need_new_interpreters(
    options: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "coverage.ini").write_text("[run]\nparallel = true\n")
    done = run_script(tmp_path, KIND, *options, **variables)
    assert (done.code, done.out, done.err) == (0, "[0] NEW None\n", "")


def test_stdout_may_be_closed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit('reached')")
    done = run(["sh", "-c", '"$@" >&-', "sh", *words(str(tmp_path / "train.py"))])
    assert done.code == 1
    assert "SystemExit" not in done.err
    assert "[0] reached" in done.err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_may_not_import_torch(launcher: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, KIND, "--launcher", launcher, n=2)
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["[0] FORK None", "[1] FORK None"]


@pytest.mark.parametrize("name", ["queue", "typing_extensions"])
def test_a_file_beside_the_script_is_imported(name: str, tmp_path: Path) -> None:
    """Even if torch has imported Python's or a library's module of that name."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / f"{name}.py").write_text("is_users = True")
    done = run_script(tmp_path, f"import {name}\nassert {name}.is_users\n{KIND}")
    assert (done.code, done.out) == (0, "[0] NEW None\n"), done.err


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "torch.cuda._initialized = True",
    ],
    ids=["thread", "device"],
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_server_that_cant_be_forked_says_so(code: str, launcher: str, tmp_path: Path) -> None:
    """Libraries that extend torch are loaded by it, and start what they like."""
    begin = f"import threading, time\ndef begin():\n    import torch\n    {code}\n"
    (tmp_path / "extends_torch.py").write_text(begin)
    metadata = tmp_path / "extends_torch-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extends_torch\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nx = extends_torch:begin\n")
    path = f"{SOURCES}:{tmp_path}"
    done = run_script(tmp_path, KIND, "--launcher", launcher, PYTHONPATH=path)
    assert (done.code, done.out, done.err) == (0, "[0] NEW None\n", "")


def test_torch_that_cant_be_imported_fails_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "own" / "torch").mkdir(parents=True)
    (tmp_path / "own" / "torch" / "__init__.py").write_text("raise ImportError('broken')")
    script = "try:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
    done = run_script(tmp_path, script, PYTHONPATH=f"{SOURCES}:{tmp_path / 'own'}")
    assert (done.code, done.out) == (0, "[0] broken\n")


@pytest.mark.parametrize("way", WAYS)
def test_children_end_with_their_rank_and_daemons_dont(way: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, LEAVES, way=way)
    child, daemon = map(int, re.findall(r"\d+", done.out.partition("LEFT")[2]))
    assert not gone([child], 2.0)
    assert gone([daemon], 0.0) == [daemon]


@pytest.mark.parametrize(
    ("target", "number"),
    [
        *[(target, signal.SIGTERM) for target in ("launcher", "wrapper", "rank")],
        *[(target, signal.SIGKILL) for target in ("launcher", "wrapper", "rank", "server")],
    ],
)
def test_nothing_outlives_what_is_ended(
    target: str, number: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    with started(words(str(script), n=2)) as job:
        job.wait_for("READY", 2)
        rank, server = map(int, re.findall(r"\[1\] READY (\d+) (\d+)", job.out())[0])
        launcher = psutil.Process(job.process.pid)
        forks = [each for each in launcher.children() if each.cmdline() == launcher.cmdline()]
        _, wrapper = sorted(each.pid for each in forks)
        pids = {"launcher": job.process.pid, "wrapper": wrapper, "rank": rank, "server": server}
        os.kill(pids[target], number)
        code = job.process.wait(LIMIT_S)
        nobody_is_left(job.mark)
        error = job.err()
    expected = 128 + (signal.SIGKILL if target == "server" else number)
    assert code == (-number if code < 0 else expected)
    named = {
        "wrapper": "error: rank 1 of 2 ",
        "rank": "error: rank 1 of 2 ",
        "server": " was ended by SIGKILL: its fork server has ended, ",
    }
    assert named.get(target, "") in error
    assert "last output" not in error


@pytest.mark.parametrize(
    ("target", "number"),
    [
        *[("launcher", number) for number in (signal.SIGTERM, signal.SIGKILL)],
        *[(target, signal.SIGKILL) for target in ("agent", "wrapper", "rank", "server")],
    ],
)
def test_nothing_outlives_what_is_ended_below_torchs_agent(
    target: str, number: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    with started([*words("--launcher", "torchrun", str(script), n=2)]) as job:
        job.wait_for("READY", 2)
        rank, server = map(int, re.findall(r"\[1\] READY (\d+) (\d+)", job.out())[0])
        (agent,) = [each for each in psutil.Process(server).children() if each.children()]
        wrapper = agent.children()[1].pid
        pids = {"launcher": job.process.pid, "wrapper": wrapper, "rank": rank, "server": server}
        os.kill({**pids, "agent": agent.pid}[target], number)
        code = job.process.wait(LIMIT_S)
        nobody_is_left(job.mark)
        error = job.err()
    # At the end of a wrapper the agent ends the job, and says which.
    assert code == (-number if code < 0 else 1 if target == "wrapper" else 128 + number), error
    named = {
        "rank": "error: rank 1 of 2 ",
        "server": " was ended by SIGKILL: its fork server has ended, ",
        "wrapper": "rank      : 1 ",
    }
    assert named.get(target, "") in error


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_to_all_processes_lets_ranks_save(way: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    with started(words(str(script), n=2, way=way)) as job:
        job.wait_for("READY", 2)
        launcher = psutil.Process(job.process.pid)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for process in (launcher, *launcher.children(recursive=True)):
                process.send_signal(number)
        assert job.process.wait(LIMIT_S) == 0
        nobody_is_left(job.mark)
        assert job.out().count("SAVED") == 2


def test_a_script_that_has_changed_its_folder_starts_again_where_it_began(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    script = "import os\nos.chdir('below')\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n"
    done = run_script(tmp_path, script + "print(torch.get_num_threads(), os.getcwd())")
    assert (done.code, done.out) == (0, f"[0] 1 {tmp_path / 'below'}\n"), done.err


def test_ctrl_c_is_for_ranks_though_a_shell_has_ignored_it(tmp_path: Path) -> None:
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's "&" does
    try:
        done = run_script(tmp_path, "import signal; print(signal.getsignal(signal.SIGINT))")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert "default_int_handler" in done.out


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_start_again_as_forks_of_the_same_server(launcher: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, FAILS_ONCE, "--launcher", launcher, "--max-restarts", "1", n=2)
    assert done.code == 0, done.err
    assert "restart 1 of 1" in done.err
    servers = re.findall(r"SERVER (\d+)", done.out)
    assert 3 <= len(servers) <= 4  # a rank may have been ended before it could print
    assert len(set(servers)) == 1


def test_ten_megabytes_of_output_are_whole(tmp_path: Path) -> None:
    done = run_script(tmp_path, WRITES, "--log-dir", "logs", n=2)
    assert done.code == 0, done.err
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank{rank}.out").stat().st_size == 10_000_000
        assert done.out.count(f"[{rank}] {99 * 'x'}\n") == 100_000
