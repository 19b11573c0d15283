"""A checkpoint is the complete old or new one, whatever happens while it is written."""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono as idist
from tests.support.processes import python, until
from tests.support.worlds import alone_and_several, run, several
from unisono.errors import (
    ArgumentError,
    PayloadError,
    PeerFailedError,
    WorkerFailedError,
)


@pytest.mark.fast
@alone_and_several
def test_one_rank_writes_and_all_read(tmp_path: Path) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    path = tmp_path / "é model.pt"
    for value in range(2):
        state = {"w": torch.full((3,), float(rank + value)), "epoch": value}
        idist.save_checkpoint(state, path, rank=size - 1)
        loaded = idist.load_checkpoint(path)
        assert loaded["w"].tolist() == [size - 1.0 + value] * 3
        assert loaded["w"].device == idist.device()
        idist.barrier()
    assert os.listdir(tmp_path) == ["é model.pt"]


@several
def test_a_failure_reaches_every_rank(tmp_path: Path) -> None:
    with pytest.raises(PeerFailedError, match="rank 0 raised FileNotFoundError") as caught:
        idist.save_checkpoint({"w": torch.ones(1)}, tmp_path / "no such folder" / "x.pt")
    assert isinstance(caught.value.__cause__, OSError) == (idist.get_rank() == 0)
    with pytest.raises(PayloadError, match=r"can't be saved by rank 0: .*pickle"):  # on every rank
        idist.save_checkpoint(lambda: 0, tmp_path / "y.pt")
    assert not (tmp_path / "y.pt").exists()


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    idist.save_checkpoint({"w": torch.zeros(10)}, path)
    run("gloo", 2, fills_the_disk, str(path))
    assert idist.load_checkpoint(path)["w"].tolist() == [0.0] * 10
    assert os.listdir(tmp_path) == ["model.pt"]


def fills_the_disk(local_rank: int, path: str) -> None:
    """Write a file over this process's size limit, which fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(
        PeerFailedError, match=r"rank 0 raised OSError: \[Errno 27\] File too large"
    ):
        idist.save_checkpoint({"w": torch.ones(2**20)}, path)


# A save that works comes first: only root may be able to read modules that torch imports late.
WITHOUT_PERMISSION = """
import os, sys, torch, unisono as idist
idist.save_checkpoint({'w': torch.ones(10)}, sys.argv[2])
if os.geteuid() == 0:  # root may write everywhere
    os.setuid(65534)
try:
    idist.save_checkpoint({'w': torch.ones(10)}, sys.argv[1])
except idist.errors.PeerFailedError as error:
    print(error)
"""


def test_a_folder_without_permission_leaves_the_old_file(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    path = closed / "model.pt"
    idist.save_checkpoint({"w": torch.zeros(10)}, path)
    closed.chmod(0o555)
    for folder in closed.parents:
        if Path(tempfile.gettempdir()) in folder.parents and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    done = python("-c", WITHOUT_PERMISSION, str(path), str(tmp_path / "other.pt"))
    closed.chmod(0o755)
    assert "PermissionError" in done.stdout, done.stdout + done.stderr
    assert idist.load_checkpoint(path)["w"].tolist() == [0.0] * 10


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """Kill the writer at six moments of one save."""
    path, written = tmp_path / "model.pt", tmp_path / "written"
    for turn in range(6):
        with pytest.raises(WorkerFailedError, match="SIGALRM"):
            run("gloo", 1, writes_until_killed, str(path), str(written), turn / 6)
        last = len(written.read_text())
        loaded = idist.load_checkpoint(path)["w"]
        assert loaded.unique().numel() == 1
        assert loaded.numel() == 500_000
        assert loaded[0].item() in (last, last + 1)
        written.unlink()
    assert all(name.endswith(".tmp") for name in os.listdir(tmp_path) if name != "model.pt")


def writes_until_killed(local_rank: int, path: str, written: str, part: float) -> None:
    """Save until a signal ends the process, after a part of the duration of one save."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open(written, "a", buffering=1) as note:
        for value in range(1, 10_000):
            begin = time.perf_counter()
            idist.save_checkpoint({"w": torch.full((500_000,), float(value))}, path)
            print(".", end="", file=note, flush=True)
            if value == 2:
                took = time.perf_counter() - begin
                signal.setitimer(signal.ITIMER_REAL, took * part + 1e-6)


