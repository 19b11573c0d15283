"""How Horovod's operations are started, named, waited for, and what their errors mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.deadlines import allowed_s, format_s, host_s, limit_of
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PayloadError,
    PeerFailedError,
)
from unisono.model.error_mapping import ErrorRow, mapped
from unisono.model.handle import Handle
from unisono.topology import Group, name_of

Start = Callable[[str, Any], int]
"""Starts an operation under a name in a process set; gives Horovod's handle."""
_Work = tuple[str, int]
"""An operation under way: its key in the table, and Horovod's handle."""

NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_ERRORS = (
    ErrorRow(Exception, "^Mismatched", CollectiveMismatchError),
    ErrorRow(
        Exception,
        "horovod has been shut down|not been initialized|closed by peer|reset by peer",
        PeerFailedError,
    ),
    ErrorRow(Exception, "", CollectiveError),
)
_REASONS: dict[type[CollectiveError], str] = {
    CollectiveMismatchError: "met something else on another rank: {text} Make every rank call the "
    "same, with equal shapes and dtypes",
    PeerFailedError: "lost a peer: another rank failed, ended, or shut Horovod down: {text}",
    CollectiveError: "failed: {text}",
}
_MAX_COUNT = 2**31 - 1
_ASYNC_NAMES = 512  # fewer than Horovod's response cache holds, 1024


class Calls:
    """The operations of one replica in one Horovod context."""

    # Horovod matches operations by name. These names depend on the group and the kind of call
    # alone, never on a value, so ranks that disagree get Horovod's own error; and the response
    # cache works, which a new name for each call would only fill. Calls that run side by side are
    # numbered.

    def __init__(self, hvd: ModuleType, timeout_s: float) -> None:
        self._hvd: Any = hvd
        self.timeout_s = timeout_s
        self._place = f"rank {hvd.rank()} of {hvd.size()}"
        self._under_way: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def run(self, call: str, group: Group | None, count: int, start: Start, label: str = "") -> Any:
        """Start an operation and wait for its value. Collective over `group`."""
        return self._finish(self._begin(call, group, count, start, label), call, group)

    def start(self, call: str, group: Group | None, count: int, start: Start) -> Handle[Any]:
        """Start an operation without waiting for it. Collective over `group`, as `run` is."""
        number = self._numbers.get(team := name_of(group), 0)
        self._numbers[team] = number + 1
        work = self._begin(call, group, count, start, f".async{number % _ASYNC_NAMES}")
        return Handle(lambda: self._finish(work, call, group), lambda: self._is_done(work))

    def fail(self, call: str, group: Group | None, error: Exception) -> NoReturn:
        """Raise our error for one of Horovod's."""
        text = str(error).strip()
        ours = mapped(_ERRORS, error, text) or CollectiveError
        raise ours(f"{self._where(call, group)} {_REASONS[ours].format(text=text)}") from error

    def _where(self, call: str, group: Group | None) -> str:
        return f"{self._place}: {call}" + ("" if group is None else f" in group {group.ranks}")

    def _process_set(self, group: Group | None) -> Any:
        return self._hvd.global_process_set if group is None else group.handle

    def _begin(self, call: str, group: Group | None, count: int, start: Start, label: str) -> _Work:
        if count > _MAX_COUNT:
            raise PayloadError(
                f"{call} of {count} elements over all ranks: Horovod counts in 32 bits, so "
                f"{_MAX_COUNT} are the most; split the tensor"
            )
        members = self._process_set(group)
        name = f"unisono.{name_of(group)}{label}"
        key = f"{call}.{name}"
        earlier = self._under_way.get(key)
        if earlier is not None:  # it timed out, was interrupted, or nobody waited for it yet
            self._wait(earlier, call, group)
        try:
            handle = self._under_way[key] = start(name, members)
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is a RuntimeError
            self.fail(call, group, error)
        return key, handle

    def _wait(self, handle: int, call: str, group: Group | None) -> None:
        begin, limit_s = time.monotonic(), limit_of(allowed_s(self, group)) or 0.0
        try:
            while not self._hvd.poll(handle):
                waited_s = time.monotonic() - begin
                if waited_s > host_s(limit_s):
                    raise CollectiveTimeoutError(
                        f"{self._where(call, group)} timed out after {format_s(limit_s)}: some "
                        "rank didn't come, or called something else"
                    )
                # hvd.synchronize would spin, on a core that Horovod's own thread may need.
                time.sleep(min(max(waited_s / 50, 5e-5), 1e-3))
        except ValueError:
            return  # somebody has waited for it already

    def _finish(self, work: _Work, call: str, group: Group | None) -> Any:
        key, handle = work
        self._wait(handle, call, group)
        if self._under_way.get(key) == handle:
            del self._under_way[key]
        try:
            return self._hvd.synchronize(handle)
        except (RuntimeError, ValueError) as error:
            self.fail(call, group, error)

    def _is_done(self, work: _Work) -> bool:
        try:
            return bool(self._hvd.poll(work[1]))
        except ValueError:
            return True


def widened(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what Horovod reduces exactly instead of a tensor, and the way back."""
    dtype = tensor.dtype
    if dtype in NARROW:
        return tensor.to(torch.int32), lambda total: total.to(dtype)
    return tensor, lambda total: total
