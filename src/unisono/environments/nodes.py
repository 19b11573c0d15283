"""Detection of this process's node, unless a launcher has started the process as a rank.

RANK and WORLD_SIZE count ranks for torch, but nodes for several platforms. If nothing shows which,
the result is ambiguous. Slurm and MPI may also start one task on each host, which then starts the
ranks. Such a task is a node if a platform gives it the same number, or if the user states so in
UNISONO_RANK_COUNTS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from unisono.environments.detection import Environment, Finding, detect, judge
from unisono.environments.platforms import PLATFORMS, PORT, Machine, Platform
from unisono.environments.reader import RANK_COUNTS, Reader, shown
from unisono.errors import EnvironmentDetectionError
from unisono.topology import NodeInfo, RankInfo

_OF_AGENT = ("GROUP_RANK", "TORCHELASTIC_RUN_ID")  # set by torchrun's agent for its ranks
_BARE = "torch"  # the source of a node found only by RANK and WORLD_SIZE
_STATED = "stated"  # the platform for a statement of the user
_ONE_TASK = (
    f"start one task on each host, or unset {RANK_COUNTS}, or pass --nnodes 1 (nnodes=1 to "
    "Parallel) for a job of this node alone"
)


def detect_node(
    env: Mapping[str, str],
    machine: Machine,
    extra: Iterable[Environment] = (),
    *,
    is_asked: bool = False,
) -> NodeInfo | None:
    """Return this process's node, from the first platform whose variables are set."""
    rank, reader = _find_rank(env, extra), Reader(env, _BARE, "")
    # Only a RANK and a WORLD_SIZE without a local rank may also count nodes.
    if rank is not None and (
        rank.local_rank is not None or rank.source != "torchrun" or reader.counts_nodes() is False
    ):
        return _node_of_task(env, machine, rank, is_asked=is_asked)
    for platform in PLATFORMS:
        if rank is None or platform.node_rank == ("RANK",):
            # There is no rank to agree with, or the platform reads RANK as a node's number.
            info = platform.detect(env, machine)
        elif platform.starts == "first node" and not is_asked:
            info = None  # the user may have started as many ranks as hosts, all on one host
        else:  # the node must agree with the rank, which an error of the platform doesn't affect
            info = _ask(platform, env, machine).info
            info = info if _is_node_of(info, rank) else None
        if info is not None:
            return info
    return _ambiguous_node(reader, rank)


def _find_rank(env: Mapping[str, str], extra: Iterable[Environment]) -> RankInfo | None:
    try:
        return detect(env, extra)
    except EnvironmentDetectionError:  # `initialize` raises it; a node may still be found
        return None


def _ask(platform: Platform, env: Mapping[str, str], machine: Machine) -> Finding[NodeInfo]:
    try:
        return Finding(platform.NAME, platform.detect(env, machine))
    except EnvironmentDetectionError as error:
        return Finding(platform.NAME, error=error)


def _is_node_of(info: NodeInfo | None, rank: RankInfo) -> bool:
    """Return whether a rank could be the only rank of its job on a node."""
    if info is None or not info.nnodes <= rank.world_size <= info.max_nnodes:
        return False
    return info.node_rank in (None, rank.rank)  # an elastic job's nodes number themselves


def _node_of_task(
    env: Mapping[str, str], machine: Machine, rank: RankInfo, *, is_asked: bool
) -> NodeInfo | None:
    """Return the node of a host's only task, if that task has to start the ranks."""
    reader = Reader(env, _STATED, _ONE_TASK)
    if reader.has(*_OF_AGENT) or reader.value(RANK_COUNTS) == "ranks":
        return None  # torchrun's agent has started this rank, or the user calls it a rank
    is_task = rank.source != "torchrun"  # else LOCAL_RANK is set, so this is a rank
    # Platforms that start ranks set LOCAL_RANK even for the only task of a node.
    applies = {"ranks": True, "nodes": is_task, "first node": is_task and is_asked}
    for platform in PLATFORMS if _is_alone(rank) else ():
        info = _ask(platform, env, machine).info if applies[platform.starts] else None
        if info is not None and info.node_rank == rank.rank and _is_node_of(info, rank):
            return info
    return _stated_node(reader, rank) if is_task and reader.counts_nodes() else None


