"""Each pair of programs of "Coming from" does the same: theirs, and ours on threads and gloo."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.at_a_glance import COLUMNS, check_in_child
from tests.support.coming_from import PAIRS, PYTHON, lines_of, ours, theirs
from tests.support.pages import ROOT, blocks

FOLDER = ROOT / "docs" / "coming-from"
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LIBRARIES = {
    "accelerate": ("accelerate", TORCHRUN),
    "fabric": ("lightning_fabric", PYTHON),
    "ignite": ("ignite", TORCHRUN),
    "mmengine": ("mmengine", TORCHRUN),
    "torch_distributed": ("torch", TORCHRUN),
    "torch_multiprocessing": ("torch", PYTHON),
}
PEERS = {
    **dict.fromkeys(("unisono", "torch.distributed", "torch.multiprocessing"), "torch"),
    **{"ignite": "ignite", "accelerate": "accelerate", "Fabric": "lightning_fabric"},
    **{"mmengine": "mmengine", "mpi4py": "mpi4py"},
}
ELSEWHERE = {"horovod", "mpi4py"}  # tests/real, where these libraries are
HERE = [pair for pair in PAIRS if pair[0] in LIBRARIES]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def lines_of_ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str]]:
    """What our program of a job prints on a backend; run once, however many libraries ask."""

    @functools.cache
    def lines(job: str, backend: str) -> list[str]:
        folder = tmp_path_factory.mktemp(f"{job}_{backend}")
        return lines_of(PYTHON, ours(job, backend, folder), folder)

    return lines


@pytest.mark.parametrize("job", sorted({job for _, job in PAIRS}))
def test_ours_prints_the_same_on_gloo_and_threads(
    job: str, lines_of_ours: Callable[[str, str], list[str]]
) -> None:
    assert lines_of_ours(job, "gloo") == lines_of_ours(job, "threads")


@pytest.mark.parametrize(("library", "job"), HERE, ids=map("-".join, HERE))
def test_theirs_and_ours_print_the_same(
    library: str, job: str, tmp_path: Path, lines_of_ours: Callable[[str, str], list[str]]
) -> None:
    module, launcher = LIBRARIES[library]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} isn't installed")
    expected = lines_of(launcher, theirs(library, job), tmp_path)
    for backend in ("gloo", "threads"):
        assert lines_of_ours(job, backend) == expected, backend


def test_every_program_is_on_its_page() -> None:
    assert {library for library, _ in PAIRS} == {*LIBRARIES, *ELSEWHERE}
    for library in {library for library, _ in PAIRS}:
        page = FOLDER / f"{library.replace('_', '-')}.md"
        files = {block.mark("file") for block in blocks(page)} - {None}
        jobs = [job for name, job in PAIRS if name == library]
        programs = "docs/coming-from/programs"
        wanted = {f"{programs}/{where}/{job}.py" for job in jobs for where in (library, "ours")}
        assert files == wanted  # word for word: test_pages


@pytest.mark.parametrize("column", PEERS)
def test_every_call_at_a_glance_can_be_made(column: str) -> None:
    if importlib.util.find_spec(PEERS[column]) is None:
        pytest.skip(f"{PEERS[column]} isn't installed")
    check_in_child(column)


def test_every_column_at_a_glance_is_checked() -> None:
    assert {*PEERS, "Horovod"} == {*COLUMNS}  # Horovod's: tests/real/test_horovod.py