WRITER = """
import sys, torch, unisono as idist
while True:
    idist.save_checkpoint({"w": torch.ones(20_000_000)}, sys.argv[1])
"""


def test_writers_of_one_path_leave_each_other_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer may begin at the last moment, before this file is renamed."""
    path, replace = tmp_path / "both.pt", Path.replace

    def late(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        idist.save_checkpoint({"by": "another"}, path)
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", late)
    idist.save_checkpoint({"by": "this one"}, path)
    assert idist.load_checkpoint(path) == {"by": "this one"}
    assert list(tmp_path.iterdir()) == [path]


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    until(lambda: any(part.stat().st_size for part in tmp_path.glob(".model.pt.*.tmp")), 60)
    writer.send_signal(signal.SIGSTOP)
    (part,) = tmp_path.glob(".model.pt.*.tmp")
    other = tmp_path / ".model.pt.other.0123456789abcdef.tmp"
    other.write_bytes(b"of a file model.pt.other")
    old = tmp_path / f".model.pt.{'0' * 32}.tmp"
    old.touch()  # an empty file, as on a file system without locks
    os.utime(old, (0, 0))
    idist.save_checkpoint({"w": torch.ones(1)}, path)
    assert part.exists() and not old.exists()  # the writer of `part` is still alive
    writer.kill()
    writer.wait()
    idist.save_checkpoint({"w": torch.ones(1)}, path)
    assert sorted(os.listdir(tmp_path)) == [other.name, "model.pt"]


def test_a_link_stays_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "model.pt", tmp_path / "latest.pt"
    idist.save_checkpoint({"w": 1}, path)
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    path.chmod(0o600)
    link.symlink_to("model.pt")
    idist.save_checkpoint({"w": 2}, link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert idist.load_checkpoint(path) == idist.load_checkpoint(link) == {"w": 2}
    (tmp_path / "dangling.pt").symlink_to("new.pt")
    idist.save_checkpoint({"w": 3}, tmp_path / "dangling.pt")
    assert idist.load_checkpoint(tmp_path / "new.pt") == {"w": 3}
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PeerFailedError, match="isn't a regular file"):
        idist.save_checkpoint({"w": 1}, tmp_path / "fifo")


def count_refusals(path: Path, times: int, draw: random.Random, load: Callable[[], None]) -> int:
    """Damage a file many times; `load` refuses it, or checks that the values are as saved."""
    data, refused = path.read_bytes(), 0
    for _ in range(times):
        path.write_bytes(damaged(data, draw))
        try:
            load()
        except (PayloadError, ArgumentError):
            refused += 1
    path.write_bytes(data)
    load()
    return refused


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Change bytes, leave some out, cut the end off, or return other data."""
    kind = draw.randrange(4)
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 9)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(changed)
    if kind == 2:
        start = draw.randrange(len(data))
        return data[:start] + data[start + draw.randrange(1, 300) :]
    return draw.randbytes(draw.randrange(200))


