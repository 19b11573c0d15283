"""What a replica does between its start and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono import _context
from unisono._tracebacks import hides
from unisono.control.deadlines import Limit, within
from unisono.launchers._lifetime import Lifetime
from unisono.launchers._output import begin_lines_with_rank
from unisono.model import ComputationModel
from unisono.registry import find_model
from unisono.topology import RankInfo

__all__ = ("Replica",)

__tracebackhide__ = hides


@dataclass(frozen=True, slots=True)
class Replica:
    """A user's function, and the context that it runs in.

    Args:
        backend: what to initialise.
        fn: called as ``fn(local_rank, *args, **kwargs)``.
        args: its positional arguments after the first.
        kwargs: its keyword arguments.
        options: options of the model's ``initialize``.
        limit: the deadline of the block that it was made in; None for none.
        prefix_output: whether lines that it prints begin with its rank, if it is one of several
            processes.
    """

    backend: str
    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: Limit | None = None
    prefix_output: bool = False

    def __call__(self, info: RankInfo) -> Any:
        """Run in a process of its own. Collective over all ranks of `info`.

        After an exception nothing is finalised: the connections stay open, so that the parent sees
        this error before any that it causes elsewhere. Threads that the function leaves behind
        have the context until they end, as an asynchronous checkpoint needs it.
        """
        if self.prefix_output and info.world_size > 1:
            begin_lines_with_rank(info.rank)
        cls = find_model(self.backend)
        with within(self.limit):
            model = _context.activate(lambda: cls.initialize(self.backend, info, **self.options))
            with Lifetime.function():
                result = self.fn(info.local_rank, *self.args, **self.kwargs)
            if model.is_alive():
                model.settle()
                model.finalize()
        _context.forget()
        return result

    def run(self, model: ComputationModel) -> Any:
        """Run where the model says: in a thread of its own, or in a process that it launched.

        Collective over all ranks of `model`.
        """
        is_process = threading.current_thread() is threading.main_thread()
        if self.prefix_output and is_process and model.topology.world_size > 1:
            begin_lines_with_rank(model.topology.rank)
        with _context.replica(model), within(self.limit):
            with Lifetime.function():
                result = self.fn(model.topology.local_rank, *self.args, **self.kwargs)
            model.settle()
            model.finalize()
            return result
