"""Imports torch while an interpreter loads its ``site``, and forks it there for each rank.

Python imports this file at the start of ``python train.py`` if its folder is in PYTHONPATH. It
serves until all ranks have ended. Each fork returns from here, and its interpreter runs the script
as any other: no frame, argument or module of ours is left for the script to see. Only what
importing torch has changed is put back. What a script can see is compared with that of a new
interpreter by tests/launch/test_forked_scripts.py.
"""

from __future__ import annotations

import sys

_BEFORE = set(sys.modules)

import atexit  # noqa: E402
import copy  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

_LINK = "UNISONO_LINK"
_HERE = Path(__file__).resolve().parent
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband")


# By its path, as the package may be missing from sys.path.
_spec: Any = importlib.util.spec_from_file_location(
    "unisono_forkserver", _HERE.parents[1] / "job" / "forkserver.py"
)
_forkserver: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_forkserver)


def _effects() -> object:
    """Return what this process has done that others could see: output, children, threads, files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    written = next(line for line in lines if line.startswith("wchar"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return written, children, os.listdir("/proc/self/task"), len(os.listdir("/proc/self/fd"))


class _Hidden:
    """The modules that importing torch has loaded: hidden until the script imports them."""

    def __init__(self) -> None:
        self._filters = list(warnings.filters)
        atexit.register(self._leave)  # registered first, so that it runs last
        gc.disable()
        import torch

        _forkserver.prepare_for_forks()
        gc.enable()
        self._new_filters = [item for item in warnings.filters if item not in self._filters]
        self._torch: Any = torch
        names = [name for name in sys.modules if name not in _BEFORE]
        self._standard = {name.partition(".")[0] for name in names} & sys.stdlib_module_names
        self._hidden: dict[str, Any] = {
            name: sys.modules[name]
            for name in names
            if name.partition(".")[0] not in {*self._standard, "__mp_main__"}
        }
        self._at_load = _forkserver.at_load(os.environ)
        self._is_late = False

    def why_unusable(self, beside: str) -> str:
        """Return why forks of this process would differ from new interpreters; empty if not."""
        if not hasattr(ctypes.CDLL(None), "on_exit"):
            return "this isn't Linux with glibc"
        try:
            _effects()
        except (OSError, StopIteration):
            return "/proc doesn't show what a process has written and started"
        # OpenBLAS's threads end at the first fork, and only there.
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if len(os.listdir("/proc/self/task")) > 1:
            return "importing torch has started threads that stay"
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        if any(path.startswith(_DEVICES) for path in opened) or self._torch.cuda.is_initialized():
            return "importing torch has opened a device"
        beside_it = os.listdir(beside) if beside else []
        shadows = [name for name in beside_it if name.partition(".")[0] in self._standard]
        for path in [Path(beside, name) for name in shadows]:
            if path.suffix in (".py", ".pyc", ".so") or (path / "__init__.py").exists():
                return f"{path} has the name of a module of Python's"
        return ""

    def hide(self) -> None:
        """Make this fork a process that hasn't imported torch."""
        if _forkserver.at_load(os.environ) != self._at_load:
            raise OSError("other variables than the server's")
        importlib.invalidate_caches()
        _forkserver.seed_generators()
        for name in self._hidden:
            del sys.modules[name]
        self._set_filters(self._filters)
        log: Any = logging
        log._startTime = time.time() if isinstance(log._startTime, float) else time.time_ns()
        main: Any = threading.main_thread()
        main._set_native_id()  # a fork keeps its parent's
        multiprocessing.current_process().authkey = os.urandom(32)
        # Frozen by `prepare_for_forks`, its objects would never be finalized, nor files flushed.
        script = ctypes.py_object(vars(sys.modules["__main__"]))
        ctypes.pythonapi.PyObject_GC_UnTrack(script)
        ctypes.pythonapi.PyObject_GC_Track(script)
        # Handlers run in reverse order. `_exit`, which gets the exit code, skips those before it:
        # the destructors of the libraries loaded so far, which would copy every page.
        libc: Any = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        libc["__cxa_atexit"](libc.fflush, None, None)  # writes the C library's buffers
        self._environ, self._folder, self._seen = dict(os.environ), os.getcwd(), _effects()
        sys.meta_path.insert(0, self)

    def _leave(self) -> None:
        """Keep the server's modules out of the interpreter's end, which would copy their pages."""
        for name in self._hidden:
            sys.modules.pop(name, None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._hidden))

    @staticmethod
    def _set_filters(filters: list[Any]) -> None:
        warnings.filters[:] = filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    # The protocol of finders and loaders

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Find a hidden module."""
        if name not in self._hidden:
            return None
        spec = copy.copy(self._hidden[name].__spec__)
        spec.loader, spec.loader_state = self, self._hidden[name].__spec__
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        """Return a hidden module, and reveal all that belong to it."""
        self._check_is_in_time(spec.name)
        top = spec.name.partition(".")[0]
        if top == "torch":
            sys.meta_path.remove(self)
            self._set_filters([*self._new_filters, *warnings.filters])
        for name, hidden in self._hidden.items():
            if top in ("torch", name.partition(".")[0]):
                sys.modules.setdefault(name, hidden)
        module: ModuleType = self._hidden[spec.name]
        return module

    def exec_module(self, module: Any) -> None:
        """Restore the module's own spec, which the import has replaced."""
        module.__spec__ = module.__spec__.loader_state

    def _check_is_in_time(self, name: str) -> None:
        """Start again as a new interpreter if an import would do something else there."""
        changed = {variable for variable, _ in _forkserver.at_load(os.environ) ^ self._at_load}
        if "." not in name:
            finders = [finder for finder in sys.meta_path if finder is not self]
            specs = (finder.find_spec(name, None) for finder in finders)
            found = next(filter(None, specs), None)
            ours = self._hidden[name].__spec__
            if found is None or ours is None or found.origin != ours.origin:
                changed.add("sys.path")
        if not changed or self._is_late:
            return
        if _effects() == self._seen:
            os.chdir(self._folder)
            os.execve(sys.executable, sys.orig_argv, self._environ)
        self._is_late = True  # said once
        words = ", ".join(sorted(changed))
        sys.stderr.write(
            f"unisono run: {words} was changed after torch was loaded: use unisono run --fresh\n"
        )


