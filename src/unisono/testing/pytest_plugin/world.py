"""`World`: a test's view of the ranks that run it."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from unisono import facts
from unisono.collectives.gathers import all_gather
from unisono.pickling import dumps
from unisono.testing.cases import difference
from unisono.tracebacks import hides

__tracebackhide__ = hides


@dataclass(frozen=True)
class World:
    """The ranks that run a test.

    Args:
        rank: this rank.
        size: number of ranks.
    """

    rank: int
    size: int

    @classmethod
    def here(cls) -> World:
        """Create the world of this rank."""
        return cls(facts.get_rank(), facts.get_world_size())

    def same(self, value: object, *, among: Collection[int] | None = None) -> None:
        """Check that type, dtype, shape and bits are the same on all ranks, or `among` some."""
        # Collective over all ranks.
        __tracebackhide__ = hides  # here as well, for the debugger
        # Pickled, as tensors would be joined, and types may differ among ranks.
        pickles = all_gather(dumps(value))
        chosen = range(self.size) if among is None else sorted(among)
        values = {rank: pickle.loads(pickles[rank]) for rank in chosen}
        groups: list[list[int]] = []
        for rank in chosen:
            for group in groups:
                if not difference(values[rank], values[group[0]]):
                    group.append(rank)
                    break
            else:
                groups.append([rank])
        if len(groups) > 1:
            shown = "".join(f"\n  {ranks_text(group)}: {values[group[0]]!r}" for group in groups)
            where = difference(values[groups[1][0]], values[groups[0][0]])
            raise AssertionError(f"the ranks have different values:{shown}\n  they differ: {where}")

    @contextmanager
    def raises_on(self, rank: int | Collection[int], error: type[BaseException]) -> Iterator[None]:
        """Check that a block raises on certain ranks, and on no others.

        Args:
            rank: the rank that should raise, or several.
            error: the expected error, which ends the block; other errors propagate.

        Raises:
            AssertionError: the block didn't raise there (on these ranks).
        """
        __tracebackhide__ = hides
        if not self.only(rank):
            yield
            return
        try:
            yield
        except error:
            return
        raise AssertionError(f"rank {self.rank} of {self.size} didn't raise {error.__name__}")

    def only(self, rank: int | Collection[int]) -> bool:
        """Return whether this rank is among the given ones: ``if world.only(0): ...``."""
        return self.rank == rank if isinstance(rank, int) else self.rank in rank


def ranks_text(ranks: Collection[int]) -> str:
    """Return "rank 2" or "ranks 0,2-5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    # A range of two ranks isn't shorter.
    texts = [f"{p[0]}-{p[-1]}" if len(p) > 2 else ",".join(map(str, p)) for p in parts]
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(texts)}"
