"""Atomic writes by rename after fsync, and checks of torch archives."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import stat
import time
import uuid
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from unisono.errors import PayloadError

_DAY_S = 24 * 60 * 60.0
# How many characters of the target's name a temporary name keeps; file systems allow 255 bytes.
_KEPT_CHARACTERS = 50


class _ErrorRecorder:
    """A file that keeps its last write error, which torch's writer discards."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write to the file, and record an error."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing, because `_fill` flushes the file at the end."""


def write_whole(target: Path, write: Callable[[Any], object]) -> None:
    """Write a temporary file, sync it to the disk, and rename it to `target`."""
    # A symbolic link is kept, and the file it leads to is replaced, with the same mode. Temporary
    # files of killed writers are removed; they are recognized by being unlocked or a day old.
    target = Path(os.path.realpath(target))
    old = target.stat() if target.exists() else None
    # Renaming would replace a device, such as /dev/null, by a file.
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise OSError(f"{target} isn't a regular file")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    start = f".{target.name[:_KEPT_CHARACTERS]}."
    part = target.with_name(f"{start}{uuid.uuid4().hex}.tmp")
    try:
        with open(part, "xb") as file:
            _lock(file.fileno())
            _remove_leftovers(target.parent, start, part)
            if old is not None:  # the new file gets the old permissions
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            _fill(file, write, target)
            part.replace(target)  # still locked, as other writers remove unlocked files
    except BaseException:  # after Ctrl-C, too, no partial file remains
        part.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # otherwise a system crash could undo the renaming
    finally:
        os.close(folder)


def _fill(file: IO[bytes], write: Callable[[Any], object], target: Path) -> None:
    """Write a file and sync it to the disk; raise OSErrors that name `target`."""
    recorder = _ErrorRecorder(file)
    try:
        write(recorder)
        file.flush()
        os.fsync(file.fileno())
    except Exception as error:
        # torch raises a RuntimeError that doesn't say why a write failed.
        cause = error if isinstance(error, OSError) else recorder.error
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(target)) from error


def _lock(descriptor: int) -> bool:
    """Lock an open file; return False if a writer locked it, or its file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(folder: Path, start: str, current: Path) -> None:
    """Remove other temporary files whose names begin with `start`, if their writers are gone."""
    # The digits are those of a UUID; without them, other files may begin with the same characters.
    for path in folder.glob(f"{glob.escape(start)}{'[0-9a-f]' * 32}.tmp"):
        if path != current:
            with suppress(OSError):  # another writer removed it, or it belongs to another user
                if _is_abandoned(path):
                    path.unlink()


def _is_abandoned(path: Path) -> bool:
    """Return whether a temporary file is a day old, or unlocked and not empty."""
    # On a file system without locks, only its age shows that a file's writer is gone.
    if time.time() - path.stat().st_mtime > _DAY_S:
        return True
    with open(path, "r+b") as file:
        # A new file is empty until its writer has locked it.
        return os.fstat(file.fileno()).st_size > 0 and _lock(file.fileno())


def check_archive(file: IO[bytes], name: str) -> None:
    """Raise if a checksum in a torch archive is wrong; other files are not checked."""
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)
    if not is_archive:  # torch before 1.6 wrote other files, without checksums
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises a dozen types of errors on damaged headers
        raise PayloadError(f"{name} is damaged: {error}") from error
    if damaged is not None:
        raise PayloadError(f"{name} is damaged: checksum mismatch in {damaged}")
    file.seek(0)
