"""Checks of what users pass."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import unisono as idist
from unisono.arguments import check_count, check_names, check_port, seconds, suggestion
from unisono.errors import ArgumentError


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "0", "-2", " 2", "2.0", "٣", "", None, [1]])
def test_no_count(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^n=.* should be an int of at least 1$"):
        check_count("n", value)


def test_counts() -> None:
    assert check_count("n", 1) == 1
    assert check_count("n", 0, 0) == 0
    assert check_count("n", 10**30) == 10**30
    assert check_count("n", "12") == 12  # as argparse gives it


@pytest.mark.parametrize("value", [0, -1, 65536, True, 80.0, "0", "65536", "http", None])
def test_no_port(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^p=.* from 1 to 65535$"):
        check_port("p", value)


def test_ports() -> None:
    assert [check_port("p", port) for port in (1, "29500", 65535)] == [1, 29500, 65535]


def test_unknown_names_come_with_the_nearest_known_one() -> None:
    check_names("f", {"timeout": 1}, {"timeout", "rank"})
    check_names("f", {}, ())
    with pytest.raises(
        ArgumentError,
        match=r"^f takes no option 'timout'\. Did you mean 'timeout'\? It takes: rank, timeout$",
    ):
        check_names("f", {"rank": 0, "timout": 1}, iter(["timeout", "rank"]))
    with pytest.raises(ArgumentError, match=r"^f takes no option 'zzz'\. It takes: rank$"):
        check_names("f", {"zzz": 1}, ["rank"])


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(1, timedelta(seconds=1)), (0.25, timedelta(milliseconds=250)),
     (timedelta(minutes=2), timedelta(minutes=2))],
)  # fmt: skip
def test_seconds(value: Any, wanted: timedelta) -> None:
    assert seconds("timeout", value) == wanted


@pytest.mark.parametrize(
    "value",
    [0, -1, 0.0, timedelta(0), timedelta(seconds=-1), True, "5", None, float("nan"), float("inf"),
     1e300, 10**400],
)  # fmt: skip
def test_no_seconds(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^timeout="):
        seconds("timeout", value)


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"nproc_per_node": 0}, "nproc_per_node=0"),
    ({"nproc_per_node": -2}, "nproc_per_node=-2"),
    ({"nproc_per_node": "2x"}, "nproc_per_node='2x'"),
    ({"nproc_per_node": True}, "nproc_per_node=True"),
    ({"args": "text"}, r"args='text' should be a list or tuple, such as \('text',\)"),
    ({"args": 3}, "args=3"),
    ({"kwargs_dict": [1]}, "kwargs_dict="),
    ({"kwargs_dict": {1: 2}}, "kwargs_dict="),
    ({"fn": "no function"}, "fn should be callable"),
    ({"timout": 2}, r"takes no option 'timout'\. Did you mean 'timeout'"),
    ({"nproc_per_nod": 2}, r"takes no option 'nproc_per_nod'\. Did you mean 'nproc_per_node'"),
    ({"timeout": 0}, "timeout=0"),
    ({"timeout": "1"}, "timeout='1'"),
    ({"nnodes": 0}, "nnodes=0"),
    ({"nnodes": 2}, "needs master_addr"),
    ({"nnodes": 2, "node_rank": 2}, "node_rank=2"),
    ({"node_rank": 1}, "node_rank=1"),
    ({"master_port": 0}, "master_port=0"),
    ({"master_port": "http"}, "master_port='http'"),
]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize(("options", "text"), BAD_CALLS, ids=[text for _, text in BAD_CALLS])
def test_spawn_refuses_before_anything_starts(
    backend: str, options: dict[str, Any], text: str
) -> None:
    fn = options.get("fn", lambda local_rank: None)
    rest = {key: value for key, value in options.items() if key != "fn"}
    with pytest.raises(ArgumentError, match=text):
        idist.spawn(backend, fn, **rest)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (idist.WorkerPool, {"nproc_per_nod": 2}),
        (idist.Parallel, {"nproc_per_nod": 2}),
        (idist.Parallel, {"nproc_per_nod": 2, "nproc_per_node": 2}),
    ],
)
def test_a_misspelt_number_of_ranks_is_answered_with_its_name(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    named = rf"^{call.__name__} takes no option 'nproc_per_nod'\. Did you mean 'nproc_per_node'\?"
    for backend in ("gloo", None):
        with pytest.raises(ArgumentError, match=named):
            call(backend, **options)


def test_the_nearest_name_is_found_in_any_case() -> None:
    assert suggestion("fsdp3", ["FSDP2", "flat"]) == " Did you mean 'FSDP2'?"
    assert suggestion("Flat", ["FSDP2", "flat"]) == " Did you mean 'flat'?"
    assert suggestion("round", ["FSDP2", "flat"]) == ""
    assert suggestion(3, ["FSDP2", "flat"]) == ""


def test_an_argument_error_is_what_idist_users_catch() -> None:
    for kind in (ValueError, TypeError, idist.UnisonoError):
        with pytest.raises(kind):
            idist.all_reduce(1, "SUMM")  # type: ignore[call-overload]
