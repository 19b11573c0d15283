"""The programs of examples/, to be run or called."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def load(name: str) -> Any:
    """Import an example under a name that no worker could import, as if it were `__main__`."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module


def commands() -> list[str]:
    """Give the commands of the README, in order."""
    text = (EXAMPLES / "README.md").read_text()
    return re.findall(r"\| `([^`]+)` \|$", text, re.MULTILINE)


def numbers(text: str, name: str) -> list[float]:
    """Give the numbers that an example printed after a name."""
    return [float(found) for found in re.findall(rf"{name}:? ([\d.]+)", text)]
