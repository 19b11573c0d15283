"""Finding models and launchers by name: built-in ones, registered ones, plug-ins, broken ones.

Plug-ins here are real distributions: a module and its dist-info folder on sys.path.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono import plugins, registry
from unisono.environments.detection import environments
from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    RegistrationError,
    UnknownBackendError,
)
from unisono.models.threads import ThreadsModel
from unisono.training.batchnorm import _converters
from unisono.training.wrapping import _wrappers

GOOD = """
    from unisono.models.threads import ThreadsModel

    class Model(ThreadsModel):
        name = "plugged-dist"
        backends = ("plugged",)
"""
LAUNCH = """
    def launch(entry, plan, *, environ, greeting="hello"):
        return [f"{greeting} {rank}" for rank in range(plan.nproc_per_node)]
"""
Install = Callable[..., None]


def _forget_what_was_scanned() -> None:
    importlib.invalidate_caches()
    plugins.load.cache_clear()
    for kind in (registry._models, registry.launchers, environments, _wrappers, _converters):
        kind._scanned = kind._loaded = None  # read again at the next use
    registry._models.watched = None


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Give a function that installs a distribution into a folder of its own on sys.path."""
    before, path = set(sys.modules), list(sys.path)

    def lay(distribution: str, points: str, **modules: str) -> None:
        folder = tmp_path / distribution
        info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(points))
        for name, code in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(code))
        sys.path.insert(0, str(folder))
        _forget_what_was_scanned()

    yield lay
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    _forget_what_was_scanned()


@pytest.fixture
def mine() -> Iterator[type[ThreadsModel]]:
    """Give a class that is unregistered at the end."""

    class Mine(ThreadsModel):
        name = "my-dist"
        backends = ("mine",)

    yield Mine
    registry.unregister_model(Mine)


def model_name(local_rank: int) -> str:
    return unisono.model_name()


def test_an_unknown_backend_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UnknownBackendError) as raised:
        registry.find_model("thread")
    text = str(raised.value)
    head, _, usable = text.partition(" Usable here: ")
    assert head == "unknown backend 'thread'. Did you mean 'threads'?"
    usable, _, others = usable.partition(". Known, but not usable here: ")
    here = usable.split(", ")
    assert {"serial", "threads", "gloo"} <= set(here)
    assert here == sorted(here)
    known = {*here, *others.partition(" (")[0].split(", ")}
    assert {"nccl", "mpi4py", "horovod", "xla-cpu"} <= known


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("q", r"^unknown backend 'q'\. Usable here: "),  # near to nothing
        *((name, "named by a str, not ") for name in (None, 3, b"gloo", ["gloo"])),
    ],
)
def test_what_is_no_backend_gets_no_guess(name: Any, said: str) -> None:
    with pytest.raises(UnknownBackendError, match=said):
        registry.find_model(name)


@pytest.mark.parametrize("name", ["gloo", "GLOO", "Gloo", "Threads", "SERIAL"])
def test_names_are_taken_in_any_case(name: str) -> None:
    assert registry.find_model(name) is registry.find_model(name.lower())


def test_a_backend_that_is_known_but_not_installed_says_how_to_get_it() -> None:
    reasons = {name: reason for name, reason in registry.availability().items() if reason}
    of_devices = [name for name, why in reasons.items() if "no such device on this machine" in why]
    for name in of_devices:  # another machine may have one
        del reasons[name]
    assert reasons, "everything is installed here"
    for name, reason in reasons.items():
        with pytest.raises(BackendUnavailableError) as raised:
            registry.find_model(name)
        assert f"backend '{name}' can't be used here: {reason}" == str(raised.value)
        assert isinstance(raised.value, ImportError)


def test_a_plug_in_is_found_loaded_late_and_used(install: Install) -> None:
    install("good-plugin", "[unisono.models]\nplugged = good_plugin:Model\n", good_plugin=GOOD)
    assert "plugged" in unisono.available_backends()
    assert "good_plugin" not in sys.modules
    assert unisono.spawn("Plugged", model_name, nproc_per_node=2) == ["plugged-dist"] * 2


