"""Where a launcher and its ranks tell each other what nobody else may read or write."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from unisono.errors import LaunchError
from unisono.topology import PRIVATE_STORE

__all__ = ("no_room", "private_folder", "private_store")


def private_folder(
    prefix: str = "unisono-", parent: str | os.PathLike[str] | None = None, longest: int = 4096
) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that no other user can look into.

    Local.

    Args:
        prefix: what its name begins with.
        parent: where it is made; None for the system's temporary files.
        longest: the length that the path of the system's temporary files may have; where it is
            longer, ``/tmp`` serves.

    Returns:
        A context manager that removes it.

    Raises:
        LaunchError: it can't be made; says where and what to do.
    """
    try:
        if parent is None and len(tempfile.gettempdir()) >= longest:
            parent = "/tmp"
        return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    except OSError as error:
        raise no_room(error) from error


def no_room(error: OSError) -> LaunchError:
    """Say what to do where the folder, or a file in it, can't be made. Local."""
    return LaunchError(
        f"nothing was started, since the launcher's files can't be written: {error}; make room "
        "there, or name another folder: in TMPDIR, or, for Slurm, with folder="
    )


def private_store(held: ExitStack) -> dict[str, str]:
    """Make the file that the ranks of one host meet in, where no other user can come.

    Local. On Linux it has no name: ranks open it in this process's folder of ``/proc``, which the
    kernel opens to this user alone, and it is gone with the last process that has it. Elsewhere it
    is in a folder of mode 0700.

    Args:
        held: keeps it.

    Returns:
        The variable that tells the ranks where it is.

    Raises:
        LaunchError: it can't be made; says where and what to do.
    """
    if sys.platform != "linux" or not os.path.isdir("/proc/self/fd"):
        folder = held.enter_context(private_folder())
        return {PRIVATE_STORE: str(Path(folder, "store"))}
    try:
        file = os.memfd_create("unisono-store")
    except OSError as error:
        raise LaunchError(f"the file that ranks meet in can't be made: {error}") from error
    held.callback(os.close, file)
    return {PRIVATE_STORE: f"/proc/{os.getpid()}/fd/{file}"}
