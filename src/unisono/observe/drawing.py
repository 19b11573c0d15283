"""Draw who was waited for and who waited, where matplotlib is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unisono import plugins
from unisono.errors import ArgumentError
from unisono.observe.waits import Waits


def draw(what: str, found: Mapping[str, Waits], path: str | os.PathLike[str]) -> None:
    """Draw a picture into a file."""
    try:
        picture = plugins.load("unisono.observe.picture:draw")
    except ImportError as error:
        raise ArgumentError(
            f"{what} needs matplotlib, which can't be imported ({error}): pip install matplotlib, "
            "or print the table, which says the same"
        ) from error
    try:
        picture(found, path)
    except (OSError, ValueError) as error:  # such as a suffix that it doesn't know
        raise ArgumentError(f"{what}: {os.fspath(path)} can't be written: {error}") from error
