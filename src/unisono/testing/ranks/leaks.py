"""What a test left behind: variables, directory, settings, contexts, threads and files."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from unisono import context

_PATIENCE_S = 0.2  # for threads that are about to end
_LONGEST = 60
_FDS = "/proc/self/fd"
# Threads and files of pytest's, torch's and our own, which stay for the process.
_OWN_THREADS = ("unisono", "pymp-", "QueueFeederThread", "tqdm_monitor", "pydevd", "execnet")
_OWN_FILES = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/", "/proc/", "/sys/")
_OWN_VARIABLES = frozenset(
    {
        *("PYTEST_CURRENT_TEST", "COLUMNS", "LINES"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING"),  # torch's
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # OpenMP's, once it is loaded
    }
)


@dataclass(frozen=True)
class _Snapshot:
    """What a process, or a rank of it, has at one moment."""

    variables: Mapping[str, str]
    folder: str
    threads: frozenset[threading.Thread]
    files: Mapping[int, str]
    settings: Mapping[str, object]
    group: object
    model: object


class LeakCheck:
    """Tells what is left of a test that begins now."""

    def __init__(self, *, of_process: bool = True, of_rank: bool = True) -> None:
        self._take = partial(_take, of_process, of_rank)
        self._before = self._take()

    @contextmanager
    def allowing(self) -> Iterator[None]:
        """Allow what a fixture makes that outlives the test."""
        was = self._take()
        try:
            yield
        finally:
            self._before = _adopted(self._before, was, self._take())

    def left(self) -> list[str]:
        """Name what is there that wasn't, or is gone or another."""
        # Local; takes some 0.1 ms, and 0.01 ms for each open descriptor. It waits for a moment for
        # new threads that are about to end.
        before, after = self._before, self._take()
        return [
            *_of_variables(before.variables, after.variables),
            *_of_folder(before.folder, after.folder),
            *_of_settings(before.settings, after.settings),
            *_of_contexts(before, after),
            *_of_threads(after.threads - before.threads),
            *_of_files(before.files, after.files),
        ]

    def restore(self) -> None:
        """Set back what can be, where no process ends that has it."""
        before = self._before
        torch.set_default_dtype(cast("torch.dtype", before.settings["default dtype"]))
        torch.use_deterministic_algorithms(bool(before.settings["deterministic algorithms"]))
        for name in set(os.environ) - set(before.variables) - _OWN_VARIABLES:
            del os.environ[name]
        os.environ.update(before.variables)
        if before.folder and before.folder != _folder():
            os.chdir(before.folder)


def left_text(left: Sequence[str]) -> str:
    """Say what a test left behind, and what to do."""
    return (
        f"the test left behind: {'; '.join(left)}\n"
        "undo it within the test or a fixture: other tests run in the same ranks\n"
    )


def _take(of_process: bool, of_rank: bool) -> _Snapshot:
    model = context.current_model() if of_rank else None
    if not of_process:
        return _Snapshot({}, "", frozenset(), {}, {}, None, model)
    threads = frozenset(threading.enumerate())
    variables = {n: value for n, value in os.environ.items() if n not in _OWN_VARIABLES}
    files, settings = dict(_files()), _settings()
    return _Snapshot(variables, _folder(), threads, files, settings, _default_group(), model)


def _adopted(before: _Snapshot, was: _Snapshot, now: _Snapshot) -> _Snapshot:
    """Add to what was there at first what has changed since."""
    gone = was.variables.keys() - now.variables.keys()
    set_since = {n: v for n, v in now.variables.items() if was.variables.get(n) != v}
    variables = {n: v for n, v in before.variables.items() if n not in gone}
    opened = {fd: name for fd, name in now.files.items() if was.files.get(fd) != name}
    return _Snapshot(
        {**variables, **set_since},
        before.folder if was.folder == now.folder else now.folder,
        before.threads | (now.threads - was.threads),
        {**before.files, **opened},
        before.settings if was.settings == now.settings else now.settings,
        before.group if was.group is now.group else now.group,
        before.model if was.model is now.model else now.model,
    )


def _of_variables(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        was, value = before.get(name), after.get(name)
        if was == value:
            continue
        if value is None:
            yield f"environment variable {name} is gone"
        elif was is None:
            yield f"environment variable {name}={_short(value)}"
        else:
            yield f"environment variable {name}={_short(value)}, which was {_short(was)}"


def _short(value: str) -> str:
    return repr(value if len(value) <= _LONGEST else value[:_LONGEST] + "...")


def _of_folder(before: str, after: str) -> Iterator[str]:
    if before != after:
        yield f"working directory {after or 'that is gone'}, which was {before}"


def _settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _of_settings(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    for name, value in after.items():
        if before[name] != value:
            yield f"torch's {name} {value}, which was {before[name]}"


def _of_contexts(before: _Snapshot, after: _Snapshot) -> Iterator[str]:
    if before.model is not after.model:
        yield "the context of its ranks, which it ended or replaced"
    elif before.group is not after.group:
        what = {(True, False): "is there", (False, True): "is gone"}
        state = what.get((before.group is None, after.group is None), "is another one")
        yield f"torch's default process group {state}"


def _of_threads(new: frozenset[threading.Thread]) -> Iterator[str]:
    for thread in sorted(new, key=lambda each: each.name):
        if thread.name.startswith(_OWN_THREADS):
            continue
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            target: Any = getattr(thread, "_target", None)
            name = getattr(target, "__qualname__", type(thread).__qualname__)
            yield f"thread {thread.name!r}, which still runs {name}"


def _of_files(before: Mapping[int, str], after: Mapping[int, str]) -> Iterator[str]:
    for fd, name in sorted(after.items()):
        if before.get(fd) != name and not name.startswith(_OWN_FILES):
            yield f"open file {name} (descriptor {fd})"


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _files() -> Iterator[tuple[int, str]]:
    """List the open descriptors, where the system can tell them."""
    with suppress(OSError):
        for name in os.listdir(_FDS):
            with suppress(OSError):  # the one that lists them is closed by now
                yield int(name), os.readlink(f"{_FDS}/{name}")


def _default_group() -> object:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return None if distributed is None else distributed.GroupMember.WORLD
