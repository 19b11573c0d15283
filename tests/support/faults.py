"""Faults of a replica, each with words that its error must have."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Fault:
    """A function that makes a replica fail or hang, and words of the error."""

    do: Callable[[], Any]
    says: str


class Locked(Exception):
    """An exception that can't be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Mute(Exception):
    """An exception that can't be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def throw(error: BaseException) -> NoReturn:
    raise error


def run_out_of_memory() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), hard))
    bytearray(4 << 30)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


FAULTS = {
    "raises": Fault(lambda: throw(ArithmeticError("mine")), "raised ArithmeticError: mine"),
    "os._exit(3)": Fault(lambda: os._exit(3), "ended with exit code 3 before its work was done"),
    "os._exit(0)": Fault(lambda: os._exit(0), "ended with exit code 0 before its work was done"),
    'sys.exit("text")': Fault(lambda: sys.exit("text"), "raised SystemExit: text"),
    "SIGKILL": Fault(lambda: kill(signal.SIGKILL), "was ended by SIGKILL"),
    "SIGSEGV": Fault(lambda: kill(signal.SIGSEGV), "was ended by SIGSEGV"),
    "out of memory": Fault(run_out_of_memory, "raised MemoryError"),
    "exception that can't be pickled": Fault(lambda: throw(Locked()), "Locked: locked"),
    "exception whose __str__ raises": Fault(lambda: throw(Mute()), "Mute"),
    "KeyboardInterrupt": Fault(lambda: throw(KeyboardInterrupt()), "raised KeyboardInterrupt"),
}


def compute() -> None:
    while True:
        pass


class Clinging:
    """An object whose finalizer hangs."""

    def __del__(self) -> None:
        signal.pause()


HANGS = {
    "SIGSTOP": Fault(lambda: kill(signal.SIGSTOP), ": it is stopped by a signal"),
    "a loop in Python": Fault(compute, "in compute"),
    "a call in C": Fault(lambda: ctypes.CDLL(None).sleep(600), ": it is at"),
    "a call in C that holds the GIL": Fault(lambda: ctypes.PyDLL(None).sleep(600), " never "),
    "a __del__ hangs": Fault(Clinging, ": it is at"),
}
