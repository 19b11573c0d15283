"""The fork server: a clean process that starts workers for one parent, and ends with it.

Once the control socket is closed, the server starts no more workers and ends with the last one.
Its workers are ranks of a function, or of a script: see ``script/hook/sitecustomize.py``.

The hook loads this file by its path, so it imports only the standard library. Each request on the
control socket is one byte with five file descriptors: stdin, stdout and stderr of the worker, its
channel to the parent, and its status socket. On the status socket the parent writes signal numbers,
one byte each, and reads ``{process id}p`` once the worker exists, or ``{errno}x`` if it can't be
created; ``{signal}s`` when the worker is stopped, ``{signal}c`` when it continues, and
``{wait status}e`` once it has ended. Closing the status socket ends the worker. Processes that a
failed worker leaves behind in the process group are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

_REPORT = re.compile(rb"([0-9]+)([psecx])")
# Names of the facade that a rank is likely to use: their modules are loaded once for all ranks.
LIKELY = ("Parallel", "all_gather", "all_reduce", "barrier", "broadcast", "one_rank_only", "send")
# Prefixes of variables that libraries read only when they are loaded, found by tracing getenv and
# os.environ during the imports of torch and numpy: too late to change them in a fork.
_AT_LOAD = (
    *("ACC_", "COMPILE_STROBELIGHT_", "DNNL_", "FX_", "GFORTRAN_", "GOMP_", "GOTO_", "KINETO_"),
    *("KMP_", "MKL", "NPY_", "NUMPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH"),
)
# Signals for ranks: all but those for one process alone, which are its own faults, its children's,
# and those that stop it.
OF_RANKS = signal.valid_signals() - {
    signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGPIPE, signal.SIGSEGV,
    signal.SIGSYS, signal.SIGTRAP, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGCONT, signal.SIGKILL,
    signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.5  # between checks of the parent, whose children may keep the control socket open
_TERM_S = 1.0  # from SIGTERM to SIGKILL, for a worker's children: some remove their files


def at_load(environ: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return the variables that libraries read only when they are loaded, with their values."""
    # TORCHELASTIC_ variables are the rank's, and read later.
    return {
        (name, value)
        for name, value in environ.items()
        if name.startswith(_AT_LOAD) and not name.startswith("TORCHELASTIC_")
    }


def interpreter() -> list[str]:
    """Return the command of this Python with its flags, as multiprocessing does."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Arrange that this process gets the signal `number` when its parent process ends."""
    # Linux sends the signal whenever the parent ends; elsewhere the parent is checked only once,
    # here.
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent and os.getppid() != parent:  # it ended before `_prctl`; `parent` is 0 if unknown
        os.kill(os.getpid(), number)


def guard(group: int) -> int:
    """Fork a process that kills a group once this process has ended; return a pipe to cancel it."""
    # A byte in the pipe cancels the guard. Only this process holds the write end, which closes when
    # the process ends.
    reader, writer = os.pipe()

    def wait_and_kill() -> None:
        os.close(writer)
        if not os.read(reader, 1):
            os.killpg(group, signal.SIGKILL)

    _fork_watcher(wait_and_kill)
    os.close(reader)
    return writer


def end_with(parent: int, number: int) -> None:
    """Fork a process that sends this one the signal `number`, once, when this one's parent ends."""
    # PR_SET_PDEATHSIG sends one signal for each thread of the parent. Open MPI's mpiexec takes the
    # second one for an order to end at once, and leaves its files behind.
    try:
        pidfds = [os.pidfd_open(pid) for pid in (parent, os.getpid())]
    except (AttributeError, OSError):  # another system, or an old Linux
        return die_with(parent, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)

    def wait_and_signal() -> None:
        _ready(pidfds, None)  # until either ends; a signal to an ended process has no effect
        signal.pidfd_send_signal(pidfds[1], number)

    _fork_watcher(wait_and_signal)


