"""Every law on every model that needs nothing but torch, and on one that a third party ships."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest

import unisono as idist
from tests.support.short_rounds import launch_with_short_rounds
from unisono.context import communicator
from unisono.control import plane
from unisono.testing import LAWS, Conformance, check

pytestmark = pytest.mark.timeout(600)  # each of these tests checks all laws


def without_sockets(local_rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a replica whose ranks can't connect. Collective over all ranks."""
    vars(plane)["connect_group"] = lambda *_: None
    control = communicator().control
    control.close("")  # the connections of the default group, if `initialize` made them
    hubs = vars(control)["hubs"]
    result = fn(local_rank, *args)
    assert set(hubs.values()) == {None}, "every exchange should have been the derived one"
    return result


def launch_without_sockets(backend: str, fn: Any, args: tuple[Any, ...], **options: Any) -> Any:
    return idist.spawn(backend, without_sockets, (fn, *args), **options)


@pytest.mark.fast
class TestSerial(Conformance):
    backend = "serial"
    sizes = (1,)


@pytest.mark.fast
class TestThreads(Conformance):
    backend = "threads"
    sizes = (2,)


@pytest.mark.fast
class TestGloo(Conformance):
    backend = "gloo"
    sizes = (2,)


# Files of laws that don't depend on the number of ranks or on the path of the bytes.
OF_ONE_WAY = {"facts", "forks", "recording", "training"}


def all_hold(backend: str, nproc: int, without: set[str], **options: Any) -> None:
    laws = [n for n, law in LAWS.items() if law.check.__module__.split(".")[-1] not in without]
    assert 50 < len(laws) < len(LAWS)
    outcomes = check(backend, nproc, laws=laws, **options)
    assert [outcome.law for outcome in outcomes] == laws
    failed = [f"{each.law}: {each.reason}" for each in outcomes if each.status == "failed"]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("nproc", [1, 3])
def test_the_laws_hold_on_other_numbers_of_ranks(backend: str, nproc: int) -> None:
    all_hold(backend, nproc, OF_ONE_WAY if nproc == 1 else OF_ONE_WAY | {"refusals"})


def test_the_laws_hold_with_short_rounds() -> None:
    """Every value is sent on the data plane, which otherwise carries only long ones."""
    all_hold("gloo", 3, OF_ONE_WAY, launch=launch_with_short_rounds)


def test_the_laws_hold_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shared memory gloo moves every tensor, as it does between hosts."""
    monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")
    all_hold("gloo", 3, OF_ONE_WAY | {"refusals"}, launch=launch_with_short_rounds)


def test_the_laws_hold_where_ranks_cant_meet() -> None:
    """Values that aren't tensors are sent by `exchange`, which every model has."""
    all_hold("gloo", 3, OF_ONE_WAY, launch=launch_without_sockets)


def test_a_call_is_recorded_once_where_torch_s_backend_is_ours() -> None:
    """unisono's group is built on a process group that records calls, too, which adds no record."""
    (outcome,) = check("unisono", 2, laws=["hooks_see_the_group_of_a_call"])
    assert outcome.status == "passed", outcome.reason


class TestKvStorePlugin(Conformance):
    backend = "kvstore"
    sizes = (2,)

    def test_it_is_found_through_its_entry_point_and_brings_what_is_required(self) -> None:
        points = entry_points(group="unisono.models", name="kvstore")
        assert points, "install it first: pip install ./tests/plugin (the nox session does)"
        assert "kvstore" in idist.available_backends()
        (point,) = points
        brought = {name for name in vars(point.load()) if not name.startswith("_")}
        required = idist.ComputationModel.__abstractmethods__
        assert brought == {*required, "name", "backends", "dtypes"}
