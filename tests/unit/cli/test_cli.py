"""The command line: its options, what it loads, and its tables on terminals of every width."""

from __future__ import annotations

import os
import re

import pytest

import unisono
from tests.support.pages import ROOT
from tests.support.processes import run_python
from tests.support.screens import on_terminal, run
from unisono.cli import COMMANDS
from unisono.testing import law_names

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CHECK = ("check", "threads", "-n", "2", "--law", "broadcast")
BENCH = ("bench", "--backend", "threads", "--sizes", "4 64K", "--rounds", "2")
LOADS = """
import sys, unisono.cli
for words in (["--help"], ["-h"], ["--version"], ["-V"], ["run", "-h"]):
    try: unisono.cli.main(words)
    except SystemExit: pass
    heavy = {"torch", *({"psutil", "unisono.cli.run", "unisono.registry"} if not words[1:] else ())}
    print("loaded:", *heavy & set(sys.modules))
"""


def test_help_and_version_load_neither_torch_nor_a_command() -> None:
    """And the help of a command loads no torch."""
    lines = run_python("-c", LOADS).splitlines()
    assert [line for line in lines if line.startswith("loaded:")] == ["loaded:"] * 5


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_same_short_options(name: str) -> None:
    shown = run(name, "-h")
    assert shown.code == 0
    assert shown.out == run(name, "--help").out
    assert shown.out.startswith(f"Usage: unisono {name} ")
    if name not in ("doctor", "top", "trace", "where"):
        assert "-n, --nproc-per-node" in shown.out
    done = run(name, "-V")
    assert (done.code, done.out) == (0, f"unisono {unisono.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_and_its_page(name: str) -> None:
    example, page = re.findall(r"^  (?:Example|Guide): +(.+)$", run(name, "-h").out, re.MULTILINE)
    assert example.startswith(f"unisono {name} ")
    assert (ROOT / page).is_file()


def test_options_of_run_are_under_headings() -> None:
    text = run("run", "-h").out
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings == ["Arguments", "Options", "Nodes", "Failures", "Output", "Slurm"]
    assert "--max-restarts" in text.partition("\nFailures:\n")[2].partition("\nOutput:\n")[0]


def test_variables_set_options_of_run_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for Slurm where there is no srun: what is printed is for another machine."""
    given = {"LAUNCHER": "slurm", "PRINT": "1", "NNODES": "2", "NPROC_PER_NODE": "4"}
    for name, value in {**given, "OPTION": "time=10:00 gres=gpu:4"}.items():
        monkeypatch.setenv(f"UNISONO_RUN_{name}", value)
    monkeypatch.setenv("PATH", "")
    done = run("run", "-n", "3", __file__)
    assert (done.code, done.err) == (0, "")
    for line in ("--nodes=2", "--ntasks-per-node=3", "--time=10:00", "--gres=gpu:4"):
        assert f"\n#SBATCH {line}\n" in done.out
    assert not [name for name in os.environ if name.startswith("UNISONO_RUN_")]


def test_a_wrong_value_of_a_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, option in (("GRACE", "soon", "--grace"), ("PRINT", "maybe", "--print")):
        with monkeypatch.context() as patch:
            patch.setenv(f"UNISONO_RUN_{name}", value)
            done = run("run", __file__)
        assert done.code == 2
        assert f"'{option}'" in done.err
        assert f"; the value is that of UNISONO_RUN_{name} (see --help)" in done.err


@pytest.mark.parametrize("name", ["SCRIPT", "PRINT_ONLY", "VERSION", "HELP", "MAX_RESTART"])
def test_a_variable_of_no_option_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"UNISONO_RUN_{name}", "1")
    done = run("run", __file__)
    assert (done.code, done.out) == (2, "")
    assert f"unknown variable UNISONO_RUN_{name}." in done.err
    if name == "MAX_RESTART":
        assert "Did you mean 'UNISONO_RUN_MAX_RESTARTS'?" in done.err


@pytest.mark.parametrize(
    ("words", "at", "completed"),
    [("unisono run --nproc", "2", ["--nproc-per-node"]), ("unisono d", "1", ["demo", "doctor"])],
)
def test_words_are_completed(
    monkeypatch: pytest.MonkeyPatch, words: str, at: str, completed: list[str]
) -> None:
    monkeypatch.setenv("_UNISONO_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", at)
    assert run().out.split() == completed


@pytest.mark.parametrize("width", [45, 60, 80])
def test_tables_fit_the_terminal_and_no_figure_is_cut(width: int) -> None:
    for words in (CHECK, BENCH):
        text = ESCAPES.sub("", on_terminal(width, *words)[0])
        lines = [line.rpartition("\r")[2] for line in text.split("\n")]
        laws = [line for line in lines if line.startswith(("passed ", "derived "))]
        assert bool(laws) == (words == CHECK)
        assert {line.split()[-1] for line in laws} <= set(law_names())  # whole, to be copied
        assert max(len(line) for line in lines if line not in laws) <= width
        assert "\u2026" not in text
    times = re.findall(r"(?m)^ ?all_reduce .* \d+\.\d", text)
    assert len(times) == 4


def test_doctor_folds_between_words() -> None:
    lines = on_terminal(60, "doctor")[0].split("\n")
    assert lines[0] == "recommended here"
    assert max(len(line) for line in lines if len(line.split()) > 2) <= 60
    assert {word for line in lines for word in line.split()} == set(run("doctor").out.split())


def test_what_is_piped_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "45")
    text = run(*CHECK).out
    assert "\x1b" not in text
    assert text.isascii()
    law = "broadcast_takes_type_and_shape_from_the_source"
    (line,) = (line for line in text.splitlines() if line.endswith(law))
    assert line.split()[0] == "passed"


def test_a_file_that_cannot_be_written_is_wrong_use() -> None:
    done = run("check", "serial", "-n", "1", "--law", "broadcast", "--save", "/dev/null/x")
    assert done.code == 2
    assert done.err.startswith("error: --save /dev/null/x: it can't be written: ")


def test_no_color_is_heeded() -> None:
    assert "\x1b[32m" in on_terminal(100, *CHECK)[0]
    assert "\x1b[32m" not in on_terminal(100, *CHECK, NO_COLOR="1")[0]


def test_a_backend_that_nobody_knows_is_answered_by_what_is_usable() -> None:
    done = run("check", "nosuch")
    assert (done.code, done.out) == (2, "")
    assert "Usable here: " in done.err
    assert "gloo" in done.err
