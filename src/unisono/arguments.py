"""Checks of users' arguments, before anything starts."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from unisono.errors import ArgumentError, EnvironmentDetectionError

LAST_PORT = 65535
_HOST = re.compile(r"([\w.-]+)(?::([1-9][0-9]{0,5}))?")


# The variables that users set; docs/reference/variables.md describes them.
_VARIABLES = (
    *("UNISONO_BACKEND", "UNISONO_DEBUG", "UNISONO_NO_PICKLE", "UNISONO_RANK_COUNTS"),
    *("UNISONO_SHARED_BYTES", "UNISONO_SOCKET_IFNAME", "UNISONO_STATUS", "UNISONO_TRACE"),
    *("UNISONO_TRACEBACK", "UNISONO_WARN_AFTER_S"),
)


def check_variables() -> None:
    """Raise if one of our variables is misspelt or its number is bad; called before a start."""
    for variable in ("UNISONO_WARN_AFTER_S", "UNISONO_SHARED_BYTES"):
        number_in(variable, 0.0)  # called only for its error
    known = {name.removeprefix("UNISONO_"): name for name in _VARIABLES}
    for name in os.environ:
        # Other programs may have variables of this prefix, whose names aren't near to ours.
        if name.startswith("UNISONO_") and name not in _VARIABLES:
            near = difflib.get_close_matches(name.removeprefix("UNISONO_"), known, 1, 0.8)
            if near:
                raise ArgumentError(f"unknown variable {name}: did you mean {known[near[0]]}?")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return an int from `least` to `most`, also from a decimal string, as from ``argparse``."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ArgumentError(f"{name}={value!r} should be an int {limits}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Return whether a value counts as true."""
    try:
        return bool(value)
    except Exception as error:  # such as a tensor of several elements
        kind = type(value).__name__
        raise ArgumentError(f"{name} should be True or False, not a {kind}: {error}") from error


def ranks_by_host(name: str, text: str) -> dict[str, int]:
    """Parse NAME:RANKS,NAME:RANKS into the ranks of each host; a name alone has 1 rank."""
    matches = [_HOST.fullmatch(item.strip()) for item in text.split(",")]
    found = {match[1]: int(match[2] or 1) for match in matches if match}
    if len(found) != len(matches):  # an item is malformed, or a name occurs twice
        raise ArgumentError(
            f"{name}={text!r} should be NAME:RANKS,NAME:RANKS, each name once, at least 1 rank each"
        )
    return found


def check_names(call: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise on unknown keywords, and suggest the nearest known one."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise ArgumentError(
                f"{call} takes no option {name!r}.{suggestion(name, names)} It takes: "
                f"{', '.join(names)}"
            )


def only_timeout_s(call: str, options: Mapping[str, Any]) -> float | None:
    """Return the seconds of ``timeout``, the only option of a call; None if it isn't given."""
    check_names(call, options, {"timeout"})
    timeout = options.get("timeout")
    return None if timeout is None else float(timeout.total_seconds())


def suggestion(name: Any, known: Iterable[str]) -> str:
    """Return a suggestion of the nearest known name, beginning with a space, or nothing."""
    names = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), names, n=1) if isinstance(name, str) else []
    return f" Did you mean {names[near[0]]!r}?" if near else ""


def seconds(name: str, value: Any, *, may_be_zero: bool = False) -> timedelta:
    """Return seconds or a timedelta as a timedelta; raise unless it is over 0, or an allowed 0."""
    if isinstance(value, timedelta):
        given = value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            given = timedelta(seconds=value)
        except (OverflowError, ValueError) as error:
            raise ArgumentError(f"{name}={value!r} isn't a number of seconds") from error
    else:
        raise ArgumentError(f"{name}={value!r} should be seconds or a timedelta")
    if given < timedelta(0) or (not given and not may_be_zero):
        limit = "at least 0" if may_be_zero else "over 0"
        raise ArgumentError(f"{name}={value!r} should be {limit}")
    return given


def number_in(variable: str, default: float, least: float = 0.0) -> float:
    """Read a number from one of our variables; return `default` if it isn't set."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least <= value < math.inf):  # NaN fails every comparison
        raise EnvironmentDetectionError(
            f"{variable}={text[:60]!r} should be a number of at least {least:g}: correct or unset "
            "it",
            source="unisono",
            variable=variable,
            value=text,
        )
    return value
