"""The house stands as drawn: imports go down, heavy libraries have one door, facts are documented.

Read from the syntax trees, so that what nobody runs here is held to it too. The drawing is in
docs/architecture.md. What may be otherwise is listed in this file, each with its reason; an entry
that isn't needed any more fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.sources import (
    FUNCTIONS,
    Function,
    Source,
    constants,
    drawing,
    every,
    functions,
    imported,
    named_in_strings,
    ours,
    public_names,
    room_of,
    sources,
)

SPEAKS = re.compile(r"(^|\n\n|\. )(Local|Collective (over|at creation))\b")
Key = TypeVar("Key", str, tuple[str, str])

# A module that may use a room above or beside it, until when.
GOES_UP: dict[tuple[str, str], str] = {}


def uses(source: Source) -> Iterator[tuple[int, str]]:
    """List the modules of ours that a file imports or names in a string, with their lines."""
    for node, dotted in imported(source):
        module = ours(dotted)
        if module is not None:
            yield node.lineno, module
    if source.name not in TABLES:
        yield from named_in_strings(source)


def going_up(source: Source) -> list[tuple[str, str, int]]:
    """List the uses of rooms that aren't below: the module, the room and the line."""
    own, height = room_of(source.name)
    found = []
    for line, module in uses(source):
        room, below = room_of(module)
        if room != own and below >= height:
            found.append((source.name, room, line))
    return found


# Tables of what is loaded by name: the one place for a string that names a module of ours.
TABLES = {
    "plugins": "the built-in models and launchers",
    "registry": "the model of every backend that torch knows",
    "__init__": "the facade: where each name is loaded from",
    "testing": "its own names, since pytest's plug-in is in it and doesn't wait for torch",
}


def is_empty(source: Source) -> bool:
    return not [node for node in source.tree.body if not isinstance(node, ast.Expr)]


@pytest.mark.parametrize("source", [every(source) for source in sources() if not is_empty(source)])
def test_imports_only_go_down(source: Source) -> None:
    for module, room, line in going_up(source):
        assert (module, room) in GOES_UP, f"{module} (line {line}) imports unisono.{room}"


def held_to(allowed: Mapping[Key, str], found: Mapping[Key, object]) -> None:
    """Fail for what is found and not allowed, and for what is allowed and not found any more."""
    unknown = {key: where for key, where in found.items() if key not in allowed}
    assert not unknown, f"without a reason in this file: {unknown}"
    stale = [key for key in allowed if key not in found]
    assert not stale, f"take what isn't needed any more out of this file: {stale}"
    assert all(allowed.values())


def test_every_exception_to_the_drawing_is_needed() -> None:
    written = [source for source in sources() if not is_empty(source)]
    found = {(name, room): line for s in written for name, room, line in going_up(s)}
    held_to(GOES_UP, found)


def test_every_room_that_is_drawn_is_there() -> None:
    names = {source.name for source in sources()}
    assert not [room for room in drawing() if room.removesuffix(".*") not in names]


# A module that loads another by name where no table can: it would be loaded for nothing.
LOADED_LATE = {
    (
        "models.native.registration",
        "models.native.torch_backend",
    ): "once a group is made",
    ("models.xla.setup", "models.xla.graph"): "the one door to torch_xla",
    ("testing.ranks.plugin", "testing.ranks.pools"): "at the first test that wants ranks",
    ("testing.ranks.plugin", "testing.ranks.world"): "in the ranks",
    ("payload.codec", "payload.pickling"): "cloudpickle, where a value needs it",
    ("observe.drawing", "observe.picture"): "the one door to matplotlib",
    ("training.checkpoints", "training.shards"): "torch's distributed checkpoints",
}


def test_a_string_that_names_a_module_stands_in_a_table() -> None:
    found = {
        (source.name, module): line
        for source in sources()
        for line, module in named_in_strings(source)
        if source.name not in TABLES
    }
    held_to(LOADED_LATE, found)
    assert set(TABLES) <= {source.name for source in sources() if list(named_in_strings(source))}


