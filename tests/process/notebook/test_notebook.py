"""The notebook of the examples, executed in a kernel of its own."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT
from tests.support.processes import until

NOTEBOOK = ROOT / "examples" / "testing" / "notebook.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries


def interrupt_when_busy(client: Any, folder: Path) -> None:
    """Interrupt the kernel as its button does, once both ranks are within the cell."""
    until(lambda: all((folder / f"busy-{rank}").exists() for rank in (0, 1)), 120)
    client.km.provisioner.process.send_signal(signal.SIGINT)


def execute(folder: Path) -> dict[str, str]:
    """Execute the notebook; give by name what each cell shows."""
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    threading.Thread(target=interrupt_when_busy, args=(client, folder), daemon=True).start()
    client.execute(env={**os.environ, "IPYTHONDIR": str(folder)})
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 12
    return {cell.id: "".join(map(text_of, cell.outputs)) for cell in code}


def text_of(output: Any) -> str:
    if output.output_type == "error":
        return "\n".join([f"{output.ename}: {output.evalue}", *output.traceback])
    return str(output.get("text", ""))


def test_each_cell_of_the_notebook_shows_what_it_should(tmp_path: Path) -> None:
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} isn't installed")
    cells = execute(tmp_path)
    lines = {
        "start": ["all ranks say this", "1"],
        "state": ["[rank 0] rank 0 has [0]", "[rank 1] rank 1 has [10]"],
        "gather": ["[0, 10]"],
        "one-rank": ["[rank 0] [0, 1]"],
        "still": ["[rank 0] [0, 1]", "[rank 1] [10]"],
        "after": ["[rank 0] ([0, 1], 2)", "[rank 1] ([10], 2)"],
        "fresh": ["(2, False)"],
    }
    assert {name: cells[name].splitlines() for name in lines} == lines
    assert cells["error"].startswith("ZeroDivisionError: division by zero\n")
    assert cells["interrupt"].startswith("KeyboardInterrupt")
    parts = {
        "error": [
            "rank 0 of 2 raised ZeroDivisionError",
            r'File "In\[\d+\]", line 3, in share\n    return 12 / parts\n',
        ],
        "interrupt": [
            "rank 0 of 2:",
            r"    idist\.all_reduce\(1\)\n",
            "The ranks and all their names stay",
            "their context was made again",
        ],
        "hang": [
            "CollectiveTimeoutError: ranks 0, 1 of 2 weren't done after 1 s",
            r"    idist\.barrier\(\)\n",
            r'rank 1 of 2:\n.*\n  File "In\[\d+\]", line [56], in <module>',
        ],
        "death": ["rank 1 of 2 was ended by SIGKILL", "their names are lost"],
    }
    for name, patterns in parts.items():
        for pattern in patterns:
            assert re.search(pattern, cells[name]), (name, pattern, cells[name])
