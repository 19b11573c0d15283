"""State dicts without the prefixes of wrappers, for saving and loading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unisono.errors import ArgumentError, PayloadError
from unisono.payload.pytree import mapped
from unisono.training.data_parallel import Replicated
from unisono.training.same_tensors import is_sharded

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, Replicated)
_COMPILED = "_orig_mod"  # torch.compile's name for the module
_PREFIXES = ("module.", f"{_COMPILED}.")
BY_RANK = "by_rank"
"""The key under which a checkpoint has the states of all ranks."""
# The names of the children in which custom wrappers keep their modules.
_custom: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def remember_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Record the name of the child in which a custom wrapper keeps the module, if any."""
    if wrapper is not module:
        names = [name for name, part in wrapper.named_children() if part is module]
        if names:
            _custom[wrapper] = names[0]


def _inner_name(module: nn.Module) -> str | None:
    """Return the name of the child that a wrapper wraps; None for other modules."""
    if isinstance(module, _WRAPPERS):
        return "module"
    # By name, since importing its class would import torch's compiler.
    is_compiled = type(module).__name__ == "OptimizedModule" and _COMPILED in module._modules
    return _COMPILED if is_compiled else _custom.get(module)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside any wrappers.

    Args:
        model: wrapped or not, also in several wrappers, such as ``torch.compile``'s.

    Returns:
        The plain module, whose state dict has the same keys in every wrapper.

    Example:
        >>> import torch, unisono as idist
        >>> idist.unwrap_model(idist.auto_model(torch.nn.Identity()))
        Identity()
    """
    name = _inner_name(model)
    return model if name is None else unwrap_model(model.get_submodule(name))


def hidden_module(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers that add nothing to its state."""
    name = _hidden_name(module)
    return module if name is None else hidden_module(module.get_submodule(name))


def _hidden_name(module: nn.Module) -> str | None:
    """Return the name of the child that a wrapper wraps, if the wrapper has no further state."""
    name = _inner_name(module)
    if name is None or set(module._modules) != {name}:
        return None
    own = {key for key, item in module._parameters.items() if item is not None}
    own |= module._buffers.keys() - module._non_persistent_buffers_set
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    return None if own or has_extra else name


