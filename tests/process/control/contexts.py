"""Contexts of ranks that are made by hand: how they begin, hear, and wait for each other."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import by_hand
from tests.support.processes import until
from unisono.context import communicator

LIMIT_S = 60.0


def start(
    folder: Path, rank: int, size: int, timeout: float = 60, is_compared: bool = True
) -> None:
    if not is_compared:  # so that ranks meet, and miss each other, on the data plane alone
        os.environ.update(UNISONO_DEBUG="0", UNISONO_SHARED_BYTES="0")
    store = FileStore(str(folder / "store"), size)
    unisono.initialize("gloo", rank=rank, world_size=size, store=store, timeout=timeout)


def in_ranks(
    size: int = 2, *, killed: int = -1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of a rank, a folder and parameters: each rank is made by hand."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(tmp_path: Path, **case: Any) -> None:
            by_hand(lambda rank: body(rank, tmp_path, **case), size, killed)

        _, _, *cases = inspect.signature(body).parameters.values()
        folder = next(iter(inspect.signature(test).parameters.values()))
        vars(test)["__signature__"] = inspect.Signature([folder, *cases])
        return test

    return decorate


def until_there(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths), LIMIT_S)


def tell_of_two_looks(path: Path, ended: int) -> None:
    """Make a file once this rank, while it waits, has looked twice at who is gone.

    Looks count once the process of a descriptor has ended.
    """
    control: Any = communicator().control
    gone, looks = control.gone, list[None]()

    def look(*where: Any) -> Any:
        has_ended, absent = select.select([ended], [], [], 0)[0], gone(*where)
        if has_ended:
            looks.append(None)
        if len(looks) == 2:
            path.touch()
        return absent

    control.gone = look


@contextlib.contextmanager
def heard(path: Path | None = None, begin: str = "") -> Iterator[list[str]]:
    """Collect the warnings of this process that begin so, and make a file at each."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def keep(record: logging.LogRecord) -> None:
        if record.getMessage().startswith(begin):
            said.append(record.getMessage())
            if path is not None:
                path.touch()

    vars(handler)["emit"] = keep
    logging.getLogger("unisono").addHandler(handler)
    yield said
    logging.getLogger("unisono").removeHandler(handler)