FIND: dict[str, Callable[[str], object]] = {
    "model": registry.find_model,
    "launcher": registry.find_launcher,
}


@pytest.mark.parametrize(("kind", "called"), [("model", "backend"), ("launcher", "launcher")])
def test_two_plug_ins_with_one_name_are_an_error_that_names_both(
    install: Install, kind: str, called: str
) -> None:
    for name in ("first", "second"):
        points = f"[unisono.{kind}s]\ntwice = {name}:Thing\n"
        install(f"{name}-plugin", points, **{name: "Thing = 3"})
    both = rf"{called} 'twice' is claimed by two plug-ins, first-plugin and second-plugin"
    with pytest.raises(RegistrationError, match=both):
        FIND[kind]("twice")
    if kind == "model":
        assert "twice" not in unisono.available_backends()
        assert "first-plugin" in str(registry.availability()["twice"])
        assert registry.find_model("gloo").name == "native-dist"


def test_a_plug_in_does_not_shadow_a_built_in_backend(install: Install) -> None:
    points = "[unisono.models]\ngloo = shadow:Model\nthreads = shadow:Model\n"
    install("shadow", points, shadow=GOOD)
    assert registry.find_model("gloo").name == "native-dist"
    assert registry.find_model("threads") is ThreadsModel


BROKEN = {
    "raises": "raise RuntimeError('no licence')",
    "needs what isn't there": "import a_library_that_is_not_there",
    "has no such class": "",
    "isn't a model": "class Model: pass",
    "is unfinished": "import unisono\nclass Model(unisono.ComputationModel): name = 'x'",
    "isn't a class": "Model = 3",
}
ASKED = [("model", code) for code in BROKEN.values()]
ASKED += [("launcher", BROKEN[why]) for why in ("raises", "has no such class", "isn't a class")]


@pytest.mark.parametrize(("kind", "code"), ASKED)
def test_a_broken_plug_in_that_is_asked_for_raises_with_cause_and_distribution(
    install: Install, kind: str, code: str
) -> None:
    points = f"[unisono.{kind}s]\nbroken = broken_plugin:Model\n"
    install("broken-plugin", points, broken_plugin=code)
    with pytest.raises(BackendUnavailableError, match=r"of distribution broken-plugin") as raised:
        FIND[kind]("broken")
    cause = raised.value.__cause__
    assert cause is not None
    assert f"{type(cause).__name__}: {cause}" in str(raised.value)


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_a_broken_plug_in_is_left_out_with_one_warning_while_probing(
    install: Install, tmp_path: Path, code: str
) -> None:
    points = "[unisono.models]\nbroken = a_library.model:Model\n"
    install("broken-plugin", points)
    folder = Path(sys.path[0], "a_library")
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text(code)
    assert unisono.get_rank() == 0  # nobody has imported its library: not looked at
    importlib.import_module("a_library")
    with pytest.warns(RuntimeWarning, match=r"a_library\.model:Model of broken-plugin is left out"):
        assert unisono.get_rank() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unisono.model_name() == "serial"
        dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            assert unisono.model_name() == "native-dist"
        finally:
            dist.destroy_process_group()


def test_a_registered_model_is_found_and_can_be_taken_back(mine: type[ThreadsModel]) -> None:
    mine.backends = ("Mine",)
    assert unisono.register_model(mine) is mine
    assert unisono.register_model(mine) is mine  # twice does no harm
    assert "mine" in unisono.available_backends()
    assert mine in unisono.registered_computation_models
    assert unisono.spawn("MINE", model_name, nproc_per_node=2) == ["my-dist"] * 2
    with pytest.raises(ArgumentError, match=r"the replicas of mine are threads"):
        unisono.spawn("mine", model_name, launcher="processes")
    registry.unregister_model(mine)
    with pytest.raises(UnknownBackendError):
        registry.find_model("mine")