def _run_agent(options: list[str]) -> NoReturn:
    """Be torch's agent, which gives its stdin to the wrappers of its ranks."""
    from torch.distributed.run import main

    try:
        main(options)
    except BaseException:  # a rank has failed, or a signal has come
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _become_rank(channel: socket.socket, server: int, mask: set[Any], hidden: _Hidden) -> None:
    """Make this fork a rank of the script; the ranks' store and torch's agent never return."""
    with channel:  # until it is closed, the launcher waits: no signal may come before `setpgid`
        with channel.makefile() as file:
            request = json.load(file)
        _forkserver.die_with(server)
        os.setpgid(0, 0)
    if "store" in request:
        sys.path.insert(0, str(_HERE.parents[3]))
        from unisono.control.stores import host_forever

        host_forever(*request["store"])
    os.environ.clear()
    os.environ.update(request["environ"])
    # A new interpreter has this handler, too: a shell's "&" has made the server ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if options := request.get("agent"):
        _run_agent(options)
    try:
        hidden.hide()
    except Exception:  # this Python or torch is other than expected
        os.execve(sys.executable, sys.orig_argv, request["environ"])


def _fork_ranks() -> None:
    """Serve as this process; return only in forks that are ranks."""
    # Signals to all processes of a job, such as those of a time limit, are for its ranks: the
    # server ends with the launcher, and lets the ranks save.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _forkserver.OF_RANKS)
    link = json.loads(os.environ.pop(_LINK))
    control = socket.socket(fileno=link["control"])
    try:
        entry = os.path.dirname(__file__)
        sys.path[:] = [item for item in sys.path if item != entry]
        sys.path_importer_cache.pop(entry, None)
        hidden = _Hidden()
        answer = hidden.why_unusable(link["beside"]) or "ready"
        control.send(answer.encode())
        if answer != "ready":
            os._exit(0)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        server = os.getpid()
        channel = _forkserver.serve(control, 0)
        if channel is None:
            os._exit(0)
        _become_rank(socket.socket(fileno=channel), server, mask, hidden)
    except BaseException:  # `site` would print it, and the interpreter run the script
        os._exit(1)


_fork_ranks()
del sys.modules[__name__]
# The next one in sys.path, the user's; `site` ignores the error if there is none.
importlib.import_module("sitecustomize")
