"""Run the notebooks of the site while it is built, each in a fresh kernel and an empty folder.

One of them shows an interrupt: the kernel gets SIGINT once each rank has made a file ``busy-RANK``
there, as if a reader pressed the button. A cell that may fail is tagged ``raises-exception``; any
other error fails the build.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import nbclient
import nbformat
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from traitlets.config import Config

_RANKS = 2
_LIMIT_S = 240


def execute(path: Path) -> str:
    """Run a notebook and give it with what its cells show, as JSON."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="unisono-notebook-") as name:
        folder = Path(name)
        client = nbclient.NotebookClient(
            notebook,
            timeout=_LIMIT_S,
            kernel_name="python3",
            resources={"metadata": {"path": name}},
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{name}/kernel"}}),
        )
        is_over = threading.Event()
        watcher = threading.Thread(target=_interrupt, args=(client, folder, is_over))
        watcher.start()
        try:
            client.execute(env={**os.environ, "IPYTHONDIR": name})
        except nbclient.exceptions.CellExecutionError as error:
            raise ExtensionError(f"{path}: a cell failed: {error}") from error
        finally:
            is_over.set()
            watcher.join()
    return nbformat.writes(notebook)


def _interrupt(client: nbclient.NotebookClient, folder: Path, is_over: threading.Event) -> None:
    while not is_over.wait(0.05):
        if all((folder / f"busy-{rank}").exists() for rank in range(_RANKS)):
            client.km.provisioner.process.send_signal(signal.SIGINT)
            return


def _on_source(app: Sphinx, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        source[0] = execute(path)


def setup(app: Sphinx) -> dict[str, bool]:
    """Run notebooks when their sources are read."""
    app.connect("source-read", _on_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
