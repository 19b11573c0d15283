"""The edge of a model: a table says which error of its library becomes which of our errors."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono.errors import CollectiveError


def mapped(table: Mapping[str, type[CollectiveError]], text: str) -> type[CollectiveError]:
    """Return the error of the first pattern that matches a library's text."""
    rows = table.items()
    found = (error for pattern, error in rows if re.search(pattern, text, re.IGNORECASE))
    return next(found, CollectiveError)
