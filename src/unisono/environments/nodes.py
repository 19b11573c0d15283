"""Who is this node? What platforms' variables say to a launcher that still has to start the ranks.

A process that is a rank already has none of this to do, so `detection` is asked first. RANK and
WORLD_SIZE count ranks for torch and nodes for several platforms: where nothing decides, the answer
says so, and the caller has to refuse it or to be sure that both meanings are the same.

Slurm and MPI may as well start one task on each host, which is to start the ranks: where a platform
says the same place as the task's own, or the user says that it counts nodes, the task is a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.environments.detection import Environment, Verdict, _Recorder, detect
from unisono.environments.platforms import PLATFORMS, PORT, Machine, Platform
from unisono.environments.reader import RANK_COUNTS, Reader, counts_nodes, shown
from unisono.errors import EnvironmentDetectionError
from unisono.topology import NodeInfo, RankInfo

_OF_RANKS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_BARE = "torch"
"""The source of a node that only RANK and WORLD_SIZE speak of."""
_STATED = "stated"
"""The platform that is the user's own word."""
_ONE_TASK = (
    f"start one task on each host, or unset {RANK_COUNTS}, or say --nnodes 1 (nnodes=1 to "
    "Parallel) for a job of this node alone"
)


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """What one platform says, for a person to read."""

    source: str
    info: NodeInfo | None = None
    error: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    verdict: Verdict = "absent"


def detect_node(
    env: Mapping[str, str],
    machine: Machine,
    extra: Iterable[Environment] = (),
    *,
    is_asked: bool = False,
) -> NodeInfo | None:
    """Say which node of which job this is: what the first platform that is there says."""
    # In the order of `PLATFORMS`.
    rank, reader = _rank(env, extra), Reader(env, _BARE, "")
    if rank is not None and (
        rank.local_rank is not None or rank.source != "torchrun" or counts_nodes(reader) is False
    ):
        return _only_rank(env, machine, rank, is_asked=is_asked)
    for platform in PLATFORMS:
        if rank is None or platform.node_rank == ("RANK",):
            info = platform.detect(env, machine)
        elif platform.starts_first and not is_asked:
            info = None  # so many ranks as hosts may as well have been started by hand on one
        else:  # it has to mean the same; what is wrong with it isn't the rank's
            info = _asked(platform, env, machine)[0]
            info = info if _is_same(info, rank) else None
        if info is not None:
            return info
    return _either(env, rank)


def _is_same(info: NodeInfo | None, rank: RankInfo) -> bool:
    """Return whether a node could have such a rank and be its job's only one there."""
    if info is None or not info.nnodes <= rank.world_size <= info.max_nnodes:
        return False
    return info.node_rank in (None, rank.rank)  # an elastic job's nodes seat themselves


def _rank(env: Mapping[str, str], extra: Iterable[Environment]) -> RankInfo | None:
    try:
        return detect(env, extra)
    except EnvironmentDetectionError:
        return None


def _only_rank(
    env: Mapping[str, str], machine: Machine, rank: RankInfo, *, is_asked: bool
) -> NodeInfo | None:
    """Give the node of a task that was started as the only one there, and is to start the ranks."""
    reader = Reader(env, _STATED, _ONE_TASK)
    if reader.has(*_OF_RANKS[2:]) or reader.text(RANK_COUNTS) == (RANK_COUNTS, "ranks"):
        return None  # torch's agent has started it, or the user says so
    is_task = rank.source != "torchrun"  # else LOCAL_RANK is set, which means a rank
    for platform in PLATFORMS if _is_alone(rank) else ():
        if platform.starts_ranks or (is_task and (is_asked or not platform.starts_first)):
            info = _asked(platform, env, machine)[0]
            if info is not None and info.node_rank == rank.rank and _is_same(info, rank):
                return info
    return _stated(reader, rank) if is_task and counts_nodes(reader) else None


