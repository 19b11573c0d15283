"""Memory of another process: what its owner names is opened, and nothing else."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest

from unisono.host import memory, sealed

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
    with pytest.raises(OSError, match="isn't the memory that was to be shared"):
        memory.open_at(struct.pack("<5Q", *fields), writes=True)
    os.close(other)
    with pytest.raises(OSError, match="isn't the address"):
        memory.open_at(b"short", writes=False)


def test_what_is_sealed_cant_be_changed_and_comes_back() -> None:
    blocks: list[sealed.Block] = [b"head", b"", memoryview(bytes(range(200))), bytearray(3)]
    fd = sealed.seal(blocks)
    assert fd is not None
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 10)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(fd, 0)
    mine, other = sealed.open_copy(fd), sealed.open_copy(fd)
    os.close(fd)
    for whole in (mine, other, sealed.joined(blocks)):
        assert [bytes(block) for block in sealed.blocks_in(whole)] == [bytes(b) for b in blocks]
    sealed.blocks_in(mine)[0][0] = 0
    assert bytes(sealed.blocks_in(other)[0]) == b"head"
    assert [bytes(b) for b in sealed.blocks_in(sealed.joined([]))] == []
