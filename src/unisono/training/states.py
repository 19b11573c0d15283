"""State dicts without the prefixes of wrappers, and how they are loaded again."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unisono.context import current_model
from unisono.errors import ArgumentError, PayloadError
from unisono.training.data_parallel import Replicated
from unisono.training.local_parts import local_part, optimizer_parts

__all__ = (
    "ByRank",
    "by_rank",
    "entries",
    "has_shards",
    "has_shown_wrapper",
    "has_state",
    "own_states",
    "plain",
    "refuse_lost_shards",
    "refuse_lost_states",
    "remember_wrapper",
    "restore",
    "states_to_fill",
    "unwrapped",
)

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, Replicated)
_COMPILED = "_orig_mod"  # where torch.compile keeps the module
_SHOWN = ("module.", f"{_COMPILED}.")
_BY_RANK = "by_rank"  # in a checkpoint, beside the states of all ranks
_custom: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # where others' wrappers keep it


def remember_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Note where somebody else's wrapper keeps the module, if it is one of its own. Local."""
    if wrapper is not module:
        names = [name for name, part in wrapper.named_children() if part is module]
        if names:
            _custom[wrapper] = names[0]


def _inner_name(module: nn.Module) -> str | None:
    """Name the part that a wrapper wraps; None for what isn't a wrapper."""
    if isinstance(module, _WRAPPERS):
        return "module"
    is_compiled = type(module).__name__ == "OptimizedModule" and _COMPILED in module._modules
    return _COMPILED if is_compiled else _custom.get(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Give the module within all wrappers. Local."""
    return _within(module, _inner_name)


def _within(module: nn.Module, inner_name: Callable[[nn.Module], str | None]) -> nn.Module:
    name = inner_name(module)
    while name is not None:
        inner = module._modules[name]
        assert inner is not None
        module, name = inner, inner_name(inner)
    return module


def _hidden_name(module: nn.Module) -> str | None:
    """Name the part that a wrapper wraps, if its state is that of this part and no more. Local."""
    name = _inner_name(module)
    if name is None or set(module._modules) != {name}:
        return None
    own = {key for key, item in module._parameters.items() if item is not None}
    own |= module._buffers.keys() - module._non_persistent_buffers_set
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    return None if own or has_extra else name


def _shown(module: nn.Module) -> list[tuple[str, str]]:
    """List prefixes that wrappers give to keys, the longest first, with what they stand for."""
    prefixes = []
    for name, part in module.named_modules(remove_duplicate=False):
        inner = _hidden_name(part)
        if inner is not None:
            own = f"{name}." if name else ""
            prefixes.append((f"{own}{inner}.", own))
    return sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True)


def _without(key: str, shown: list[tuple[str, str]]) -> str:
    for prefix, own in shown:
        if key.startswith(prefix):
            key = own + key[len(prefix) :]
    return key


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Give a state dict other keys, and the versions of its modules with them."""
    renamed = OrderedDict((names.get(key, key), value) for key, value in state.items())
    if len(renamed) != len(state):
        raise PayloadError("several keys of a module's state are the same without its wrappers")
    versions: Any = getattr(state, "_metadata", None)
    if versions is not None:
        made: Any = renamed
        made._metadata = OrderedDict(
            (names.get(f"{path}.", f"{path}.")[:-1] if path else path, version)
            for path, version in versions.items()
        )
    return renamed


def _state_of(module: nn.Module) -> OrderedDict[str, Any]:
    shown = _shown(module)
    state: Any = module.state_dict()
    if not shown:
        made: OrderedDict[str, Any] = state
        return made
    paths = [f"{path}." for path in getattr(state, "_metadata", ()) if path]
    return _renamed(state, {key: _without(key, shown) for key in (*state, *paths)})


class ByRank:
    """Keeps the states of all ranks, where they differ, in what `save_checkpoint` is given.

    `load_checkpoint` into the same gives each of as many ranks its own.

    Args:
        kept: has a state dict, as a loader or a meter has; or is a ``torch.Generator``; or a
            function that gives a state of tensors and plain values.
        load: where `kept` is a function, the one that takes the state.

    Raises:
        ArgumentError: `kept` is something else.

    Example:
        >>> import pathlib, tempfile, torch, unisono as idist
        >>> path = pathlib.Path(tempfile.mkdtemp(), "last.pt")
        >>> state = {"random": idist.ByRank(idist.get_rng_state, idist.set_rng_state)}
        >>> idist.save_checkpoint(state, path)
        >>> first = torch.rand(1)
        >>> state = idist.load_checkpoint(path, into=state)
        >>> bool(torch.rand(1) == first)
        True
    """

    def __init__(self, kept: Any, load: Callable[[Any], object] | None = None) -> None:
        if load is None and has_state(kept):
            kept, load = kept.state_dict, kept.load_state_dict
        elif load is None and isinstance(kept, torch.Generator):
            generator = kept
            kept, load = generator.get_state, lambda state: generator.set_state(state.cpu())
        if not callable(kept) or not callable(load):
            raise ArgumentError(
                f"ByRank takes what has a state dict, a torch.Generator, or two functions, not a "
                f"{type(kept).__qualname__}"
            )
        self.state: Callable[[], Any] = kept
        self.load: Callable[[Any], object] = load


def by_rank(states: Sequence[Any]) -> dict[str, Any]:
    """Make what is saved of the states of all ranks. Local."""
    return {_BY_RANK: tuple(states)}  # a tuple is one value in shards, whatever it holds


def own_states(obj: Any) -> dict[int, Any]:
    """Ask modules and whatever else has a state for it, by their ids.

    Local, but for what the state dict of a module does. Not optimizers, some of which have their
    whole state on one rank alone.

    Args:
        obj: dicts, lists and tuples are looked into.

    Raises:
        PayloadError: `obj` contains itself.
    """
    states: dict[int, Any] = {}
    leaves = [leaf for _, leaf in _leaves(obj)]
    for leaf in leaves:  # first, as it may be collective: what fails on one rank alone comes later
        if isinstance(leaf, nn.Module) and id(leaf) not in states:
            states[id(leaf)] = _state_of(_within(leaf, _hidden_name))
    for leaf in leaves:
        if isinstance(leaf, ByRank):
            states[id(leaf)] = by_rank(())
        elif has_state(leaf) and not isinstance(leaf, (nn.Module, torch.optim.Optimizer)):
            states[id(leaf)] = leaf.state_dict()
    return states


def entries(obj: Any, states: Mapping[int, Any]) -> dict[str, Any]:
    """Name what `own_states` has asked besides modules, as `survey` would. Local."""
    return {
        "".join(f"{{{key!r}}}" for key in path): leaf
        for path, leaf in _leaves(obj)
        if id(leaf) in states and not isinstance(leaf, nn.Module)
    }


def _leaves(obj: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """List what dicts, lists and tuples hold, with the keys that lead there. Local."""
    try:
        return list(_walk((), obj))
    except RecursionError as error:
        raise PayloadError("a dict or list contains itself, or is nested too deep") from error


def _walk(path: tuple[Any, ...], obj: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(obj, dict):
        for key, item in obj.items():
            yield from _walk((*path, key), item)
    elif isinstance(obj, (list, tuple)):
        for index, item in enumerate(obj):
            yield from _walk((*path, index), item)
    else:
        yield path, obj


def has_shards(obj: Any, states: Mapping[int, Any]) -> bool:
    """Tell whether tensors are sharded, without asking anything but modules for its state. Local.

    Args:
        obj: what is to be saved.
        states: what `own_states` found.
    """
    for _, leaf in _leaves(obj):
        tensors = [leaf]
        if isinstance(leaf, nn.Module):
            tensors = list(states[id(leaf)].values())
        elif isinstance(leaf, torch.optim.Optimizer):
            tensors = [item for group in leaf.param_groups for item in group["params"]]
        if any(isinstance(item, Tensor) and hasattr(item, "device_mesh") for item in tensors):
            return True
    return False


def plain(obj: Any, states: Mapping[int, Any]) -> Any:
    """Put state dicts in the place of what has one; keys of modules are those without wrappers.

    Local.

    Args:
        obj: dicts, lists and tuples are looked into.
        states: what `own_states` found; whatever else has a state and isn't there is asked.

    Returns:
        `obj` itself where there is nothing to replace.
    """
    if id(obj) in states:
        return states[id(obj)]
    if has_state(obj):
        return obj.state_dict()
    if isinstance(obj, dict):
        made = {key: plain(value, states) for key, value in obj.items()}
        return _like(obj, made) if any(made[key] is not obj[key] for key in made) else obj
    if isinstance(obj, (list, tuple)):
        items = [plain(item, states) for item in obj]
        is_same = all(new is old for new, old in zip(items, obj, strict=True))
        return obj if is_same else _like(obj, items)
    return obj


def _like(obj: Any, made: Any) -> Any:
    """Give a container of the type of another, with other values. Local."""
    if isinstance(obj, tuple):
        make: Any = getattr(obj, "_make", type(obj))  # of a namedtuple
        return make(made)
    copied = copy.copy(obj)
    if isinstance(obj, dict):
        copied.update(made)
    else:
        copied[:] = made
    return copied


def refuse_lost_shards(obj: Any, state: Any) -> None:
    """Refuse what shards can't hold. Local.

    Args:
        obj: what is to be saved or filled.
        state: what `plain` made of it.

    Raises:
        PayloadError: it isn't a dict, or has a tuple of what has a state.
    """
    if not isinstance(state, Mapping):
        raise PayloadError(
            f"shards need a dict or one module, not {_kind(obj)}: give them names, {{'model': ...}}"
        )
    if _has_full_tuple(obj):
        raise PayloadError("shards hold no tuple of modules, optimizers or tensors: use a list")


def _has_full_tuple(obj: Any) -> bool:
    if isinstance(obj, tuple):
        return _is_kept(obj)
    items = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list) else ()
    return any(map(_has_full_tuple, items))


def states_to_fill(into: Any, saved: Mapping[str, Any]) -> dict[int, Any]:
    """Make the states of optimizers such that shards fit in, by the ids of the optimizers. Local.

    The state of an optimizer is empty before its first step, and shards fill what is there.

    Args:
        into: what is to be filled.
        saved: has the keys of the shards.
    """
    states = {}
    for path, leaf in _leaves(into):
        if isinstance(leaf, torch.optim.Optimizer):
            start = "".join(f"{key}." for key in (*path, "state"))
            names = {key[len(start) :].partition(".")[0] for key in saved if key.startswith(start)}
            if names and not leaf.state:
                _begin(leaf)
            state = leaf.state_dict()
            kept = {key: item for key, item in state["state"].items() if str(key) in names}
            states[id(leaf)] = {**state, "state": kept}
    return states


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, by a step of length zero that changes nothing. Local."""
    groups = optimizer.param_groups
    grads = [(item, item.grad) for group in groups for item in group["params"]]
    rates = [(group, group["lr"]) for group in groups if "lr" in group]
    try:
        for item, _ in grads:
            item.grad = torch.zeros_like(item) if item.requires_grad else None
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    except Exception:  # some need a closure, some refuse a zero rate
        optimizer.state.clear()  # no half of a state stays
        raise
    finally:
        for item, grad in grads:
            item.grad = grad
        for group, rate in rates:
            group["lr"] = rate


def refuse_lost_states(into: Any, there: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse to leave a part of an optimizer's state, or of the like, unread.

    Local.

    Args:
        into: what is to be filled.
        there: has the keys that are filled.
        saved: has the keys of the shards.

    Raises:
        PayloadError: what has a state lacks some keys.
    """
    for path, leaf in _leaves(into):
        is_split = "".join(f"{key}." for key in path) + _BY_RANK in saved
        _check_split(leaf, is_split, f"the checkpoint{''.join(f'[{key!r}]' for key in path)}")
        if has_state(leaf) and not isinstance(leaf, nn.Module):
            is_optimizer = isinstance(leaf, torch.optim.Optimizer)
            start = "".join(f"{key}." for key in (*path, *(["state"] if is_optimizer else [])))
            lost = [key for key in saved if key.startswith(start) and key not in there]
            if lost:
                raise PayloadError(
                    f"{type(leaf).__qualname__} has no place yet for {', '.join(lost[:3])}: "
                    "bring it to where it was at saving, an optimizer by a step, before "
                    "load_checkpoint"
                )


def has_state(obj: Any) -> bool:
    """Tell whether something is kept by its state, as optimizers and schedulers are. Local."""
    kind = type(obj)
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def has_shown_wrapper(obj: Any) -> str | None:
    """Give the prefix that all keys of a state dict have, as those of a wrapped module do. Local.

    Args:
        obj: a state dict, or a dict or list of some.
    """
    if isinstance(obj, Mapping):
        prefix = next((text for text in _SHOWN if _all_begin(obj, text)), None)
        return prefix or _first(has_shown_wrapper(item) for item in obj.values())
    return _first(map(has_shown_wrapper, obj)) if type(obj) in (list, tuple) else None


def _all_begin(state: Mapping[Any, Any], prefix: str) -> bool:
    """Tell whether a state dict has only keys that begin so, and tensors."""
    return bool(state) and all(
        isinstance(key, str) and key.startswith(prefix) and isinstance(item, Tensor)
        for key, item in state.items()
    )


def _first(texts: Iterator[str | None]) -> str | None:
    return next((text for text in texts if text), None)


def restore(into: Any, saved: Any, where: str = "the checkpoint") -> Any:
    """Load a saved state into existing objects.

    Local.

    Args:
        into: what `plain` was given, or the like: what has a state is loaded, tensors are filled in
            place, other values of dicts, and of lists with something to load, are replaced.
        saved: what `plain` made of it then.
        where: what is being loaded, for messages.

    Returns:
        `into`; where that can't be changed, as a tuple or a number, what comes in its place.

    Raises:
        PayloadError: they don't fit together.
    """
    _check_split(into, isinstance(saved, Mapping) and saved.keys() == {_BY_RANK}, where)
    if isinstance(into, ByRank):
        _load_own(into, saved[_BY_RANK], where)
    elif isinstance(into, nn.Module):
        _load(_within(into, _hidden_name), saved, where)
    elif has_state(into):
        if isinstance(into, torch.optim.Optimizer):
            saved = optimizer_parts(into, saved, where)
        try:
            into.load_state_dict(saved)
        except Exception as error:  # each class has its own
            raise PayloadError(f"{where} doesn't fit: {error}") from error
    elif isinstance(into, dict):
        _restore_dict(into, saved, where)
    elif isinstance(into, (list, tuple)) and _is_kept(into):
        return _restore_items(into, saved, where)
    elif isinstance(into, Tensor):
        _fill_tensor(into, saved, where)
    else:
        return saved
    return into


def _check_split(into: Any, is_split: bool, where: str) -> None:
    if is_split and has_state(into):
        raise PayloadError(f"{where} was saved by rank: load it into ByRank(...)")
    if isinstance(into, ByRank) and not is_split:
        raise PayloadError(f"{where} wasn't saved by rank: load it into what is in ByRank(...)")


def _load_own(into: ByRank, states: Sequence[Any], where: str) -> None:
    topology = current_model().topology
    if len(states) != topology.world_size:
        raise PayloadError(
            f"{where} was saved by rank, on {len(states)} ranks, and can't be loaded on "
            f"{topology.world_size}: leave it out of into="
        )
    try:
        into.load(states[topology.rank])
    except Exception as error:  # each class has its own
        raise PayloadError(f"{where} doesn't fit: {error}") from error


def _is_kept(item: Any) -> bool:
    """Tell whether something is loaded in place, rather than replaced. Local."""
    if isinstance(item, (list, tuple)):
        return any(map(_is_kept, item))
    return isinstance(item, (nn.Module, ByRank, dict, Tensor)) or has_state(item)


def _restore_items(into: Any, saved: Any, where: str) -> Any:
    if not isinstance(saved, (list, tuple)) or len(saved) != len(into):
        raise PayloadError(f"{where} should have {len(into)} values: {_was_saved(saved)}")
    items = [restore(item, saved[i], f"{where}[{i}]") for i, item in enumerate(into)]
    if isinstance(into, list):
        into[:] = items
        return into
    return into if all(map(operator.is_, items, into)) else _like(into, items)


def _fill_tensor(into: Tensor, saved: Any, where: str) -> None:
    if not isinstance(saved, Tensor):
        raise PayloadError(f"{where} has no tensor: {_was_saved(saved)}")
    if (into.shape, into.dtype) != (saved.shape, saved.dtype):
        raise PayloadError(
            f"{where} doesn't fit: a tensor of shape {tuple(saved.shape)} and {saved.dtype} was "
            f"saved, and is to fill one of shape {tuple(into.shape)} and {into.dtype}"
        )
    into.detach().copy_(local_part(into, saved, where))


def _restore_dict(into: dict[Any, Any], saved: Any, where: str) -> None:
    missing = list(into) if not isinstance(saved, Mapping) else [k for k in into if k not in saved]
    if missing:
        raise PayloadError(f"{where} has no {', '.join(map(repr, missing[:5]))}")
    for key, item in into.items():
        into[key] = restore(item, saved[key], f"{where}[{key!r}]")


def _load(module: nn.Module, saved: Any, where: str) -> None:
    if not isinstance(saved, Mapping):
        raise PayloadError(f"{where} has no state of a module: {_was_saved(saved)}")
    shown = _shown(module)
    own = module.state_dict()
    names = {_without(key, shown): key for key in own}
    while not names.keys() & saved.keys():  # others wrote it from within their wrappers
        prefix = next((text for text in _SHOWN if _all_begin(saved, text)), None)
        if prefix is None:
            break
        paths = [f"{path}." for path in getattr(saved, "_metadata", ()) if path]
        saved = _renamed(saved, {key: key.removeprefix(prefix) for key in (*saved, *paths)})
    paths = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    names |= {_without(f"{path}.", shown): f"{path}." for path in paths}
    made = _renamed(saved, names)
    for key in made:
        made[key] = local_part(own.get(key), made[key], f"{where}[{key!r}]")
    try:
        module.load_state_dict(made)
    except Exception as error:  # modules check what they take by themselves
        raise PayloadError(f"{where} doesn't fit: {error}") from error


def _was_saved(saved: Any) -> str:
    return f"{_kind(saved)} was saved"


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__qualname__}"
