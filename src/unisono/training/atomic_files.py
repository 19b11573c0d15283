"""Atomic files: renamed once they are on the disk, checked when they are read."""

from __future__ import annotations

import errno
import importlib
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
_LONGEST = 50  # letters of a name that a temporary one begins with: a disk takes 255 bytes


class _Recorded:
    """A file that remembers why it couldn't be written, which torch's writer forgets."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write as the file does."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing: the file is flushed at the end."""


def write_whole(target: Path, write: Callable[[Any], object]) -> None:
    """Write a temporary file, sync it to the disk, and rename it."""
    # A symbolic link stays one, and its target is replaced; an old file's mode stays. Temporary
    # files that killed writers of the same file left are removed: they aren't locked, or a day old.
    target = Path(os.path.realpath(target))
    old = target.stat() if target.exists() else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise OSError(f"{target} isn't a regular file")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    start = f".{target.name[:_LONGEST]}."
    part = target.with_name(f"{start}{uuid.uuid4().hex}.tmp")
    try:
        with open(part, "xb") as file:
            _lock(file.fileno())
            _remove_leftovers(target, start, part)
            if old is not None and os.name == "posix":  # others may read no more than before
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            _fill(file, write, target)
            part.replace(target)  # while it is locked: others remove what isn't
    except BaseException:  # Ctrl-C too: no half of a file is left
        part.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _fill(file: IO[bytes], write: Callable[[Any], object], target: Path) -> None:
    recorded = _Recorded(file)
    try:
        write(recorded)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error
    except Exception as error:
        cause = recorded.error
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(target)) from error


def _lock(number: int) -> bool:
    """Lock a file as long as it is open, if nobody else has and its file system can."""
    if os.name != "posix":
        return False
    fcntl: Any = importlib.import_module("fcntl")
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(target: Path, start: str, own: Path) -> None:
    names: list[str] = []
    with suppress(OSError):  # a folder may be writable and not readable
        names = os.listdir(target.parent)
    for name in names:
        is_one = name.startswith(start) and name.endswith(".tmp") and len(name) == len(own.name)
        with suppress(OSError):  # another writer was faster, or it is another user's
            path = target.with_name(name)
            if is_one and name != own.name and (_is_old(path) or _is_left(path)):
                path.unlink()


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _DAY_S


def _is_left(path: Path) -> bool:
    with open(path, "r+b") as file:
        # One that is just being made isn't locked yet, and has nothing in it.
        return os.fstat(file.fileno()).st_size > 0 and _lock(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # others can't open a folder
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_archive(file: IO[bytes], name: str) -> None:
    """Check the checksums of an archive of torch; other files are left alone."""
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)
    if not is_archive:
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises a dozen kinds on damaged headers
        raise PayloadError(f"{name} is damaged: {error}") from error
    if damaged is not None:
        raise PayloadError(f"{name} is damaged: the checksum of {damaged} in it is another")
    file.seek(0)
