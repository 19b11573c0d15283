"""What the facade keeps on every model: groups, hubs, and what runs in the background."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from unisono.control.signatures import SequenceNumbers, from_here
from unisono.errors import CollectiveError
from unisono.model.handle import BACKGROUND, Background, Handle
from unisono.topology import Group

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ("Keeping",)

T = TypeVar("T")
_context_ids = itertools.count(1)


class Keeping:
    """The part of a model that belongs to one context, whatever its library is."""

    name: ClassVar[str]

    context_id: int
    """Identity of this context: never equal for two contexts of one process."""
    groups: dict[tuple[int, ...], Group]
    """Groups that the facade made for lists of ranks, by the ranks in ascending order."""
    planes: dict[str, Any]
    """Hubs of the control plane, by the name of their group; empty for models without sockets."""
    steps: SequenceNumbers
    """What this rank has begun on the data plane."""
    secret: bytes | None
    """What ranks prove to each other before their data plane is trusted; None where they share
    nothing yet."""
    proved: set[str]
    """Names of the groups whose ranks have proved it."""
    is_one_host: bool
    """Whether all ranks are processes of this user on this host."""
    is_checked: bool | None
    """Whether ranks compare their calls before each collective of the data plane; None for where
    it costs little, which `compares_calls` tells."""
    interrupted: CollectiveError | None
    """Why this rank calls nothing more in this context: it left a collective half-way."""
    hosts: Sequence[bytes]
    """The name of each rank's host, once the ranks of an adopted context have said them."""
    must_introduce: bool
    """Whether the first call over all ranks has these name their hosts, in an adopted context."""
    _background: Background | None

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Set what the facade keeps on a model, so that none needs a ``super().__init__``."""
        model = super().__new__(cls)
        model.context_id = next(_context_ids)
        model.groups = {}
        model.planes = {}
        model.steps = SequenceNumbers()
        model.secret = None
        model.proved = set()
        model.is_one_host = False
        model.is_checked = {"0": False, "1": True}.get(os.environ.get("UNISONO_DEBUG", ""))
        model.interrupted = None
        model.hosts = ()
        model.must_introduce = False
        model._background = None
        return model

    def is_alive(self) -> bool:
        """Tell whether this is still the context that it was. Local; called before each use."""
        return True

    def part(self, farewell: str = "left") -> None:
        """Close what the facade keeps on a context that has ended. Local.

        Args:
            farewell: what the others hear this rank did; empty for no word, as of one that failed.
        """
        hubs = [hub for hub in self.planes.values() if hub is not None]
        self.planes.clear()
        self.groups.clear()
        for hub in hubs:
            hub.close(farewell)

    def say_farewell(self, how: str) -> None:
        """Let the others know that this rank calls nothing more. Local."""
        for hub in [hub for hub in self.planes.values() if hub is not None]:
            hub.say_farewell(how)

    def disown(self) -> None:
        """Close what a forked child has inherited, without a word to the others. Local."""
        hubs = [hub for hub in self.planes.values() if hub is not None]
        self.planes.clear()
        self._background = None  # its thread isn't here
        for hub in hubs:
            hub.disown()

    def inherit(self, other: Keeping) -> None:
        """Take over what the facade keeps on another view of this context, if it is that. Local.

        What the ranks made together must not be made again on some of them alone.
        """
        if other.is_alive():
            self.context_id = other.context_id
            self.groups, self.planes, self.steps = other.groups, other.planes, other.steps
            self.secret, self.proved = other.secret, other.proved
            self.is_one_host = other.is_one_host
            self._background, self.is_checked = other._background, other.is_checked
            self.interrupted, self.must_introduce = other.interrupted, other.must_introduce
            self.hosts = other.hosts

    def interrupt(self, who: str, how: str) -> None:
        """Take note that a collective was left half-way, and tell the ranks that wait for this one.

        Local; waits a second at most for a rank that doesn't read.

        Args:
            who: this rank, for messages.
            how: what interrupted which call.
        """
        if self.interrupted is None:
            self.interrupted = CollectiveError(
                f"{who}: {how}, so the ranks are out of step: end the job, or finalize() and "
                "initialize again"
            )
            self.tell_interrupted(how)

    def tell_interrupted(self, how: str) -> None:
        """Let other ranks know that this one won't come. Local."""
        for hub in [hub for hub in self.planes.values() if hub is not None]:
            hub.interrupt(how)

    def check_whole(self) -> None:
        """Refuse any collective after an interrupted one. Local.

        Raises:
            CollectiveError: a collective of this context was left half-way.
        """
        if self.interrupted is not None:
            raise type(self.interrupted)(*self.interrupted.args)

    def start(self, call: Callable[[], T]) -> Handle[T]:
        """Start `call`, which uses this model's collectives, without waiting for it.

        Local. The default runs it in one background thread for each context, in order, under the
        deadline that holds here, and in the name of the user's line.
        """
        self.check_whole()
        if self._background is None:
            self._background = Background(f"{BACKGROUND}-{self.name}-{self.context_id}")
        return self._background.submit(partial(from_here().run, call))

    def settle(self) -> None:
        """Wait for what `start` has under way, so that every rank keeps one order. Local."""
        if self._background is not None:
            self._background.settle()
