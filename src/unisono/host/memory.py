"""Anonymous memory that processes of one host share, sent over a connection between them.

Also memory for results that are written at once, in huge pages: if the kernel allocated it page by
page, that would cost more than the writing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import struct

from torch import Tensor

_MAPPED_BYTES = 32 << 20  # malloc keeps shorter blocks, and maps longer ones
_PAGE_BYTES = 4096
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_MEMORY, _NONE = b"+", b"-"  # sent with and without a descriptor
_ADDRESS = struct.Struct("<5Q")  # process, its descriptor; device, inode and size of the memory


def is_supported() -> bool:
    """Return whether this machine has such memory, and keeps the order of stores."""
    return why_not() is None


def why_not() -> str | None:
    """Return why ranks of this machine can't share memory; None if they can."""
    if not hasattr(os, "memfd_create"):
        return f"{platform.system()} has no memory without a name (memfd_create)"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} doesn't keep the order of stores, as x86 does"
    return None


def make(size_bytes: int) -> tuple[int, mmap.mmap] | None:
    """Create zeroed memory, None if that fails; pages take room only once written."""
    if not is_supported():
        return None
    fd = -1
    try:
        fd = os.memfd_create("unisono")  # closed by exec
        os.ftruncate(fd, size_bytes)
        return fd, mmap.mmap(fd, size_bytes)
    except OSError:  # not allowed, larger than a file may be here, or no room left
        if fd >= 0:
            os.close(fd)
        return None


def send(sock: socket.socket, fd: int | None) -> None:
    """Send memory over a Unix-domain socket, or a note that there is none."""
    if fd is None:
        sock.sendall(_NONE)
    else:
        socket.send_fds(sock, [_MEMORY], [fd])


def receive(sock: socket.socket, size_bytes: int | None = None) -> mmap.mmap | None:
    """Receive memory, of `size_bytes` if given; None if the sender has none."""
    tag, fds, flags, _ = socket.recv_fds(sock, 1, 1)
    try:
        if tag == _NONE and not fds:
            return None
        if tag != _MEMORY:
            raise OSError("refused")  # such as no tag at all, if the sender has closed
        if not fds or flags & socket.MSG_CTRUNC:
            raise OSError("shared memory was sent, but this process may have no more descriptors")
        sent_bytes = os.fstat(fds[0]).st_size
        if sent_bytes != (size_bytes or sent_bytes):
            raise OSError("the peer sent shared memory of another size")
        return mmap.mmap(fds[0], sent_bytes)
    finally:  # the mapping keeps the memory
        for fd in fds:
            os.close(fd)


def new(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty CPU tensor that is written at once; a long one lies in huge pages."""
    tensor = like.new_empty(shape)
    if tensor.nbytes >= _MAPPED_BYTES and _HUGE is not None:
        begin = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES  # madvise requires whole pages
        size_bytes = (tensor.data_ptr() + tensor.nbytes - begin) // _PAGE_BYTES * _PAGE_BYTES
        advise = ctypes.CDLL(None).madvise  # it may fail, on a kernel without huge pages
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), _HUGE)
    return tensor


# Processes of one user whose connections are in use share memory in another way: the owner of the
# memory sends its address over an authenticated channel, and the others open that address.


def address_of(fd: int) -> bytes:
    """Return the address for other processes to open this memory while `fd` is open."""
    status = os.fstat(fd)
    return _ADDRESS.pack(os.getpid(), fd, status.st_dev, status.st_ino, status.st_size)


def path_of(fd: int) -> str:
    """Return the path at which this process can open its own memory."""
    return f"/proc/self/fd/{fd}"


def open_at(address: bytes, *, writes: bool) -> int:
    """Open memory of a process of this user; return the descriptor."""
    try:
        pid, number, *identity = _ADDRESS.unpack(address)
    except struct.error:
        raise OSError("received an invalid shared-memory address") from None
    path = f"/proc/{pid}/fd/{number}"
    if _identity(os.stat(path)) != identity:  # before it is opened: any file may be there
        raise OSError(f"{path} is not the shared memory that was announced")
    fd = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC)
    if _identity(os.fstat(fd)) != identity:  # the file was replaced meanwhile
        os.close(fd)
        raise OSError(f"{path} is not the shared memory that was announced")
    return fd


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size]
