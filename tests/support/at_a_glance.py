"""A check of the tables of other libraries' calls: each call must exist with these arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from tests.support.pages import ROOT
from tests.support.processes import run_python

PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
# By column: the module, or the object in a module, for each name with which its calls begin.
COLUMNS = {
    "unisono": {"idist": "unisono", "loader": "unisono.training.loader:ReplicaLoader"},
    "ignite": {"idist": "ignite.distributed"},
    "accelerate": {
        "accelerator": "accelerate:Accelerator",
        "Accelerator": "accelerate:Accelerator",
        "notebook_launcher": "accelerate:notebook_launcher",
        "ProjectConfiguration": "accelerate.utils:ProjectConfiguration",
        "get_logger": "accelerate.logging:get_logger",
        **{
            name: f"accelerate.utils:{name}"
            for name in ("broadcast", "broadcast_object_list", "gather_object", "set_seed")
        },
    },
    "Fabric": {
        "fabric": "lightning_fabric:Fabric",
        "Fabric": "lightning_fabric:Fabric",
        "rank_zero_only": "lightning_fabric.utilities:rank_zero_only",
    },
    "torch.distributed": {
        "dist": "torch.distributed",
        "ddp": "torch.nn.parallel:DistributedDataParallel",
        "DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel",
        "DataLoader": "torch.utils.data:DataLoader",
        "DistributedSampler": "torch.utils.data:DistributedSampler",
        "sampler": "torch.utils.data:DistributedSampler",
        "SyncBatchNorm": "torch.nn:SyncBatchNorm",
    },
    "Horovod": {
        "hvd": "horovod.torch",
        "DistributedSampler": "torch.utils.data:DistributedSampler",
    },
    "mmengine": {
        "dist": "mmengine.dist",
        "DefaultSampler": "mmengine.dataset:DefaultSampler",
        "MMDistributedDataParallel": "mmengine.model:MMDistributedDataParallel",
        "convert_sync_batchnorm": "mmengine.model:convert_sync_batchnorm",
    },
    "mpi4py": {"MPI": "mpi4py.MPI", "comm": "mpi4py.MPI:Comm"},
    "torch.multiprocessing": {"mp": "torch.multiprocessing", "t": "torch:Tensor"},
}
GIVES = {"mp.Pool": "multiprocessing.pool:Pool"}  # the class of a function's result


def check_in_child(*columns: str) -> None:
    """Check columns in a separate process, as libraries change variables when they are loaded."""
    code = f"from tests.support.at_a_glance import check; [*map(check, {columns!r})]"
    run_python("-W", "ignore", "-c", code, cwd=ROOT)


def _tables() -> Iterator[list[list[str]]]:
    """Give the rows of each table that has a library's calls beside those of unisono."""
    for page in PAGES:
        for lines in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
            rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in lines.splitlines()]
            if rows[0][1:] == ["unisono"]:
                assert rows[0][0] in COLUMNS, rows[0]
                yield rows


def _calls(column: str) -> Iterator[str]:
    for titles, _, *rows in _tables():
        for row in rows if column in titles else ():
            assert len(row) == len(titles), row
            assert all(row), row
            yield from re.findall(r"`([^`]+)`", row[titles.index(column)])


def check(column: str) -> None:
    """Look up each call of a column in its library, and bind the arguments of the table."""
    shown = list(_calls(column))
    assert shown
    if column == "mpi4py":
        importlib.import_module("mpi4py").rc.initialize = False  # MPI isn't needed for signatures
    for call in shown:
        if not call.startswith("loss.backward"):
            _find(ast.parse(call, mode="eval").body, COLUMNS[column], call)


def _find(node: ast.expr, words: dict[str, str], call: str) -> Any:
    if isinstance(node, ast.Name):
        return _load(words.get(node.id, node.id))
    if isinstance(node, ast.Attribute):
        owner = _find(node.value, words, call)
        if inspect.ismodule(owner) and not hasattr(owner, node.attr):
            return importlib.import_module(f"{owner.__name__}.{node.attr}")
        return getattr(owner, node.attr)
    assert isinstance(node, ast.Call), call
    found = _find(node.func, words, call)
    _bind(found, node, _takes_self(node.func, words, call), call)
    given = GIVES.get(ast.unparse(node.func))
    return _load(given) if given else found


def _takes_self(called: ast.expr, words: dict[str, str], call: str) -> bool:
    """Return whether a call is of a method, whose object is represented by its class here."""
    if not isinstance(called, ast.Attribute):
        return False
    owner = _find(called.value, words, call)
    if not inspect.isclass(owner):
        return False
    return not isinstance(inspect.getattr_static(owner, called.attr), (staticmethod, classmethod))


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def _bind(found: Any, node: ast.Call, takes_self: bool, call: str) -> None:
    """Compare a call's arguments with the function's parameters, without calling it."""
    try:
        signature = inspect.signature(found)
    except ValueError:  # written in C
        assert callable(found), call
        return
    arguments = [None] * (len(node.args) + takes_self)
    keywords = {each.arg: None for each in node.keywords if each.arg}
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise AssertionError(f"{call}: {error}") from error
