"""The source of unisono as syntax trees, and the rooms that docs/architecture.md draws."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

import unisono

__all__ = (
    "FUNCTIONS",
    "PAGE",
    "Function",
    "Source",
    "constants",
    "drawing",
    "every",
    "functions",
    "imported",
    "named_in_strings",
    "ours",
    "public_names",
    "room_of",
    "sources",
)

FOLDER = Path(unisono.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MODULE = re.compile(r"unisono((?:\.\w+)+)(?::\w*)?")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    name: str  # dotted, without "unisono."; "__init__" for the facade
    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The package that it is in, dotted; empty for what lies in unisono itself."""
        is_package = self.path.name == "__init__.py" and self.name != "__init__"
        return self.name if is_package else self.name.rpartition(".")[0]

    def __str__(self) -> str:
        return self.name


@functools.cache
def sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        parts = list(path.relative_to(FOLDER).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found.append(Source(".".join(parts), path, ast.parse(path.read_text())))
    return tuple(found)


def every(source: Source) -> object:
    return pytest.param(source, id=source.name)


@functools.cache
def drawing() -> dict[str, int]:
    """Read the picture: the floor of every room, dotted; the ground is 0."""
    _, _, rest = PAGE.read_text().partition("```drawing\n")
    lines = rest.partition("\n```")[0].splitlines()
    floors = {}
    for height, line in enumerate(reversed(lines)):
        rooms, _, _ = line.partition("   ")  # three spaces: what follows is a remark
        for room in rooms.split():
            assert room not in floors, f"{PAGE.name} draws {room} twice"
            floors[room.replace("/", ".")] = height
    return floors


def room_of(module: str) -> tuple[str, int]:
    """Give the room that a module is in, and its floor."""
    floors, parts = drawing(), module.split(".")
    for length in range(len(parts), 0, -1):
        name, family = ".".join(parts[:length]), ".".join([*parts[: length - 1], "*"])
        if name in floors:
            return name, floors[name]
        if length > 1 and family in floors:
            return name, floors[family]
    pytest.fail(f"unisono/{module} is in no room: draw one in docs/{PAGE.name}")


def for_type_checkers(tree: ast.Module) -> set[int]:
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imported(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """List dotted names that are imported anywhere in a file but for type checkers alone."""
    skipped = for_type_checkers(source.tree)
    for node in ast.walk(source.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def constants(source: Source) -> Iterator[tuple[int, str]]:
    """List the strings of a file with their lines, docstrings aside."""
    docstrings = {
        id(node.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(source.tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield node.lineno, text


def named_in_strings(source: Source) -> Iterator[tuple[int, str]]:
    """List our modules that strings of a file name, ``unisono.x.y`` or ``unisono.x.y:z``."""
    names = {each.name for each in sources() if each.path.name != "__init__.py"}
    for line, text in constants(source):
        match = MODULE.fullmatch(text)
        if match and match[1][1:] in names - {source.name}:
            yield line, match[1][1:]


def ours(dotted: str) -> str | None:
    """Give the module of unisono that a dotted name is or is in, None if it is somebody else's."""
    root, _, rest = dotted.partition(".")
    if root != "unisono":
        return None
    names = {source.name for source in sources()}
    while rest and rest not in names:
        rest = rest.rpartition(".")[0]
    return rest or "__init__"


def public_names(source: Source) -> tuple[str, ...] | None:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.Tuple), f"{source}: __all__ isn't a tuple"
            names = tuple(ast.literal_eval(element) for element in node.value.elts)
            assert len(set(names)) == len(names), f"{source}: __all__ names something twice"
            return names
    return None


def functions(source: Source) -> Iterator[Function]:
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS):
            yield node