def test_no_damaged_file_is_loaded_with_other_content(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    idist.save_checkpoint({"w": torch.arange(1000.0), "s": "x", "l": [1, 2, {"a": 3}]}, path)

    def load() -> None:
        loaded = idist.load_checkpoint(path)
        assert torch.equal(loaded["w"], torch.arange(1000.0))  # a date may differ
        assert (loaded["s"], loaded["l"]) == ("x", [1, 2, {"a": 3}])

    assert count_refusals(path, 1500, random.Random(1), load) > 1000


def test_no_damaged_shard_is_loaded_with_other_content(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    idist.save_checkpoint({"w": torch.arange(100.0), "n": 3, "s": ["x"]}, path, sharded=True)

    def load() -> None:
        into: dict[str, Any] = {"w": torch.zeros(100), "n": 0, "s": ["y"]}
        idist.load_checkpoint(path, into=into)
        assert torch.equal(into["w"], torch.arange(100.0))
        assert (into["n"], into["s"]) == (3, ["x"])

    draw = random.Random(2)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert sum(count_refusals(file, 60, draw, load) for file in files) > 150


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


# A pickle that sets an attribute of one of the classes of torch's metadata.
CHANGES_A_CLASS = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}Vhacked\nI1\nstb."


def test_shards_run_no_code(tmp_path: Path) -> None:
    path, evil = tmp_path / "shards", tmp_path / "evil"
    idist.save_checkpoint({"w": torch.ones(4), "o": 1}, path, sharded=True)
    (folder,) = path.glob("shards-*")
    (folder / "metadata.sha256").unlink()
    metadata = (folder / ".metadata").read_bytes()
    into: dict[str, Any] = {"w": torch.zeros(4), "o": 0}
    for data in (pickle.dumps(Touches(evil)), CHANGES_A_CLASS, pickle.dumps({"w": 1})):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(PayloadError, match="can't be read"):
            idist.load_checkpoint(path, into=into)
        assert not evil.exists()
    (folder / ".metadata").write_bytes(metadata)
    idist.load_checkpoint(path, into=into)
    assert (into["w"].tolist(), into["o"]) == ([1.0] * 4, 1)
    for name in ("../../../../etc", "shards-x/../../evil", ""):
        (path / "CURRENT").write_text(name)
        with pytest.raises(PayloadError, match="invalid shard folder name"):
            idist.load_checkpoint(path, into=into)
    idist.save_checkpoint({"w": torch.ones(4), "o": Touches(evil)}, path, sharded=True)
    into["w"].zero_()
    with pytest.raises(PayloadError, match="can't be read"):
        idist.load_checkpoint(path, into=into)
    assert not evil.exists() and not into["w"].any()
    idist.load_checkpoint(path, into=into, weights_only=False)
    assert evil.exists()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    path, evil = tmp_path / "x.pt", tmp_path / "evil"
    with pytest.raises(ArgumentError, match="there is no checkpoint"):
        idist.load_checkpoint(path)
    for value, made in ((Touches(evil), "mkdir"), (np.float64(1.5), "scalar"), (path, "Path")):
        with pytest.warns(UserWarning, match=rf"{path}: values made by .*{made}") as warned:
            idist.save_checkpoint({"code": value}, path)
        assert warned[0].filename == __file__
        with pytest.raises(PayloadError, match=rf"can't be read .*: values made by .*{made}"):
            idist.load_checkpoint(path)
    with pytest.warns(UserWarning):
        idist.save_checkpoint({"code": Touches(evil)}, path)
    assert not evil.exists()
    assert idist.load_checkpoint(path, weights_only=False) == {"code": None}
    assert evil.exists()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PayloadError, match=r"x\.pt can't be read \(rank 0 of 1\)"):
        idist.load_checkpoint(path)
    with pytest.raises(ArgumentError, match="has no checkpoint"):
        idist.load_checkpoint(tmp_path)
    idist.save_checkpoint({"w": torch.ones(1)}, tmp_path / "s", sharded=True)
    with pytest.raises(ArgumentError, match="into="):
        idist.load_checkpoint(tmp_path / "s")
    with pytest.raises(ArgumentError, match="rank=1"):
        idist.save_checkpoint({}, path, rank=1)
    with pytest.raises(PeerFailedError, match=rf"there is no such folder: '{tmp_path / 'no'}'"):
        idist.save_checkpoint({}, tmp_path / "no" / "x.pt")
    long = tmp_path / ("x" * 252 + ".pt")
    state = idist.get_rng_state()
    idist.save_checkpoint(state, long)
    idist.set_rng_state(idist.load_checkpoint(long))
