"""What a script defines itself, in the ranks that it makes: classes of every kind, files, lines."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from tests.support import functions
from tests.support.processes import run_python
from unisono.launchers.job.pickling import load_from_parent, pickle_for_worker
from unisono.pickling import dumps

KINDS = Path(__file__).parents[3] / "data" / "kinds.py"
MAIN = """
import sys
import unisono

folder = sys.argv[1]
for method in ("fork", "forkserver", "spawn"):
    check(unisono.spawn("gloo", work, (folder,), nproc_per_node=2, start_method=method))
check(unisono.spawn("gloo", work, (folder,), nproc_per_node=2, launcher="torchrun"))
with unisono.WorkerPool("gloo", 2) as pool:
    check(pool.run(work, folder))
print("done")
"""


def test_a_class_of_every_kind_works_in_a_rank_and_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # without a main guard
    script.write_text(f"{KINDS.read_text()}\n\n{MAIN}")
    assert run_python(str(script), str(tmp_path)) == "done"


def test_code_that_goes_by_value_keeps_its_file() -> None:
    names = {"__name__": "__main__"}
    text = "def outer():\n    return lambda: 1 / 0\nclass C:\n    def method(self): pass\n"
    exec(compile(text, "/of/a/script.py", "exec"), names)
    outer, kind = pickle.loads(dumps((names["outer"], names["C"])))
    for fn in (outer, outer(), kind.method):
        assert fn.__code__.co_filename == "/of/a/script.py"
    assert outer().__code__.co_firstlineno == 2


def test_what_a_module_defines_that_is_there_already_stays() -> None:
    before = functions.add_to
    cloudpickle.register_pickle_by_value(functions)
    try:
        sent = pickle_for_worker(before)
    finally:
        cloudpickle.unregister_pickle_by_value(functions)
    assert load_from_parent(sent) is not before
    assert functions.add_to is before


def test_a_module_that_cant_be_found_has_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("unlisted")
    exec("def seven(): return 7", vars(module))
    monkeypatch.setitem(sys.modules, "unlisted", module)
    sent = pickle_for_worker(vars(module)["seven"])
    monkeypatch.delitem(sys.modules, "unlisted")
    seven = load_from_parent(sent)
    assert seven is not vars(module)["seven"]
    assert vars(sys.modules["unlisted"])["seven"] is seven
