"""A call too many on one rank shows in the lines; ranks that take turns or branch show nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from unisono.control import signatures
from unisono.control.signatures import CallHistory, call_head
from unisono.errors import CollectiveMismatchError

RIGHT = {
    "all on one line": ["AAA", "AAA", "BBB"],
    "one branch for one rank": ["AAA", "LSS", "BBB", "LSS", "LSS", "BBB"],
    "two branches after each other": ["LSS", "MTT", "NUU", "AAA"],
    "three ranks take turns": ["ABB", "BAB", "BBA", "ABB", "BAB"],
    "a line of its own for each": ["ABC", "DEF", "GHI"],
    "a helper that some call": ["LSS", "SSS", "LSS", "SSS"],
    "differing for long before": ["LSS", "MTT", "TUU", "UVV"],
}
WRONG = {
    "a call too many": ["AAA", "LAA", "ABB"],
    "a call too many, of the last": ["AAA", "AAL", "BBA"],
    "a call too many in the first round": ["LAA", "ABB"],
    "a call too few": ["AAA", "BAA", "CBB"],
    "a call too many of two": ["AA", "LA", "AB"],
}


def follow(rounds: Sequence[str]) -> None:
    """Let the ranks make one call after another on the lines that the letters stand for."""
    history = CallHistory()
    for letters in rounds:
        if len(set(letters)) == 1:
            history.sites = None
        else:
            history.compare([f"{letter}.py:1" for letter in letters], "barrier", [0, 1, 2])


@pytest.mark.parametrize("case", RIGHT)
def test_no_mistake(case: str, caplog: pytest.LogCaptureFixture) -> None:
    follow(RIGHT[case])
    assert not caplog.records


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake(case: str) -> None:
    with pytest.raises(
        CollectiveMismatchError, match="has made one call (more|less) than"
    ) as caught:
        follow(WRONG[case])
    said = str(caught.value)
    lines = said.split("\n")
    assert [line[:7] for line in lines[1:3]] == ["  rank ", "  other"], lines
    assert len(lines) == 4
    assert "\\" not in said
    if "many" in case and "of two" not in case:
        assert "one call more than the others, probably at L.py:1" in said
        assert f"rank {2 if 'last' in case else 0} has" in said
    if "few" in case:
        assert "rank 0 has made one call less than the others, probably at A.py:1" in said


def test_two_calls_in_another_order_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        follow(["AA", "AB", "BA", "CC", "AB", "BA", "CC"])
    (record,) = caplog.records
    assert "A.py:1 and then at B.py:1, the other ranks in the opposite order" in record.getMessage()


def test_a_call_that_is_long_is_compared_whole() -> None:
    frames = [call_head(f"all_gather {'x' * 5000}{end}", signatures.site()) for end in "ab"]
    assert max(map(len, frames)) < 2000
    with pytest.raises(CollectiveMismatchError):
        signatures.unpack(frames, frames[0], lambda: [0, 1])
    assert signatures.unpack([frames[0]] * 2, frames[0], lambda: [0, 1]) == [b"", b""]