def _is_alone(rank: RankInfo) -> bool:
    """Return whether every node appears to run a single rank."""
    if rank.local_rank not in (0, None) or rank.nnodes not in (None, rank.world_size):
        return False
    # If the number of local ranks is unknown, local rank 0 may be the only one.
    return rank.local_world_size == 1 or (rank.local_world_size is None and rank.local_rank == 0)


def _stated_node(reader: Reader, rank: RankInfo) -> NodeInfo:
    """Return the node of a task that the user calls a node."""
    size, address = rank.world_size, rank.master_addr
    claim = f"{RANK_COUNTS}=nodes, but {rank.source} reports rank {rank.rank} of {size}"
    for name, number in (("RANK", rank.rank), ("WORLD_SIZE", size)):
        value = reader.value(name)
        if value is not None and value != str(number):
            raise reader.error(f"{claim}, and {name} is {shown(value)}", RANK_COUNTS, "nodes")
    if not _is_alone(rank):
        raise reader.error(f"{claim}, and not one rank on each node", RANK_COUNTS, "nodes")
    if size > 1 and address is None:
        message = f"{claim}, and MASTER_ADDR, the address of node 0, is not set"
        raise reader.error(message, "MASTER_ADDR", None)
    # A node alone meets no other, so it needs no address.
    address, port = None if size == 1 else address, rank.master_port or PORT
    return NodeInfo(rank.rank, size, size, address, port, None, _STATED)


def _ambiguous_node(reader: Reader, rank: RankInfo | None) -> NodeInfo | None:
    """Return the node that RANK and WORLD_SIZE could mean, unless they only mean a rank."""
    # Other launchers' variables only count ranks; with a size of 1 both meanings are the same.
    if rank is None or rank.source != "torchrun" or rank.world_size == 1:
        return None
    if reader.has("LOCAL_RANK", "LOCAL_WORLD_SIZE", *_OF_AGENT, RANK_COUNTS):
        return None
    size, port = rank.world_size, rank.master_port or PORT
    return NodeInfo(rank.rank, size, size, rank.master_addr, port, None, _BARE, is_ambiguous=True)


def ambiguity(info: NodeInfo) -> EnvironmentDetectionError:
    """Build the error for a RANK and a WORLD_SIZE that could count nodes or ranks."""
    return EnvironmentDetectionError(
        f"RANK={info.node_rank} and WORLD_SIZE={info.nnodes} are set, and it is unknown whether "
        f"they count nodes or ranks: set {RANK_COUNTS}=nodes if this is one of {info.nnodes} "
        f"nodes, to start ranks here, or {RANK_COUNTS}=ranks if this is one of {info.nnodes} "
        "ranks, to start a separate job in it; or pass --nnodes and --node-rank; "
        "or unset RANK and WORLD_SIZE",
        source=info.source,
        variable="RANK",
        value=str(info.node_rank),
    )


def not_a_node(
    what: str, env: Mapping[str, str], extra: Iterable[Environment] = ()
) -> EnvironmentDetectionError | None:
    """Build the error if this is one of several ranks, while `what` needs a node; else None."""
    rank, stated = _find_rank(env, extra), Reader(env, _STATED, "").value(RANK_COUNTS)
    if rank is None or rank.world_size == 1 or stated == "ranks":
        return None  # with "ranks" the user agrees to a job in each rank: see `ambiguity`
    size, variable = rank.world_size, RANK_COUNTS
    remedy = (
        "if each is the only task of its host, and has to start the ranks there, set "
        f"{RANK_COUNTS}=nodes, and MASTER_ADDR to the host of rank 0 if {rank.source} "
        "does not set it"
    )
    if rank.source == "torchrun":  # then LOCAL_RANK shows a rank, whatever RANK_COUNTS states
        variable, remedy = "LOCAL_RANK", "unset RANK, WORLD_SIZE and LOCAL_RANK if this is a node"
    return EnvironmentDetectionError(
        f"{what}: no platform identifies this node, but {rank.source} reports rank {rank.rank} of "
        f"{size}, and each of these would start a separate job: {remedy}; or leave {what} out if "
        "that is intended",
        source=rank.source,
        variable=variable,
        value=None,
    )


