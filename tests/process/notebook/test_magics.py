"""The magics in a shell of IPython: what cells print, what they raise, which ranks there are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.processes import until
from unisono.errors import ArgumentError, CollectiveTimeoutError, WorkerFailedError

interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython isn't installed")
traitlets = pytest.importorskip("traitlets.config")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of IPython's own

KINDS = Path(__file__).parents[2] / "data" / "kinds.py"
Shown = Callable[[str, str], list[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    config = traitlets.Config({"HistoryManager": {"enabled": False}})
    made = interactive.InteractiveShell(config=config, ipython_dir=str(tmp_path / "ipython"))
    made.run_line_magic("load_ext", "unisono")
    yield made
    made.run_line_magic("unload_ext", "unisono")


@pytest.fixture
def shown(shell: Any, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs a cell, and gives the lines that it shows; what it raises, it raises here."""

    def run(line: str, cell: str) -> list[str]:
        capsys.readouterr()
        shell.run_cell_magic("ranks", line, cell)
        text = capsys.readouterr().out
        return text.removesuffix("\n").split("\n") if text else []  # bars have "\r"

    return run


def raised(shown: Shown, error: type[BaseException], line: str, cell: str) -> str:
    """Run a cell that fails; give the traceback that it shows."""
    with pytest.raises(error) as caught:
        shown(line, cell)
    return "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]


@pytest.mark.fast
def test_equal_lines_and_values_are_shown_once(shown: Shown) -> None:
    cell = "print('same')\nprint('I am', rank)\nprint('same too')\nx = rank\nsize"
    lines = ["same", "[rank 0] I am 0", "[rank 1] I am 1", "same too", "2"]
    assert shown("2 --on threads", cell) == lines
    assert shown("", "idist.all_reduce(x)") == ["1"]
    assert shown("", "x") == ["[rank 0] 0", "[rank 1] 1"]
    assert shown("", "x;") == []
    assert shown("--rank 1", "print('alone')\nx = 5") == ["[rank 1] alone"]
    assert shown("", "x") == ["[rank 0] 0", "[rank 1] 5"]


def test_bars_of_ranks_do_not_tangle(shown: Shown) -> None:
    cell = (
        "import sys\n"
        "for done in range(5):\n"
        "    sys.stderr.write(f'\\rrank {rank}: {done} of 4')\n"
        "    sys.stderr.flush()\n"
        "    idist.barrier()\n"
        "sys.stderr.write('\\n');"
    )
    text = "\n".join(shown("2 --on gloo", cell)).rpartition("\r")[2]
    assert text.splitlines() == ["[rank 0] rank 0: 4 of 4", "[rank 1] rank 1: 4 of 4"]
    written = "import os\nos.system('echo by a child')\nos.write(2, b'by a descriptor\\n');"
    assert shown("", written) == ["by a child", "by a descriptor"]


def test_an_error_of_all_ranks_is_one_and_shows_the_cell(shell: Any, shown: Shown) -> None:
    text = raised(shown, ZeroDivisionError, "2 --on threads", "y = 3\ny / 0")
    assert text.startswith("all 2 ranks raised ZeroDivisionError: division by zero")
    assert f'File "In[{shell.execution_count}]", line 3, in <module>\n    y / 0' in text
    with pytest.raises(SyntaxError):
        shown("", "y = ")
    with pytest.raises(SystemExit):
        shown("", "raise SystemExit(3)")
    assert shown("", "y") == ["3"]
    assert "its ranks don't" not in raised(shown, NameError, "", "lr")
    shell.user_ns["lr"] = 0.1
    text = raised(shown, NameError, "", "lr")
    assert "\nthe notebook has lr, its ranks don't: define it in a cell of %%ranks" in text


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_ranks_that_wait_for_a_failed_one_stay(shown: Shown, backend: str) -> None:
    cell = "x = rank\nif rank == 1:\n    raise ValueError('on one rank')\nidist.all_reduce(1)"
    text = raised(shown, ValueError, f"2 --on {backend}", cell)
    assert text.startswith("rank 1 of 2 raised ValueError: on one rank")
    assert "    idist.all_reduce(1)\n" in text
    assert shown("", "idist.all_reduce(1), x") == ["[rank 0] (2, 0)", "[rank 1] (2, 1)"]


