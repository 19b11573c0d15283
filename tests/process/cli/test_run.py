"""``unisono run`` and its variables."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import UNISONO, run

INNER = """
import os, subprocess, sys
print(sorted(name for name in os.environ if name.startswith("UNISONO_RUN_")))
words = ("run", "--launcher", "torchrun", "--print", __file__)
print(subprocess.run([sys.executable, "-m", "unisono", *words], stdout=-1, text=True).stdout)
"""


def test_a_run_within_a_rank_is_not_told_by_the_variables_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INNER)
    done = run([*UNISONO, "run", "-n", "1", str(script)], UNISONO_RUN_MAX_RESTARTS="7")
    assert done.code == 0, done.err
    first, second, *_ = done.out.splitlines()
    assert first == "[0] []"
    assert "torch.distributed.run" in second
    assert "7" not in second.split()
