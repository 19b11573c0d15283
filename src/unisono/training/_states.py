"""State dicts whose keys don't show what a module is wrapped in, and their way back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from unisono.errors import PayloadError
from unisono.training.replicated import Replicated

__all__ = ("has_shown_wrapper", "plain", "remember_wrapper", "restore", "unwrapped")

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, Replicated)
_COMPILED = "_orig_mod"  # where torch.compile keeps the module
_SHOWN = ("module.", f"{_COMPILED}.")
_custom: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # where others' wrappers keep it


def remember_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Note where somebody else's wrapper keeps the module, if it is one of its own. Local."""
    if wrapper is not module:
        found = [name for name, part in wrapper.named_children() if part is module]
        if found:
            _custom[wrapper] = found[0]


def _inner_name(module: nn.Module) -> str | None:
    """Name the part that a wrapper wraps; None for what is no wrapper."""
    if isinstance(module, _WRAPPERS):
        return "module"
    is_compiled = type(module).__name__ == "OptimizedModule" and _COMPILED in module._modules
    return _COMPILED if is_compiled else _custom.get(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Give the module within all wrappers. Local."""
    name = _inner_name(module)
    while name is not None:
        inner = module._modules[name]
        assert inner is not None
        module, name = inner, _inner_name(inner)
    return module


def _shown(module: nn.Module) -> list[tuple[str, str]]:
    """List prefixes that wrappers give to keys, the longest first, with what they stand for."""
    found = []
    for name, part in module.named_modules(remove_duplicate=False):
        inner = _inner_name(part)
        if inner is not None:
            own = f"{name}." if name else ""
            found.append((f"{own}{inner}.", own))
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)


def _without(key: str, shown: list[tuple[str, str]]) -> str:
    for prefix, own in shown:
        if key.startswith(prefix):
            key = own + key[len(prefix) :]
    return key


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> OrderedDict[str, Any]:
    """Give a state dict other keys, and the versions of its modules with them."""
    renamed = OrderedDict((names.get(key, key), value) for key, value in state.items())
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


def plain(obj: Any) -> Any:
    """Put state dicts in the place of what has one; keys of modules are those without wrappers.

    Local, but for what the state dict of a module does.

    Args:
        obj: dicts, lists and tuples are looked into.

    Returns:
        `obj` itself where there is nothing to replace.
    """
    if isinstance(obj, nn.Module):
        return _state_of(unwrapped(obj))
    if _has_state(obj):
        return obj.state_dict()
    if type(obj) is dict:
        made = {key: plain(value) for key, value in obj.items()}
        return made if any(made[key] is not obj[key] for key in made) else obj
    if type(obj) in (list, tuple):
        items = [plain(item) for item in obj]
        is_same = all(new is old for new, old in zip(items, obj, strict=True))
        return obj if is_same else type(obj)(items)
    return obj


def _has_state(obj: Any) -> bool:
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


def _first(found: Iterator[str | None]) -> str | None:
    return next((text for text in found if text), None)


def restore(into: Any, found: Any, where: str = "the checkpoint") -> Any:
    """Bring what was saved into what is there now.

    Local.

    Args:
        into: what `plain` was given, or the like: what has a state is loaded, tensors of dicts are
            filled in place, other values of dicts are replaced.
        found: what `plain` made of it then.
        where: what is being loaded, for messages.

    Returns:
        `into`; the value of `found` where that can't be changed.

    Raises:
        PayloadError: they don't fit together.
    """
    if isinstance(into, nn.Module):
        _load(unwrapped(into), found, where)
    elif _has_state(into):
        try:
            into.load_state_dict(found)
        except Exception as error:  # each class has its own
            raise PayloadError(f"{where} doesn't fit: {error}") from error
    elif isinstance(into, dict):
        _restore_dict(into, found, where)
    elif isinstance(into, (list, tuple)) and any(map(_is_kept, into)):
        if not isinstance(found, (list, tuple)) or len(found) != len(into):
            raise PayloadError(f"{where} has no {len(into)} values: {_kind(found)}")
        for index, item in enumerate(into):
            restore(item, found[index], f"{where}[{index}]")
    elif isinstance(into, Tensor) and isinstance(found, Tensor) and into.shape == found.shape:
        into.detach().copy_(found)
    else:
        return found
    return into


def _is_kept(item: Any) -> bool:
    return isinstance(item, (nn.Module, dict, Tensor)) or _has_state(item)


def _restore_dict(into: dict[Any, Any], found: Any, where: str) -> None:
    missing = list(into) if not isinstance(found, Mapping) else [k for k in into if k not in found]
    if missing:
        raise PayloadError(f"{where} has no {', '.join(map(repr, missing[:5]))}")
    for key, item in into.items():
        into[key] = restore(item, found[key], f"{where}[{key!r}]")


def _load(module: nn.Module, found: Any, where: str) -> None:
    if not isinstance(found, Mapping):
        raise PayloadError(f"{where} has no state of a module: {_kind(found)}")
    shown = _shown(module)
    names = {_without(key, shown): key for key in module.state_dict()}
    for prefix in _SHOWN:  # of a file that others wrote from within their wrapper
        if found and not names.keys() & found.keys() and _all_begin(found, prefix):
            paths = [f"{path}." for path in getattr(found, "_metadata", ()) if path]
            found = _renamed(found, {key: key.removeprefix(prefix) for key in (*found, *paths)})
    paths = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    names |= {_without(f"{path}.", shown): f"{path}." for path in paths}
    try:
        module.load_state_dict(_renamed(found, names))
    except Exception as error:  # modules check what they take by themselves
        raise PayloadError(f"{where} doesn't fit: {error}") from error


def _kind(found: Any) -> str:
    return f"a {type(found).__qualname__} was saved"