def environ_uses(source: Source) -> Iterator[tuple[int, bool]]:
    """List the lines that use the environment's variables, and whether each one changes them."""
    parents = {
        id(child): node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            parent = parents[id(node)]
            is_item = isinstance(parent, ast.Subscript) and isinstance(
                parent.ctx, (ast.Store, ast.Del)
            )
            is_call = isinstance(parent, ast.Attribute) and parent.attr in CHANGES
            yield node.lineno, is_item or is_call


CHANGES = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
        *("popleft", "remove", "setdefault", "update"),
    }
)
WRITES_ENVIRON = {
    "cli.run": "the backend and the folder of traces that were asked for reach the ranks",
    "launchers.job.worker": "a forked worker takes the variables of its job",
    "launchers.mpi.script": "a rank under mpiexec learns what mpiexec can't be told",
    "launchers.ray.actor": "an actor takes the variables of its rank",
    "launchers.ray.launcher": "Ray is told by variables",
    "launchers.script.function_job": "a rank's function sees the variables of its launcher",
    "models.horovod.context": "hvd.init leaves a variable behind",
    "models.native.rendezvous": "gloo is told its address by a variable alone, which goes again",
    "testing.ranks.leaks": "what a test left in a process that stays is set back",
    "testing.environments": "a law gives an environment certain variables, and takes them back",
}


def test_variables_are_set_in_these_places_alone() -> None:
    found = {
        source.name: line
        for source in sources()
        for line, is_write in environ_uses(source)
        if is_write
    }
    held_to(WRITES_ENVIRON, found)


MODELS_READING_ENVIRON = {
    "models.horovod.context": "Horovod is told by variables",
    "models.mpi.availability": "where mpi4py's wheel would look for its library",
    "models.mpi.model": "which rank of the host this is, as MPI doesn't tell",
    "models.native.process_group": "the interface that the user named for gloo",
    "models.native.rendezvous": "the store that our launchers pass on; gloo's address",
}


def test_models_do_not_read_variables_but_for_these() -> None:
    models = [source for source in sources() if source.name.startswith("models.")]
    held_to(
        MODELS_READING_ENVIRON,
        {source.name: line for source in models for line, _ in environ_uses(source)},
    )


FOREIGN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(OMPI|PMI|PMIX|HOROVOD|SLURM|MV2|MPI|PALS|LSB|JSM|TORCHELASTIC)_[A-Z_]+)"
)
# Modules besides those of environments/ that spell variables of other programs.
SPELLS_VARIABLES = {
    "cli.run": "refuses to be run as a rank",
    "context": "LOCAL_RANK alone, where nothing says who else is there",
    "control.addresses": "the host that ranks meet at says which interface leads there",
    "launchers.horovod.functions": "horovodrun's own",
    "launchers.job.lifetime": "torchrun's ranks, in a worker's title",
    "launchers.mpi.functions": "Open MPI refuses root without",
    "launchers.mpi.script": "what each rank is told",
    "launchers.script.function_job": "the attempt of torchrun that this is",
    "launchers.script.rank.program": "what each rank is told",
    "launchers.script.script": "what each rank is told",
    "launchers.slurm": "what each rank is told",
    "launchers.variables": "what each rank is told, and what a job around leaves",
    "lifecycle": "where rank and world size are given and the address isn't",
    "models.horovod.context": "Horovod is told by variables",
    "models.horovod.rendezvous": "horovodrun's rendezvous server",
    "models.mpi.world": "which rank of the host this is, as MPI doesn't tell",
    "models.native.rendezvous": "the attempt of torchrun that this is",
    "recording": "ranks that meet at one address are of one job",
}


def test_variables_of_other_programs_are_spelt_in_these_modules_alone() -> None:
    found = {
        source.name: (line, text)
        for source in sources()
        if not source.name.startswith("environments.")
        for line, text in constants(source)
        if FOREIGN.fullmatch(text)
    }
    held_to(SPELLS_VARIABLES, found)


