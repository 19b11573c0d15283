"""The house stands as drawn: imports go down, heavy libraries have one door, facts are documented.

Read from the syntax trees, so that what nobody runs here is held to it too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import unisono

ROOT = Path(unisono.__file__).parent
# From the ground up. What stands on one floor doesn't import its neighbours.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"tracebacks"}),
    frozenset({"errors", "topology", "at_exit"}),
    frozenset({"arguments", "options", "plugins", "host"}),
    frozenset({"deadlines", "payload"}),
    frozenset({"model"}),
    frozenset({"control"}),
    frozenset({"models", "environments", "launchers"}),
    frozenset({"registry", "rendezvous"}),
    frozenset({"context", "diagnosis", "launching"}),
    frozenset({"facts", "collectives"}),
    frozenset({"sections", "lifecycle"}),
    frozenset({"parallel", "pool", "training"}),
    frozenset({"compat"}),
    frozenset({"__init__"}),
    frozenset({"testing"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
HEAVY = ("horovod", "torch_xla", "mpi4py", "ray", "typer", "rich")
# What must not be loaded by a bare import; numpy only where torch loads it itself.
NOT_LOADED = (*HEAVY, "cloudpickle", "psutil", "sklearn", "numpy")
SPEAKS = re.compile(r"(^|\n\n|\. )(Local|Collective (over|at creation))\b")


@dataclass(frozen=True)
class Source:
    name: str  # dotted, without "unisono."; "__init__" for the facade
    path: Path
    tree: ast.Module

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return self.name


@functools.cache
def sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        text = path.read_text()
        found.append(Source(".".join(parts), path, ast.parse(text)))
    return tuple(found)


def every(source: Source) -> object:
    return pytest.param(source, id=source.name)


@functools.cache
def floor_of(top: str) -> int:
    for height, floor in enumerate(FLOORS):
        if top in floor:
            return height
    pytest.fail(f"unisono/{top} stands on no floor: give it one in FLOORS, in this file")


def imported(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """List dotted names that are imported anywhere in a file but for type checkers alone."""
    skipped = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
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


def ours(dotted: str) -> str | None:
    """Give the module of unisono that a dotted name is or is in, None if it is somebody else's."""
    root, _, rest = dotted.partition(".")
    if root != "unisono":
        return None
    names = {source.name for source in sources()}
    while rest and rest not in names:
        rest = rest.rpartition(".")[0]
    return rest or "__init__"


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_imports_only_go_down(source: Source) -> None:
    height = floor_of(source.top)
    for node, dotted in imported(source):
        module = ours(dotted)
        if module is None or module.partition(".")[0] == source.top:
            continue
        below = floor_of(module.partition(".")[0])
        assert below < height, f"{source} (line {node.lineno}) imports {dotted}"


SIBLINGS = [source for source in sources() if source.top in ("models", "environments", "launchers")]
# What all launchers stand on, or all environments, or several models: nobody's sibling.
SHARED = (
    "models.thread_exchange",
    *("launchers.job", "launchers.script", "launchers.availability"),
    *("environments.reader", "environments.hostlist"),
)


