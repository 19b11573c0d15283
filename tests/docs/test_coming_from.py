"""Each pair of programs of "Coming from" does the same: theirs, and ours on threads and gloo."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.at_a_glance import COLUMNS, check_in_child
from tests.support.coming_from import PAIRS, lines_in, ours, theirs
from tests.support.pages import ROOT, blocks
from tests.support.programs import PYTHON, TORCHRUN, Printed, run_programs

FOLDER = ROOT / "docs" / "coming-from"
LIBRARIES = {
    "accelerate": "accelerate",
    "ignite": "ignite",
    "mmengine": "mmengine",
    "torch_distributed": "torch",
}
"""The module by the name of the folder."""
PEERS = {
    **dict.fromkeys(("unisono", "torch.distributed", "torch.multiprocessing"), "torch"),
    **{"ignite": "ignite", "accelerate": "accelerate", "Fabric": "lightning_fabric"},
    **{"mmengine": "mmengine", "mpi4py": "mpi4py"},
}
BACKENDS = ("gloo", "threads")
pytestmark = pytest.mark.timeout(400)


def page_of(library: str) -> Path:
    return FOLDER / f"{library.replace('_', '-')}.md"


def is_here(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


@pytest.fixture(scope="module")
def by_us(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """The output of our programs, all in one interpreter."""
    folder = tmp_path_factory.mktemp("ours")
    jobs = sorted({job for _, job in PAIRS})
    programs = {f"{job}-{on}": [str(ours(job, on, folder))] for job in jobs for on in BACKENDS}
    return run_programs(PYTHON, programs, folder)


@pytest.fixture(scope="module")
def by_them(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """The output of the other libraries' programs, all in one launch of torchrun."""
    programs = {
        f"{library}-{job}": [str(theirs(library, job))]
        for library, job in PAIRS
        if is_here(LIBRARIES[library])
    }
    return run_programs(TORCHRUN, programs, tmp_path_factory.mktemp("theirs"))


@pytest.mark.parametrize("job", sorted({job for _, job in PAIRS}))
def test_ours_prints_the_same_on_gloo_and_threads(job: str, by_us: Printed) -> None:
    assert lines_in(by_us, f"{job}-gloo") == lines_in(by_us, f"{job}-threads")


@pytest.mark.parametrize(("library", "job"), PAIRS, ids=map("-".join, PAIRS))
def test_theirs_and_ours_print_the_same(
    library: str, job: str, by_us: Printed, by_them: Printed
) -> None:
    if not is_here(LIBRARIES[library]):
        pytest.skip(f"{LIBRARIES[library]} isn't installed")
    lines = lines_in(by_us, f"{job}-gloo")
    assert lines == lines_in(by_them, f"{library}-{job}")
    shown = [block.text for block in blocks(page_of(library)) if block.language == "text"]
    assert "".join(f"{line}\n" for line in lines) in shown


def test_every_program_is_on_its_page() -> None:
    assert {library for library, _ in PAIRS} == {*LIBRARIES}
    for library in LIBRARIES:
        files = {block.mark("file") for block in blocks(page_of(library))} - {None}
        jobs = [job for name, job in PAIRS if name == library]
        programs = "docs/coming-from/programs"
        wanted = {f"{programs}/{where}/{job}.py" for job in jobs for where in (library, "ours")}
        assert files == wanted  # word for word: test_pages


def test_every_call_at_a_glance_can_be_made() -> None:
    assert {*PEERS, "Horovod"} == {*COLUMNS}  # Horovod's: tests/real/test_horovod.py
    check_in_child(*(column for column, module in PEERS.items() if is_here(module)))
