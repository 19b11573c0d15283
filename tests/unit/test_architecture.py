"""The rules of the house that import-linter can't check; its contracts are in pyproject.toml.

Read from the syntax trees, so that code that doesn't run here is held to them too. What may be
otherwise is listed in this file, each with its reason; an entry that isn't needed any more fails.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import unisono
from tests.support.pages import ROOT

FOLDER = Path(unisono.__file__).parent
MODULE = re.compile(r"unisono((?:\.\w+)+)(?::\w*)?")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    name: str  # dotted, without "unisono."; "__init__" for the facade
    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The package that it is in, dotted; empty for what lies in unisono itself."""
        is_package = self.path.name == "__init__.py" and self.name != "__init__"
        return self.name if is_package else self.name.rpartition(".")[0]

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(node for node in self.nodes if isinstance(node, FUNCTIONS))

    @functools.cached_property
    def strings(self) -> tuple[tuple[int, str], ...]:
        """The strings of a file with their lines, docstrings aside."""
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        return tuple(
            (node.lineno, node.value)
            for node in self.nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docstrings
        )

    @functools.cached_property
    def public(self) -> tuple[str, ...] | None:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                assert isinstance(node.value, ast.Tuple), f"{self.name}: __all__ isn't a tuple"
                return tuple(ast.literal_eval(node.value))
        return None


@functools.cache
def sources() -> tuple[Source, ...]:
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        parts = list(path.relative_to(FOLDER).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found.append(Source(".".join(parts), path, ast.parse(path.read_text())))
    return tuple(found)


def held_to(allowed: Mapping[str, str], found: Mapping[str, object]) -> None:
    """Fail for what is found without a reason in this file, and for a reason that is stale."""
    unknown = {key: where for key, where in found.items() if key not in allowed}
    assert (unknown, allowed.keys() - found.keys()) == ({}, set())


# Tables of what is loaded by name: the one place for a string that names a module of ours.
TABLES = {
    "plugins": "the built-in models and launchers",
    "registry": "the model of every backend that torch knows",
    "lazy_import": "what the facade's variables are answered from",
}
# A module that loads another of its folder where no table can: it would be loaded for nothing.
LOADED_LATE = {
    "node > accelerators": "torch, where a number of ranks isn't given",
    "models.native.registration > models.native.torch_backend": "once a group is made",
    "models.xla.setup > models.xla.graph": "the one door to torch_xla",
    "testing.pytest_plugin.plugin > testing.pytest_plugin.pools": "at the first test with ranks",
    "payload.codec > payload.pickling": "cloudpickle, where a value needs it",
    "training.checkpoints > training.shards": "torch's distributed checkpoints",
}


def test_a_string_that_names_a_module_stands_in_a_table() -> None:
    names = {each.name for each in sources() if each.path.name != "__init__.py"}
    found: dict[str, dict[str, int]] = {source.name: {} for source in sources()}
    for source in sources():
        for line, text in source.strings:
            match = MODULE.fullmatch(text)
            if match and match[1][1:] in names - {source.name}:
                found[source.name][match[1][1:]] = line
    held_to(TABLES, {name: found.pop(name) for name in TABLES if found[name]})
    held_to(
        LOADED_LATE, {f"{name} > {to}": at for name, of in found.items() for to, at in of.items()}
    )
    for pair in LOADED_LATE:
        name, _, other = pair.partition(" > ")
        assert name.rpartition(".")[0] == other.rpartition(".")[0], pair


CHANGES = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
        *("popleft", "remove", "setdefault", "update"),
    }
)
WRITES_ENVIRON = {
    "cli.run": "the backend and the folder of traces that were asked for reach the ranks",
    "launchers.job.worker": "a forked worker takes the variables of its job",
    "launchers.script.hook.sitecustomize": "a forked rank takes the variables of its job",
    "launchers.script.processes": "the wrapper of a rank takes the variables of its job",
    "launchers.ray": "Ray is told by variables; an actor takes those of its rank",
    "launchers.job.wrapper": "a rank's share of cores; programs that it starts know of no link",
    "models.horovod.model": "hvd.init leaves a variable behind",
    "models.native.rendezvous": "gloo is told its address by a variable alone, which goes again",
    "testing.environments": "a law gives an environment certain variables, and takes them back",
}
MODELS_READING_ENVIRON = {
    "models.horovod.model": "Horovod is told by variables",
    "models.mpi.world": "where mpi4py's wheel would look for its library",
    "models.mpi.model": "which rank of the host this is, as MPI doesn't tell",
    "models.native.model": "LOCAL_RANK alone, where nothing says who else is there",
    "models.native.rendezvous": "the store that our launchers pass on; gloo's address",
}


