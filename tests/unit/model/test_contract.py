"""The waist is narrow: few members, each of them documented, each collective called."""

from __future__ import annotations

import ast
from pathlib import Path

import unisono
from unisono.model import contract, launching, training

ROOT = Path(unisono.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-model.md"
MOST_MEMBERS = 30
LIFE = {"initialize", "finalize"}  # the context's own, which `context` and `lifecycle` call


def members(path: str, name: str) -> dict[str, str]:
    """Give the public members of a class as its file declares them, with their docstrings."""
    tree = ast.parse(Path(path).read_text())
    [body] = [
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    docstrings: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            docstrings[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            docstrings[node.target.id] = ""
    return {name: text for name, text in docstrings.items() if not name.startswith("_")}


CONTRACT = members(contract.__file__, "ComputationModel")


def called_on_models() -> set[str]:
    """List the methods that the facade's collectives call on a model, or on a plane like one."""
    called = set()
    for path in (*(ROOT / "collectives").glob("*.py"), ROOT / "context.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if owner == "plane" or owner.startswith("plane_for(") or owner.endswith(".model"):
                    called.add(node.func.attr)
    return called


def test_the_contract_has_few_members_and_a_model_inherits_nothing_else() -> None:
    assert len(CONTRACT) <= MOST_MEMBERS, f"{len(CONTRACT)} members: {sorted(CONTRACT)}"
    public = {name for name in dir(contract.ComputationModel) if not name.startswith("_")}
    assert public <= set(CONTRACT)


def test_every_collective_of_the_contract_is_called_by_the_facade() -> None:
    collectives = {name for name, text in CONTRACT.items() if "Collective" in text} - LIFE
    assert len(collectives) > 5
    uncalled = collectives - called_on_models()
    assert not uncalled, f"nobody calls {sorted(uncalled)}: they are no part of the contract"


def test_every_member_is_on_the_page_for_authors() -> None:
    page = PAGE.read_text()
    hooks = members(training.__file__, "TrainingHooks") | members(launching.__file__, "LaunchHooks")
    missing = [name for name in CONTRACT | hooks if f"`{name}" not in page]
    assert not missing, f"docs/how-to/write-a-model.md doesn't name {missing}"
