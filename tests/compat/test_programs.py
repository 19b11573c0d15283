"""Whole programs of the peers' shapes, of which only the import is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import PYTHON, TORCHRUN, run_programs

FOLDER = Path(__file__).parent / "programs"
IMPORTS = {
    "import ignite.distributed as idist": "import unisono.compat.ignite as idist",
    "import mmengine.dist as dist": "import unisono.compat.mmengine as dist",
}
UNISONO = (*PYTHON, "-m", "unisono", "run", "--nproc-per-node=2")
ALONE = {"cifar10": "1 32 (1, 1, 0) True", "distributed_training": "1 3 2 True"}
ON_TWO = {"cifar10": "2 32 (1, 2, 0) True", "distributed_training": "2 6 2.0 True"}
LAUNCHED = {"cifar10": ["--backend=gloo"], "distributed_training": ["--launcher=pytorch"]}


@pytest.mark.parametrize(
    ("launcher", "options", "wanted"),
    [
        pytest.param(PYTHON, {name: [] for name in ALONE}, ALONE, id="alone"),
        pytest.param(
            PYTHON, {"cifar10": ["--backend=gloo", "--nproc_per_node=2"]}, ON_TWO, id="that spawn"
        ),
        pytest.param(TORCHRUN, LAUNCHED, ON_TWO, id="under torchrun"),
        pytest.param(UNISONO, LAUNCHED, ON_TWO, id="under run"),
    ],
)
def test_programs_run_with_only_their_import_replaced(
    launcher: tuple[str, ...], options: dict[str, list[str]], wanted: dict[str, str], tmp_path: Path
) -> None:
    programs = {}
    for name, words in options.items():
        text = (FOLDER / f"{name}.py").read_text()
        for theirs, ours in IMPORTS.items():
            text = text.replace(theirs, ours)
        program = tmp_path / f"{name}.py"
        program.write_text(text)
        programs[name] = [str(program), *words]
    printed = run_programs(launcher, programs, tmp_path)
    for name in options:
        assert f"RESULT {wanted[name]}\n" in printed[name]