def environ_uses(source: Source) -> Iterator[tuple[int, bool]]:
    """List the lines that use the environment's variables, and whether each one changes them."""
    for node in source.nodes:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and child.attr in ("environ", "getenv"):
                is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
                is_call = isinstance(node, ast.Attribute) and node.attr in CHANGES
                is_call |= isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".dict")
                if ast.unparse(child.value) == "os":
                    yield child.lineno, is_item or is_call


def test_variables_are_set_in_these_places_alone_and_read_by_these_models() -> None:
    uses = [(source.name, *use) for source in sources() for use in environ_uses(source)]
    held_to(WRITES_ENVIRON, {name: line for name, line, is_write in uses if is_write})
    of_models = {name: line for name, line, _ in uses if name.startswith("models.")}
    held_to(MODELS_READING_ENVIRON, of_models)


FOREIGN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(OMPI|PMI|PMIX|HOROVOD|SLURM|MV2|MPI|PALS|LSB|JSM|TORCHELASTIC)_[A-Z_]+)"
)
# Modules besides those of environments/ that spell variables of other programs.
SPELLS_VARIABLES = {
    "cli.run": "refuses to be run as a rank",
    "control.addresses": "the host that ranks meet at says which interface leads there",
    "launchers.horovod": "horovodrun's own",
    "launchers.job.lifetime": "torchrun's ranks, in a worker's title",
    "launchers.mpi": "Open MPI refuses root without; and what each rank is told",
    "launchers.script.rank.program": "what each rank is told",
    "launchers.script.script": "what each rank is told",
    "launchers.slurm": "what each rank is told",
    "launchers.variables": "what each rank is told, and what a job around leaves",
    "lifecycle": "where rank and world size are given and the address isn't",
    "models.horovod.model": "Horovod is told by variables",
    "models.horovod.setup": "horovodrun's rendezvous server",
    "models.mpi.world": "whether mpiexec has started a process alone, as MPI doesn't tell",
    "models.native.model": "LOCAL_RANK alone, where nothing says who else is there",
    "models.native.rendezvous": "the attempt of torchrun that this is",
    "recording.records": "ranks that meet at one address are of one job",
}


def test_variables_of_other_programs_are_spelt_in_these_modules_alone() -> None:
    found = {
        source.name: (line, text)
        for source in sources()
        if not source.name.startswith("environments.")
        for line, text in source.strings
        if FOREIGN.fullmatch(text)
    }
    held_to(SPELLS_VARIABLES, found)


# What a process keeps besides its contexts and its registry: "module: its names", with the reason.
STATE = {
    "control.signatures: _purpose": "what calls that a thread makes are for",
    "context: _context_ids _forked _lock _previous _process": "who is active",
    "context: _replica_threads _serial _thread": "who is active",
    "context: _local_rank": "the user's hint",
    "control.signatures: _carried": "the call that a background thread carries out",
    "control.signatures: line": "the line of the call that a thread is in",
    "deadlines: _until": "the deadline of a with block",
    "environments.detection: environments": "what plug-ins bring",
    "facts: _warned": "a warning that is given once",
    "recording.stack_signal: _lock": "one signal of the process",
    "recording.status_page: _numbers": "pages of a process are numbered",
    "recording.status_page: _open": "pages that go with the process",
    "launchers.job.channel: OWN": "the worker's own channel, as no entry has an argument for it",
    "launchers.job.lifetime: _has_function _rank_pid": "what forked children must know of the job",
    "launchers.job.pickling: _lock": "one module at a time is made to travel by value",
    "launchers.local: _fork_servers _lock": "fork servers live as long as the process",
    "launchers.xla: _child": "this process is one of XLA's children",
    "models.horovod.model: HorovodModel._current": "Horovod has one context in a process",
    "models.horovod.setup: _scopes": "Horovod has one context in a process",
    "models.mpi.barrier: _held": "what MPI may still read",
    "models.mpi.model: MpiModel._has_started_mpi cls._adopted": "MPI is initialised once",
    "models.mpi.operations: _held _numbers": "what MPI may still read",
    "models.native.torch_backend: _alive": "groups that a fork lets go of, and that an exit leaves",
    "models.xla.graph: _compiling": "one thread compiles at a time",
    "notebook.cell: _names": "what cells have defined in this rank",
    "recording.trace: _is_asked": "the trace of a whole job is begun once",
    "recording.trace: _lock _tracers": "folders that this process traces into",
    "payload.tensors: device": "where tensors of a message go, as pickle has no argument for it",
    "payload.tensors: put_together": "nothing: a function without attributes",
    "payload.codec: make_path": "nothing: a function without attributes",
    "payload.codec: _idle": "picklers, which take as long to make as to use",
    "recording.records: UNRECORDED": "a call that nobody records, which is never changed",
    "recording.records: _hooks _lock": "hooks that programs add",
    "recording.records: _planes": "what carries the call that a thread is in",
    "registry: launchers": "what plug-ins bring",
    "registry: _models": "models that programs register, libraries watched for contexts",
    "testing.cases._law: LAWS": "laws register themselves",
    "testing.cases._law: _quiet": "which threads are quiet",
    "testing.environments: ENVIRONMENT_LAWS": "laws register themselves",
    "testing.launchers: LAUNCHER_LAWS": "laws register themselves",
    "testing.pytest_plugin.body: _here": "the session of pytest in a rank, perhaps a thread",
    "testing.pytest_plugin.body: _lock": "ranks that are threads import one after the other",
    "training.batchnorm: _converters": "what plug-ins and programs bring",
    "training.clipping: _settled": "optimizers whose gradients are averaged already",
    "training.data_parallel: _alive": "wrapped modules whose gradients are averaged",
    "training.loading: _drawing": "the sampler that draws in this thread",
    "training.preemption: _received _reported _watched": "signals of the process",
    "training.states: _custom": "states that programs register",
    "training.wrapping: _averaging": "optimizers whose step averages gradients",
    "training.wrapping: _wrappers": "what plug-ins and programs bring",
    "tracebacks: _ONE_AT_A_TIME": "one thread disables collections",
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
    classes = {node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef)}
    can_change = STATEFUL | {
        name
        for name, node in classes.items()
        if not any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
    }
    values: dict[str, ast.expr | None] = {}
    for statement in source.tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            names = [target.id for target in bound(statement) if isinstance(target, ast.Name)]
            values |= dict.fromkeys(names, statement.value)
    for name, value in values.items():
        if isinstance(value, ast.Call):
            called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
            if ast.unparse(called).rpartition(".")[2] in can_change:
                yield name, value.lineno
    for function in source.functions:
        for node in ast.walk(function):
            yield from changed(node, set(values), {"cls", *classes})


