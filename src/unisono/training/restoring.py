"""In-place loading of states: everything is checked before anything is changed."""

from __future__ import annotations

import copy
import importlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.context import current_model
from unisono.errors import PayloadError
from unisono.payload.pytree import like
from unisono.training.same_tensors import is_sharded
from unisono.training.states import (
    BY_RANK,
    ByRank,
    has_state,
    hidden_module,
    is_kept,
    leaves,
    renamed,
    with_own_keys,
)

_log = logging.getLogger(__name__)
_MISSING = object()
Step = Callable[[], object]


class Plan:
    """A planned load: steps that may fail have run already, and `undo` reverts them."""

    def __init__(
        self,
        into: Any,
        saved: Any,
        is_strict: bool,
        undo: ExitStack,
        absent: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        self.is_strict: bool = is_strict
        self.trials: list[tuple[Step, Step]] = []  # loads that may fail, and what reverts each
        self.fills: list[Step] = []  # loads that can't fail, for `fill`
        self.left_out: list[str] = [_place(path) for path in absent]
        self.made: Any = self._plan(into, saved, "the checkpoint")
        for load, revert in self.trials:
            undo.callback(revert)  # registered first, as the load may fail half-way
            load()

    def fill(self) -> Any:
        """Run the steps that cannot fail; return the loaded object."""
        for fill in self.fills:
            fill()
        if self.left_out:
            _log.warning("strict=False left out %s", ", ".join(self.left_out))
        return self.made

    def _plan(self, into: Any, saved: Any, where: str) -> Any:
        """Plan the load of `saved` into `into`; return the object that replaces `into`."""
        _check_by_rank(into, isinstance(saved, Mapping) and saved.keys() == {BY_RANK}, where)
        load: Step
        if isinstance(into, ByRank):
            load = partial(into.load, _state_of_this_rank(saved[BY_RANK], where))
            self._add_trial(load, _loads_copy(into.state, into.load), where)
        elif isinstance(into, nn.Module):
            self._module(hidden_module(into), saved, where)
        elif isinstance(into, torch.optim.Optimizer):
            load = partial(into.load_state_dict, optimizer_parts(into, saved, where))
            # Loading replaces these two objects, so that they need no copy.
            kept = {name: getattr(into, name) for name in ("state", "param_groups")}
            self._add_trial(load, partial(vars(into).update, kept), where)
        elif has_state(into):
            load = partial(into.load_state_dict, saved)
            self._add_trial(load, _loads_copy(into.state_dict, into.load_state_dict), where)
        elif isinstance(into, dict):
            self._dict(into, saved, where)
        elif isinstance(into, (list, tuple)) and is_kept(into):
            return self._items(into, saved, where)
        elif isinstance(into, Tensor):
            self._tensor(into, saved, where)
        else:
            return saved
        return into

    def _add_trial(self, load: Step, revert: Step, where: str) -> None:
        """Add a step that may fail half-way, for example in a class of the user."""

        def undo() -> None:
            # An error here must neither keep other steps from being reverted nor hide the first.
            with suppress(Exception):
                revert()

        self.trials.append((_with_place(load, where), undo))

    def _module(self, module: nn.Module, saved: Any, where: str) -> None:
        """Plan the load of a module; its old values are copied only if the load may fail."""
        current = module.state_dict()
        made = with_own_keys(module, current, saved, where)
        if not self.is_strict:
            misfits = [key for key in made if not _fits(current.get(key), made[key])]
            for key in misfits:
                del made[key]
            # It contains misfits of the module's own keys, which are listed once.
            absent = [key for key in current if key not in made]
            self.left_out += [f"{where}[{key!r}]" for key in dict.fromkeys((*absent, *misfits))]
        for key in made:
            made[key] = local_part(current.get(key), made[key], f"{where}[{key!r}]")
        load = partial(module.load_state_dict, made, strict=self.is_strict)
        fits = all(_fits(current.get(key), item) for key, item in made.items())
        if fits and (not self.is_strict or made.keys() == current.keys()):
            self.fills.append(_with_place(load, where))  # it can't fail, so needs no copy
            return
        before = {
            key: item.detach().clone() if isinstance(item, Tensor) else copy.deepcopy(item)
            for key, item in current.items()
        }
        self._add_trial(load, partial(module.load_state_dict, before), where)

    def _dict(self, into: dict[Any, Any], saved: Any, where: str) -> None:
        """Plan the load of a dict's own keys; other saved keys are left out."""
        parts = {key: _entry(saved, key) for key in into}
        missing = [key for key, part in parts.items() if part is _MISSING]
        if missing and self.is_strict:
            raise PayloadError(f"{where} has no {', '.join(map(repr, missing[:5]))}")
        self.left_out += [f"{where}[{key!r}]" for key in missing]
        made = {
            key: self._plan(item, parts[key], f"{where}[{key!r}]")
            for key, item in into.items()
            if parts[key] is not _MISSING
        }
        self.fills.append(partial(into.update, made))

    def _items(self, into: Any, saved: Any, where: str) -> Any:
        """Plan the load of a list or tuple; return it, or a new tuple if an item is replaced."""
        if not isinstance(saved, (list, tuple)) or len(saved) != len(into):
            raise PayloadError(f"{where} should have {len(into)} values: {_was_saved(saved)}")
        items = [self._plan(item, saved[i], f"{where}[{i}]") for i, item in enumerate(into)]
        if isinstance(into, list):
            self.fills.append(partial(into.__setitem__, slice(None), items))
            return into
        return into if all(map(operator.is_, items, into)) else like(into, items)

    def _tensor(self, into: Tensor, saved: Any, where: str) -> None:
        """Plan the copy of a saved tensor, or of this rank's part of it, into another."""
        if not isinstance(saved, Tensor):
            raise PayloadError(f"{where} has no tensor: {_was_saved(saved)}")
        # copy_() alone would convert the dtype and broadcast the shape.
        if (into.shape, into.dtype) == (saved.shape, saved.dtype):
            self.fills.append(partial(into.detach().copy_, local_part(into, saved, where)))
        elif self.is_strict:
            raise PayloadError(
                f"{where} does not fit: a tensor of shape {tuple(saved.shape)} and {saved.dtype} "
                f"was saved, but the target has shape {tuple(into.shape)} and {into.dtype}"
            )
        else:
            self.left_out.append(where)


def _place(path: Sequence[Any]) -> str:
    return f"the checkpoint{''.join(f'[{key!r}]' for key in path)}"


def _loads_copy(state: Callable[[], Any], load: Callable[[Any], object]) -> Step:
    """Return a step that restores the present state, if that can be copied."""
    try:
        return partial(load, copy.deepcopy(state()))
    except Exception:  # raised by the user's classes
        return lambda: None


def _with_place(load: Step, where: str) -> Step:
    """Return a step whose error names `where`."""

    def step() -> None:
        try:
            load()
        except Exception as error:  # load_state_dict of a class may raise any type
            raise PayloadError(f"{where} does not fit: {error}") from error

    return step


def _fits(current: Any, saved: Any) -> bool:
    """Return whether a module is sure to accept a saved tensor in place of its current one."""
    if not (isinstance(current, Tensor) and isinstance(saved, Tensor)):
        return False
    return current.shape == saved.shape


def _entry(saved: Any, key: Any) -> Any:
    """Return the entry `key` of a saved state, or the part of a module's state under it."""
    if not isinstance(saved, Mapping):
        return _MISSING
    if key in saved:
        return saved[key]
    # A dict may name the submodules of a module that was saved whole.
    start = f"{key}."

    def within(name: Any) -> str | None:
        return name[len(start) :] if isinstance(name, str) and name.startswith(start) else None

    return renamed(saved, within) or _MISSING


def _check_by_rank(into: Any, is_by_rank: bool, where: str) -> None:
    """Raise if only one of the saved state and the object to load is by rank."""
    if is_by_rank and has_state(into):
        raise PayloadError(f"{where} was saved by rank: load it into ByRank(...)")
    if isinstance(into, ByRank) and not is_by_rank:
        raise PayloadError(f"{where} was not saved by rank: load it without ByRank(...)")


def _state_of_this_rank(states: Sequence[Any], where: str) -> Any:
    """Return this rank's state; raise if the number of ranks differs."""
    topology = current_model().topology
    if len(states) != topology.world_size:
        raise PayloadError(
            f"{where} was saved by rank, on {len(states)} ranks, and can't be loaded on "
            f"{topology.world_size}: leave it out of into="
        )
    return states[topology.rank]


def _was_saved(saved: Any) -> str:
    """Return the end of an error text about a value of the wrong type."""
    return f"a value of type {type(saved).__qualname__} was saved"


def local_part(like: object, saved: Any, where: str) -> Any:
    """Return this rank's part of a full tensor for a DTensor; other values unchanged."""
    if not is_sharded(like) or not isinstance(saved, Tensor) or is_sharded(saved):
        return saved
    target: Any = like
    if target.shape != saved.shape:
        return saved  # loading raises an error about the shape
    spread: Any = importlib.import_module("torch.distributed.tensor")
    # Derived classes, such as torch's strided shards, split tensors in other ways.
    if any(type(each) not in (spread.Shard, spread.Replicate) for each in target.placements):
        raise _unsupported_placements(where, target)
    everywhere = [spread.Replicate()] * target.device_mesh.ndim
    whole = spread.DTensor.from_local(
        saved.detach(), target.device_mesh, everywhere, run_check=False
    )
    # A local cut, as every rank has the whole tensor.
    part = whole.redistribute(placements=target.placements)
    if part.to_local().shape != target.to_local().shape:
        raise _unsupported_placements(where, target)
    return part


def _unsupported_placements(where: str, target: Any) -> PayloadError:
    return PayloadError(
        f"{where} does not fit: a full tensor cannot be split for placements "
        f"{target.placements}: save it with this model, or load it before the model is sharded"
    )


def optimizer_parts(optimizer: torch.optim.Optimizer, saved: Any, where: str) -> Any:
    """Return an optimizer state of full tensors with this rank's parts for sharded parameters."""
    params = [item for group in optimizer.param_groups for item in group["params"]]
    is_known = isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping)
    if not is_known or not any(map(is_sharded, params)):
        return saved
    names = [name for group in saved.get("param_groups", ()) for name in group["params"]]
    param_of = dict(zip(names, params, strict=False))  # loading checks their number
    state = {
        key: _state_parts(param_of.get(key), item, f"{where}['state'][{key!r}]")
        for key, item in saved["state"].items()
    }
    return {**saved, "state": state}


