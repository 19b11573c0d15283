"""Checks of what users pass."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import unisono as idist
from unisono.arguments import (
    check_count,
    check_names,
    number_in,
    ranks_by_host,
    seconds,
    suggestion,
)
from unisono.errors import ArgumentError


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "0", "-2", " 2", "2.0", "٣", "", None, [1]])
def test_no_count(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^n=.* should be an int of at least 1$"):
        check_count("n", value)


def test_counts() -> None:
    assert [check_count("n", value) for value in (1, 10**30, "12")] == [1, 10**30, 12]
    assert check_count("n", 0, 0) == 0


@pytest.mark.parametrize("value", [0, -1, 65536, True, 80.0, "0", "65536", "http", None])
def test_no_port(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^p=.* from 1 to 65535$"):
        check_count("p", value, 1, 65535)


def test_ports() -> None:
    assert [check_count("p", port, 1, 65535) for port in (1, "29500", 65535)] == [1, 29500, 65535]


def test_hosts_have_their_ranks_or_one() -> None:
    assert ranks_by_host("hosts", "a, b-2.c:3") == {"a": 1, "b-2.c": 3}
    for wrong in ("", "a:0", "a:x", "a:1,a:2", "a,,b"):
        with pytest.raises(ArgumentError, match=r"^hosts=.* each name once"):
            ranks_by_host("hosts", wrong)


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


def test_seconds() -> None:
    assert seconds("timeout", 0.25) == timedelta(milliseconds=250)
    for given_s in (1, timedelta(seconds=1)):
        assert seconds("timeout", given_s) == timedelta(seconds=1)


NUMBERS = st.integers().map(str) | st.sampled_from(["", " ", "+1", "1_0", "٣", "1e3", "²", "nan"])
ANY_BYTES = st.binary(max_size=12).map(
    lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
)


@settings(deadline=None)
@given(NUMBERS | ANY_BYTES)
def test_our_own_variables_are_numbers_or_an_error_names_them(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_WARN_AFTER_S", text)
        try:
            assert number_in("UNISONO_WARN_AFTER_S", 3.0, least=1) >= 1
        except idist.UnisonoError as error:
            assert "UNISONO_WARN_AFTER_S=" in str(error)


def test_a_misspelt_variable_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_SITE", "of somebody else")
    assert idist.spawn("serial", abs) == [0]
    monkeypatch.setenv("UNISONO_NO_PICKEL", "1")
    with pytest.raises(ArgumentError, match=r"UNISONO_NO_PICKEL: did you mean UNISONO_NO_PICKLE\?"):
        idist.spawn("serial", abs)


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
    ({"args": "text"}, r"args='text' should be a list or tuple, such as \('text',\)"),
    ({"kwargs_dict": [1]}, "kwargs_dict="),
    ({"kwargs_dict": {1: 2}}, "kwargs_dict="),
    ({"fn": "no function"}, "fn should be callable"),
    ({"timout": 2}, r"takes no option 'timout'\. Did you mean 'timeout'"),
    ({"timeout": 0}, "timeout=0"),
    ({"nnodes": 0}, "nnodes=0"),
    ({"nnodes": 2}, "needs master_addr"),
    ({"nnodes": 2, "node_rank": 2}, "node_rank=2"),
    ({"node_rank": 1}, "node_rank=1"),
    ({"master_port": 0}, "master_port=0"),
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


@pytest.mark.parametrize("call", [idist.WorkerPool, idist.Parallel])
@pytest.mark.parametrize("backend", ["gloo", None])
def test_a_misspelt_number_of_ranks_is_answered_with_its_name(
    call: Callable[..., Any], backend: str | None
) -> None:
    named = rf"^{call.__name__} takes no option 'nproc_per_nod'\. Did you mean 'nproc_per_node'\?"
    for beside in ({}, {"nproc_per_node": 2}) if call is idist.Parallel else ({},):
        with pytest.raises(ArgumentError, match=named):
            call(backend, nproc_per_nod=2, **beside)


def test_the_nearest_name_is_found_in_any_case() -> None:
    for name, nearest in (("fsdp3", "FSDP2"), ("Flat", "flat")):
        assert suggestion(name, ["FSDP2", "flat"]) == f" Did you mean '{nearest}'?"
    assert suggestion("round", ["FSDP2", "flat"]) == suggestion(3, ["FSDP2", "flat"]) == ""


def test_an_argument_too_many_is_refused() -> None:
    """Such as an `async_op` in the place where torch has it."""
    calls: list[Callable[..., Any]] = [idist.all_reduce, idist.all_reduce_]
    for call in calls:
        with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4 were"):
            call(torch.ones(2), "SUM", None, True)


def test_an_argument_error_is_what_idist_users_catch() -> None:
    for kind in (ValueError, TypeError, idist.UnisonoError):
        with pytest.raises(kind):
            idist.all_reduce(1, "SUMM")  # type: ignore[call-overload]
