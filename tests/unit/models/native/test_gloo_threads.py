from __future__ import annotations

from pathlib import Path

import pytest

from unisono.models.native import process_group

IDLE = "202 0x55db3f59c444 0x189 0x0 0x0 0x0 0xffffffff 0x7ff733813d10 0x7ff7554a3f16\n"


def test_a_thread_that_ends_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("python", "pt_gloo_runloop", "pt_gloo_runloop")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
        (tmp_path / str(number) / "syscall").write_text(IDLE)
    (tmp_path / "1" / "comm").unlink()  # as when the thread ends between two looks
    monkeypatch.setattr(process_group, "_THREADS", tmp_path)
    monkeypatch.setattr(process_group, "_THREAD_NAME", "pt_gloo_runloop\n")
    assert list(process_group._system_calls()) == [IDLE]
    monkeypatch.setattr(process_group, "_THREAD_NAME", "")  # as torch 2.6 doesn't name them
    assert list(process_group._system_calls()) == [IDLE] * 2
    monkeypatch.setattr(process_group, "_THREADS", tmp_path / "nowhere")
    assert not list(process_group._system_calls())


@pytest.mark.parametrize(
    ("call", "is_busy"),
    [
        (IDLE, False),
        ("running\n", True),
        ("202 0x7ff728009968 0x189 0x0 0x7ff733012240 0x0 0xffffffff 0x7ff7330 0x7ff7\n", True),
        ("202 0x9adf70 0x89 0x0 0x7f1c06df8a80 0x0 0xffffffff 0x7f1c06df8a00 0x7f1c\n", True),
    ],
    ids=["nothing to do", "between two waits", "in an operation", "asks for the interpreter"],
)
def test_a_thread_is_busy_unless_it_waits_without_a_timeout(call: str, is_busy: bool) -> None:
    assert bool(process_group._BUSY.match(call)) == is_busy
