"""Whole programs of the peers' shapes, of which only the import is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "programs"
IMPORTS = {
    "import ignite.distributed as idist": "import unisono.compat.ignite as idist",
    "import mmengine.dist as dist": "import unisono.compat.mmengine as dist",
}
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
UNISONO = [sys.executable, "-m", "unisono", "run", "--nproc-per-node=2"]
LAUNCHED = ["--launcher=pytorch"]
WANTED = {
    ("cifar10", 1): "1 32 (1, 1, 0) True",
    ("cifar10", 2): "2 32 (1, 2, 0) True",
    ("distributed_training", 1): "1 3 2 True",
    ("distributed_training", 2): "2 6 2.0 True",
    ("hooks", 1): "1 4 True",
    ("hooks", 2): "2 4.0 True",
    ("ddp", 1): "1 1.0 True (1, 1, 0)",
    ("ddp", 2): "2 2.0 True (1, 2, 0)",
}
WAYS = {
    "cifar10 alone": ("cifar10", 1, PYTHON, []),
    "cifar10 spawns": ("cifar10", 2, PYTHON, ["--backend=gloo", "--nproc_per_node=2"]),
    "cifar10 under torchrun": ("cifar10", 2, TORCHRUN, ["--backend=gloo"]),
    "cifar10 under run": ("cifar10", 2, UNISONO, ["--backend=gloo"]),
    "distributed_training alone": ("distributed_training", 1, PYTHON, []),
    "distributed_training under torchrun": ("distributed_training", 2, TORCHRUN, LAUNCHED),
    "distributed_training under run": ("distributed_training", 2, UNISONO, LAUNCHED),
    "hooks alone": ("hooks", 1, PYTHON, []),
    "hooks under torchrun": ("hooks", 2, TORCHRUN, LAUNCHED),
    "hooks under run": ("hooks", 2, UNISONO, LAUNCHED),
    "ddp alone": ("ddp", 1, PYTHON, []),
    "ddp under torchrun": ("ddp", 2, TORCHRUN, []),
    "ddp under run": ("ddp", 2, UNISONO, []),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_runs_with_only_its_import_replaced(way: str, tmp_path: Path) -> None:
    name, size, launcher, options = WAYS[way]
    text = (FOLDER / f"{name}.py").read_text()
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    program = tmp_path / f"{name}.py"
    program.write_text(text)
    command = [*launcher, str(program), *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"RESULT {WANTED[name, size]}" in done.stdout, done.stdout + done.stderr
