"""Pickles for workers, with functions and classes by value if the worker can't import them.

Classes and functions sent by value are defined in a module of their own name, so that plain pickle
finds them there too: ``torch.save``, queues, and workers of a DataLoader.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import linecache
import pickle
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from unisono.errors import PayloadError
from unisono.pickling import Pickler, dumps

_lock = threading.Lock()
_MAIN = "__main__"
_ONE_IN_A_PROCESS = (  # each process has its own, even after ``from os import environ``
    ("os", "environ"),
    ("os", "environb"),
    ("random", "_inst"),
    ("numpy.random.mtrand", "_rand"),
    ("torch", "default_generator"),
)


def pickle_for_worker(value: object) -> bytes:
    """Pickle a value for a process that has this one's ``sys.path``, but not its modules."""
    # Functions and classes of modules that such a process can import go by reference.
    out = io.BytesIO()
    pickler = _Pickler(out)
    with _lock:  # cloudpickle's registry is global
        try:
            pickler.dump(value)
            # By the same pickler, whose memo makes both refer to the same objects.
            pickler.dump((pickler.definitions, pickler.sources))
        except Exception as error:  # an object's own __reduce__ may raise anything
            text = f"the function or its arguments can't be pickled: {error}"
            raise PayloadError(text) from error
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
    return out.getvalue()


def load_from_parent(data: bytes, *, defines: bool = True) -> Any:
    """Load a pickle from `pickle_for_worker`."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    value = unpickler.load()
    if defines:  # not in a thread of the parent, which has the definitions
        _define(*unpickler.load())
    return value


class _Pickler(Pickler):  # type: ignore[misc]
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out)
        self.registered: list[ModuleType] = []
        self.definitions: dict[str, dict[str, Any]] = {}  # sent by value, by module and name
        self.sources: dict[str, str] = {}  # code without a file, by its name in tracebacks
        # cloudpickle sends these by value in any case.
        self._seen = {_MAIN, *cloudpickle.list_registry_pickle_by_value()}
        self._by_value = set(self._seen)
        known = ((sys.modules.get(name), key) for name, key in _ONE_IN_A_PROCESS)
        self._locations = {
            id(getattr(module, key)): (module, key) for module, key in known if hasattr(module, key)
        }

    def reducer_override(self, obj: Any) -> Any:
        if (location := self._locations.get(id(obj))) is not None:
            return getattr, location
        if isinstance(obj, (type, FunctionType, functools._lru_cache_wrapper)):
            self._register_module(obj.__module__)
            is_by_value = obj.__module__ in self._by_value
            if is_by_value and _is_at_top(obj):
                # `_define` sets it in the worker, where plain pickle then finds it.
                self.definitions.setdefault(obj.__module__, {})[obj.__name__] = obj
            if is_by_value and isinstance(obj, FunctionType):
                self._keep_source(obj.__code__.co_filename)
            if isinstance(obj, functools._lru_cache_wrapper) and (is_by_value or _is_nowhere(obj)):
                # cloudpickle would refer to a global that doesn't exist in the worker.
                return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)

    def _keep_source(self, file: str) -> None:
        """Keep the source of a function that isn't in a file, such as of a notebook's cell."""
        cached = linecache.cache.get(file, ())
        # An entry of a real file is lazy, with one item, or has a modification time.
        if file not in self.sources and len(cached) > 2 and cached[1] is None:
            self.sources[file] = "".join(cached[2])

    def _register_module(self, name: Any) -> None:
        """Send a module's definitions by value unless the worker can import it."""
        if not isinstance(name, str) or name in self._seen:  # `__module__` may be any object
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        if module is not None and not _is_importable(name, module):
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)
            self._by_value.add(name)


def _is_at_top(obj: Any) -> bool:
    """Return whether plain pickle would find a class or a function in its module."""
    module = sys.modules.get(obj.__module__)
    return module is not None and module.__dict__.get(obj.__qualname__) is obj


def _is_nowhere(obj: Any) -> bool:
    """Return whether no import would find an object, as it is local or its module isn't loaded."""
    return obj.__module__ not in sys.modules or "<locals>" in getattr(
        obj, "__qualname__", "<locals>"
    )


def _cached(fn: Any, parameters: dict[str, Any]) -> Any:
    """Rebuild a function of ``functools.cache`` or ``lru_cache``, with an empty cache."""
    return functools.lru_cache(**parameters)(fn)


def _is_importable(name: str, module: ModuleType) -> bool:
    """Return whether an import of `name` elsewhere would find the same module."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True  # even a frozen module, or an alias such as collections.abc
    parent = name.rpartition(".")[0]
    file = getattr(module, "__file__", None)
    if file is None and parent:
        return True  # created by its package, as torch creates torch._C._distributed_c10d
    path = getattr(sys.modules.get(parent), "__path__", None)
    if parent and path is None:
        return False
    # importlib.util.find_spec would look no further than sys.modules.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return file is None or spec.origin == file
    return False


def _define(definitions: dict[str, dict[str, Any]], sources: dict[str, str]) -> None:
    """Set the parent's definitions where plain pickle, tracebacks and children find them."""
    for file, text in sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    for name, objects in definitions.items():
        # A new module would hide one that can be imported.
        if name not in sys.modules and not _can_be_found(name):
            sys.modules[name] = ModuleType(name)
        if name in sys.modules:
            _define_in(sys.modules[name], objects)
    main = sys.modules[_MAIN]
    if hasattr(main, "__file__"):  # multiprocessing runs that file in a fresh process itself
        return
    if not hasattr(ForkingPickler, "reducer_override"):  # another library's hook stays
        setattr(ForkingPickler, "reducer_override", _reduce_for_child)  # noqa: B010 - see its type


def _define_in(module: ModuleType, objects: dict[str, Any]) -> None:
    """Set objects in a module, except those that an imported module has already."""
    is_imported = module.__name__ != _MAIN and getattr(module, "__spec__", None) is not None
    for key, obj in objects.items():
        if not (is_imported and hasattr(module, key)):
            setattr(module, key, obj)


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # its package can't be imported
        return False


def _reduce_for_child(_: ForkingPickler, obj: Any) -> Any:
    """Send definitions of ``__main__`` by value to a fresh process of multiprocessing."""
    # To find them, that process would run the program's file, which this worker hasn't run.
    if isinstance(obj, (type, FunctionType)) and obj.__module__ == _MAIN and _is_at_top(obj):
        return _define_in_child, (obj.__name__, dumps(obj))
    return NotImplemented


def _define_in_child(name: str, data: bytes) -> Any:
    """Set a definition in ``__main__`` of a fresh process, unless it is there; return it."""
    main = sys.modules[_MAIN]
    if name not in vars(main):
        setattr(main, name, pickle.loads(data))
    return getattr(main, name)
