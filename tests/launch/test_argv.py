"""What launchers would run and what ranks would read, without starting anything."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import main
from unisono.cli.run import _print_command
from unisono.environments import detection
from unisono.errors import ArgumentError
from unisono.host import memory
from unisono.launchers import mpi, slurm, torchrun
from unisono.launchers.script.rank.program import RankOptions, variables
from unisono.launchers.script.rank.report import Reader, Report, encode
from unisono.launchers.script.script import RANK_WRAPPER, Script, env_for, rank_infos
from unisono.launchers.variables import LINK, OF_TORCH, without
from unisono.topology import LaunchPlan, RankInfo

PROGRAM = (sys.executable, "train.py", "--lr", "0.1", "two words")
RANK_WORDS = [sys.executable, RANK_WRAPPER, "{}", *PROGRAM]
OPEN_MPI, HYDRA = "mpirun (Open MPI) 4.1.4", "HYDRA build details:"


def script(**more: object) -> Script:
    return Script(PROGRAM, token="", **{"nproc_per_node": 2, **more})  # type: ignore[arg-type]


def infos(counts: tuple[int, ...]) -> list[RankInfo]:
    return rank_infos(counts, "10.0.0.1", 29999)


@pytest.mark.parametrize("counts", [(1,), (2,), (3, 1), (1, 3), (2, 2, 1)])
def test_what_ranks_read_is_what_was_planned(counts: tuple[int, ...]) -> None:
    seats = [(node, i, count) for node, count in enumerate(counts) for i in range(count)]
    for rank, (info, seat) in enumerate(zip(infos(counts), seats, strict=True)):
        assert detection.detect(env_for(info)) == detection.detect(env_for(info, 1, 2)) == info
        assert (info.rank, info.world_size, info.nnodes) == (rank, sum(counts), len(counts))
        assert (info.node_rank, info.local_rank, info.local_world_size) == seat


def test_the_ranks_of_a_plan_are_those_of_one_node() -> None:
    where: dict[str, Any] = {"master_addr": "10.0.0.1", "master_port": 29999}
    plan = replace(script(nproc_per_node=3).plan(), **where, store_is_hosted=True)
    found = [replace(plan.info(local_rank), source="torchrun") for local_rank in range(3)]
    assert [replace(info, job_id=None) for info in found] == infos((3,))
    assert [detection.detect(env_for(info)) for info in found] == found


def test_torchrun() -> None:
    words = torchrun.argv(script())
    assert words[1:4] == ["-m", "torch.distributed.run", "--nnodes"]
    assert "--standalone" in words
    assert words[-len(RANK_WORDS) - 1 :] == ["--no-python", *RANK_WORDS]
    where = {"master_addr": "h1", "master_port": 4000}
    text = shlex.join(torchrun.argv(script(nnodes=2, max_nnodes=2, node_rank=1, **where)))
    assert "--node-rank 1 --master-addr h1 --master-port 4000 " in text
    text = shlex.join(torchrun.argv(script(nnodes=1, max_nnodes=4, timeout_s=7.0, **where)))
    assert "--nnodes 1:4 " in text
    assert "--rdzv-backend c10d --rdzv-endpoint h1:4000 " in text
    assert "join_timeout=7,read_timeout=7" in text
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # as restarts want it
    assert torchrun.environment(script(max_restarts=1), {})[own_store] == "1"
    assert torchrun.environment(script(nnodes=1, max_nnodes=2), {})[own_store] == "1"
    assert own_store not in torchrun.environment(script(), {})


@pytest.mark.parametrize("given", [{}, {"master_addr": "h1"}, {"master_port": 4000}])
def test_torchrun_on_several_nodes_needs_an_address(given: dict[str, object]) -> None:
    lacking = "--master-port" if "master_addr" in given else "--master-addr"
    with pytest.raises(ArgumentError, match=f"--nnodes 2 needs {lacking}"):
        torchrun.argv(script(nnodes=2, max_nnodes=2, node_rank=1, **given))


def test_srun() -> None:
    asked = script(nnodes=2, max_nnodes=2)
    words = slurm.argv(asked)
    assert words[:1] == ["srun"]
    assert "--kill-on-bad-exit=1" in words
    assert words[3:6] == ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    assert words[-len(RANK_WORDS) :] == RANK_WORDS
    hosts = script(hosts=(("n1", 3), ("n2", 1)))
    assert "--nodelist=n1,n1,n1,n2" in slurm.argv(hosts)
    assert slurm.environment(hosts, {})["MASTER_ADDR"] == "n1"
    lines = slurm.batch_script(asked, "train").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks=4", "#SBATCH --job-name=train"} <= set(lines)
    assert shlex.split(lines[-1])[1:] == words


@pytest.mark.parametrize(
    ("said", "handed_over"),
    [("NONE", LINK), ("A,B", f"A,B,{LINK}"), ("ALL", "ALL"), ("ALL,A=1", "ALL,A=1")],
)
def test_tasks_of_a_function_get_its_link_whatever_else_srun_hands_over(
    said: str, handed_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_EXPORT_ENV", said)
    asked = script(options=(("export", said),))
    with ExitStack() as held:
        words, variables = slurm._prepare(asked, held)
    assert f"--export={handed_over}" in words
    assert variables["SLURM_EXPORT_ENV"] == handed_over


def test_a_job_forgets_the_step_or_the_job_that_it_is_started_in() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "PATH": "/bin"}
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "RANK": "1"}
    assert slurm.environment(script(), {**kept, **step}) == kept
    old = env_for(infos((2,))[1])
    assert without({**old, "ROLE_RANK": "1", "HOME": "/h"}, OF_TORCH) == {"HOME": "/h"}


def test_options_of_slurm_are_for_the_job_and_the_step() -> None:
    own = (("time", "10:00"), ("gres", "gpu:2"), ("mem_per_cpu", "2G"), ("exclusive", ""))
    options = ["--time=10:00", "--gres=gpu:2", "--mem-per-cpu=2G", "--exclusive"]
    asked = script(options=own)
    assert [word for word in slurm.argv(asked) if word in options] == options
    lines = slurm.batch_script(asked, "train").splitlines()
    assert [line for line in lines if line.partition(" ")[2] in options] == [
        f"#SBATCH {option}" for option in options
    ]
    assert shlex.split(lines[-1])[1:] == slurm.argv(script())  # the job's options are the step's
    named = slurm.batch_script(script(options=(("job-name", "mine"),)), "train")
    assert "#SBATCH --job-name=mine" in named
    quoted = slurm.batch_script(script(options=(("comment", "two words"), ("x11", ""))), "train")
    assert "#SBATCH '--comment=two words'\n#SBATCH --x11\n" in quoted
    zero = dict(slurm._texts({"mem": 0, "nice": False, "hold": True}))
    assert zero == {"mem": "0", "hold": ""}
    assert "train" not in named.replace("train.py", "")


@pytest.mark.parametrize("name", ["nodes", "ntasks-per-node", "Time", "a b", ""])
def test_options_that_are_not_the_users_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="option"):
        slurm.argv(script(options=((name, "1"),)))
    with pytest.raises(ArgumentError, match="option"):
        slurm.launch(repr, LaunchPlan(1), options={name: 1})


def test_options_are_given_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"  # nothing runs it: with --print it only has to be there
    srun.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--launcher", "slurm", "-n", "2", "-o", "time=10:00", "--option", "exclusive"]
    assert command(*words, "--print", __file__) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --time=10:00" in text
    assert "#SBATCH --exclusive" in text
    assert command("-o", "time=10:00", __file__) == 2
    assert "does not support --option" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "option"), [(OPEN_MPI, "--host"), (HYDRA, "-hosts")])
def test_mpiexec(version: str, option: str) -> None:
    words = mpi.argv(script(), "mpiexec", version)
    assert words[:3] == ["mpiexec", "-n", "2"]
    assert words[words.index(option) + 1] == "localhost"
    assert words[-len(RANK_WORDS) :] == RANK_WORDS
    words = mpi.argv(script(hosts=(("a", 3), ("b", 1))), "mpiexec", version)
    assert words[:3] == ["mpiexec", "-n", "4"]
    assert words[words.index(option) + 1] == "a:3,b:1"


def test_a_program_gets_torchs_variables_and_a_prefix_and_keeps_its_own_variables() -> None:
    info = infos((3, 1))[3]
    found = variables(info, {"OMP_NUM_THREADS": "5", "MASTER_PORT": "1"})
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "4", "0"]
    assert (found["OMP_NUM_THREADS"], found["MASTER_PORT"]) == ("5", "1")
    assert variables(None, {}) == {"PYTHONUNBUFFERED": "1"}
    assert RankOptions().prefix(info) == b"[3] "
    assert RankOptions(is_coloured=True).prefix(infos((2,))[1]) == b"\x1b[33m[1] \x1b[0m"


def test_a_report_survives_being_torn_and_labelled() -> None:
    report = Report(1, 2, "host", 7, -9, 0, "", "", "a line: é\n" * 300, 1, 0)
    lines = encode(report, "t").splitlines(keepends=True)
    assert len(lines) > 3
    assert max(map(len, lines)) < 1000
    reader = Reader("t")
    others = [b"1: hello\n", b"\x1eother x 0 of 1 abc\n"]
    assert [reader.read(line) for line in others] == [False, False]
    said = [reader.read(b"1: " + line) for line in reversed(lines)]
    assert said[:-1] == [True] * (len(lines) - 1)
    assert said[-1] == report
    assert report.signal_name == "SIGKILL"
    assert report.exit_code == 137


def test_reports_of_others_failures_are_known() -> None:
    for last, is_secondary in (
        ("ValueError: no", False),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:1", True),
        ("unisono.errors.PeerFailedError: rank 1", True),
    ):
        assert Report(0, 2, "h", 1, 1, raised=last).is_secondary is is_secondary, last
        assert Report(0, 2, "h", 1, 1, words=f"{last}\n").is_secondary is is_secondary, last


def command(*words: str, name: str = "run") -> int:
    with pytest.raises(SystemExit) as raised:
        main([name, *words])
    code = raised.value.code
    assert isinstance(code, int)
    return code


HERE = str(Path(__file__).with_name("job.py"))
BAD = [
    (["nowhere.py"], "script 'nowhere.py' doesn't exist"),
    (["/"], "script '/' is a folder without __main__.py"),
    (["-"], "a rank's standard input is empty; use a file"),
    (["--nproc-per-node", "0", HERE], "--nproc-per-node 0 should be a number of at least 1"),
    (["--nproc-per-node", "-1", HERE], "--nproc-per-node -1 should be"),
    (["--nproc-per-node", "two", HERE], "--nproc-per-node two should be"),
    (["--nnodes", "0", HERE], "--nnodes 0 should be"),
    (["--nnodes", "4:2", HERE], "--nnodes 4:2 should be"),
    (["--nnodes", "2", HERE], "--nnodes 2 needs --master-addr"),
    (["--nnodes", "2", "--node-rank", "2", HERE], "--node-rank 2 should be below --nnodes 2"),
    (["--launcher", "processes", "--nnodes", "2", HERE], "ranks on this host alone"),
    (["--launcher", "nope", HERE], "unknown launcher 'nope'. Known:"),
    (["--backend", "nope", HERE], "unknown backend 'nope'"),
    (["--backend", "threads", HERE], "its replicas are threads"),
    (["--hosts", "a:0", HERE], "--hosts='a:0' should be"),
    (["--hosts", "a:1,a:2", HERE], "each name once"),
    (["--master-port", "70000", HERE], "invalid value for '--master-port'"),
    (["--node-rank", "-1", HERE], "invalid value for '--node-rank'"),
    (["--max-restarts", "-1", HERE], "invalid value for '--max-restarts'"),
    (["--timeout", "0", HERE], "--timeout=0.0 should be over 0"),
    (["--stdin", "3", "-n", "3", HERE], "--stdin 3 should be a rank below 3"),
    (
        ["--stdin", "0", "--launcher", "torchrun", HERE],
        "launcher 'torchrun' does not support --stdin",
    ),
    (["--local-ranks-filter", "0,x", HERE], "--local-ranks-filter 0,x should be local ranks"),
    (["--local-ranks-filter", "2", "-n", "2", HERE], "--local-ranks-filter 2 should be below 2"),
    (["--module", "--no-python", "x"], "contradict each other"),
    (["--nproc-pre-node", "2", HERE], "--nproc-pre-node"),
    ([], "SCRIPT"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda value: str(value)[:40])
def test_wrong_use_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BACKEND", "")  # the command sets it, in its own process
    assert command(*words) == 2
    error = capsys.readouterr().err
    assert said.casefold() in error.casefold()
    assert "Traceback" not in error


def test_a_folder_with_a_main_module_is_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "__main__.py").touch()
    assert command("--launcher", "torchrun", "-n", "2", "--print", str(tmp_path)) == 0
    assert capsys.readouterr().out.endswith(f" {sys.executable} {tmp_path}\n")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ((sys.executable, "/u/train.py"), "train"),
        ((sys.executable, "-m", "my.train"), "my.train"),
        (("/bin/ls",), "ls"),
    ],
)
def test_a_batch_script_is_named_after_the_program(
    program: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _print_command("slurm", Script(program), program[-1]) == 0
    assert f"\n#SBATCH --job-name={name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mpi", "slurm"])
def test_a_launcher_that_isnt_installed_is_named_with_its_remedy(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interpreter is seen outside of its environment, which may have an mpiexec of its own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    assert command("--launcher", name, HERE) == 2
    error = capsys.readouterr().err
    assert f"launcher {name!r} can't be used here" in error
    assert "apt-get install" in error


Doctor = Callable[..., tuple[int, Any]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command with variables; give its code, and what it has found."""
    for name in os.environ:
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)

    def run(*words: str, **variables: str) -> tuple[int, Any]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            code = command("--json", *words, name="doctor")
        return code, json.loads(capsys.readouterr().out)

    return run


