"""What every collective of the facade has in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from unisono._context import left_half_way
from unisono._tracebacks import hides
from unisono.errors import UnisonoError

__all__ = ("collective",)

__tracebackhide__ = hides

F = TypeVar("F", bound=Callable[..., Any])


def collective(fn: F) -> F:
    """Decorate a collective of the facade: one that is left half-way ends the context.

    Local. Ctrl-C leaves it so, and what an alarm's handler raises. The other ranks have called it,
    or will; whatever this rank called next would meet that. The errors of the collective itself
    leave all ranks in step, or are known to the model.
    """
    note, own = left_half_way, UnisonoError

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except own:
            raise
        except BaseException as error:
            trace = error.__traceback__
            has_begun = trace is None or trace.tb_next is not None
            if has_begun or not isinstance(error, TypeError):  # as of an argument too many
                note(fn.__name__, error)
            raise

    # doctest passes over functions whose globals are another module's
    made = FunctionType(
        call.__code__, fn.__globals__, fn.__name__, call.__defaults__, call.__closure__
    )
    return cast("F", functools.update_wrapper(made, fn))
