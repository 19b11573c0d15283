"""A mailbox in memory that two ranks of one host share: no system call if both are awake.

Each direction holds one frame: a stamp (sequence number and kind in one word), the body's length,
the body. The stamp is written last, and one word at a time is written and read as a whole. x86
guarantees that earlier stores become visible first (TSO; Intel's manual, volume 3, 9.2); other CPUs
use sockets. Only the frame of the next round overwrites a frame, and that round can't begin before
the other side has taken this one.
"""

from __future__ import annotations

import mmap
import os
import socket

from unisono.host import memory

MAILBOX_BYTES = 1 << 22
"""Longest body that a mailbox carries; pages that no frame has reached take no memory."""
_HEAD_BYTES = 64
_HALF_BYTES = _HEAD_BYTES + MAILBOX_BYTES
_WORD_BYTES = 8
_SIZE, _SLEEPS = 1, 4  # words of a half's head after the stamp; the reader writes the last one
_KIND_BITS = 3
_KINDS = (1 << _KIND_BITS) - 1


class Mailbox:
    """One end of a mailbox."""

    # One direction. Its frame:
    #   empty: the stamp is the one that the reader took last
    #   empty --put: body, length, then stamp--> full --take--> empty
    # Its reader:
    #   awake --sleep(True), then one more look--> asleep --sleep(False)--> awake
    # If `put` returns False, the writer sends the whole frame over the socket, or WAKE.

    def __init__(self, shared: mmap.mmap, is_first: bool) -> None:
        mine, theirs = (0, _HALF_BYTES) if is_first else (_HALF_BYTES, 0)
        self._bytes, self._words = shared, memoryview(shared).cast("Q")
        self._out, self._in = mine // _WORD_BYTES, theirs // _WORD_BYTES  # stamps
        self._out_body, self._in_body = mine + _HEAD_BYTES, theirs + _HEAD_BYTES
        self._taken = 0  # the stamp of no frame, as rounds count from 1

    def put(self, kind: int, seq: int, body: bytes) -> bool:
        """Write a frame, once the other end has taken the last; return whether that is enough."""
        if len(body) > MAILBOX_BYTES:
            return False
        start, words, first = self._out_body, self._words, self._out
        self._bytes[start : start + len(body)] = body
        words[first + _SIZE] = len(body)
        words[first] = seq << _KIND_BITS | kind  # last: the reader looks for this word
        return words[first + _SLEEPS] == 0

    def has_frame(self) -> bool:
        """Return whether a frame has arrived."""
        return self._words[self._in] != self._taken

    def take(self) -> tuple[int, int, bytes] | None:
        """Return the frame that has arrived, or None; never waits."""
        words, first = self._words, self._in
        stamp = words[first]
        if stamp == self._taken:
            return None
        self._taken = stamp
        size = min(words[first + _SIZE], MAILBOX_BYTES)  # the other end may have written any length
        start = self._in_body
        return stamp & _KINDS, stamp >> _KIND_BITS, self._bytes[start : start + size]

    def sleep(self, is_asleep: bool) -> None:
        """Set whether the next frame must wake this end."""
        self._words[self._in + _SLEEPS] = is_asleep


def send(sock: socket.socket) -> Mailbox | None:
    """Create a mailbox and send its other end; return this one, None if that fails."""
    made = memory.make(2 * _HALF_BYTES)
    if made is None:
        memory.send(sock, None)
        return None
    fd, shared = made
    try:
        memory.send(sock, fd)
    finally:
        os.close(fd)  # the mapping keeps the memory
    return Mailbox(shared, True)


def receive(sock: socket.socket) -> Mailbox | None:
    """Receive one end of a mailbox; None if the other side could create none."""
    shared = memory.receive(sock, 2 * _HALF_BYTES)
    return None if shared is None else Mailbox(shared, False)