def test_doctor_says_which_variable_decided_what(doctor: Doctor) -> None:
    said = {"RANK": "1", "WORLD_SIZE": "2"}
    code, found = doctor(**said, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="3")
    assert code == 0
    environment = found["environment"]
    assert environment["source"] == "torchrun"
    verdicts = {each["source"]: each["verdict"] for each in environment["findings"]}
    assert verdicts == {"torchrun": "won", "openmpi": "disagrees"}
    assert environment["findings"][0]["variables"] == said
    assert {"gloo", "threads", "nccl"} <= set(found["backends"])
    assert {"processes", "ray"} <= set(found["launchers"])
    assert "lo" in found["interfaces"]


@pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")
def test_doctor_says_how_much_memory_for_tensors_ranks_share(doctor: Doctor) -> None:
    free, limited, nothing, wrong = (
        doctor(UNISONO_SHARED_BYTES=text)[1]["memory"] for text in ("", "5000000", "0", "much")
    )
    assert free["reason"] is None
    assert 0 < limited["bytes"] <= 5_000_000
    assert (limited["most_bytes"], nothing["most_bytes"]) == (5_000_000, 0)
    assert (nothing["bytes"], wrong["bytes"]) == (0, 0)
    assert "UNISONO_SHARED_BYTES" in nothing["reason"]
    assert "UNISONO_SHARED_BYTES='much' should be a number" in wrong["reason"]


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--backend", "nope"], {}, "unknown backend 'nope'"),
        (["--launcher", "nope"], {}, "unknown launcher 'nope'"),
        ([], {"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is out of range"),
        ([], {"RANK": "0"}, "WORLD_SIZE is not set"),
    ],
)
def test_doctor_fails_for_what_cant_work(
    words: list[str], variables: dict[str, str], said: str, doctor: Doctor
) -> None:
    code, found = doctor(*words, **variables)
    assert code == 1
    assert said in str(found["problems"])
