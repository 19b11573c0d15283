"""What a process knows of those that a fork server has made for it, and what they leave."""

from __future__ import annotations

import socket

from tests.support.processes import run_python
from unisono.launchers.job.forkserver import Forked


def test_a_process_that_is_waited_for_in_vain_has_not_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forked = Forked(ours)
        theirs.send(b"7p")
        forked.wait(0.0)
        assert (forked.pid, forked.poll()) == (7, None)
        theirs.send(b"768e")
        forked.wait(0.0)
        assert forked.poll() == 3


# Its worker leaves a process behind; its first thread has ended, and another one ends later.
LEAVES_WHILE_IT_ENDS = """
import ctypes, os, select, socket, subprocess, threading
from unisono.launchers.job import forkserver

libc, (reader, writer) = ctypes.CDLL(None), os.pipe()
libc.prctl(36, 1, 0, 0, 0)  # adopts what its worker leaves behind
worker = os.fork()
if worker == 0:
    subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & "])
    threading.Thread(target=lambda: os._exit(len(os.read(reader, 1)))).start()
    libc.syscall(60, 0)  # on x86-64: exit, of this thread alone
while not forkserver._is_zombie(worker):
    select.select([], [], [], 0.01)
left, = forkserver._children(os.getpid()) - {worker}
ended = os.pidfd_open(left)
status, _ours = socket.socketpair()
workers, orphans = {status: worker}, forkserver._Orphans(os.getpgrp())
orphans.reap(workers)
os.write(writer, b"!")
while workers or orphans.are_ending:
    orphans.reap(workers)
    select.select([], [], [], 0.01)
print("ended" if select.select([ended], [], [], 5)[0] else os.kill(left, 9))
"""


def test_what_a_worker_leaves_while_its_threads_end_is_ended() -> None:
    assert run_python("-c", LEAVES_WHILE_IT_ENDS).strip() == "ended"
