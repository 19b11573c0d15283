"""The notebook of the examples, executed in a kernel of its own."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT

NOTEBOOK = ROOT / "examples" / "testing" / "notebook.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries


def interrupt_when_busy(client: Any, folder: Path, is_over: threading.Event) -> None:
    """Interrupt the kernel as its button does, once both ranks are within the cell."""
    while not is_over.wait(0.05):
        if all((folder / f"busy-{rank}").exists() for rank in (0, 1)):
            client.km.provisioner.process.send_signal(signal.SIGINT)
            return


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each cell shows, by its name."""
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} isn't installed")
    yield execute(tmp_path_factory.mktemp("notebook"))


def execute(folder: Path) -> dict[str, str]:
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    is_over = threading.Event()
    watcher = threading.Thread(target=interrupt_when_busy, args=(client, folder, is_over))
    watcher.start()
    try:
        client.execute(env={**os.environ, "IPYTHONDIR": str(folder)})
    finally:
        is_over.set()
        watcher.join()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 12
    return {cell.id: "".join(map(text_of, cell.outputs)) for cell in code}


def text_of(output: Any) -> str:
    if output.output_type == "error":
        return "\n".join([f"{output.ename}: {output.evalue}", *output.traceback])
    return str(output.get("text", ""))


def test_ranks_keep_their_names_from_cell_to_cell(cells: dict[str, str]) -> None:
    assert cells["start"].splitlines() == ["all ranks say this", "1"]
    assert cells["state"].splitlines() == ["[rank 0] rank 0 has [0]", "[rank 1] rank 1 has [10]"]
    assert cells["gather"].splitlines() == ["[0, 10]"]
    assert cells["one-rank"].splitlines() == ["[rank 0] [0, 1]"]


def test_an_error_is_the_rank_s_own_and_all_names_stay(cells: dict[str, str]) -> None:
    assert cells["error"].startswith("ZeroDivisionError: division by zero\n")
    assert "rank 0 of 2 raised ZeroDivisionError" in cells["error"]
    assert re.search(r'File "In\[\d+\]", line 3, in share\n    return 12 / parts\n', cells["error"])
    assert cells["still"].splitlines() == ["[rank 0] [0, 1]", "[rank 1] [10]"]


def test_an_interrupt_says_where_each_rank_was_and_ends_none(cells: dict[str, str]) -> None:
    shown = cells["interrupt"]
    assert shown.startswith("KeyboardInterrupt")
    assert "rank 0 of 2:" in shown
    assert "    idist.all_reduce(1)\n" in shown
    assert "The ranks and all their names stay" in shown
    assert "their context was made again" in shown


def test_a_hang_ends_at_its_limit_with_the_stack_of_every_rank(cells: dict[str, str]) -> None:
    shown = cells["hang"]
    assert "CollectiveTimeoutError: ranks 0 and 1 of 2 weren't done after 1 s" in shown
    assert "    idist.barrier()\n" in shown
    assert re.search(r'rank 1 of 2:\n.*\n  File "In\[\d+\]", line [56], in <module>', shown)
    assert cells["after"].splitlines() == ["[rank 0] ([0, 1], 2)", "[rank 1] ([10], 2)"]


def test_a_rank_that_dies_is_named_and_the_next_cell_has_fresh_ones(cells: dict[str, str]) -> None:
    assert "rank 1 of 2 was ended by SIGKILL" in cells["death"]
    assert "their names are lost" in cells["death"]
    assert cells["fresh"].splitlines() == ["(2, False)"]