def _without_wrappers(module: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of wrappers from a key of a module's state."""
    prefixes = []
    # A module used twice has keys under both of its paths.
    for path, part in module.named_modules(remove_duplicate=False):
        inner = _hidden_name(part)
        if inner is not None:
            start = f"{path}." if path else ""
            prefixes.append((f"{start}{inner}.", start))
    # Longest first, because prefixes of inner wrappers contain those of outer wrappers.
    prefixes.sort(key=lambda pair: len(pair[0]), reverse=True)

    def unwrapped(key: str) -> str:
        for prefix, start in prefixes:
            if key.startswith(prefix):
                key = start + key[len(prefix) :]
        return key

    return unwrapped


def renamed(state: Mapping[str, Any], rename: Callable[[str], str | None]) -> OrderedDict[str, Any]:
    """Return a state dict with renamed keys, without those that `rename` returns None for."""
    keys = ((rename(key), value) for key, value in state.items())
    made: Any = OrderedDict((key, value) for key, value in keys if key is not None)
    versions: Any = getattr(state, "_metadata", None)
    if versions is not None:  # of modules, by their paths: with a final dot, prefixes of keys
        paths = ((rename(path and f"{path}."), version) for path, version in versions.items())
        made._metadata = OrderedDict((path[:-1], item) for path, item in paths if path is not None)
    kept: OrderedDict[str, Any] = made
    return kept


def with_own_keys(
    module: nn.Module, own: Mapping[str, Any], saved: Any, where: str
) -> OrderedDict[str, Any]:
    """Return a saved state under the module's own keys."""
    if not isinstance(saved, Mapping):
        kind = type(saved).__qualname__
        raise PayloadError(f"{where} has no state of a module: a value of type {kind} was saved")
    unwrapped = _without_wrappers(module)
    paths = [f"{path}." for path in getattr(own, "_metadata", ()) if path]
    # With the paths of modules, as `renamed` renames those in ``_metadata`` with a final dot.
    own_key_of = {unwrapped(key): key for key in (*own, *paths)}
    while saved and not own_key_of.keys() & saved.keys():  # saved with prefixes of other wrappers
        starts = [text for text in _PREFIXES if all(str(key).startswith(text) for key in saved)]
        if not starts:
            break
        saved = renamed(saved, methodcaller("removeprefix", starts[0]))
    return renamed(saved, lambda key: own_key_of.get(key, key))


class ByRank:
    """Marks a state that differs between ranks, so that `save_checkpoint` saves every rank's.

    `load_checkpoint` restores each rank's own state, on the same number of ranks.

    Args:
        kept: an object with a state dict, such as a loader or a meter; a ``torch.Generator``; or a
            function that returns a state of tensors and plain values.
        load: the function that restores the state, if `kept` is a function.

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
            # load_checkpoint may have moved the state, which set_state takes on the CPU.
            generator = kept
            kept, load = generator.get_state, lambda state: generator.set_state(state.cpu())
        if not callable(kept) or not callable(load):
            raise ArgumentError(
                f"ByRank accepts an object with a state dict, a torch.Generator, or two functions, "
                f"not a {type(kept).__qualname__}"
            )
        self.state: Callable[[], Any] = kept
        self.load: Callable[[Any], object] = load


def own_states(obj: Any) -> dict[int, Any]:
    """Return the states of modules and other stateful objects, by the objects' ids."""
    # Local, unless a module's state_dict() is collective. Optimizers are left out, as some have
    # their whole state on one rank only.
    states: dict[int, Any] = {}
    found = [leaf for _, leaf in leaves(obj)]
    for leaf in found:  # first, as state_dict() may be collective; later steps may fail on one rank
        if isinstance(leaf, nn.Module) and id(leaf) not in states:
            module = hidden_module(leaf)
            state = module.state_dict()
            states[id(leaf)] = renamed(state, _without_wrappers(module))
    for leaf in found:
        if isinstance(leaf, ByRank):
            states[id(leaf)] = {BY_RANK: ()}  # `save_checkpoint` adds the states of all ranks
        elif has_state(leaf) and not isinstance(leaf, (nn.Module, torch.optim.Optimizer)):
            states[id(leaf)] = leaf.state_dict()
    return states


def entries(obj: Any, states: Mapping[int, Any]) -> dict[str, Any]:
    """Return the objects in `states` other than modules, by the path names of `survey`."""
    return {
        "".join(f"{{{key!r}}}" for key in path): leaf
        for path, leaf in leaves(obj)
        if id(leaf) in states and not isinstance(leaf, nn.Module)
    }


def leaves(obj: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """List the leaves of nested dicts, lists and tuples, with their paths."""
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
    """Return whether any tensor is sharded; of objects with states, only modules are read."""
    for _, leaf in leaves(obj):
        tensors = [leaf]
        if isinstance(leaf, nn.Module):
            tensors = list(states[id(leaf)].values())
        elif isinstance(leaf, torch.optim.Optimizer):
            # An optimizer's state is sharded as its parameters are.
            tensors = [item for group in leaf.param_groups for item in group["params"]]
        if any(map(is_sharded, tensors)):
            return True
    return False


def plain(obj: Any, states: Mapping[int, Any]) -> Any:
    """Replace stateful objects by their state dicts, without prefixes of wrappers."""
    if id(obj) in states:
        return states[id(obj)]
    if has_state(obj):
        return obj.state_dict()  # an optimizer: `own_states` omits them
    is_container = isinstance(obj, (dict, list, tuple))
    return mapped(obj, lambda item: plain(item, states)) if is_container else obj


def refuse_lost_shards(obj: Any, state: Any) -> None:
    """Raise if sharded checkpoints cannot hold the state."""
    if not isinstance(state, Mapping):
        raise PayloadError(
            f"shards need a dict or one module, not a value of type {type(obj).__qualname__}: pass "
            "a dict such as {'model': ...}"
        )
    if _has_full_tuple(obj):
        raise PayloadError("shards hold no tuple of modules, optimizers or tensors: use a list")


def _has_full_tuple(obj: Any) -> bool:
    """Return whether a tuple contains objects that are loaded in place."""
    if isinstance(obj, tuple):
        return is_kept(obj)
    items = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list) else ()
    return any(map(_has_full_tuple, items))


def has_state(obj: Any) -> bool:
    """Return whether an object has state_dict() and load_state_dict()."""
    kind = type(obj)
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def is_kept(item: Any) -> bool:
    """Return whether an object is loaded in place rather than replaced."""
    if isinstance(item, (list, tuple)):
        return any(map(is_kept, item))
    return isinstance(item, (nn.Module, ByRank, dict, Tensor)) or has_state(item)
