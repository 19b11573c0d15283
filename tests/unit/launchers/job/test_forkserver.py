"""What a process knows of those that a fork server has made for it."""

from __future__ import annotations

import socket

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
