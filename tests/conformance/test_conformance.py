"""Every law on every model that needs nothing but torch, and on one that a third party ships."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar

import pytest

import unisono as idist
from unisono.context import communicator
from unisono.control import plane
from unisono.testing import Conformance

pytestmark = pytest.mark.timeout(600)  # each of these tests is all laws


def without_sockets(local_rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a replica whose ranks can't meet. Collective over all ranks."""
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


class TestThreadsOfOtherSizes(Conformance):
    backend = "threads"
    sizes = (1, 3)


class TestGlooOfOtherSizes(Conformance):
    backend = "gloo"
    sizes = (1, 3)


class TestGlooWithShortRounds(Conformance):
    """What is longer than nothing follows on the data plane, which small values else never see."""

    backend = "gloo"
    sizes = (2, 3)

    @pytest.fixture(autouse=True)
    def short_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNISONO_INLINE_BYTES", "0")


class TestGlooWithoutSharedMemory(Conformance):
    """Without memory that ranks share gloo itself moves every tensor, as between hosts."""

    backend = "gloo"
    sizes = (3,)

    @pytest.fixture(autouse=True)
    def nothing_is_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNISONO_INLINE_BYTES", "0")
        monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")


class TestGlooWithoutSockets(Conformance):
    """Where ranks can't meet, what no tensor is travels in the exchange that every model has."""

    backend = "gloo"
    sizes = (2, 3)
    options: ClassVar[Mapping[str, Any]] = {"launch": launch_without_sockets}


class TestKvStorePlugin(Conformance):
    backend = "kvstore"
    sizes = (1, 2)

    def test_it_is_found_through_its_entry_point(self) -> None:
        points = entry_points(group="unisono.models", name="kvstore")
        assert points, "install it first: pip install ./tests/plugin (the nox session does)"
        assert "kvstore" in idist.available_backends()

    def test_it_brings_what_is_required_and_nothing_else(self) -> None:
        (point,) = entry_points(group="unisono.models", name="kvstore")
        brought = {name for name in vars(point.load()) if not name.startswith("_")}
        required = idist.ComputationModel.__abstractmethods__
        assert brought == {*required, "name", "backends", "dtypes"}
