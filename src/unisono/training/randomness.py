"""Seeds and random generators, shared or per rank."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from unisono.arguments import check_count
from unisono.collectives.broadcasts import broadcast
from unisono.collectives.membership import GroupLike, context_and_group
from unisono.context import current_model
from unisono.errors import ArgumentError

_LIMIT = 2**32  # numpy's limit


def sync_random_seed(seed: int | None = None, group: GroupLike = None) -> int:
    """Return the same random seed on every rank.

    Collective over `group`.

    Args:
        seed: the seed, taken from the group's first rank; None draws one from the system.
        group: a Group, a list of ranks, or None for all ranks.

    Returns:
        0 to 2**32 - 1, the same on every rank.

    Raises:
        ArgumentError: the seed isn't an int in that range.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.sync_random_seed(3)
        3
    """
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else _checked(seed)
    _, members, is_member = context_and_group(group)
    src = 0 if members is None or not is_member else members.ranks[0]
    agreed: int = broadcast(drawn, src, group) if is_member else drawn
    return agreed


def _checked(seed: Any) -> int:
    return check_count("seed", seed, 0, _LIMIT - 1)


def seed_everything(seed: int | None = None, per_rank: bool = False) -> int:
    """Seed python, torch on all devices, and numpy if it is loaded.

    Collective over all ranks.

    Args:
        seed: the seed, taken from rank 0; None draws one from the system.
        per_rank: whether each rank adds its rank, so that ranks draw different numbers, as for
            dropout; else all draw the same, as for equal parameters, except in the dataset of an
            `auto_dataloader`.

    Returns:
        The seed before the rank was added, the same on every rank. Replicas that are threads share
        these generators, so their numbers are not reproducible: use `rank_generator` there.

    Raises:
        ArgumentError: the seed isn't an int from 0 to 2**32 - 1.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.seed_everything(7)
        7
    """
    shared = sync_random_seed(seed)
    mine = (shared + (current_model().topology.rank if per_rank else 0)) % _LIMIT
    random.seed(mine)
    torch.manual_seed(mine)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mine)
    return shared


def _generators() -> dict[
    str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]
]:
    """Return functions that get, set and seed each global generator of this rank."""
    default = torch.default_generator
    made: dict[str, Any] = {
        "python": (random.getstate, random.setstate, random.seed),
        # torch.manual_seed would seed every device, too.
        "torch": (torch.get_rng_state, torch.set_rng_state, default.manual_seed),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        made["numpy"] = (numpy.random.get_state, numpy.random.set_state, numpy.random.seed)
    device = current_model().device
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "get_rng_state"):
        get = partial(module.get_rng_state, device)
        put = partial(module.set_rng_state, device=device)
        made["device"] = (get, put, module.manual_seed)
    return made


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators in a block, and restore their states afterwards."""
    generators = _generators().values()
    before = [(put, get()) for get, put, _ in generators]
    for _, _, set_seed in generators:
        set_seed(seed % _LIMIT)
    try:
        yield
    finally:
        for put, state in before:
            put(state)


def rank_generator(seed: int | None = None, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator that only this rank uses, even if replicas are threads.

    Args:
        seed: the rank is added to it; None draws one from the system.
        device: the generator's device.

    Returns:
        A new generator, for ``torch.rand(..., generator=...)``, samplers and loaders. With a seed
        its numbers equal those of ``seed_everything(seed, per_rank=True)`` in a separate process.

    Raises:
        ArgumentError: the seed isn't an int from 0 to 2**32 - 1.

    Example:
        >>> import torch, unisono as idist
        >>> def draw(local_rank):
        ...     return torch.rand(1, generator=idist.rank_generator(7)).item()
        >>> idist.spawn("threads", draw, nproc_per_node=2) == idist.spawn(
        ...     "threads", draw, nproc_per_node=2
        ... )
        True
    """
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed((_checked(seed) + current_model().topology.rank) % _LIMIT)
    return generator


def get_rng_state() -> dict[str, Any]:
    """Return the states of the generators that `seed_everything` seeds, for a checkpoint.

    Returns:
        Plain values and tensors, which ``load_checkpoint`` reads with ``weights_only=True``. Each
        rank has different states: ``ByRank(get_rng_state, set_rng_state)`` saves all of them.

    Example:
        >>> import torch, unisono as idist
        >>> state = idist.get_rng_state()
        >>> first = torch.rand(1)
        >>> idist.set_rng_state(state)
        >>> bool(torch.rand(1) == first)
        True
    """
    state = {name: get() for name, (get, _, _) in _generators().items()}
    # Converted to lists and numbers, which weights_only=True can load.
    version, internal, gauss = state["python"]
    state["python"] = [version, list(internal), gauss]
    if "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        state["numpy"] = [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that `get_rng_state` returned.

    Args:
        state: this rank's result of `get_rng_state`.

    Raises:
        ArgumentError: `state` isn't a result of `get_rng_state`.

    Example:
        >>> import unisono as idist
        >>> idist.set_rng_state(idist.get_rng_state())
    """
    if not isinstance(state, dict) or not {"python", "torch"} <= set(state):
        raise ArgumentError("state must be a result of get_rng_state()")
    version, internal, gauss = state["python"]
    given = {**state, "python": (version, tuple(internal), gauss)}
    for name, (_, put, _) in _generators().items():
        if name in given:
            value = given[name]
            # load_checkpoint may have moved the state to the device.
            put(value.cpu() if isinstance(value, torch.Tensor) else value)