def _is_alone(rank: RankInfo) -> bool:
    """Return whether each node has one rank, as far as this one is told."""
    if rank.local_rank not in (0, None) or rank.nnodes not in (None, rank.world_size):
        return False
    return rank.local_world_size == 1 or (rank.local_world_size is None and rank.local_rank == 0)


def _stated(reader: Reader, rank: RankInfo) -> NodeInfo:
    """Return the node of a task that the user says is one."""
    said = f"{RANK_COUNTS}=nodes, but {rank.source} says that this is rank {rank.rank} of "
    said += f"{rank.world_size}"
    others = (("RANK", rank.rank), ("WORLD_SIZE", rank.world_size))
    for name, number in others:
        text = reader.text(name)
        if text is not None and text[1] != str(number):
            raise reader.error(f"{said}, and {name} is {shown(text[1])}", RANK_COUNTS, "nodes")
    if not _is_alone(rank):
        raise reader.error(f"{said}, and not that each node has one", RANK_COUNTS, "nodes")
    size, addr = rank.world_size, rank.master_addr
    if size > 1 and addr is None:
        message = f"{said}, and MASTER_ADDR, which says where node 0 is, is not set"
        raise reader.error(message, "MASTER_ADDR", None)
    return NodeInfo(
        rank.rank, size, size, None if size == 1 else addr, rank.master_port or PORT, None, _STATED
    )


def _either(env: Mapping[str, str], rank: RankInfo | None) -> NodeInfo | None:
    """Give the node that RANK and WORLD_SIZE could mean, where they don't mean a rank for sure."""
    reader = Reader(env, _BARE, "")
    if rank is None or rank.source != "torchrun" or rank.world_size == 1:
        return None
    if reader.has(*_OF_RANKS) or counts_nodes(reader) is not None:
        return None
    size, port = rank.world_size, rank.master_port or PORT
    return NodeInfo(rank.rank, size, size, rank.master_addr, port, None, _BARE, is_ambiguous=True)


def ambiguity(info: NodeInfo) -> EnvironmentDetectionError:
    """Make the error for a RANK and a WORLD_SIZE that could count nodes and ranks."""
    return EnvironmentDetectionError(
        f"RANK={info.node_rank} and WORLD_SIZE={info.nnodes} are set, and nothing says whether "
        f"they count nodes or ranks: set {RANK_COUNTS}=nodes if this is one of {info.nnodes} "
        f"nodes, whose ranks are to be started here, or {RANK_COUNTS}=ranks if this is one of "
        f"{info.nnodes} ranks, in which a job of its own starts; or say --nnodes and --node-rank; "
        "or unset RANK and WORLD_SIZE",
        source=info.source,
        variable="RANK",
        value=str(info.node_rank),
    )


def not_a_node(
    what: str, env: Mapping[str, str], extra: Iterable[Environment] = ()
) -> EnvironmentDetectionError | None:
    """Say why a job of this process's own would be one of several, each of which is alone."""
    # For where `detect_node` finds no node, though the user asks for what the platform says.
    rank, said = _rank(env, extra), Reader(env, _STATED, "").text(RANK_COUNTS)
    if rank is None or rank.world_size == 1 or said == (RANK_COUNTS, "ranks"):
        return None
    size, variable = rank.world_size, RANK_COUNTS
    remedy = (
        f"if they are the only tasks of {size} hosts, whose ranks are to be started, set "
        f"{RANK_COUNTS}=nodes, and MASTER_ADDR to the host of rank 0 where {rank.source} "
        "doesn't say it"
    )
    if rank.source == "torchrun":  # then that word changes nothing: LOCAL_RANK means a rank
        variable, remedy = "LOCAL_RANK", "unset RANK, WORLD_SIZE and LOCAL_RANK if it is a node"
    return EnvironmentDetectionError(
        f"{what} finds no platform that says which node this is, but {rank.source} says that it is "
        f"rank {rank.rank} of {size}, and each of these would start a job of its own: {remedy}; "
        f"or leave {what} out if that is meant",
        source=rank.source,
        variable=variable,
        value=None,
    )