def _fork_watcher(watch: Callable[[], None]) -> None:
    """Run a function in a process that has its own session and is reaped by init."""
    pid = os.fork()
    if pid == 0:
        try:
            for number in (signal.SIGTERM, signal.SIGHUP):  # the group may get them before `setsid`
                signal.signal(number, signal.SIG_IGN)
            os.setsid()
            # Forked twice: Horovod ends a rank by killing all descendants that the rank then has.
            if os.fork() == 0:
                os.closerange(0, 3)  # readers of the output must not wait for the watcher
                watch()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Fork(subprocess.Popen[bytes]):
    """A fork of this process that runs a function, and ends with it."""

    def __init__(self, run: Callable[[], object], **streams: Any) -> None:
        self._run = run
        super().__init__(["fork"], **streams)

    def _execute_child(self, *arguments: Any) -> None:  # called by Popen to start its process
        pipes = arguments[10:16]  # three pairs, in each of which one end, or none, is the child's
        with warnings.catch_warnings():  # about threads, none of which holds a lock of ours
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid: int = os.fork()
        self._child_created = True  # Popen's destructor reads it
        if self.pid == 0:
            try:
                for target, fd in enumerate((pipes[0], pipes[3], pipes[5])):
                    if fd != -1:
                        os.dup2(fd, target)
                self._run()
            except BaseException:  # a fork must not return into its parent's code
                traceback.print_exc()
            finally:
                os._exit(1)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Forked:
    """A process that another one has made for this one, and whose state it reports."""

    def __init__(self, status: socket.socket) -> None:
        self.status = status
        self.pid: int = 0  # until it has been made
        self.refusal: int | None = None  # the errno if it couldn't be made
        self.wait_status: int | None = None
        self.has_ended: bool = False
        self.stopped_by: int | None = None
        """The signal that has stopped the process."""
        self._unread = b""  # an incomplete report

    def read_status(self, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Read the reports that have arrived; 0 waits. Return whether the process has ended."""
        try:
            received = self.status.recv(4096, flags)
        except BlockingIOError:
            return self.has_ended
        except OSError:
            received = b""
        reports = _REPORT.findall(self._unread + received)
        self._unread = _REPORT.sub(b"", self._unread + received)
        for number, kind in reports:
            if kind == b"p":
                self.pid = int(number)
            elif kind == b"x":
                self.refusal = int(number)
            elif kind == b"e":
                self.wait_status = int(number)
            else:
                self.stopped_by = int(number) if kind == b"s" else None
            self.has_ended = self.has_ended or kind in b"ex"
        if not received:  # closed: the process that would report the end is gone
            self.has_ended = True
        return self.has_ended

    def poll(self) -> int | None:
        """Return the exit code, None if the process runs."""
        if not (self.has_ended or self.read_status()):
            return None
        # Without a report the kernel has killed it, as it does when the fork server ends.
        status = signal.SIGKILL if self.wait_status is None else self.wait_status
        return os.waitstatus_to_exitcode(status)

    def wait(self, limit_s: float) -> None:
        """Wait for the end of the process, or for `limit_s` seconds without a report."""
        while not self.read_status() and _ready([self.status.fileno()], limit_s):
            pass


class _Orphans:
    """Processes left behind by workers that have ended; this process then becomes their parent."""

    def __init__(self, group: int) -> None:
        self._group = group  # of the workers and their children, except daemons
        self.are_ending: bool = False
        self._spared: set[int] = set()  # left by workers that still run or have ended well
        self._signalled: set[int] = set()
        self._until = 0.0  # when the remaining ones are killed

    def reap(self, workers: dict[socket.socket, int]) -> list[int]:
        """Remove workers that have ended, and end the processes that failed ones left behind."""
        # This call never waits.
        before = _children(os.getpid())  # with those left by workers that this call reaps
        ended = _reap(workers)
        here = _children(os.getpid()).difference(workers.values())
        here = {pid for pid in here if not _has_ended(pid)}
        if any(ended):  # one has failed, so what it left behind must end
            self.are_ending, self._until = True, time.monotonic() + _TERM_S
        doomed = _in_group(self._group, here - self._spared) if self.are_ending else set()
        is_over = time.monotonic() >= self._until
        # Descendants are found again at each call, since one that ends may leave children.
        if is_over or not doomed:
            _signal(doomed, signal.SIGKILL)
            # Those not in `before` may be left by a worker that just ended, and all by one whose
            # last threads are ending, so that it can't be reaped yet: the next call decides.
            if not any(map(_is_zombie, workers.values())):
                self._spared = here & before
            self._signalled, self.are_ending = set(), False
        else:
            # A stopped process gets SIGTERM only once it continues.
            _signal(doomed - self._signalled, signal.SIGTERM, signal.SIGCONT)
            self._signalled |= doomed
        return ended


def _children(pid: int) -> set[int]:
    """Return the children of a process; none if the kernel doesn't list them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process or one of its threads has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def _is_zombie(pid: int) -> bool:
    """Return whether the first thread of a process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return False


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and reap it then."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def _in_group(group: int, pids: set[int]) -> set[int]:
    """Return those of the given processes and their descendants that are in a process group."""
    found: set[int] = set()
    while pids:
        found |= pids
        pids = {child for pid in pids for child in _children(pid)} - found
    return {pid for pid in found if _group_of(pid) == group}


def _group_of(pid: int) -> int:
    """Return the group of a process; 0 if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def _signal(pids: Iterable[int], *numbers: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for number in numbers:
                os.kill(pid, number)


def serve(control: socket.socket, parent: int) -> int | None:
    """Fork workers until `control` is closed and all have ended; in a fork, return its channel.

    The workers also end with the process `parent`, unless it is 0.
    """
    # SIGTERM ends all workers, then this process. A fork restores the previous handlers.
    orders: list[int] = []
    previous = {
        signal.SIGCHLD: signal.SIG_DFL,
        # The parent decides what Ctrl-C means.
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: orders.append(number)),
    }
    wake = wake_by_signals()
    workers: dict[socket.socket, int] = {}
    orphans, accepts_requests = _Orphans(os.getpgrp()), True  # until the parent closes `control`
    if parent:  # what ranks of a script leave behind is their wrappers' to end
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while accepts_requests or workers or orphans.are_ending:
        ready = _attend(workers, wake[0], *([control.fileno()] if accepts_requests else []))
        if orders or (parent and os.getppid() != parent):  # it ends only after it has reaped them
            accepts_requests = False
            _signal(workers.values(), signal.SIGKILL)
        elif control.fileno() in ready:
            request, fds, _, _ = socket.recv_fds(control, 1, 5)
            accepts_requests = bool(request)
            if request and _fork_worker(fds, workers):
                return _become_worker(fds, [control, *workers], wake, previous)
        orphans.reap(workers)
    return None


def supervise(status: socket.socket, pid: int, parent: int) -> int:
    """Supervise a child, which leads a process group, until it ends; return its status."""
    workers = {status: pid}
    signal.signal(signal.SIGTERM, lambda number, _: _signal(workers.values(), number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    # A launcher may kill this process at any moment; the guard then ends the worker's children. It
    # is forked before `_Orphans` is created, after which this process would have to reap it.
    cancel = guard(pid)
    orphans = _Orphans(pid)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended: list[int] = []
    wake_read, _ = wake_by_signals()
    _send(status, f"{pid}p")
    while not (ended := ended + orphans.reap(workers)) or orphans.are_ending:
        _attend(workers, wake_read)
        if os.getppid() != parent:
            _signal(workers.values(), signal.SIGKILL)
    if ended[0] == 0:  # processes that a successful worker left may stay
        with contextlib.suppress(OSError):  # the guard may be gone
            os.write(cancel, b"-")
    return ended[0]


def wake_by_signals() -> tuple[int, int]:
    """Create a pipe that becomes readable when a signal arrives, such as SIGCHLD."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    # Without a Python handler, the signal wouldn't be written to the pipe.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read, wake_write


def _attend(workers: dict[socket.socket, int], wake_read: int, *others: int) -> set[int]:
    """Wait for a change, and forward signals to workers; return the readable descriptors."""
    by_fd = {status.fileno(): status for status in workers}
    ready = _ready([wake_read, *by_fd, *others])
    with contextlib.suppress(BlockingIOError):
        os.read(wake_read, 4096)
    for status in [by_fd[fd] for fd in ready & by_fd.keys()]:
        _forward_signals(status, workers[status])
    return ready


def _fork_worker(fds: list[int], workers: dict[socket.socket, int]) -> bool:
    """Fork a worker; return whether this process is the worker."""
    status = socket.socket(fileno=fds.pop())
    try:
        pid = os.fork()
    except OSError as error:  # other workers need this process
        _send(status, f"{error.errno or 0}x")
        status.close()
    else:
        workers[status] = pid  # in the fork, too, which closes its copy
        if pid == 0:
            return True
        _send(status, f"{pid}p")
    for fd in fds:
        os.close(fd)
    return False


def _become_worker(
    fds: list[int], sockets: list[socket.socket], wake: tuple[int, int], previous: dict[Any, Any]
) -> int:
    """Undo in a fork what `serve` has set for its own process; return the worker's channel."""
    try:
        signal.set_wakeup_fd(-1)
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        # Copies held by the fork would keep the others from noticing that a connection was closed.
        for each in sockets:
            each.close()
        for fd in wake:
            os.close(fd)
        channel = fds.pop()
        for target, fd in enumerate(fds):  # all above 2, as the server's own streams are open
            os.dup2(fd, target)
            os.close(fd)
    except BaseException:  # a fork must not return into the server's loop
        os._exit(1)
    return channel


def _ready(fds: list[int], limit_s: float | None = _POLL_S) -> set[int]:
    """Wait up to `limit_s`, or without a limit for None; return the readable descriptors."""
    watched = select.poll()  # select() accepts no descriptor above 1023
    for fd in fds:
        watched.register(fd, select.POLLIN)
    return {fd for fd, _ in watched.poll(None if limit_s is None else limit_s * 1000)}


def _forward_signals(status: socket.socket, pid: int) -> None:
    """Forward the signals that arrive on a status socket to its worker."""
    try:
        orders = status.recv(64)
    except OSError:
        orders = b""
    for order in orders or bytes([signal.SIGKILL]):  # no data: the socket is closed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, order)


def _reap(workers: dict[socket.socket, int]) -> list[int]:
    """Report changes of workers' states; return the wait statuses of those that have ended."""
    ended = []
    for status, pid in list(workers.items()):
        done, code = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if not done:
            continue
        if os.WIFSTOPPED(code):
            _send(status, f"{os.WSTOPSIG(code)}s")
        elif os.WIFCONTINUED(code):
            _send(status, f"{int(signal.SIGCONT)}c")
        else:
            _send(status, f"{code}e")
            status.close()
            del workers[status]
            ended.append(code)
    return ended


def _send(status: socket.socket, report: str) -> None:
    with contextlib.suppress(OSError):  # the parent might not be reading
        status.send(report.encode(), socket.MSG_DONTWAIT)


def prepare_for_forks() -> None:
    """Keep forks of this process from finalizing or collecting the objects that it has now."""
    # Finalizers in a fork would remove temporary folders that other processes still use, and
    # collecting torch's objects would take 20 ms.
    finalizers: Iterable[weakref.finalize[Any, Any]] = getattr(weakref.finalize, "_registry", ())
    for finalizer in list(finalizers):
        finalizer.atexit = False
    gc.freeze()


def seed_generators() -> None:
    """Seed the generators that a fork has inherited."""
    # A fresh process seeds each again; a fork does so only for Python's own generator.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def run(control: socket.socket, parent: int, work: Callable[[int, int], object]) -> NoReturn:
    """Serve as this process, and run `work` in each fork."""
    server = os.getpid()
    channel = serve(control, parent)
    if channel is not None:
        try:
            work(channel, server)
        finally:
            os._exit(1)  # reached only after an exception, as `work` ends the process
    os._exit(0)


def _work_afresh(channel: int, parent: int) -> None:
    """Become a worker in a fresh interpreter."""
    die_with(parent)
    os.set_inheritable(channel, True)
    code = f"import sys; sys.path[:] = {sys.path!r}; "
    code += f"from unisono.launchers.job.worker import work; work({channel}, {parent})"
    os.execv(sys.executable, [*interpreter(), "-c", code])


def main(control_fd: int, parent: int, preload: bool) -> None:
    """Run the fork server as this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    control = socket.socket(fileno=control_fd)
    work: Callable[[int, int], object] = _work_afresh
    if preload:
        gc.disable()  # the import makes objects that `prepare_for_forks` freezes anyway
        from unisono.launchers.job.worker import work

        for name in LIKELY:
            getattr(sys.modules["unisono"], name)
        prepare_for_forks()
        gc.enable()
    run(control, parent, work)
