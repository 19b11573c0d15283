"""The one place that derives a rendezvous port from the id of a job."""

from __future__ import annotations

import zlib

__all__ = ("port_of",)

# Below 29500, torch's own default, and below the ephemeral ports of every common system (Linux
# takes them from 32768), so that no outgoing connection sits on a derived port by accident.
_FIRST = 20000
_COUNT = 9473  # a prime: jobs and steps that are near each other never share a port
_STRIDE = 97


def port_of(job: str, step: str = "0") -> int:
    """Derive the rendezvous port of a job, the same on every rank.

    Local. Ids that are numbers are laid out so that 97 consecutive jobs with up to 97 steps each
    have ports of their own; other ids are hashed.

    Args:
        job: id of the job, unique on the hosts that it runs on.
        step: id of the step within the job.

    Returns:
        A port from 20000 to 29472.
    """
    return _FIRST + (_number(job) * _STRIDE + _number(step)) % _COUNT


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))
