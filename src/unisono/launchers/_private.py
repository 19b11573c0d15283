"""A folder of mode 0700 for what a launcher and its ranks tell each other."""

from __future__ import annotations

import os
import tempfile

from unisono.errors import LaunchError

__all__ = ("no_room", "private_folder")


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