def is_gap(error: EnvironmentDetectionError, *, may_be_several: bool) -> bool:
    """Return whether the variables behind an error may also occur in a job of one node."""
    platform = next((each for each in PLATFORMS if error.source == each.NAME), None)
    if platform is None:
        return False
    # Without a number of nodes there may be only one. A platform that starts only the first node
    # is used only if the user asks for it, so its errors don't matter here.
    is_open = may_be_several or error.variable in (platform.nnodes or platform.hosts)
    return platform.starts == "first node" or (error.value is None and is_open)


def alone(info: NodeInfo) -> str:
    """Return the warning for a process whose platform starts only the first host."""
    hosts = ", ".join((*info.hosts[:8], "...") if len(info.hosts) > 8 else info.hosts)
    return (
        f"this process continues alone: {info.source} gives the job {info.nnodes} hosts ({hosts}), "
        "and starts its script on the first; start it on each of them with --nnodes auto, or "
        'nnodes="auto" to Parallel, to use them all; --nnodes 1, or nnodes=1, selects a single '
        "host, as does rank=0, world_size=1 in initialize()"
    )


def meaning(
    env: Mapping[str, str], machine: Machine, extra: Sequence[Environment] = ()
) -> str | None:
    """Describe whether RANK and WORLD_SIZE count nodes or ranks, and why; raise nothing."""
    reader = Reader(env, _BARE, "")
    if reader.has("LOCAL_RANK") or not (reader.has("RANK") and reader.has("WORLD_SIZE")):
        return None
    what = f"RANK={env['RANK']} and WORLD_SIZE={env['WORLD_SIZE']}"
    try:
        info = detect_node(env, machine, extra)
        if info is None:
            detect(env, extra)  # raises the rank's error, which `detect_node` ignores
            return f"{what} count ranks"
    except EnvironmentDetectionError as error:
        return f"{what} can't be used: {error}"
    if info.is_ambiguous:
        return f"{what} are AMBIGUOUS, and taken for a rank by initialize(): {ambiguity(info)}"
    return f"{what} count nodes, by {info.source}; if each node has one rank, they also count ranks"


def explain_nodes(
    env: Mapping[str, str], machine: Machine, extra: Sequence[Environment] = ()
) -> list[Finding[NodeInfo]]:
    """Return the findings of all platforms, in order of priority; raise nothing."""
    decided: Finding[NodeInfo]
    try:
        info = detect_node(env, machine, extra)
        decided = Finding("" if info is None else info.source, info)
    except EnvironmentDetectionError as error:
        decided = Finding(error.source, error=error)

    def ask(platform: Platform, view: Mapping[str, str]) -> Finding[NodeInfo]:
        finding = _ask(platform, view, machine)  # also for the winner: `view` records the names
        # The winner's finding has the raised error object itself, which is compared below.
        is_decisive = decided.source == platform.NAME
        return replace(decided, info=decided.info or finding.info) if is_decisive else finding

    findings = [judge(partial(ask, each), env, decided, _is_same) for each in PLATFORMS]
    return [
        replace(each, verdict="unused") if each.error not in (None, decided.error) else each
        for each in findings  # a platform is refused only if its error was raised
    ]


def _is_same(one: NodeInfo, other: NodeInfo) -> bool:
    return (one.node_rank, one.nnodes) == (other.node_rank, other.nnodes)
