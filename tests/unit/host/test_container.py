"""What a container has left, by the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.host import container


def group(folder: Path, limit: int | str, used: int, cached: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name = [
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.max", "memory.current"),
    ][version - 1]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    prefix = ["total_", ""][version - 1]
    lines = (f"{prefix}inactive_file {cached}", f"{prefix}active_file 1", "anon 5")
    (folder / "memory.stat").write_text("\n".join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def free(folder: Path, membership: str) -> int | None:
    (folder.parent / "membership").write_text(membership)
    return container.free_bytes(folder, folder.parent / "membership")


@pytest.mark.parametrize(("used", "cached", "left"), [(900, 300, 401), (5000, 0, 0)])
def test_pages_of_files_count_as_free(folder: Path, used: int, cached: int, left: int) -> None:
    group(folder, 1000, used, cached, 2)
    assert free(folder, "0::/\n") == left


def test_the_tightest_group_around_counts(folder: Path) -> None:
    group(folder, "max", 0, 0, 2)
    group(folder / "slice", 5000, 4000, 0, 2)
    group(folder / "slice" / "job", "max", 10, 0, 2)
    assert free(folder, "0::/slice/job\n") == 1001
    group(folder / "slice" / "job", 500, 10, 0, 2)
    assert free(folder, "0::/slice/job\n") == 491


def test_a_container_may_not_see_the_path_of_its_group(folder: Path) -> None:
    group(folder / "memory", 2000, 500, 0, 1)
    membership = "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/x\n0::/\n"
    assert free(folder, membership) == 1501


@pytest.mark.parametrize("text", ["", "words\n"])
def test_what_can_not_be_read_is_no_limit(folder: Path, text: str) -> None:
    assert container.free_bytes(folder, folder / "none") is None
    group(folder, "max", 0, 0, 2)
    assert free(folder, "0::/\n") is None
    (folder / "memory.max").write_text(text)
    assert free(folder, "0::/\n") is None


def test_this_process_can_be_asked() -> None:
    free_bytes = container.free_bytes()
    assert free_bytes is None or free_bytes > 0
