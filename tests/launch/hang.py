"""A job whose last rank waits for a lock that nobody gives back, and whose others wait for it."""

from __future__ import annotations

import sys
import threading

import unisono as idist

idist.initialize("gloo", timeout=600)
idist.barrier()
if idist.get_rank() == idist.get_world_size() - 1:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # here
idist.barrier()
sys.exit("it went on")