# What a process keeps besides its contexts and its registry: "module:name", with the reason.
STATE = {
    "at_exit:cls._is_held": "one exit handler of the process",
    "context:_before": "who is active",
    "context:_context_ids": "contexts are numbered",
    "context:_forked": "who is active",
    "context:_local_rank": "the user's hint",
    "context:_lock": "who is active",
    "context:_ours": "who is active",
    "context:_process": "who is active",
    "context:_replica_threads": "who is active",
    "context:_serial": "who is active",
    "context:_thread": "who is active",
    "control.signatures:_carried": "the call that a background thread carries out",
    "control.signatures:line": "the line of the call that a thread is in",
    "deadlines:_until": "the deadline of a with block",
    "environments.detection:environments": "what plug-ins bring",
    "facts:_warned": "a warning that is given once",
    "host.stack_signal:_installed": "one signal of the process",
    "host.stack_signal:_lock": "one signal of the process",
    "host.status_page:_numbers": "pages of a process are numbered",
    "host.status_page:_open": "pages that go with the process",
    "launchers.job.lifetime:cls._is_within": "what forked children must know of the job",
    "launchers.job.lifetime:cls._pid": "what forked children must know of the job",
    "launchers.job.pickling:_lock": "one module at a time is made to travel by value",
    "launchers.processes:_helpers": "fork servers live as long as the process",
    "launchers.processes:_lock": "fork servers live as long as the process",
    "launchers.processes:_retired": "fork servers live as long as the process",
    "launchers.xla.child:_child": "this process is one of XLA's children",
    "models.horovod.model:HorovodModel._current": "Horovod has one context in a process",
    "models.horovod.rendezvous:_scopes": "Horovod has one context in a process",
    "models.mpi.liveness:_held": "what MPI may still read",
    "models.mpi.liveness:_sending": "what MPI may still read",
    "models.mpi.liveness:_sent": "what MPI may still read",
    "models.mpi.model:MpiModel._has_started_mpi": "MPI is initialised once in a process",
    "models.mpi.model:cls._adopted": "MPI is initialised once in a process",
    "models.mpi.operations:_held": "what MPI may still read",
    "models.mpi.operations:_numbers": "what MPI may still read",
    "models.native.torch_backend:_alive": "groups that a fork lets go of, and that an exit leaves",
    "models.xla.graph:_compiling": "one thread compiles at a time",
    "notebook.cell:_lock": "which cells run in ranks that are threads",
    "notebook.cell:_names": "what cells have defined in this rank",
    "notebook.cell:_running": "which cells run in ranks that are threads",
    "observe.trace:_is_asked": "the trace of a whole job is begun once",
    "observe.trace:_lock": "folders that this process traces into",
    "observe.trace:_tracers": "folders that this process traces into",
    "payload.pickling:_device": "where tensors of a message go, as pickle has no argument for it",
    "recording:_NOTHING": "a call that nobody records, which is never changed",
    "recording:_after": "hooks that programs add",
    "recording:_before": "hooks that programs add",
    "recording:_codes": "what is known of the code of callers",
    "recording:_lock": "hooks that programs add",
    "recording:_planes": "what carries the call that a thread is in",
    "registry:_launchers": "what plug-ins bring",
    "registry:_models": "models that programs register, libraries watched for contexts",
    "testing.cases._law:LAWS": "laws register themselves",
    "testing.cases._law:_quiet": "which threads are quiet",
    "testing.environments:ENVIRONMENT_LAWS": "laws register themselves",
    "testing.launchers:LAUNCHER_LAWS": "laws register themselves",
    "testing.ranks.body:_here": "the session of pytest within a rank, which may be a thread",
    "testing.ranks.body:_lock": "ranks that are threads import one after the other",
    "training.batchnorm:_converters": "what plug-ins and programs bring",
    "training.clipping:_settled": "optimizers whose gradients are averaged already",
    "training.data_parallel:_alive": "wrapped modules whose gradients are averaged",
    "training.loading:_drawing": "the sampler that draws in this thread",
    "training.preemption:_noted": "signals of the process",
    "training.preemption:_told": "signals of the process",
    "training.preemption:_watched": "signals of the process",
    "training.states:_custom": "states that programs register",
    "training.wrapping:_averaging": "optimizers whose step averages gradients",
    "training.wrapping:_wrappers": "what plug-ins and programs bring",
}
STATEFUL = frozenset(
    {
        *("Condition", "ContextVar", "Event", "Lock", "OrderedDict", "PluginRegistry", "RLock"),
        *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "count", "defaultdict", "deque"),
        "local",
    }
)


def module_state(source: Source) -> Iterator[tuple[str, int]]:
    """List what a module or its classes keep for the process: names that functions change."""
    classes = {"cls"} | {n.name for n in source.tree.body if isinstance(n, ast.ClassDef)}
    values: dict[str, ast.expr | None] = {}
    for statement in source.tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            for target in bound(statement):
                if isinstance(target, ast.Name):
                    values[target.id] = statement.value
    for name, value in values.items():
        if isinstance(value, ast.Call):
            made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
            if ast.unparse(made).rpartition(".")[2] in STATEFUL | changeable(source):
                yield name, value.lineno
    for function in functions(source):
        for node in ast.walk(function):
            yield from changed(node, set(values), classes)


def changeable(source: Source) -> set[str]:
    """List the classes of a module whose instances can change."""
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name
        for node in classes
        if not any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
    }


