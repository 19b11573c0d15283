"""The folder that makes the device known to torch in every process that has it in its path."""

from __future__ import annotations

from pathlib import Path

ENTRY = "[torch.backends]\npretend = tests.support.accelerator.device:load\n"


def write_site(folder: Path) -> str:
    """Write what an installed package would be, and give the path to be searched."""
    about = folder / "pretend_accelerator-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pretend-accelerator\nVersion: 1.0\n"
    )
    (about / "entry_points.txt").write_text(ENTRY)
    return str(folder)
