"""Memory of another process: what its owner names is opened, and nothing else."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest

from tests.support.processes import in_fork
from unisono.host import memory

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")


def test_what_another_descriptor_is_isnt_opened(tmp_path: Path) -> None:
    made = memory.make(4096)
    assert made is not None
    fd, shared = made
    address = memory.address_of(fd)
    opened = memory.open_at(address, writes=True)
    mmap.mmap(opened, 4096)[0] = 7
    assert shared[0] == 7
    os.close(opened)
    os.close(fd)
    with pytest.raises(OSError, match=r"/proc/|No such file"):
        memory.open_at(address, writes=True)
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    fields = list(struct.unpack("<5Q", address))
    fields[1] = other
    with pytest.raises(OSError, match="is not the shared memory that was announced"):
        memory.open_at(struct.pack("<5Q", *fields), writes=True)
    os.close(other)
    with pytest.raises(OSError, match="invalid shared-memory address"):
        memory.open_at(b"short", writes=False)


def test_what_there_is_no_room_for_leaves_no_descriptor() -> None:
    def make() -> None:
        os.close(0)  # as of a daemon: memory is the first that is opened
        assert memory.make(1 << 62) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)

    assert in_fork(make) == 0