def bound(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
    return [
        inner
        for target in targets
        for inner in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
    ]


def changed(node: ast.AST, names: set[str], classes: set[str]) -> Iterator[tuple[str, int]]:
    """List which of a module's names, or of its classes' attributes, a node changes."""
    if isinstance(node, ast.Global):
        yield from ((name, node.lineno) for name in node.names)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGES
        and (owner := ast.unparse(node.func.value)) in names
    ):
        yield owner, node.lineno
    for target in bound(node):
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            owner = ast.unparse(target.value)
            if owner in names:
                yield owner, target.lineno
            elif owner in classes and isinstance(target, ast.Attribute):
                yield f"{owner}.{target.attr}", target.lineno


def test_what_a_process_keeps_is_listed() -> None:
    allowed = {
        f"{module}: {name}": reason
        for entry, reason in STATE.items()
        for module, _, names in [entry.partition(": ")]
        for name in names.split()
    }
    kept = [(source.name, *each) for source in sources() for each in module_state(source)]
    held_to(allowed, {f"{module}: {name}": line for module, name, line in kept})


# A private name that is used outside of its folder: "module:name".
PRIVATE_USES = {"payload.codec:_data": "of os.environ: what isn't set is no exception there"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(source: Source) -> set[str]:
    names: set[str] = set()
    for node in source.nodes:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def private_uses(source: Source) -> Iterator[tuple[str, int]]:
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (base + alias.name).partition(".")[0] == "unisono":
                    parts = (base + alias.name).split(".")
                    yield from ((part, node.lineno) for part in parts if is_private(part))


def test_private_names_stay_in_their_folder() -> None:
    homes: dict[str, set[str]] = {}
    for source in sources():
        set_here = {
            node.attr
            for node in source.nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        slots = {text for _, text in source.strings}
        for name in {*defined(source), *set_here, *slots, source.name.rpartition(".")[2]}:
            if is_private(name):
                homes.setdefault(name, set()).add(source.folder)
    found = {
        f"{source.name}:{name}": line
        for source in sources()
        for name, line in private_uses(source)
        if name in homes and source.folder not in homes[name]
    }
    held_to(PRIVATE_USES, found)


MOST_LINES, DEEPEST = 40, 3
BRANCHES = (ast.If, ast.For, ast.While, ast.AsyncFor, ast.Match)


def lines_of(function: Function) -> int:
    """Count the lines of a body; a signature and a docstring are for the reader."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def depth_of(node: ast.AST) -> int:
    """Tell how deeply branches and loops lie in each other; an elif is no deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef, ast.expr)):
            is_elif = isinstance(node, ast.If) and node.orelse == [child]
            is_deeper = isinstance(child, BRANCHES) and not (is_elif and isinstance(child, ast.If))
            deepest = max(deepest, depth_of(child) + is_deeper)
    return deepest


