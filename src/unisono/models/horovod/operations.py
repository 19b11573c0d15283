"""Operations of Horovod: start, names, waiting, and mapping of errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.control.plane import SocketControlPlane
from unisono.control.waiting import LOOK_S, Wait
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PayloadError,
    PeerFailedError,
)
from unisono.model.handle import Handle
from unisono.topology import Group, name_of

Start = Callable[[str, Any], int]
"""Function that starts an operation under a name in a process set; returns Horovod's handle."""
NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_ERRORS: dict[str, type[CollectiveError]] = {
    "^Mismatched": CollectiveMismatchError,
    "horovod has been shut down|not been initialized|closed by peer|reset by peer": PeerFailedError,
}
_MAX_COUNT = 2**31 - 1
_ASYNC_NAMES = 512  # fewer than Horovod's response cache holds, 1024


class HorovodCalls:
    """Operations of one replica in one Horovod context."""

    # Horovod matches operations by name. These names depend only on the group and the kind of call,
    # never on a value, so mismatched calls raise Horovod's own error; and the response
    # cache works, which a new name for each call would only fill. Concurrent calls are
    # numbered.

    def __init__(self, hvd: ModuleType, control: SocketControlPlane) -> None:
        self._hvd: Any = hvd
        self._control = control
        self._under_way: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def run(self, call: str, group: Group | None, count: int, start: Start, label: str = "") -> Any:
        """Start an operation and wait for its value. Collective over `group`."""
        return self._finish(*self._begin(call, group, count, start, label))

    def start(self, call: str, group: Group | None, count: int, start: Start) -> Handle[Any]:
        """Start an operation without waiting for it. Collective over `group`, as `run` is."""
        number = self._numbers.get(team := name_of(group), 0)
        self._numbers[team] = number + 1
        work = self._begin(call, group, count, start, f".async{number % _ASYNC_NAMES}")
        return Handle(partial(self._finish, *work), partial(self._is_done, work[-1]))

    def fail(self, call: str, group: Group | None, error: Exception) -> NoReturn:
        """Raise our error for an error of Horovod's."""
        try:
            Wait(self._control, group, call).fail(_ERRORS, error)
        except CollectiveMismatchError as ours:
            text = f"{ours}; make every rank call the same, with equal shapes and dtypes"
            raise CollectiveMismatchError(text) from error

    def _begin(
        self, call: str, group: Group | None, count: int, start: Start, label: str
    ) -> tuple[str, str, Group | None, int, int]:
        """Start an operation; return the arguments of `_finish`."""
        if count > _MAX_COUNT:
            raise PayloadError(
                f"{call} of {count} elements over all ranks: Horovod counts in 32 bits, so "
                f"{_MAX_COUNT} are the most; split the tensor"
            )
        members = self._hvd.global_process_set if group is None else group.handle
        name = f"unisono.{name_of(group)}{label}"
        key = f"{call}.{name}"
        earlier = self._under_way.get(key)
        if earlier is not None:  # it timed out, was interrupted, or hasn't been waited for
            self._wait(call, group, 0, earlier)
        step = self._control.steps.begin(name_of(group), call)
        try:
            handle = self._under_way[key] = start(name, members)
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is a RuntimeError
            self.fail(call, group, error)
        return key, call, group, step, handle

    def _wait(self, call: str, group: Group | None, step: int, handle: int) -> None:
        look, begin = Wait(self._control, group, call, step), time.monotonic()
        look_at = begin + LOOK_S
        while not self._is_done(handle):
            now = time.monotonic()
            if now >= look_at:
                look()
                look_at = now + LOOK_S
            # hvd.synchronize would spin, on a core that Horovod's own thread may need.
            time.sleep(min(max((now - begin) / 50, 5e-5), 1e-3))

    def _finish(self, key: str, call: str, group: Group | None, step: int, handle: int) -> Any:
        self._wait(call, group, step, handle)
        if self._under_way.get(key) == handle:
            del self._under_way[key]
        try:
            return self._hvd.synchronize(handle)
        except (RuntimeError, ValueError) as error:
            self.fail(call, group, error)

    def _is_done(self, handle: int) -> bool:
        try:
            return bool(self._hvd.poll(handle))
        except ValueError:  # another thread has waited for it already
            return True


def widened(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a tensor that Horovod reduces exactly, and the inverse conversion."""
    dtype = tensor.dtype
    if dtype in NARROW:
        return tensor.to(torch.int32), lambda total: total.to(dtype)
    return tensor, lambda total: total
