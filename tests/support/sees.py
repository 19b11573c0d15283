"""A script that prints, as a line of JSON, what it can see of its start; or ends in a certain way.

    python sees.py [--short] [NAME=VALUE ...] [its own arguments]
    python sees.py --end KIND

The rank R sets the R-th NAME=VALUE before it imports torch; `--short` leaves out what starts other
processes. KIND is one of PASSING or FAILING; with "PASSING" it is that of the rank, and with
"FAILING" that of the attempt. It starts each stream's output.

A row is equal in all starts of a script with the same command, but for "rank's own: ...", which
differs between the ranks of a start.
"""

import sys

# Before anything else is imported.
_MODULES, _NAMES = list(sys.modules), sorted(globals())
_STACK = [sys._getframe()]
while (_frame := _STACK[-1].f_back) is not None:
    _STACK.append(_frame)
_FRAMES = len(_STACK) - 1
del _STACK, _frame
_HOOKS = [sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook]
import warnings

_FILTERS = [repr(item) for item in warnings.filters]
_FINDERS = [getattr(item, "__name__", type(item).__name__) for item in sys.meta_path]
import atexit
import gc
import os

_HANDLERS, _FROZEN, _ENVIRON = atexit._ncallbacks(), gc.get_freeze_count(), dict(os.environ)
_TASKS, _FILES = len(os.listdir("/proc/self/task")), sorted(os.listdir("/proc/self/fd"), key=int)
with open("/proc/self/status") as _file:
    _STATUS = dict(_line.rstrip("\n").split(":\t", 1) for _line in _file if ":\t" in _line)
del _file

import asyncio
import builtins
import contextvars
import ctypes
import dataclasses
import decimal
import faulthandler
import fcntl
import importlib.util
import inspect
import io
import json
import linecache
import locale
import logging
import multiprocessing.process
import pickle
import random
import re
import resource
import signal
import site
import stat
import subprocess
import tempfile
import threading
import time
import traceback
import tracemalloc
import typing
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Row = Callable[[], Any]
SYS: Any = sys
SPEC: Any = __spec__
LOADER: Any = globals()["__loader__"]
LIBC = ctypes.CDLL(None)
torch: Any  # once it is imported
_OWN_FILE = re.compile(r"sees\.py|__main__\.py")


@dataclasses.dataclass
class Point:
    """A class of __main__."""

    x: int
    y: "list[int]" = dataclasses.field(default_factory=list)