def _state_parts(param: Any, state: Any, where: str) -> Any:
    """Return a parameter's optimizer state, with this rank's parts of full tensors."""
    if not is_sharded(param) or not isinstance(state, Mapping):
        return state
    for name, item in state.items():
        # A single number, such as Adam's step, isn't sharded.
        is_whole = isinstance(item, Tensor) and not is_sharded(item) and item.numel() > 1
        if is_whole and item.shape != param.shape:
            raise PayloadError(
                f"{where}[{name!r}] does not fit: a whole tensor of shape {tuple(item.shape)} was "
                f"saved, for a sharded parameter of shape {tuple(param.shape)}"
            )
    return {name: local_part(param, item, f"{where}[{name!r}]") for name, item in state.items()}


def refuse_lost_states(into: Any, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise if shards have a part of a state that `state`, which is filled from them, lacks."""
    for path, leaf in leaves(into):
        start = "".join(f"{key}." for key in path)
        _check_by_rank(leaf, start + BY_RANK in saved, _place(path))
        if has_state(leaf) and not isinstance(leaf, nn.Module):
            lost = [key for key in saved if key.startswith(start) and key not in state]
            if lost:
                raise PayloadError(
                    f"{type(leaf).__qualname__} has no state for {', '.join(lost[:3])} yet: "
                    "initialize it first, then call load_checkpoint"
                )
