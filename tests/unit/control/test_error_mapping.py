"""Which of our errors a library's error becomes."""

from __future__ import annotations

import pytest

from unisono.control.absent_ranks import matching_error
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

TABLE = {"timed out": CollectiveTimeoutError, "^gone|reset by peer": PeerFailedError}


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("Timed out waiting 5 ms", CollectiveTimeoutError),
        ("Connection RESET by peer", PeerFailedError),
        ("gone, and timed out", CollectiveTimeoutError),
        ("they are gone", CollectiveError),
    ],
)
def test_the_first_row_that_matches_counts(text: str, ours: type[CollectiveError]) -> None:
    assert matching_error(TABLE, text) is ours
