"""A program that asks for a backend whose library is broken, in a fork for each way to be so."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import unisono as idist
from tests.support.pages import ROOT
from tests.support.processes import in_fork, run_python
from unisono import registry
from unisono.errors import BackendUnavailableError, WorkerFailedError

LIBRARIES = {"horovod": "horovod", "xla-cpu": "torch_xla"}


def refusals(backend: str, folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """Ask where a folder comes before the library; by way what is known, and two refusals."""
    words = [f"{name}={folder}" for name, folder in folders.items()]
    found = defaultdict(list)
    for line in run_python("-m", "tests.real.refusals", backend, *words, cwd=ROOT).splitlines():
        name, _, said = line.partition(": ")
        found[name].append(said)
    return found


def refusal(call: Callable[[str], object], backend: str) -> str:
    try:
        call(backend)
    except (BackendUnavailableError, WorkerFailedError) as error:
        return f"{type(error.__cause__).__name__} {error}"
    return "it wasn't refused"


def ask(backend: str, name: str, folder: str) -> None:
    """Print what is known without an import, and why the backend is refused; go on with gloo."""
    sys.path.insert(0, folder)
    reason = registry.availability()[backend]
    assert (backend in idist.available_backends()) == (reason is None)
    assert "gloo" in idist.available_backends()
    assert not any(loaded.partition(".")[0] == LIBRARIES[backend] for loaded in sys.modules)
    calls = (idist.initialize, partial(idist.spawn, fn=print))
    lines = [str(reason), *(refusal(call, backend) for call in calls)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idist.initialize("gloo")
        assert (idist.all_reduce(2), idist.backend()) == (2, "gloo")
        idist.finalize()
        assert (idist.get_rank(), idist.model_name()) == (0, "serial")
    for line in lines:
        sys.stdout.write(f"{name}: {' '.join(line.split())}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for word in sys.argv[2:]:
        assert in_fork(partial(ask, sys.argv[1], *word.split("="))) == 0, word