@pytest.mark.parametrize("backend", ["gloo", "threads", "serial", "mpi4py", "GLOO"])
def test_a_built_in_backend_is_taken_over_only_with_override(
    mine: type[ThreadsModel], backend: str
) -> None:
    original = registry._models.entry(backend.lower())
    mine.backends = (backend,)
    with pytest.raises(RegistrationError, match=r"is taken: .*override=True"):
        unisono.register_model(mine)
    assert registry._models.registered == {}
    unisono.register_model(mine, override=True)
    assert registry.find_model(backend) is mine
    registry.unregister_model(mine)
    assert registry._models.entry(backend.lower()) == original


def test_of_several_backends_none_is_registered_if_one_is_taken(mine: type[ThreadsModel]) -> None:
    class Other(ThreadsModel):
        name = "other-dist"
        backends = ("others", "mine")

    unisono.register_model(mine)
    with pytest.raises(RegistrationError, match=r"'mine' of .*Other is taken"):
        unisono.register_model(Other)
    assert registry.find_model("mine") is mine
    with pytest.raises(UnknownBackendError):
        registry.find_model("others")


def test_a_launcher_of_a_plug_in_is_found_and_gets_its_own_options(install: Install) -> None:
    install("ship", "[unisono.launchers]\nship = ship:launch\n", ship=LAUNCH)
    results = unisono.spawn("gloo", model_name, nproc_per_node=2, launcher="ship")
    assert results == ["hello 0", "hello 1"]
    options = {"greeting": "ahoy"}
    results = unisono.spawn("gloo", model_name, launcher="ship", launcher_options=options)
    assert results == ["ahoy 0"]
    with pytest.raises(ArgumentError, match=r"takes no option 'greating'"):
        unisono.spawn("gloo", model_name, launcher="ship", launcher_options={"greating": "x"})


def test_an_unknown_launcher_or_environment_is_answered_by_the_known_ones(install: Install) -> None:
    install("ship", "[unisono.launchers]\nship = ship:launch\n", ship=LAUNCH)
    for find, name, said in (
        (registry.find_launcher, "shop", r"Did you mean 'ship'\? Known: .*processes.*ship"),
        (registry.find_launcher, "Torchrn", r"Did you mean 'torchrun'\? Known: "),
        (registry.find_environment, "slrm", r"Did you mean 'slurm'\? Known: .*torchrun"),
    ):
        with pytest.raises(ArgumentError, match=rf"'{name}'\. {said}"):
            find(name)


def test_an_environment_of_a_plug_in_says_who_this_is(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        from unisono import RankInfo

        NAME = "fleet"

        def detect(environ):
            return RankInfo(0, 1, source=NAME) if "FLEET_SHIP" in environ else None
    """
    install("fleet", "[unisono.environments]\nfleet = fleet\n", fleet=code)
    assert plugins.read_environment(os.environ) is None
    monkeypatch.setenv("FLEET_SHIP", "1")
    found = plugins.read_environment(os.environ)
    assert found is not None
    assert found.source == "fleet"


def test_a_folder_of_a_librarys_name_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if importlib.util.find_spec("ray").origin is not None:  # type: ignore[union-attr]
        pytest.skip("ray is installed here")
    assert "ray isn't installed" in str(registry.launchers.availability()["ray"])


def test_wrappers_and_batch_norms_of_plug_ins_are_found_by_name(install: Install) -> None:
    code = "def flatten(module, **options):\n    module.seen = options\n    return module\n"
    points = (
        "[unisono.wrappers]\nFlat = flat:flatten\nlost = flat:nothing\n"
        "[unisono.batchnorms]\nflat = flat:flatten\n"
    )
    install("flat", points, flat=code)
    model = torch.nn.Linear(2, 1)
    assert unisono.convert_sync_batchnorm(model, "flat") is model
    assert unisono.auto_model(model, wrapper="flat") is model
    with pytest.raises(
        ArgumentError, match=r"wrapper 'float'\. Did you mean 'flat'\? Known: ddp, .*flat.*lost"
    ):
        unisono.auto_model(model, wrapper="float")
    with pytest.raises(ArgumentError, match=r"batch norm\. Known: .*flat.*torch, unisono; or give"):
        unisono.convert_sync_batchnorm(model, "round")
    with pytest.raises(BackendUnavailableError, match=r"wrapper 'lost': .*of distribution flat"):
        unisono.auto_model(model, wrapper="lost")