class Squares:
    """A data set of __main__."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> float:
        return float(i * i)


def twice(x: float) -> float:
    """A function of __main__."""
    return x + x


def fail() -> None:
    raise ValueError("on purpose")


async def nothing() -> None: ...


# ---- how the interpreter was told to start


monitoring = getattr(sys, "monitoring", None)
OF_INTERPRETER: dict[str, Row] = {
    "sys: argv": lambda: sys.argv,
    "sys: orig_argv": lambda: sys.orig_argv,
    "sys: path[0]": lambda: sys.path[0],
    "sys: path, the rest": lambda: sys.path[1:],
    "sys: flags": lambda: repr(sys.flags),
    "sys: warnoptions": lambda: sys.warnoptions,
    "sys: _xoptions": lambda: sys._xoptions,
    "sys: executable, base": lambda: [sys.executable, SYS._base_executable],
    "sys: prefixes": lambda: [sys.prefix, sys.base_prefix, sys.exec_prefix],
    "sys: pycache_prefix": lambda: [sys.pycache_prefix, sys.dont_write_bytecode],
    "sys: digits of int, recursion": lambda: [
        SYS.get_int_max_str_digits(),
        sys.getrecursionlimit(),
    ],
    "sys: switch interval, dlopen flags": lambda: [
        sys.getswitchinterval(),
        sys.getdlopenflags(),
    ],
    "sys: excepthook and others": lambda: [repr(hook) for hook in _HOOKS],
    "sys: last exception": lambda: [name for name in vars(sys) if name.startswith("last_")],
    "sys: meta_path": lambda: _FINDERS,
    "sys: path_hooks": lambda: [getattr(hook, "__name__", "") for hook in sys.path_hooks],
    "sys: trace, profile, monitoring": lambda: [
        sys.gettrace(),
        sys.getprofile(),
        sys.get_coroutine_origin_tracking_depth(),
        monitoring and [monitoring.get_tool(number) for number in range(6)],
    ],
    "sys: modules at start, third party": lambda: sorted(
        {name.partition(".")[0] for name in _MODULES} - {*sys.stdlib_module_names, "__mp_main__"}
    ),
    "sys: modules at start, standard library": lambda: sorted(
        name for name in _MODULES if name.partition(".")[0] in sys.stdlib_module_names
    ),
    "asserts are run": lambda: __debug__,
    "hash of a str": lambda: (
        hash("unisono") if os.environ.get("PYTHONHASHSEED", "random") != "random" else "random"
    ),
    "encoding: of file names": lambda: [
        sys.getfilesystemencoding(),
        sys.getfilesystemencodeerrors(),
    ],
    "encoding: locale": lambda: [
        locale.getpreferredencoding(),
        locale.setlocale(locale.LC_ALL),
        locale.localeconv(),
    ],
    "site: user's customization ran, in this process": lambda: (
        getattr(sys, "_customized_in", None) == os.getpid()
    ),
    "site: user site": lambda: site.ENABLE_USER_SITE,
    # Older versions of torch keep pybind11's state there, from the time that they are loaded.
    "site: names in builtins": lambda: [
        name for name in sorted(vars(builtins)) if "pybind11" not in name
    ],
}


# ---- who __main__ is


def traceback_of_exception() -> list[str]:
    try:
        fail()
    except ValueError:
        return traceback.format_exc().splitlines()
    return []


def places_of_warnings() -> list[Any]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("one", stacklevel=1)
        warnings.warn("two", stacklevel=50)
    return [[item.filename, item.lineno > 1] for item in seen]


OF_MAIN: dict[str, Row] = {
    "main: __file__": lambda: globals().get("__file__"),
    "main: __name__, __package__": lambda: [__name__, globals().get("__package__", "none")],
    "main: __doc__": lambda: (__doc__ or "")[:20],
    "main: __spec__": lambda: SPEC and [SPEC.name, SPEC.origin, SPEC.parent],
    "main: __cached__": lambda: globals().get("__cached__", "none"),
    "main: __loader__": lambda: [
        type(LOADER).__name__,
        getattr(LOADER, "name", None),
        getattr(LOADER, "path", None),
    ],
    "main: __builtins__": lambda: type(globals()["__builtins__"]).__name__,
    "main: names at start": lambda: _NAMES,
    "main: is sys.modules['__main__']": lambda: vars(sys.modules["__main__"]) is globals(),
    "main: __mp_main__": lambda: sys.modules.get("__mp_main__") is sys.modules["__main__"],
    "main: frames below the script": lambda: _FRAMES,
    "main: inspect.stack": lambda: [
        info.function for info in inspect.stack() if not _OWN_FILE.search(info.filename)
    ],
    "main: pickle of a class": lambda: [pickle.dumps(Point(1, [2])).hex(), Point.__module__],
    "main: unpickled": lambda: pickle.loads(pickle.dumps(Point(3))) == Point(3),
    "main: source of a function": lambda: [
        inspect.getsource(twice),
        inspect.getsourcefile(twice),
    ],
    "main: lines of its file": lambda: len(linecache.getlines(__file__)),
    "main: type hints of a class": lambda: str(typing.get_type_hints(Point)),
    "main: data beside it, by __loader__": lambda: len(LOADER.get_data(__file__)),
    "main: traceback of an exception": traceback_of_exception,
    "main: places of warnings": places_of_warnings,
}


# ---- state of the standard library


def log_is_older_than_process() -> bool:
    start: float = logging._startTime  # type: ignore[attr-defined]
    now_s = start if isinstance(start, float) else start / 1e9
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    age_s = up_s - float(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - now_s > age_s + 0.1


def main_thread() -> list[Any]:
    thread = threading.main_thread()
    is_current = thread is threading.current_thread() and thread.ident == threading.get_ident()
    is_own = thread.native_id == threading.get_native_id() == os.getpid()
    return [is_current, thread.name, thread.daemon, is_own]


def multiprocessing_state() -> list[Any]:
    process = multiprocessing.current_process()
    return [
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.parent_process(),
        multiprocessing.active_children(),
        [process.name, process.pid == os.getpid(), process.daemon],
    ]


OF_LIBRARY: dict[str, Row] = {
    "warnings: filters at start": lambda: _FILTERS,
    "warnings: showwarning": lambda: warnings.showwarning.__module__,
    "atexit: handlers at start": lambda: _HANDLERS,
    "gc: frozen objects at start": lambda: bool(_FROZEN),
    "gc: enabled, threshold": lambda: [gc.isenabled(), gc.get_threshold()],
    "gc: callbacks, debug": lambda: [len(gc.callbacks), gc.get_debug()],
    "threads: of Python, of the system": lambda: [threading.active_count(), _TASKS],
    "threads: main thread": main_thread,
    "threads: stack size, excepthook": lambda: [
        threading.stack_size(),
        threading.excepthook.__name__,
        getattr(threading, "_profile_hook", None),
    ],
    "signals: handlers": lambda: {
        number.name if isinstance(number, signal.Signals) else number: repr(handler)
        for number in sorted(signal.valid_signals())
        if (handler := signal.getsignal(number)) is not signal.SIG_DFL
    },
    "signals: mask, pending": lambda: [
        sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        sorted(signal.sigpending()),
    ],
    "signals: wake-up descriptor, timers": lambda: [
        signal.set_wakeup_fd(-1),
        [signal.getitimer(kind) for kind in (0, 1, 2)],
    ],
    "signals: as the kernel has them": lambda: {
        name: _STATUS[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")
    },
    "faulthandler, tracemalloc": lambda: [faulthandler.is_enabled(), tracemalloc.is_tracing()],
    "logging: level, handlers": lambda: [logging.root.level, len(logging.root.handlers)],
    "logging: is older than the process": log_is_older_than_process,
    "time zone, decimal context": lambda: [time.tzname, repr(decimal.getcontext())],
    "contextvars": lambda: len(contextvars.copy_context()),
    "asyncio: runs": lambda: asyncio.run(nothing()),
    "multiprocessing: state": multiprocessing_state,
    "multiprocessing: folder": lambda: multiprocessing.process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    "random: seeded": lambda: random.Random(7).random(),
    "rank's own: random": random.random,
    "rank's own: hash secret": lambda: hash("unisono"),
    "rank's own: place of an object in memory": lambda: id(_NAMES),
    "rank's own: multiprocessing's key": lambda: multiprocessing.current_process().authkey.hex(),
    "rank's own: tempfile's name": lambda: next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
    "rank's own: uuid4": lambda: str(uuid.uuid4()),
    "rank's own: urandom": lambda: os.urandom(4).hex(),
}


# ---- what the system keeps of a process


def streams() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("stdin", "stdout", "stderr"):
        stream: Any = getattr(sys, name)
        number = stream.fileno()
        facts = [type(stream).__name__, stream is getattr(sys, f"__{name}__"), stream.name]
        facts += [stream.mode, number, stream.encoding, stream.errors, stream.line_buffering]
        facts += [stream.write_through, stream.isatty(), type(stream.buffer).__name__]
        facts += [stat.S_IFMT(os.fstat(number).st_mode), fcntl.fcntl(number, fcntl.F_GETFL)]
        found[name] = facts
    return found


def descriptors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _FILES:
        if os.path.exists(f"/proc/self/fd/{name}"):  # else it was the listing's own
            target = os.readlink(f"/proc/self/fd/{name}")
            found[name] = [re.sub(r"\W.*", "", target) or target, os.get_inheritable(int(name))]
    return found


def of_process(option: int) -> int:
    """Return what prctl gives as a number."""
    value = ctypes.c_int(0)
    result: int = LIBC.prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value or result


def of_c() -> list[str]:
    LIBC.getenv.restype = ctypes.c_char_p
    return [
        name
        for name, value in os.environ.items()
        if LIBC.getenv(os.fsencode(name)) != os.fsencode(value)
    ]


def of_kernel() -> set[str]:
    text = Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape")
    return set(text.split("\0")[:-1])


users = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "TracerPid")
limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
own: dict[str, Row] = {
    f"proc: {name}": Path("/proc/self", name).read_text
    for name in ("oom_score_adj", "coredump_filter", "cgroup", "comm")
}
OF_SYSTEM: dict[str, Row] = {
    **own,
    "proc: cmdline": lambda: Path("/proc/self/cmdline").read_text().split("\0"),
    "proc: exe": lambda: os.readlink("/proc/self/exe"),
    "proc: namespaces": lambda: sorted(map(os.readlink, Path("/proc/self/ns").iterdir())),
    "proc: environ is that of os.environ": lambda: (
        of_kernel() == {f"{name}={value}" for name, value in _ENVIRON.items()}
    ),
    "streams": streams,
    "descriptors": descriptors,
    "cwd, root": lambda: [os.getcwd(), os.readlink("/proc/self/root")],
    "umask": lambda: _STATUS["Umask"],
    "limits": lambda: {name: resource.getrlimit(getattr(resource, name)) for name in limits},
    "nice, scheduler, io priority": lambda: [
        os.nice(0),
        os.sched_getscheduler(0),
        LIBC.syscall(252, 1, 0),
    ],
    "affinity, memory's nodes": lambda: [
        sorted(os.sched_getaffinity(0)),
        _STATUS.get("Mems_allowed"),
    ],
    "user, groups, capabilities, seccomp": lambda: {name: _STATUS.get(name) for name in users},
    "huge pages": lambda: _STATUS.get("THP_enabled"),
    "dumpable, parent's death, adopts orphans": lambda: [
        LIBC.prctl(3, 0, 0, 0, 0),
        of_process(2),
        of_process(37),
    ],
    "session, group, terminal": lambda: [
        os.getsid(0) == os.getpid(),
        os.getpgrp() == os.getpid(),
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[4],
    ],
    "environment: names and values": lambda: dict(sorted(_ENVIRON.items())),
    "environment: C has the same": of_c,
}


# ---- torch


def import_torch() -> list[bool]:
    global torch
    before = set(sys.modules)
    import torch

    return ["torch" in before, "torch" in sys.modules, torch.__name__ == "torch"]


def spec_of_torch() -> list[Any]:
    spec: Any = torch.__spec__
    kinds = [type(spec.loader).__name__, type(torch.__loader__).__name__]
    return [spec.name, *kinds, torch.__file__, spec.origin == torch.__file__]


def openmp() -> list[int]:
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/\S*lib[gi]omp\S*", maps)
    library = ctypes.CDLL(found[0] if found else None)
    names = ("max_threads", "dynamic", "max_active_levels")
    return [getattr(library, f"omp_get_{name}")() for name in names]


def backends() -> list[Any]:
    from torch import backends

    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    flags = [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32]
    modules: list[Any] = [backends.mkldnn, backends.mkl, backends.openmp]
    flags += [matmul.allow_tf32, *(module.is_available() for module in modules)]
    return [*flags, backends.cpu.get_cpu_capability()]


def cpp_stack_is_shown() -> bool:
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        return "CapturedTraceback" in str(error) or "frame #" in str(error)
    return False


def random_of_numpy() -> float:
    import numpy

    return float(numpy.random.rand())


def computes() -> list[Any]:
    import numpy

    x = torch.ones(400, 400, requires_grad=True)
    torch.autograd.backward([(x @ x).sum()])
    product = numpy.ones((300, 300)) @ numpy.ones((300, 300))
    return [x.grad is not None and x.grad[0, 0].item(), product[0, 0]]


def saves() -> int:
    file = io.BytesIO()
    torch.save(Point(5), file)
    file.seek(0)
    point: Point = torch.load(file, weights_only=False)
    return point.x


def meets() -> Any:
    distributed = torch.distributed
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    x = torch.ones(1)
    distributed.all_reduce(x)
    distributed.destroy_process_group()
    return x.item()


def logger(name: str) -> list[Any]:
    found = logging.getLogger(name)
    return [found.level, len(found.handlers), found.propagate]


LOGGERS = ("torch", "torch._dynamo", "torch.distributed", "torch._inductor")
OF_TORCH: dict[str, Row] = {
    "torch: import": import_torch,
    "torch: spec, loader, file": spec_of_torch,
    "torch: find_spec": lambda: [
        getattr(importlib.util.find_spec(name), "origin", None)
        for name in ("torch", "numpy", "torch.nn", "torch.utils.data")
    ],
    "sys: modules after import torch": lambda: sorted(
        name for name in sys.modules if name.startswith(("torch", "numpy"))
    ),
    "sys: meta_path after import torch": lambda: [
        getattr(item, "__name__", type(item).__name__) for item in sys.meta_path
    ],
    "warnings: filters after import torch": lambda: [repr(item) for item in warnings.filters],
    "torch: threads": lambda: [torch.get_num_threads(), torch.get_num_interop_threads()],
    "torch: parallel_info": lambda: torch.__config__.parallel_info(),
    "torch: OpenMP's own numbers": openmp,
    "torch: default dtype, device": lambda: [
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
    ],
    "torch: grad, anomaly, deterministic": lambda: [
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ],
    "torch: backends' flags": backends,
    "torch: cuda untouched": lambda: [
        torch.cuda.is_initialized(),
        torch.cuda._is_in_bad_fork(),
        getattr(torch.cuda, "_cached_device_count", None),
        torch.cuda.is_available(),
    ],
    "torch: CUDA_VISIBLE_DEVICES": lambda: torch.cuda._parse_visible_devices()[:4],
    "rank's own: torch.initial_seed": lambda: torch.initial_seed(),
    "rank's own: torch.rand": lambda: torch.rand(1).item(),
    "rank's own: numpy.random.rand": random_of_numpy,
    "torch: seeded numbers": lambda: [
        torch.manual_seed(7).initial_seed(),
        torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
    ],
    "torch: logging": lambda: {name: logger(name) for name in LOGGERS},
    "torch: jit is enabled": lambda: bool(torch.jit._state._enabled),
    "torch: debug level": lambda: str(torch.distributed.get_debug_level()),
    "torch: FX_PATCH_GETITEM": lambda: getattr(
        importlib.import_module("torch.fx._symbolic_trace"), "FX_PATCH_GETITEM", None
    ),
    "torch: distributed not begun": lambda: torch.distributed.is_initialized(),
    "torch: excepthook": lambda: sys.excepthook is sys.__excepthook__,
    "torch: stacks of C++ in errors": cpp_stack_is_shown,
    "torch: computes": computes,
    "torch: jit.script of a function": lambda: len(str(torch.jit.script(twice).graph)) > 1,
    "torch: save and load of a class": saves,
    "torch: a group of one rank": meets,
}


# ---- processes that it starts


def child(queue: Any) -> None:
    main = sys.modules["__main__"].__name__
    queue.put([__name__, main, Point.__module__, len(sys.argv), Point(1)])


def in_child(method: str) -> list[Any]:
    context: Any = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    *found, point = queue.get()
    process.join(20)
    return [*found, point == Point(1), process.exitcode]


def loaded_with(method: str) -> list[Any]:
    from torch.utils.data import DataLoader

    data: Any = Squares()
    loader: DataLoader[Any] = DataLoader(data, 2, num_workers=1, multiprocessing_context=method)
    return [batch.tolist() for batch in loader]


def in_pool() -> list[Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(twice, [1.5]))


def in_interpreter() -> str:
    code = (
        "import os, sys; "
        "print(sorted(os.environ), sys.path, {'torch', 'sitecustomize'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout + done.stderr


def in_exec() -> int:
    pid = os.fork()
    if pid == 0:
        code = "import sys; sys.exit(40 + ('torch' in sys.modules))"
        os.execv(sys.executable, [sys.executable, "-c", code])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def after_choice() -> list[Any]:
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(1) as pool:
        return [multiprocessing.get_start_method(), pool.map(abs, [-1])]


OF_PROCESSES: dict[str, Row] = {
    "processes: set_start_method": after_choice,
    "processes: fork": lambda: in_child("fork"),
    "processes: spawn": lambda: in_child("spawn"),
    "processes: forkserver": lambda: in_child("forkserver"),
    "processes: executor": in_pool,
    "processes: DataLoader with fork": lambda: loaded_with("fork"),
    "processes: DataLoader with spawn": lambda: loaded_with("spawn"),
    "processes: an interpreter that it starts": in_interpreter,
    "processes: exec in a fork": in_exec,
}


def found_by(function: Row) -> Any:
    try:
        return function()
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


def show(is_short: bool) -> None:
    values: dict[str, Any] = {}

    def look(rows: dict[str, Row]) -> None:
        values.update((name, found_by(function)) for name, function in rows.items())

    look(OF_INTERPRETER | OF_MAIN | OF_LIBRARY | OF_SYSTEM)
    look(OF_TORCH)
    look({} if is_short else OF_PROCESSES)
    print(json.dumps(values, sort_keys=True, default=repr))


# ---- ends


def in_thread(function: Callable[[], object]) -> None:
    threading.Thread(target=function).start()


def keep_lines_back() -> None:
    typing.cast("io.TextIOWrapper", sys.stdout).reconfigure(
        write_through=False, line_buffering=False
    )


def print_late() -> None:
    time.sleep(0.1)
    print("thread")


def handlers_in_order() -> None:
    for number in range(2):
        atexit.register(print, number)
    in_thread(print_late)


def not_flushed() -> None:
    keep_lines_back()
    print("kept", end="")


def not_flushed_and_lost() -> None:
    keep_lines_back()
    print("lost", end="")
    os._exit(0)


def unraisable() -> None:
    class Late:
        def __del__(self) -> None:
            raise ValueError("at the end")

    globals()["late"] = Late()


def fork_exits() -> None:
    if os.fork() == 0:
        sys.exit(9)
    os.wait()


def daemon_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def dump_stack() -> None:
    faulthandler.enable()
    faulthandler.dump_traceback()


def file_left_open() -> None:
    globals()["left_open"] = open(f"left{os.environ['RANK']}", "w")  # noqa: SIM115
    globals()["left_open"].write("whole")


def file_left_open_by_c() -> None:
    LIBC.fopen.restype = ctypes.c_void_p
    LIBC.fputs(b"whole", ctypes.c_void_p(LIBC.fopen(b"left by C", b"w")))


PASSING: dict[str, Callable[[], object]] = {
    "return": lambda: None,
    "exit None": lambda: sys.exit(),
    "raise in a thread": lambda: in_thread(fail),
    "SystemExit in a handler": lambda: atexit.register(sys.exit, 5),
    "order of handlers": handlers_in_order,
    "not flushed": not_flushed,
    "not flushed, _exit": not_flushed_and_lost,
    "unraisable": unraisable,
    "print_stack": traceback.print_stack,
    "warning": lambda: warnings.warn("watch out", stacklevel=9),
    "exit from a fork": fork_exits,
    "daemon thread": daemon_thread,
    "faulthandler": dump_stack,
    "file left open": file_left_open,
    "file left open by C": file_left_open_by_c,
}


def recursion(depth: int = 0) -> None:
    recursion(depth + 1)


def fails_with_own_hook() -> None:
    def hook(kind: type[BaseException], value: BaseException, tb: Any) -> None:
        print("hook", kind, value, len(traceback.extract_tb(tb)))

    sys.excepthook = hook
    fail()


def interrupted() -> None:
    raise KeyboardInterrupt


def stdout_closed() -> None:
    os.close(1)
    print("x" * 10)


def print_last() -> None:
    def shown() -> None:
        print(SYS.last_type, len(traceback.extract_tb(SYS.last_traceback)))

    atexit.register(shown)
    fail()


def fails_with_torch() -> None:
    import torch

    torch.ones(2)
    fail()


def alarmed() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    signal.pause()


FAILING: dict[str, Callable[[], object]] = {
    "exit text": lambda: sys.exit("words"),
    "raise": fail,
    "raise, its own excepthook": fails_with_own_hook,
    "recursion": recursion,
    "_exit 4": lambda: os._exit(4),
    "abort": os.abort,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "KeyboardInterrupt": interrupted,
    "stdout closed": stdout_closed,
    "print_last": print_last,
    "torch, then raise": fails_with_torch,
    "SIGALRM": alarmed,
    "exit 3": lambda: sys.exit(3),
}


def end(kind: str) -> None:
    if kind in ("PASSING", "FAILING"):
        number = "RANK" if kind == "PASSING" else "TORCHELASTIC_RESTART_COUNT"
        kind = list(globals()[kind])[int(os.environ[number])]
    for stream in (sys.stdout, sys.stderr):
        print(f"=== {kind}", file=stream, flush=True)
    {**PASSING, **FAILING}[kind]()


if __name__ == "__main__":
    _changes = re.findall(r"(?m)^([A-Z_]+)=(.*)$", "\n".join(sys.argv[1:]))
    os.environ.update(_changes[int(os.environ["RANK"]) :][:1])
    if "--end" in sys.argv:
        end(sys.argv[sys.argv.index("--end") + 1])
    else:
        show("--short" in sys.argv)
