"""The edge of a model: which of our errors an exception of its library becomes."""

from __future__ import annotations

import pytest

from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError
from unisono.model.error_mapping import ErrorRow, map_errors, mapped

TABLE = (
    ErrorRow(TimeoutError, "", CollectiveTimeoutError),
    ErrorRow((RuntimeError, OSError), "reset by peer|^gone", PeerFailedError),
    ErrorRow(RuntimeError, "", CollectiveError),
)


def worded(ours: type[CollectiveError], error: Exception) -> CollectiveError:
    return ours(f"rank 1: {error}")


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (TimeoutError("reset by peer"), CollectiveTimeoutError),
        (RuntimeError("Connection RESET by peer"), PeerFailedError),
        (OSError("gone for good"), PeerFailedError),
        (RuntimeError("it is gone"), CollectiveError),
        (OSError("it is gone"), None),
        (ValueError("reset by peer"), None),
        (PeerFailedError("ours already"), None),
    ],
)
def test_the_first_row_that_matches_counts(error: Exception, ours: object) -> None:
    assert mapped(TABLE, error) is ours


def test_patterns_may_be_searched_in_something_else() -> None:
    assert mapped(TABLE, RuntimeError("MPI says 77"), "gone") is PeerFailedError


def test_an_error_of_the_library_is_the_cause_of_ours() -> None:
    cause = RuntimeError("reset by peer")
    match = "rank 1: reset by peer"
    with pytest.raises(PeerFailedError, match=match) as caught, map_errors(TABLE, worded):
        raise cause
    assert caught.value.__cause__ is cause


def test_what_no_row_matches_passes_unchanged() -> None:
    error = ValueError("the user's own")
    with pytest.raises(ValueError, match="the user's own") as caught, map_errors(TABLE, worded):
        raise error
    assert caught.value is error
