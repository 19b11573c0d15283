"""How ranks of MPI that wait tell each other so, and find out who doesn't: MPI itself can't say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

__all__ = ("Asking",)

_QUESTION, _ANSWER = 32_764, 32_765  # tags beside those of the model's own messages
_BYTES = 256
_NAP_S = 1e-3
_sending = threading.Lock()
_sent: list[list[Any]] = []  # what MPI reads, until it is done: longer than a context where need be


class Asking:
    """Questions between ranks that wait, in messages.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of all ranks.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm

    def answer(self, doing: str) -> None:
        """Tell those who have asked since the last time. Local; doesn't wait.

        Args:
            doing: what this rank waits in.
        """
        for rank, _ in self._heard(_QUESTION):
            self._send(doing.encode()[:_BYTES], rank, _ANSWER)

    def ask(self, ranks: Iterable[int], doing: str, limit_s: float) -> dict[int, str]:
        """Ask ranks what they wait in, answering those that ask too.

        Local.

        Args:
            ranks: whom to ask.
            doing: as in `answer`.
            limit_s: seconds to wait for the answers.

        Returns:
            The answers, by rank. Who isn't there gives none, nor who waits without a deadline.
        """
        asked = {rank for rank in ranks if rank != self._comm.rank}
        for rank in asked:
            self._send(b"?", rank, _QUESTION)
        found: dict[int, str] = {}
        until = time.monotonic() + limit_s
        while asked - found.keys() and time.monotonic() < until:
            self.answer(doing)
            found |= {rank: said.decode("utf-8", "replace") for rank, said in self._heard(_ANSWER)}
            time.sleep(_NAP_S)
        self.answer(doing)
        return found

    def _heard(self, tag: int) -> list[tuple[int, bytes]]:
        heard = []
        status = self._mpi.Status()
        # The message itself, not word of it: another thread that waits would take that one.
        while message := self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status):
            body = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([body, self._mpi.BYTE])
            heard.append((status.Get_source(), bytes(body)))
        return heard

    def _send(self, body: bytes, rank: int, tag: int) -> None:
        sent: list[Any] = [None, body]
        with _sending:
            _sent[:] = [item for item in _sent if not self._is_done(item[0])]
            _sent.append(sent)  # before MPI has it: an interrupt in between must not free it
        sent[0] = self._comm.Isend([body, self._mpi.BYTE], rank, tag)

    def _is_done(self, request: Any) -> bool:
        """Tell whether MPI is done with a message, which may be of a context that is over."""
        try:
            return request is not None and bool(request.Test())
        except self._mpi.Exception:
            return True
