"""The command line: its options, what it loads, and its tables on terminals of every width."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

import pytest

import unisono
from tests.support.processes import python, read_terminal, run_python
from unisono.cli import COMMANDS
from unisono.testing import law_names

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LAWS = ("--law", "broadcast")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "unisono", *words, env={**os.environ, **environ})


def on_terminal(width: int, *words: str, **environ: str) -> str:
    """Give what a command writes to a terminal of that many columns."""
    leader, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    variables = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "CI")}
    command = [sys.executable, "-m", "unisono", *words]
    variables |= {"TERM": "xterm-256color", **environ}
    with subprocess.Popen(command, env=variables, stdin=end, stdout=end) as made:
        os.close(end)
        shown = read_terminal(leader)
    assert made.returncode == 0
    return shown.decode()


def test_help_and_version_load_neither_torch_nor_a_command() -> None:
    code = (
        "import sys, unisono.cli\n"
        "try: unisono.cli.main([sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'psutil', 'unisono.cli.run', 'unisono.registry'} & set(sys.modules))"
    )
    for word in ("--help", "-h", "--version", "-V"):
        assert run_python("-c", code, word).splitlines()[-1] == "set()", word


def test_the_help_of_run_loads_no_torch() -> None:
    code = (
        "import sys, unisono.cli\n"
        "try: unisono.cli.main(['run', '-h'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    assert run_python("-c", code).splitlines()[-1] == "False"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_same_short_options(name: str) -> None:
    shown = run(name, "-h")
    assert shown.returncode == 0
    assert shown.stdout == run(name, "--help").stdout
    assert shown.stdout.startswith(f"Usage: unisono {name} ")
    if name not in ("doctor", "top", "trace", "where"):
        assert "-n, --nproc-per-node" in shown.stdout
    done = run(name, "-V")
    assert (done.returncode, done.stdout) == (0, f"unisono {unisono.__version__}\n")


def test_words_are_completed() -> None:
    typed = {"COMP_WORDS": "unisono run --nproc", "COMP_CWORD": "2"}
    done = run(_UNISONO_COMPLETE="complete_bash", **typed)
    assert done.stdout.split() == ["--nproc-per-node"]
    typed = {"COMP_WORDS": "unisono d", "COMP_CWORD": "1"}
    done = run(_UNISONO_COMPLETE="complete_bash", **typed)
    assert done.stdout.split() == ["demo", "doctor"]


@pytest.mark.parametrize("width", [45, 60, 80])
def test_tables_fit_the_terminal_and_no_figure_is_cut(width: int) -> None:
    sizes = ("--sizes", "4 64K", "--rounds", "2")
    for words in (
        ("check", "threads", "-n", "2", *LAWS),
        ("bench", "--backend", "threads", *sizes),
    ):
        text = ESCAPES.sub("", on_terminal(width, *words))
        lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
        laws = [line for line in lines if line.startswith(("passed ", "derived "))]
        assert bool(laws) == (words[0] == "check")
        assert {line.split()[-1] for line in laws} <= set(law_names())  # whole, to be copied
        assert max(len(line) for line in lines if line not in laws) <= width
        assert "\u2026" not in text
    times = re.findall(r"(?m)^ ?all_reduce .* (\d+\.?\d* (?:us|ms|s))", text)
    assert len(times) == 4


def test_doctor_folds_between_words() -> None:
    text = on_terminal(60, "doctor")
    lines = text.replace("\r\n", "\n").split("\n")
    assert lines[0] == "recommended here"
    assert max(len(line) for line in lines if len(line.split()) > 2) <= 60
    assert {word for line in lines for word in line.split()} == set(run("doctor").stdout.split())


def test_what_is_piped_is_plain() -> None:
    done = run("check", "threads", "-n", "2", *LAWS, COLUMNS="45")
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    law = "broadcast_takes_type_and_shape_from_the_source"
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(law))
    assert line.split()[1] == "passed"


def test_no_color_is_heeded() -> None:
    words = ("check", "threads", "-n", "2", *LAWS)
    assert "\x1b[32m" in on_terminal(100, *words)
    assert "\x1b[32m" not in on_terminal(100, *words, NO_COLOR="1")


def test_a_backend_that_nobody_knows_is_answered_by_what_is_usable() -> None:
    done = run("check", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usable here: " in done.stderr
    assert "gloo" in done.stderr
