"""The public names: sorted, complete, documented, and a superset of idist's."""

from __future__ import annotations

import compileall
import inspect
import shutil
import sys
from pathlib import Path

import pytest

import unisono
from tests.support.processes import run_python
from unisono import lazy_import
from unisono.launchers.job import forkserver

# The names of `ignite.distributed` 0.5, and their arguments.
IDIST = {
    "Parallel": "backend nproc_per_node nnodes node_rank master_addr master_port init_method",
    "all_gather": "group",
    "all_gather_tensors_with_shapes": "tensor shapes group",
    "all_reduce": "op group",
    "broadcast": "src safe_mode",
    "initialize": "backend",
    "new_group": "ranks",
    "one_rank_first": "rank local",
    "one_rank_only": "rank with_barrier",
    "set_local_rank": "index",
    "spawn": "backend fn args kwargs_dict nproc_per_node",
    "sync": "temporary",
}
OTHERS = (
    *("DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim", "barrier"),
    *("available_backends", "backend", "device", "finalize", "get_local_rank", "get_nnodes"),
    *("get_node_rank", "get_nproc_per_node", "get_rank", "get_world_size", "has_hvd_support"),
    *("has_native_dist_support", "has_xla_support", "hostname", "model_name"),
    *("registered_computation_models", "show_config"),
)


def test_all_is_sorted_and_every_name_is_there_and_what_dir_lists() -> None:
    assert list(unisono.__all__) == sorted(set(unisono.__all__))
    assert set(dir(unisono)) == {*unisono.__all__, "__version__"}
    for name in unisono.__all__:
        assert getattr(unisono, name) is not None


def test_every_name_of_idist_is_there_and_takes_its_arguments() -> None:
    assert {*IDIST, *OTHERS} <= set(unisono.__all__)
    for name, arguments in IDIST.items():
        parameters = inspect.signature(getattr(unisono, name)).parameters
        assert set(arguments.split()) <= set(parameters), name


def test_facts_about_libraries_are_answered_when_asked() -> None:
    assert unisono.has_native_dist_support is True
    for name in ("has_hvd_support", "has_xla_support", "has_mpi_support"):
        assert type(getattr(unisono, name)) is bool
    models = {cls.name for cls in unisono.registered_computation_models}
    assert {"serial", "threads", "native-dist"} <= models


@pytest.mark.parametrize("name", unisono.__all__)
def test_every_function_has_a_first_sentence_and_an_example(name: str) -> None:
    item = getattr(unisono, name)
    doc = inspect.getdoc(item) or ""
    if inspect.isfunction(item) or item is unisono.Parallel:
        assert "Example:" in doc
    if inspect.isfunction(item):
        first = doc.partition("\n\n")[0]
        assert first.endswith(".")
        assert "\n" not in first


HEAVY = frozenset(
    {
        *("horovod", "torch_xla", "mpi4py", "ray", "typer", "rich", "cloudpickle", "psutil"),
        *("sklearn", "numpy"),
    }
)


def test_nothing_heavy_is_loaded() -> None:
    """What torch loads itself, such as numpy, isn't ours."""
    first, core = run_python("-c", _IMPORTS).splitlines()
    assert not set(first.split()) & (HEAVY | {"torch", "multiprocessing"})
    assert not set(core.split()) & HEAVY
    assert "unisono" in first.split() and "unisono" in core.split()


_IMPORTS = """
import sys

def loads(code):
    before = set(sys.modules)
    exec(code, {})
    print(*{name.partition(".")[0] for name in set(sys.modules) - before})

loads("import unisono; dir(unisono); from unisono import RankInfo, Topology, errors, deadline")
import torch
loads(
    "import unisono; from unisono.launchers.job.forkserver import LIKELY;"
    "[getattr(unisono, name) for name in LIKELY]"
)
"""


def test_a_misspelt_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'all_redcue'\. Did you mean: 'all_reduce'\?$"):
        unisono.all_redcue  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        unisono.xyzzy  # type: ignore[attr-defined]  # noqa: B018


def test_the_facade_is_there_without_its_source(tmp_path: Path) -> None:
    """As in a zip of compiled modules."""
    package = tmp_path / "unisono"
    shutil.copytree(Path(unisono.__file__).parent, package)
    compileall.compile_dir(package, quiet=1, legacy=True)
    for path in package.rglob("*.py"):
        path.unlink()
    code = "import unisono; print(unisono.__file__[-4:], unisono.all_gather(3), unisono.__all__[0])"
    printed = run_python("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}")
    assert printed.split() == [".pyc", "[3]", "ByRank"]


def test_names_of_a_long_module_are_found() -> None:
    """From the 257th name of a module on its code has an instruction more for each."""
    names = [f"name{index}" for index in range(300)]
    code = compile("".join(f"from unisono.facts import {name}\n" for name in names), "", "exec")
    assert lazy_import._imported(code) == dict.fromkeys(names, "unisono.facts")


def test_likely_names_are_loaded_once_for_all_workers() -> None:
    likely = {getattr(unisono, name).__module__ for name in forkserver.LIKELY}
    assert likely <= set(unisono.spawn("gloo", _modules, nproc_per_node=1)[0])


EARLY = """
import sys, psutil, unisono

class Children:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch" and not seen:
            seen.append(len(psutil.Process().children()))

seen = []
sys.meta_path.insert(0, Children)
unisono.WorkerPool
print(seen[0])
"""


OF_A_RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
OF_A_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("of_a_rank", "children"), [({}, 1), (OF_A_RANK, 0)])
def test_workers_are_prepared_while_torch_is_imported_but_not_by_a_rank(
    of_a_rank: dict[str, str], children: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in of_a_rank.items():
        monkeypatch.setenv(name, value)
    assert run_python("-c", EARLY).split() == [str(children)]


def test_what_starts_a_script_needs_no_torch() -> None:
    modules = "unisono.cli.run, unisono.launchers.script.processes"
    modules += ", unisono.launchers.script.rank.program, unisono.launchers.script.supervisor"
    run_python("-c", f"import sys; sys.modules['torch'] = None; import {modules}")


def _modules(_local_rank: int) -> list[str]:
    return sorted(sys.modules)
