"""Errors travel between processes, and the tree drawn in the docs is the real one."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from tests.support.pages import ROOT
from unisono import errors
from unisono.errors import (
    CollectiveError,
    EnvironmentDetectionError,
    PeerFailedError,
    PeerRefusedError,
    UnisonoError,
    UnsupportedOperation,
    WorkerFailedError,
)

CLASSES = [getattr(errors, name) for name in errors.__all__]
MADE: list[tuple[BaseException, dict[str, Any]]] = [
    (
        EnvironmentDetectionError("what", "slurm", "SLURM_PROCID", "x"),
        {"source": "slurm", "variable": "SLURM_PROCID", "value": "x"},
    ),
    (EnvironmentDetectionError("what"), {"source": "", "variable": "", "value": None}),
    (
        WorkerFailedError("what", 2, 3, "SIGKILL", "Traceback"),
        {"rank": 2, "exit_code": 3, "signal": "SIGKILL", "traceback": "Traceback"},
    ),
    (WorkerFailedError("what"), {"rank": -1, "exit_code": None, "signal": None, "traceback": ""}),
    (UnsupportedOperation("what", "send", "x"), {"model": "what", "what": "send", "instead": "x"}),
    (CollectiveError("what"), {"is_in_step": False}),
    (PeerFailedError("what", 1, "Traceback"), {"rank": 1, "traceback": "Traceback"}),
    (PeerFailedError("what", rank=1), {"rank": 1, "traceback": ""}),
    (PeerRefusedError("what", 1), {"rank": 1}),
]
MET = PeerFailedError("what", 1)
MET.is_in_step = True
IN_STEP: list[tuple[BaseException, dict[str, Any]]] = [
    *((MET, {"is_in_step": True}), (PeerFailedError("what", 1), {"is_in_step": False})),
    (errors.CollectiveMismatchError("what"), {"is_in_step": True}),
]


PLAIN: list[tuple[BaseException, dict[str, Any]]] = [
    (cls("what: é"), {}) for cls in CLASSES if cls is not UnsupportedOperation
]


@pytest.mark.parametrize(
    ("error", "attributes"), PLAIN + MADE + IN_STEP, ids=lambda item: type(item).__name__
)
def test_every_error_travels_with_its_message_and_attributes(
    error: BaseException, attributes: dict[str, Any]
) -> None:
    protocols = range(2, pickle.HIGHEST_PROTOCOL + 1)
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in protocols]
    for got in (*copies, pickle.loads(cloudpickle.dumps(error)), copy.copy(error)):
        assert type(got) is type(error)
        assert (str(got), repr(got), got.args) == (str(error), repr(error), error.args)
        assert {name: getattr(got, name) for name in attributes} == attributes
    assert isinstance(error, UnisonoError)
    assert str(error).startswith("what")


def test_an_error_without_attributes_of_its_own_shows_all_its_arguments() -> None:
    class PluginError(errors.LaunchError):
        def __init__(self, rank: int, reason: str) -> None:
            super().__init__(rank, reason)

    assert str(PluginError(3, "no memory")) == "(3, 'no memory')"
    assert str(UnisonoError()) == ""


def test_a_worker_s_failure_carries_its_traceback() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError) as caught:
        fail()
    error = WorkerFailedError.of(caught.value, 1, 3)
    assert str(error).startswith("rank 1 of 3 raised KeyError: 'gone'\n  at ")
    line, _, rest = str(error).partition("\n")[2].partition("\n")
    assert re.fullmatch(r"  at .*test_errors\.py:\d+, in fail", line)
    assert rest.startswith("\nTraceback")
    assert "in fail" in error.traceback
    assert (error.rank, error.__cause__) == (1, caught.value)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def drawn() -> Iterator[tuple[str, tuple[str, ...], list[str]]]:
    """Read the drawing: each class with its bases and the attributes beside it."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    path: list[str] = []
    for line in page.partition("## Error classes\n\n```\n")[2].partition("```")[0].splitlines():
        text = line.lstrip("│├└─ ")
        depth = (len(line) - len(text)) // 3
        head, *attributes = text.split(" .")
        name, _, others = head.strip().rstrip(")").partition("(")
        bases = [base for base in others.split(", ") if base]
        del path[depth:]
        yield name, (*path[-1:], *bases), [attribute.strip() for attribute in attributes]
        path.append(name)


def test_the_drawing_is_the_real_tree() -> None:
    found = list(drawn())
    assert sorted(name for name, _, _ in found) == list(errors.__all__)
    for name, bases, attributes in found:
        cls = getattr(errors, name)
        assert tuple(base.__name__ for base in cls.__bases__) == bases, name
        own = {key for error, has in MADE if type(error) is cls for key in has}
        assert set(attributes) == own, name