def bound(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return [inner for target in node.targets for inner in unpacked(target)]
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    return []


def unpacked(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]


def changed(node: ast.AST, names: set[str], classes: set[str]) -> Iterator[tuple[str, int]]:
    """List which of a module's names, or of its classes' attributes, a node changes."""
    if isinstance(node, ast.Global):
        yield from ((name, node.lineno) for name in node.names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if node.func.attr in CHANGES and owner in names:
            yield owner, node.lineno
    for target in bound(node):
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            owner = ast.unparse(target.value)
            if owner in names:
                yield owner, target.lineno
            elif owner in classes and isinstance(target, ast.Attribute):
                yield f"{owner}.{target.attr}", target.lineno


def test_what_a_process_keeps_is_listed() -> None:
    found = {
        f"{source.name}:{name}": line for source in sources() for name, line in module_state(source)
    }
    held_to(STATE, found)


# A private name that is used outside of its folder: "module:name".
PRIVATE_USES = {
    "launchers.job.forkserver:_preload": "the fork server loads the facade's core once for all",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_definitions() -> dict[str, set[str]]:
    """Tell in which folders each private name is defined."""
    homes: dict[str, set[str]] = {}
    for source in sources():
        for name in filter(is_private, defined(source) | attributes_set(source)):
            homes.setdefault(name, set()).add(source.folder)
        last = source.name.rpartition(".")[2]
        if is_private(last):
            homes.setdefault(last, set()).add(source.folder)
    return homes


def attributes_set(source: Source) -> set[str]:
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    slots = {text for _, text in constants(source) if is_private(text)}
    return slots | {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}


def private_uses(source: Source) -> Iterator[tuple[str, int]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
    for statement, dotted in imported(source):
        if ours(dotted) is not None:
            yield from ((n, statement.lineno) for n in dotted.split(".") if is_private(n))


def test_private_names_stay_in_their_folder() -> None:
    homes = private_definitions()
    found = {
        f"{source.name}:{name}": line
        for source in sources()
        for name, line in private_uses(source)
        if name in homes and source.folder not in homes[name]
    }
    held_to(PRIVATE_USES, found)


MOST_LINES, DEEPEST = 40, 3
BRANCHES = (ast.If, ast.For, ast.While, ast.AsyncFor, ast.Match)
# Functions that are longer than MOST_LINES: "module:name".
LONG: dict[str, str] = {}


def lines_of(function: Function) -> int:
    """Count the lines of a body; a signature and a docstring are for the reader."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def depth_of(node: ast.AST) -> int:
    """Tell how deeply branches and loops lie in each other; an elif is no deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth_of(child) + (isinstance(child, BRANCHES) and not is_elif))
    return deepest


def test_functions_are_short() -> None:
    found = {
        f"{source.name}:{function.name}": lines
        for source in sources()
        for function in functions(source)
        if (lines := lines_of(function)) > MOST_LINES
    }
    held_to(LONG, found)


def test_functions_are_flat() -> None:
    deep = {
        f"{source.name}:{function.name}": depth
        for source in sources()
        for function in functions(source)
        if (depth := depth_of(function)) > DEEPEST
    }
    assert not deep


@pytest.mark.parametrize("library", ["horovod", "torch_xla", "mpi4py", "ray"])
def test_a_heavy_library_has_one_door(library: str) -> None:
    doors = {
        source.name
        for source in sources()
        for node, dotted in imported(source)
        if dotted.partition(".")[0] == library and node in source.tree.body
    }
    assert len(doors) <= 1, doors
    for source in sources():
        for _, dotted in imported(source):
            module = ours(dotted)
            if module in doors:
                assert source.name.startswith(module.partition(".")[0]), (
                    f"{source} imports {module}, which is reached by string only"
                )


# Processes of their own that run before or beside the rest of unisono, and the command line.
MAY_IMPORT_LATE = ("cli.", "launchers.")


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_imports_stand_at_the_top(source: Source) -> None:
    if source.name.startswith(MAY_IMPORT_LATE):
        return
    for function in ast.walk(source.tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    pytest.fail(f"{source}: an import in {function.name}, line {node.lineno}")


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_nothing_is_imported_on_trial(source: Source) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Try):
            names = {ast.unparse(h.type) for h in node.handlers if h.type is not None}
            if names & {"ImportError", "ModuleNotFoundError"}:
                late = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert not late, f"{source}: an import on trial in line {node.lineno}"


# What the facade's ``__getattr__`` answers.
ANSWERED_WHEN_ASKED = frozenset(
    {
        *("has_hvd_support", "has_mpi_support", "has_native_dist_support", "has_xla_support"),
        "registered_computation_models",
    }
)


LAWS = ("testing.cases.", "testing.environments", "testing.launchers")


def defined(source: Source) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("source", [every(source) for source in sources()])
def test_all_is_a_tuple_that_matches(source: Source) -> None:
    public = public_names(source)
    here = {
        node.name
        for node in source.tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
    }
    is_law = source.name.startswith(LAWS)  # they register themselves
    if public is None:
        is_private = any(part.startswith("_") for part in source.name.split("."))
        is_program = source.name == "__main__" or source.name.endswith(".__main__")
        assert is_private or is_law or is_program or not here, f"{source} has no __all__"
        return
    missing = set(public) - defined(source) - ANSWERED_WHEN_ASKED
    assert not missing, f"{source}: __all__ names {missing}, which isn't there"
    assert is_law or here <= set(public), f"{source}: __all__ lacks {here - set(public)}"


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def documented(source: Source) -> Iterator[tuple[str, ast.FunctionDef]]:
    """List the public functions of a file and the public methods of its public classes."""
    public = public_names(source) or ()
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in public:
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and node.name in public and not is_protocol(node):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


# What a model overrides has its docstring in the contract; a law's says what holds.
OVERRIDES = ("models.", "testing.cases")


@pytest.mark.parametrize(
    "source", [every(source) for source in sources() if not source.name.startswith(OVERRIDES)]
)
def test_every_public_function_says_whether_it_communicates(source: Source) -> None:
    silent = []
    for name, function in documented(source):
        decorators = {ast.unparse(node) for node in function.decorator_list}
        if decorators & {"property", "overload"} or any(".setter" in d for d in decorators):
            continue
        if not SPEAKS.search(ast.get_docstring(function) or ""):
            silent.append(name)
    assert not silent, f"{source}: neither Local nor Collective: {silent}"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("models.mine", "from unisono.collectives.gathers import all_gather"),
        ("models.mine", "def late():\n    import unisono.registry"),
        ("models.mine", "from unisono.models.threads import ThreadsModel"),
        ("models.mine", "load('unisono.launchers.mpi.script:launch')"),
        ("models.mine", "NAME = 'unisono.launchers.processes'"),
        ("errors", "from unisono import topology"),
        ("payload", "import unisono"),
        ("launchers.mine", "from unisono.models import native"),
        ("environments.mine", "from unisono.environments import slurm"),
    ],
)
def test_an_import_that_goes_up_or_aside_is_seen(name: str, code: str) -> None:
    source = Source(name, Path("mine.py"), ast.parse(code))
    with pytest.raises(AssertionError, match="imports unisono"):
        test_imports_only_go_down(source)


def test_an_exception_that_is_missing_or_stale_is_seen() -> None:
    with pytest.raises(AssertionError, match="without a reason in this file: {'a': 1}"):
        held_to({}, {"a": 1})
    with pytest.raises(AssertionError, match="take what isn't needed any more"):
        held_to({"a": "why"}, {})


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("_all = {}\ndef f(): _all['x'] = 1", {"_all"}),
        ("_all = []\ndef f(): _all.append(1)", {"_all"}),
        ("_n = 0\ndef f():\n    global _n\n    _n += 1", {"_n"}),
        ("class A:\n    n = 0\n    def f(self): A.n = 1", {"A.n"}),
        ("import threading\n_lock = threading.Lock()", {"_lock"}),
        ("TABLE = {'x': 1}\ndef f(): return TABLE['x']", set()),
    ],
)
def test_what_a_module_keeps_is_seen(code: str, names: set[str]) -> None:
    assert {name for name, _ in module_state(Source("x", Path("x.py"), ast.parse(code)))} == names


@pytest.mark.parametrize(
    ("code", "is_write"),
    [
        ("os.environ['A'] = 'b'", True),
        ("del os.environ['A']", True),
        ("os.environ.pop('A', None)", True),
        ("os.environ.get('A')", False),
        ("os.environ['A']", False),
    ],
)
def test_a_change_of_a_variable_is_seen(code: str, is_write: bool) -> None:
    ((_, found),) = environ_uses(Source("x", Path("x.py"), ast.parse(code)))
    assert found is is_write


@pytest.mark.parametrize(
    ("code", "depth"),
    [
        ("for x in y:\n  if x:\n    while z: pass", 3),
        ("if x: pass\nelif y: pass\nelif z: pass", 1),
        ("with x:\n  try:\n    if y: pass\n  finally: pass", 1),
    ],
)
def test_depth_is_counted(code: str, depth: int) -> None:
    assert depth_of(ast.parse(code)) == depth