def is_gap(error: EnvironmentDetectionError, *, may_be_several: bool) -> bool:
    """Return whether variables are wrong in a way that a job of one node may have, too."""
    platform = next((each for each in PLATFORMS if error.source == each.NAME), None)
    if platform is None:
        return False
    counts = platform.nnodes or (platform.hosts.variables if platform.hosts else ())
    is_open = may_be_several or error.variable in counts
    return platform.starts_first or (error.value is None and is_open)


def alone(info: NodeInfo) -> str:
    """Say why a process of a platform that starts the first host alone doesn't wait for others."""
    return (
        f"this process goes on alone: {info.source} gives the job {info.nnodes} hosts "
        f"({', '.join(info.hosts[:8])}{', ...' * (len(info.hosts) > 8)}), and starts its script on "
        'the first; start it on each of them with --nnodes auto, or nnodes="auto" to Parallel, to '
        "use them all; --nnodes 1, or nnodes=1, says that one is meant, as do rank=0 and "
        "world_size=1 to initialize()"
    )


def meaning(
    env: Mapping[str, str], machine: Machine, extra: Sequence[Environment] = ()
) -> str | None:
    """Say what RANK and WORLD_SIZE count, and what decides that."""
    # Raises nothing.
    reader = Reader(env, _BARE, "")
    if reader.has("LOCAL_RANK") or not (reader.has("RANK") and reader.has("WORLD_SIZE")):
        return None
    what = f"RANK={env['RANK']} and WORLD_SIZE={env['WORLD_SIZE']}"
    try:
        info = detect_node(env, machine, extra)
    except EnvironmentDetectionError as error:
        return f"{what}: what they count isn't known: {error}"
    if info is None:
        try:
            detect(env, extra)
        except EnvironmentDetectionError as error:
            return f"{what} can't be those of a rank: {error}"
        return f"{what} count ranks"
    if info.is_ambiguous:
        return (
            f"{what} are AMBIGUOUS: initialize() and Parallel() take them for a rank, and unisono "
            f"run refuses them; set {RANK_COUNTS}=nodes or {RANK_COUNTS}=ranks"
        )
    return f"{what} count nodes, by {info.source}; as ranks they are right with one on each node"


def explain_nodes(
    env: Mapping[str, str], machine: Machine, extra: Sequence[Environment] = ()
) -> list[NodeFinding]:
    """Say what each platform found, which one `detect_node` gives, and which ones disagree."""
    # Raises nothing.
    winner, refused = None, None
    try:
        winner = detect_node(env, machine, extra)
    except EnvironmentDetectionError as raised:
        refused = raised
    findings = []
    for platform in PLATFORMS:
        view = _Recorder(env)
        info, error = _asked(platform, view, machine)
        if winner is not None and winner.source == platform.NAME:
            info, error = winner, None
        verdict = _verdict(info, error, winner)
        if refused is not None and refused.source == platform.NAME:
            verdict, error = "refused", refused
        text = None if error is None else str(error)
        seen = tuple(view.seen.items()) if verdict != "absent" else ()
        findings.append(NodeFinding(platform.NAME, info, text, seen, verdict))
    return findings


def _asked(
    platform: Platform, env: Mapping[str, str], machine: Machine
) -> tuple[NodeInfo | None, EnvironmentDetectionError | None]:
    try:
        return platform.detect(env, machine), None
    except EnvironmentDetectionError as error:
        return None, error


def _verdict(
    info: NodeInfo | None, error: EnvironmentDetectionError | None, winner: NodeInfo | None
) -> Verdict:
    if error is not None:
        return "unused"
    if info is None:
        return "absent"
    if winner is None:
        return "unused"
    if info.source == winner.source:
        return "won"
    same = (info.node_rank, info.nnodes) == (winner.node_rank, winner.nnodes)
    return "agrees" if same else "disagrees"