def test_functions_are_short_and_flat() -> None:
    depths: dict[str, int] = {}
    for source in sources():
        for function in source.functions:
            where = f"{source.path}:{function.lineno} {function.name}"
            assert lines_of(function) <= MOST_LINES, where
            depths[where] = depth_of(function)
    deepest = max(depths, key=depths.__getitem__)
    assert depths[deepest] == DEEPEST, deepest


def test_nothing_is_imported_on_trial() -> None:
    """Where imports stand, ruff checks: at the top but for the command line and launchers."""
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Try) and re.search(
                "ImportError|ModuleNotFoundError",
                " ".join(ast.unparse(each.type) for each in node.handlers if each.type),
            ):
                late = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert not late, f"{source.name}: an import on trial in line {node.lineno}"


# What the facade's ``__getattr__`` answers.
ANSWERED_WHEN_ASKED = frozenset(
    {
        *("has_hvd_support", "has_mpi_support", "has_native_dist_support", "has_xla_support"),
        "registered_computation_models",
    }
)
LAWS = ("testing.environments", "testing.launchers")  # they register themselves


def test_all_is_a_tuple_that_matches() -> None:
    for source in sources():
        here = {
            node.name
            for node in source.tree.body
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
        }
        here = set() if source.name.startswith(LAWS) else here
        if source.public is None:
            continue
        assert len(set(source.public)) == len(source.public), source.name
        assert set(source.public) <= defined(source) | ANSWERED_WHEN_ASKED, source.name
        assert here <= set(source.public), source.name


SPEAKS = re.compile(r"(^|\n\n|\. )Collective (over|at creation)\b")


REFERENCE = frozenset(
    name.rpartition(".")[2]
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"auto(?:function|class|exception)::\s+(\S+)", page.read_text())
)


def documented(source: Source) -> Iterator[tuple[str, ast.FunctionDef]]:
    """List the functions of a file that the reference has, and the methods of its classes."""
    for node in source.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in REFERENCE:
            if isinstance(node, ast.FunctionDef):
                yield node.name, node
            elif not any(ast.unparse(base).startswith("Protocol") for base in node.bases):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


def test_every_collective_says_so() -> None:
    silent = [
        f"{source.name}:{name}"
        for source in sources()
        for name, function in documented(source)
        if {"collective", "guarded"} & set(marks(function))
        if not SPEAKS.search(ast.get_docstring(function) or "")
    ]
    assert not silent, f"neither collective over a group nor at creation: {silent}"


def marks(function: ast.FunctionDef) -> Iterator[str]:
    names = [ast.unparse(mark).partition("(")[0] for mark in function.decorator_list]
    return iter(() if "overload" in names else names)


# The first words of what users read, the field's.
VERBS = frozenset(
    [
        "Accept",
        "Accumulate",
        "Adapt",
        "Add",
        "Adopt",
        "Allow",
        "Average",
        "Build",
        "Call",
        "Check",
        "Choose",
        "Close",
        "Compare",
        "Connect",
        "Convert",
        "Count",
        "Create",
        "Decorate",
        "Destroy",
        "Draw",
        "End",
        "Fill",
        "Find",
        "Gather",
        "Host",
        "Iterate",
        "Join",
        "Leave",
        "List",
        "Load",
        "Log",
        "Make",
        "Measure",
        "Move",
        "Name",
        "Normalize",
        "Open",
        "Overwrite",
        "Parse",
        "Prepare",
        "Print",
        "Raise",
        "Read",
        "Receive",
        "Record",
        "Reduce",
        "Register",
        "Remove",
        "Replace",
        "Restore",
        "Return",
        "Run",
        "Save",
        "Scale",
        "Seed",
        "Send",
        "Set",
        "Split",
        "Start",
        "Stop",
        "Sum",
        "Trace",
        "Wait",
        "Wrap",
        "Write",
    ]
)


def test_what_users_read_begins_with_a_verb_of_the_field() -> None:
    others = [
        f"{source.name}:{name}: {text.splitlines()[0]}"
        for source in sources()
        for name, function in documented(source)
        if (text := ast.get_docstring(function)) and text.split()[0].rstrip(",.:") not in VERBS
        if not any("property" in ast.unparse(mark) for mark in function.decorator_list)
    ]
    assert not others


SECTIONS = re.compile(r"^ *(Args|Returns|Raises|Yields|Warns):$", re.MULTILINE)
# Their docstrings are a command's help, or stand in for those of another library.
HELP = ("cli.", "compat.", "notebook.", "testing.")


def test_what_no_user_calls_is_documented_in_a_line() -> None:
    for source in sources():
        for node in [] if source.name.startswith(HELP) else source.tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name.startswith("_"):
                for inner in ast.walk(node):
                    if isinstance(inner, (*FUNCTIONS, ast.ClassDef)):
                        text = ast.get_docstring(inner) or ""
                        where = f"{source.path}:{inner.lineno}"
                        assert not SECTIONS.search(text), f"{where}: one line, and comments"