@pytest.mark.parametrize(
    ("backend", "is_of_group"), [("threads", False), ("gloo", False), ("gloo", True)]
)
def test_an_interrupt_leaves_the_names(
    shown: Shown, tmp_path: Path, backend: str, is_of_group: bool
) -> None:
    folder = tmp_path / "busy"
    folder.mkdir()
    cell = (
        "import os\nx = rank + 1\ngroup = idist.new_group([0, 1])\n"
        f"os.mkdir({str(folder)!r} + f'/{{rank}}-{{os.getpid()}}')\nwhile True: pass"
    )

    def interrupt() -> None:
        until(lambda: len(os.listdir(folder)) == 2, 60)
        pids = [int(name[2:]) for name in os.listdir(folder)]
        for pid in [*(pids if is_of_group else ()), os.getpid()]:
            os.kill(pid, signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    text = raised(shown, KeyboardInterrupt, f"2 --on {backend}", cell)
    watcher.join()
    assert "while True: pass" in text
    assert text.endswith("The ranks and all their names stay.")
    assert shown("", "x") == ["[rank 0] 1", "[rank 1] 2"]
    assert shown("", "idist.all_reduce(1, group=group)") == ["2"]


def test_an_interrupt_before_the_cell_has_begun_is_sent_again(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    came: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if not came:
            came.append(thread)
            raise KeyboardInterrupt

    shown("2 --on gloo", "import time\nx = rank")
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    begin = time.monotonic()
    raised(shown, KeyboardInterrupt, "", "for _ in range(100): time.sleep(0.1)")
    assert time.monotonic() - begin < 6
    assert shown("", "x") == ["[rank 0] 0", "[rank 1] 1"]


def test_a_rank_that_cannot_be_interrupted_is_given_up(shown: Shown) -> None:
    stuck = (
        "import ctypes\n"
        "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "if rank == 1:\n"
        "    lock(mutex), lock(mutex)\n"  # forever, in C, with Python's own lock
    )
    text = raised(shown, CollectiveTimeoutError, "2 --on gloo --timeout 0.5", stuck)
    assert "rank 1 of 2 weren't done after 0.5 s" in text
    assert "line 5, in <module>" in text
    assert "their names are lost" in text
    assert shown("", "idist.all_reduce(1)") == ["2"]


GATE = threading.Event()


def test_a_thread_that_cannot_be_interrupted_is_left_to_itself(shown: Shown) -> None:
    GATE.clear()
    stuck = f"from {__name__} import GATE\nx = rank\nif rank == 1:\n    GATE.wait()"
    try:
        text = raised(shown, CollectiveTimeoutError, "2 --on threads --timeout 0.5", stuck)
        assert shown("", "x, idist.all_reduce(1)") == ["[rank 0] (0, 2)", "[rank 1] (1, 2)"]
    finally:
        GATE.set()
    assert "rank 1 of 2 weren't done" in text
    assert "GATE.wait()" in text
    assert "names stay" in text


def test_a_death_between_cells_is_told(shown: Shown) -> None:
    shown("2 --on gloo", "x = 1\nimport os")
    with pytest.raises(WorkerFailedError, match="rank 0 of 2 ended with exit code 7"):
        shown("", "if rank == 0: os._exit(7)\nidist.barrier()")
    (line,) = shown("--rank 0", "pids = os.getpid() if 'os' in globals() else 'fresh'\npids")
    assert line == "[rank 0] 'fresh'"


def test_sets_of_ranks_stay_beside_each_other(
    shell: Any,
    shown: Shown,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ArgumentError, match="%%ranks 4"):
        shown("", "1")
    monkeypatch.setenv("UNISONO_BACKEND", "threads")  # the default, and named
    shown("2", "first = 1")
    (line,) = shown("1 --on serial", "second = 1")
    assert line.startswith("another set: 1 rank on serial; it stays beside 2 ranks on threads")
    assert shown("2 --on threads", "first") == ["1"]
    capsys.readouterr()
    shell.run_line_magic("ranks", "")
    assert capsys.readouterr().out.splitlines() == [
        "2 ranks on threads: warm, threads of this process; names in all ranks: first",
        "1 rank on serial: warm, threads of this process; names in all ranks: second",
    ]
    shell.run_line_magic("ranks", "stop")
    assert "2 ranks on threads: ended" in capsys.readouterr().out
    wrong = [("x", "invalid int"), ("2 --rank 5", "there are ranks 0 to 1")]
    wrong.append(("2 --rank x", r"argument --rank: 'x' should be ranks, such as 0 or 0,1\. It is "))
    for line, text in wrong:
        with pytest.raises(ArgumentError, match=text):
            shown(line, "1")
    with pytest.raises(ArgumentError, match="%ranks stop"):
        shell.run_line_magic("ranks", "halt")


def test_functions_of_cells_show_their_lines_in_tracebacks(shell: Any) -> None:
    shell.run_cell("def work(local_rank):\n    return 1 / local_rank\n", store_history=True)
    work = shell.user_ns["work"]
    with pytest.raises(WorkerFailedError, match=r"\n    return 1 / local_rank\n"):
        unisono.spawn("gloo", work, nproc_per_node=2)
    with (
        unisono.WorkerPool("gloo", nproc_per_node=2) as pool,
        pytest.raises(WorkerFailedError, match=r"\n    return 1 / local_rank\n"),
    ):
        pool.run(work)


def test_a_class_of_every_kind_can_be_of_a_cell(shell: Any, shown: Shown, tmp_path: Path) -> None:
    text = KINDS.read_text()
    shell.run_cell(text, store_history=True).raise_error()
    names = shell.user_ns
    names["check"](unisono.spawn("gloo", names["work"], (str(tmp_path),), nproc_per_node=2))
    shown("2 --on gloo", f"{text}\ncheck([work(rank, {str(tmp_path)!r})])")
