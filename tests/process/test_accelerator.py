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

LIMIT_S = 150.0
ROOT = Path(__file__).parents[2]
# What makes the device known to torch in every process that has the folder in its path.
ABOUT = {
    "METADATA": "Metadata-Version: 2.1\nName: pretend-accelerator\nVersion: 1.0\n",
    "entry_points.txt": "[torch.backends]\npretend = tests.support.accelerator.device:load\n",
}

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="this torch has no devices in Python: it needs 2.9"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process found that has the device: every part in one, for the imports' sake."""
    site = tmp_path_factory.mktemp("site")
    (site / "pretend_accelerator-1.0.dist-info").mkdir()
    for name, text in ABOUT.items():
        (site / "pretend_accelerator-1.0.dist-info" / name).write_text(text)
    path = (str(site), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        (sys.executable, "-c", "from tests.support.accelerator import program; program.main()"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("part", "right"),
    [
        pytest.param("beside", [], id="every law holds for tensors of the cpu beside the device"),
        pytest.param("laws", [], id="every law holds for tensors on the device"),
        pytest.param("mutants", {}, id="a wrong handling of the device is caught"),
        pytest.param("values", [0, 0], id="values that aren't on the device never touch it"),
        pytest.param(
            "parent initialised the device",
            False,
            id="a process that lists backends and starts ranks leaves the device alone",
        ),
    ],
)
def test_nothing_is_wrong(found: dict[str, Any], part: str, right: Any) -> None:
    assert found[part] == right


def test_each_rank_has_its_own_device_before_anything_else(found: dict[str, Any]) -> None:
    by_rank, masked, gloo = found["places"]
    first, second = (["pretendccl", f"pretend:{i}", [f"set {i}"]] for i in range(2))
    assert by_rank == [first, second]
    assert masked == [first, first]  # of one visible device each: number 0, whichever that is
    assert gloo == [["gloo", "cpu", []]] * 2


def test_training_is_on_the_device_and_its_file_loads_anywhere(found: dict[str, Any]) -> None:
    ranks, file, again = found["training"]
    for rank in ranks:
        assert rank["wrapper"] == "DistributedDataParallel"
        assert rank["output"] == "pretend:0"
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
