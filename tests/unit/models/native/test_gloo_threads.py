from __future__ import annotations

from pathlib import Path

import pytest

from unisono.models.native import gloo_threads


def test_a_thread_that_ends_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("python", "pt_gloo_runloop", "pt_gloo_runloop")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} ({name}) R 1 1 1 0 -1")
    (tmp_path / "1" / "stat").unlink()  # as when the thread ends between two looks
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)
    monkeypatch.setattr(gloo_threads, "_NAME", "(pt_gloo_runloop)")
    assert gloo_threads._states() == ["R"]
    monkeypatch.setattr(gloo_threads, "_NAME", "")  # as torch 2.6 doesn't name them
    assert gloo_threads._states() == ["R", "R"]
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path / "nowhere")
    assert gloo_threads._states() == []