def sibling_of(module: str) -> str:
    """Give the model, environment or launcher that a module is part of: a file or a folder."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("source", [every(source) for source in SIBLINGS if "." in source.name])
def test_siblings_do_not_import_each_other(source: Source) -> None:
    own = sibling_of(source.name)
    if own == "environments.detection":
        return
    for node, dotted in imported(source):
        module = ours(dotted)
        if module is None or module.partition(".")[0] != source.top:
            continue
        assert module == source.top or sibling_of(module) in {own, *SHARED}, (
            f"{source} (line {node.lineno}) imports its sibling {module}"
        )


@pytest.mark.parametrize("library", ["horovod", "torch_xla", "mpi4py", "ray"])
def test_a_heavy_library_has_one_door(library: str) -> None:
    doors = {
        source.name
        for source in sources()
        for node, dotted in imported(source)
        if dotted.partition(".")[0] == library and node in source.tree.body
    }
    assert len(doors) <= 1, doors
    for source in sources():
        for _, dotted in imported(source):
            module = ours(dotted)
            if module in doors:
                assert source.name.startswith(module.partition(".")[0]), (
                    f"{source} imports {module}, which is reached by string only"
                )


# Processes of their own that run before or beside the rest of unisono, and the command line.
MAY_IMPORT_LATE = ("cli.", "launchers.")


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_imports_stand_at_the_top(source: Source) -> None:
    if source.name.startswith(MAY_IMPORT_LATE):
        return
    for function in ast.walk(source.tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    pytest.fail(f"{source}: an import in {function.name}, line {node.lineno}")


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_nothing_is_imported_on_trial(source: Source) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Try):
            names = {ast.unparse(h.type) for h in node.handlers if h.type is not None}
            if names & {"ImportError", "ModuleNotFoundError"}:
                late = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert not late, f"{source}: an import on trial in line {node.lineno}"


# What the facade's ``__getattr__`` answers.
ANSWERED_WHEN_ASKED = frozenset(
    {
        *("has_hvd_support", "has_mpi_support", "has_native_dist_support", "has_xla_support"),
        "registered_computation_models",
    }
)


def public_names(source: Source) -> tuple[str, ...] | None:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.Tuple), f"{source}: __all__ isn't a tuple"
            names = tuple(ast.literal_eval(element) for element in node.value.elts)
            assert len(set(names)) == len(names), f"{source}: __all__ names something twice"
            return names
    return None


LAWS = ("testing.cases.", "testing.environments", "testing.launchers")


def defined(source: Source) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_all_is_a_tuple_that_matches(source: Source) -> None:
    public = public_names(source)
    here = {
        node.name
        for node in source.tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
    }
    is_law = source.name.startswith(LAWS)  # they register themselves
    if public is None:
        is_private = any(part.startswith("_") for part in source.name.split("."))
        is_program = source.name == "__main__" or source.name.endswith(".__main__")
        assert is_private or is_law or is_program or not here, f"{source} has no __all__"
        return
    missing = set(public) - defined(source) - ANSWERED_WHEN_ASKED
    assert not missing, f"{source}: __all__ names {missing}, which isn't there"
    assert is_law or here <= set(public), f"{source}: __all__ lacks {here - set(public)}"


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def documented(source: Source) -> Iterator[tuple[str, ast.FunctionDef]]:
    """List the public functions of a file and the public methods of its public classes."""
    public = public_names(source) or ()
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in public:
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and node.name in public and not is_protocol(node):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


# What a model overrides has its docstring in the contract; a law's says what holds.
OVERRIDES = ("models.", "testing.cases")


@pytest.mark.parametrize(
    "source", [every(source) for source in sources() if not source.name.startswith(OVERRIDES)]
)
def test_every_public_function_says_whether_it_communicates(source: Source) -> None:
    silent = []
    for name, function in documented(source):
        decorators = {ast.unparse(node) for node in function.decorator_list}
        if decorators & {"property", "overload"} or any(".setter" in d for d in decorators):
            continue
        if not SPEAKS.search(ast.get_docstring(function) or ""):
            silent.append(name)
    assert not silent, f"{source}: neither Local nor Collective: {silent}"


@pytest.mark.parametrize("name", unisono.__all__)
def test_every_function_and_class_with_a_life_of_the_facade_has_an_example(name: str) -> None:
    item = getattr(unisono, name)
    if inspect.isfunction(item) or item is unisono.Parallel:
        assert "Example:" in (inspect.getdoc(item) or "")


def test_a_bare_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import unisono; unisono._preload(); "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "unisono" in loaded
    assert not loaded & set(NOT_LOADED), loaded


def test_every_floor_is_built() -> None:
    tops = {source.top for source in sources()}
    planned = {"pool", "compat"}  # of issues that are not closed
    assert {top for floor in FLOORS for top in floor} - tops <= planned


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("models.mine", "from unisono.collectives.gathers import all_gather"),
        ("models.mine", "def late():\n    import unisono.registry"),
        ("errors", "from unisono import topology"),
        ("payload", "import unisono"),
        ("launchers.mine", "from unisono.models import native"),
    ],
)
def test_an_import_that_goes_up_or_aside_is_seen(name: str, code: str) -> None:
    source = Source(name, Path("mine.py"), ast.parse(code))
    with pytest.raises(AssertionError, match="imports unisono"):
        test_imports_only_go_down(source)


def test_a_sibling_that_is_imported_is_seen() -> None:
    code = "from unisono.models.threads import ThreadsModel"
    source = Source("models.mine", Path("mine.py"), ast.parse(code))
    with pytest.raises(AssertionError, match="imports its sibling models.threads"):
        test_siblings_do_not_import_each_other(source)
