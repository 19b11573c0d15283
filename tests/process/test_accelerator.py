"""The paths of an accelerator, on the one of `tests.support.accelerator`, which is in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerator.site import write_site

LIMIT_S = 150.0
ROOT = Path(__file__).parents[2]
MUTANTS = {
    "a device without an index": "device_id with index",
    "a device that isn't made the current one": "isn't current",
    "the first device for every rank": "Duplicate device",
    "set_device after the first collective": "isn't current",
    "sums on the CPU": "got a tensor of device cpu",
    "gathered rows on the CPU": "got a tensor of device cpu",
    "CPU tensors given to the device's backend": "No backend type associated with device type cpu",
    "subclasses on the sender's device": "index=1",
    "tensors in objects on the CPU": "got a tensor of device cpu",
    "own tensors on the user's default device": "can't be read",
    "numbers and objects over the device": "touches",
    "numbers and objects copied to it": "touches",
}

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="this torch has no devices in Python: it needs 2.9"
)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine on which the device's package is installed."""
    site = write_site(tmp_path_factory.mktemp("site"))
    path = os.pathsep.join((site, str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture(scope="module")
def found(environ: dict[str, str]) -> dict[str, Any]:
    """What a process found that has the device: every part in one, for the imports' sake."""
    return json.loads(_run(environ, "-m", "tests.support.accelerator.program"))  # type: ignore[no-any-return]


def _run(environ: dict[str, str], *args: str) -> str:
    done = subprocess.run(
        (sys.executable, *args), env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_law_holds_for_tensors_of_the_cpu_beside_the_device(found: dict[str, Any]) -> None:
    assert found["beside"] == []


def test_every_law_holds_for_tensors_on_the_device(found: dict[str, Any]) -> None:
    assert found["laws"] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_handling_of_the_device_is_caught(found: dict[str, Any], mutant: str) -> None:
    how = found["mutants"][mutant]
    assert how.startswith("failed") and MUTANTS[mutant] in how


def test_each_rank_has_its_own_device_before_anything_else(found: dict[str, Any]) -> None:
    by_rank, masked, moved, gloo = found["places"]
    first, second = (["pretendccl", f"pretend:{i}", [f"set {i}"]] for i in range(2))
    assert by_rank == [first, second]
    assert masked == [first, first]  # of one visible device each: number 0, whichever that is
    assert moved == [second, first]  # by local rank, which isn't the rank
    assert gloo == [["gloo", "cpu", []]] * 2


def test_values_that_are_not_on_the_device_never_touch_it(found: dict[str, Any]) -> None:
    assert found["values"] == [0, 0]


def test_a_process_that_lists_backends_and_starts_ranks_leaves_the_device_alone(
    found: dict[str, Any],
) -> None:
    assert found["parent initialised the device"] is False


def test_training_is_on_the_device_and_its_file_loads_anywhere(found: dict[str, Any]) -> None:
    ranks, file, again = found["training"]
    for rank in ranks:
        assert rank["wrapper"] == "DistributedDataParallel"
        assert rank["output"] == ["torch.bfloat16", "pretend:0"]
        assert rank["devices"] == rank["gradients"] == ["pretend:0"]
        assert rank["weights"] == [file["weight"], file["bias"]]
    assert again == [[f"pretend:{i}", "cpu", file["weight"]] for i in range(2)]


def test_a_loader_pins_where_the_device_can(found: dict[str, Any]) -> None:
    pinned, *unpinned, cpu = found["loaders"]
    names = ("asked", "pinned", "copied in the background", "batches")
    by_rank = [dict(zip(names, (True, 4, 4, [f"pretend:{i}"] * 4), strict=True)) for i in range(2)]
    assert pinned == by_rank
    nothing = {"asked": False, "pinned": 0, "copied in the background": 0}
    assert unpinned == [[{**nothing, "batches": [f"pretend:{i}"] * 4} for i in range(2)]] * 2
    assert cpu == [{**nothing, "batches": ["cpu"] * 4}] * 2
