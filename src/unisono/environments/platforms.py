"""Table of platforms that start one program on each pod or machine; each row detects its node.

A platform numbers its nodes; a launcher still has to start their ranks. A row lists the platform's
variables. If the platform has facts of another form, a function in the row reads them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from unisono.environments.reader import Number, Reader, shown
from unisono.topology import NodeInfo

PORT = 29500
"""Port of node 0 if no variable sets one; the same as torchrun's default."""
_RANGE = re.compile(r"(?P<least>[0-9]{1,9}):(?P<most>[0-9]{1,9})")
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>[0-9]{1,20})")
_LOOPBACK = ("localhost", "127.0.0.1")
_ALONE = "or pass --nnodes 1 (nnodes=1 to Parallel) for a job of this node alone"
_TOGETHER = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or unset"
_BY_HAND = 'pass --nnodes auto (nnodes="auto" to Parallel) on each host of the job, with'


@dataclass(frozen=True, slots=True)
class Machine:
    """Functions that read a node's host name, its address and one of its files."""

    name: Callable[[], str]
    address: Callable[[], str]
    read: Callable[[str], str]


class _Hosts(NamedTuple):
    """Distinct hosts of a job, node 0 first, and their number of slots if it is the same on all."""

    variable: str
    value: str
    names: Sequence[str]
    slots: int | None


def _read_node(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    """Read a node's facts; its rank is its position in the list of hosts, or else its number."""
    hosts = _read_hosts(platform, reader, machine)
    least, most = _count_nodes(platform, reader, hosts)
    rank = None  # unless one of the cases below applies, the nodes number themselves
    if hosts and not platform.node_rank:
        rank = _find_position(platform, reader, machine, hosts)
    elif most == 1 and not reader.has(*platform.node_rank):
        rank = 0
    elif least == most and platform.node_rank:
        rank = reader.below(reader.needed(*platform.node_rank), most, f"a job of {most} nodes")
    return NodeInfo(
        rank,
        least,
        most,
        None if most == 1 else _find_leader(platform, reader, machine, hosts),
        PORT if most == 1 else _read_port(platform, reader),
        _count_ranks(platform, reader, hosts),
        platform.NAME,
        # `hosts` is used only for `alone`'s warning that the other hosts aren't started.
        hosts=tuple(hosts.names) if hosts and platform.starts == "first node" else (),
    )


def _read_hosts(platform: Platform, reader: Reader, machine: Machine) -> _Hosts | None:
    """Read the hosts from a variable, or from the file that the variable names."""
    variable = reader.text(*platform.hosts)
    if variable is None:
        return None
    name, value = variable
    is_file = platform.starts == "first node"  # batch systems, such as PBS, list hosts in a file
    try:
        slots = Counter(platform.parse(machine.read(value) if is_file else value))
    except (OSError, ValueError) as error:
        what = "can't be read" if is_file else "is not a list of hosts"
        raise reader.error(f"{name}={shown(value)} {what}: {error}", name, value) from error
    if not slots:
        raise reader.error(f"{name}={shown(value)} lists no host", name, value)
    hosts, counts = [reader.host(name, host) for host in slots], set(slots.values())
    # Only a file lists slots, whose number can be used only if it is the same on all hosts.
    return _Hosts(name, value, hosts, counts.pop() if is_file and len(counts) == 1 else None)


def _parse_list(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _parse_json(text: str) -> list[str]:
    hosts = json.loads(text)
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ValueError('it should be of the form ["algo-1", "algo-2"]')
    return hosts


def _parse_file(text: str) -> list[str]:
    """Parse lines with a host and its slots, 1 by default; return each host once per slot."""
    hosts = []
    for line in filter(str.strip, text.splitlines()):
        host, *others = line.split()
        slots = others[0] if others else "1"
        if not re.fullmatch(r"[1-9][0-9]{0,4}", slots):
            raise ValueError(f"{shown(line)} should begin with a host and its slots")
        hosts += [host] * int(slots)
    return hosts


def _count_nodes(platform: Platform, reader: Reader, hosts: _Hosts | None) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes."""
    name, value = reader.text(*platform.nnodes) or ("", "")
    # Only torchrun's own option may be a range.
    match = _RANGE.fullmatch(value) if name == "PET_NNODES" else None
    if match is not None:
        least, most = int(match["least"]), int(match["most"])
        if not 0 < least <= most:
            message = f"{name}={shown(value)} should be MIN:MAX, at least 1 each"
            raise reader.error(message, name, value)
        return least, most
    if hosts is None:  # `platform.hosts` is read only for its name in the error
        count = reader.needed(*(platform.nnodes or platform.hosts), least=1).value
        return count, count
    number, count = reader.number(*platform.nnodes, least=1), len(hosts.names)
    if number is not None and number.value != count:
        message = f"{hosts.variable}={shown(hosts.value)} lists {count} hosts, but {number}"
        raise reader.error(message, hosts.variable, hosts.value)
    return count, count


def _find_position(platform: Platform, reader: Reader, machine: Machine, hosts: _Hosts) -> int:
    """Return this node's position among the hosts."""
    if len(hosts.names) == 1:
        return 0  # the only host is this one, even under another name
    # A platform's variables for this node's name, if there are any, are required; by default it is
    # the host name.
    variables = [name for name in platform.marks if name not in platform.hosts]
    named = reader.text(*variables)
    if variables and named is None:
        reader.needed(*variables)  # raises the error for a missing variable
    name = named[1] if named else machine.name()
    for form in (str, _short):  # full names first: hosts of two domains may share a short one
        places = [index for index, host in enumerate(hosts.names) if form(host) == form(name)]
        if len(places) == 1:
            return places[0]
    who = f"{named[0]}={shown(name)}" if named else f"this host, {shown(name)},"
    message = f"{who} doesn't match exactly one host in {hosts.variable}={shown(hosts.value)}"
    variable, value = named or (hosts.variable, hosts.value)
    raise reader.error(f"{message}, which lists {shown(' '.join(hosts.names))}", variable, value)


def _short(host: str) -> str:
    """Return a host's name without its domain; an address has none."""
    return host if re.fullmatch(r"[0-9.]+|.*:.*", host) else host.partition(".")[0].lower()


def _find_leader(platform: Platform, reader: Reader, machine: Machine, hosts: _Hosts | None) -> str:
    """Return node 0's host, from its variable, the list of hosts, or the row's own function."""
    variable = reader.text(*platform.leader)
    if variable is None and hosts is not None:
        variable = hosts.variable, hosts.names[0]
    if variable is None and platform.derive_leader is not None:
        variable = platform.leader[0], platform.derive_leader(reader, machine)
    if variable is None:
        names = (*platform.hosts, *platform.leader)
        message = f"none of {', '.join(names)} is set, so the address of node 0 is unknown"
        raise reader.error(message, names[0], None)
    match = _HOST_PORT.fullmatch(variable[1])
    return reader.host(variable[0], (match["v6"] or match["host"]) if match else variable[1])


def _read_port(platform: Platform, reader: Reader) -> int:
    """Return node 0's port, from the port's variable, or else from the variable with the host."""
    for name in (*platform.port, *platform.leader):
        value = reader.value(name) or ""
        if name in platform.leader:
            match = _HOST_PORT.fullmatch(value)
            value = match["port"] if match else ""
        # The reader checks this part of the text as if it were the variable's whole value.
        number = replace(reader, env={name: value}).number(name, least=1, most=65535)
        if number is not None:
            return number.value
    return PORT


def _count_ranks(platform: Platform, reader: Reader, hosts: _Hosts | None) -> str | None:
    """Return this node's number of ranks, or a word that `count_ranks` reads; None by default."""
    value = reader.value(*platform.nproc_per_node)
    if value is None and hosts is not None and hosts.slots is not None:
        return str(hosts.slots)
    # A variable for accelerators is 0 on a node without any; there the default applies.
    if value in (None, "0", "auto", "gpu", "cpu"):
        return None if value == "0" else value
    return str(reader.needed(*platform.nproc_per_node, least=1).value)


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform, with the variables for each fact; the first of them that is set is used."""

    NAME: str
    remedy: str
    marks: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    nnodes: tuple[str, ...] = ()
    leader: tuple[str, ...] = ("MASTER_ADDR",)
    derive_leader: Callable[[Reader, Machine], str] | None = None
    port: tuple[str, ...] = ("MASTER_PORT",)
    nproc_per_node: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    parse: Callable[[str], Sequence[str]] = _parse_list
    starts: Literal["nodes", "first node", "ranks"] = "nodes"
    applies: Callable[[Reader], object] = lambda reader: True
    read: Callable[[Platform, Reader, Machine], NodeInfo] = _read_node

    def detect(self, env: Mapping[str, str], machine: Machine) -> NodeInfo | None:
        """Return the facts of a node of this platform."""
        reader = Reader(env, self.NAME, f"{self.remedy}, {_ALONE}")
        is_here = reader.has(*self.marks) and self.applies(reader)
        return self.read(self, reader, machine) if is_here else None


def _kubeflow(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    if reader.has("PET_RDZV_ENDPOINT") and not reader.has("PET_NODE_RANK"):
        # The nodes number themselves when they meet at the endpoint.
        platform = replace(platform, node_rank=())
    info = _read_node(platform, reader, machine)
    backend = reader.value("PET_RDZV_BACKEND") if info.max_nnodes > 1 else None
    if backend is not None and backend not in ("c10d", "static"):
        message = f"PET_RDZV_BACKEND={shown(backend)} isn't c10d or static: unisono has no other "
        raise reader.error(f"{message}rendezvous", "PET_RDZV_BACKEND", backend)
    restarts = reader.number("PET_MAX_RESTARTS")
    return replace(info, max_restarts=None if restarts is None else restarts.value)


def _is_dlc(reader: Reader) -> bool:
    """Return whether this is a node of PAI DLC, by the name of the job's first node."""
    is_leader = re.compile(r"dlc[0-9a-z]+-master-0(\..+)?").fullmatch
    # If LOCAL_RANK is set, this process is a rank that torchrun has started on such a node.
    return bool(is_leader(reader.value("MASTER_ADDR") or "")) and not reader.has("LOCAL_RANK")


def _volcano(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    lists = reader.matching(*platform.hosts)
    if len(lists) > 1:
        if not reader.has("RANK"):
            message = f"{' and '.join(lists)} are lists, and this node's list is unknown"
            raise reader.error(message, lists[0], reader.value(lists[0]))
        platform = replace(platform, hosts=())  # RANK counts the nodes of all lists together
    return _read_node(platform, reader, machine)


def _pytorchjob(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    info, pod = _read_node(platform, reader, machine), reader.value("HOSTNAME") or ""
    if info.master_addr in _LOOPBACK:  # set only on the master; workers reach it by its pod's name
        return replace(info, master_addr=reader.host("HOSTNAME", pod))
    return info


def _is_pod_of_rank(reader: Reader) -> bool:
    """Return whether a pod's name shows that RANK is the pod's number in the job."""
    pod, rank = reader.value("HOSTNAME") or "", reader.value("RANK") or ""
    addr = reader.value("MASTER_ADDR") or ""
    match = re.fullmatch(r"(?P<job>.+)-(?P<role>master|worker)-(?P<index>[0-9]{1,9})", pod)
    if reader.has("LOCAL_RANK") or match is None or (rank and not rank.isdecimal()):
        return False
    if addr in _LOOPBACK:  # only on the master itself
        return (match["role"], match["index"], rank or "0") == ("master", "0", "0")
    # If there is a master, the workers' numbers begin at 1.
    for leader, first in (("master", 1), ("worker", 0)):
        if addr.partition(".")[0] == f"{match['job']}-{leader}-0":
            offset = first if match["role"] == "worker" else 0
            return not rank or int(match["index"]) + offset == int(rank)
    return False


def _aws_batch(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    _, nnodes = _count_nodes(platform, reader, None)
    size = f"a job of {nnodes} nodes"
    index = reader.below(reader.needed(*platform.node_rank), nnodes, size)
    main = reader.number("AWS_BATCH_JOB_MAIN_NODE_INDEX") or Number("", 0)
    reader.below(main, nnodes, size)
    is_main = index == main.value
    if is_main:  # on this node alone, no variable has the main node's address
        platform = replace(platform, derive_leader=_own_address)
    info = _read_node(platform, reader, machine)
    # The main node must be node 0, because ranks are numbered from there. The nodes before it
    # move up by one.
    return replace(info, node_rank=0 if is_main else index + (index < main.value))


def _own_address(reader: Reader, machine: Machine) -> str:
    """Return the address of this node, which is the main node."""
    try:
        return machine.address()
    except OSError as error:
        message = f"this is the main node, and its own address isn't known ({error})"
        reader = replace(reader, remedy=f"set MASTER_ADDR, or {reader.remedy}")
        raise reader.error(message, "MASTER_ADDR", None) from error


def _tpu(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    slices = reader.number("MEGASCALE_NUM_SLICES")
    if slices is not None and slices.value > 1:
        remedy = "set PET_NODE_RANK, PET_NNODES and PET_MASTER_ADDR, which count the hosts of all "
        reader = replace(reader, remedy=f"{remedy}slices, {_ALONE}")
        message = f"{slices}, and TPU_WORKER_ID counts only the hosts of one slice"
        raise reader.error(f"{message}, and PET_NODE_RANK is not set", "PET_NODE_RANK", None)
    return _read_node(platform, reader, machine)


def _kubernetes(platform: Platform, reader: Reader, machine: Machine) -> NodeInfo:
    if _count_nodes(platform, reader, None) == (1, 1):  # such a pod may have any index
        platform = replace(platform, node_rank=())
    return _read_node(platform, reader, machine)


def _first_pod(reader: Reader, machine: Machine) -> str:
    """Derive the first pod's name from this pod's, such as train-3.train.ns.svc for number 3."""
    rank = reader.needed("JOB_COMPLETION_INDEX").value
    name, dot, domain = machine.name().partition(".")
    job, _, index = name.rpartition("-")
    if index != str(rank) or not job:
        message = f"this pod's name, {shown(name)}, doesn't end with JOB_COMPLETION_INDEX, {rank}"
        raise reader.error(f"{message}: set MASTER_ADDR", "MASTER_ADDR", None)
    if not dot:
        message = f"this pod's name, {shown(name)}, has no domain, so other pods can't resolve it"
        more = "create a headless Service and set its name as the pods' subdomain"
        raise reader.error(f"{message}: {more}, or set MASTER_ADDR", "MASTER_ADDR", None)
    return f"{job}-0.{domain}"


# In order of priority: a platform that is built on another one comes before that one, because it
# sets more variables. Each dump in tests/data/platforms names the page that documents the platform.
PLATFORMS: tuple[Platform, ...] = (
    # Kubeflow Trainer, newer releases of Kubeflow's PyTorchJob, and charts that follow them. Their
    # variables are torchrun's options with the prefix PET_. PET_NNODES may be MIN:MAX; then the
    # nodes number themselves at PET_RDZV_ENDPOINT, unless PET_RDZV_BACKEND is etcd. PyTorchJob
    # also sets RANK, which counts pods, and WORLD_SIZE, which counts pods, or ranks if
    # nprocPerNode is a number.
    Platform(
        "kubeflow",
        "set PET_NODE_RANK, PET_NNODES and PET_MASTER_ADDR together, or unset the PET_ variables",
        marks=("PET_NODE_RANK", "PET_RDZV_ENDPOINT"),
        node_rank=("PET_NODE_RANK",),
        nnodes=("PET_NNODES",),
        leader=("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "MASTER_PORT"),
        nproc_per_node=("PET_NPROC_PER_NODE",),
        read=_kubeflow,
    ),
    # PAI DLC of Alibaba Cloud: RANK and WORLD_SIZE count nodes. The address of the first node
    # begins with the job's id, which is `dlc` followed by letters and digits.
    Platform(
        "pai",
        f"{_TOGETHER} them all",
        marks=("RANK", "WORLD_SIZE"),
        node_rank=("RANK",),
        nnodes=("WORLD_SIZE",),
        nproc_per_node=("NPROC_PER_NODE",),
        applies=_is_dlc,
    ),
    # Volcano: the `env` plug-in numbers the pods of a task (VK_TASK_INDEX is the older name); the
    # `svc` plug-in lists them, as in VC_WORKER_HOSTS. The `pytorch` plug-in sets WORLD_SIZE,
    # MASTER_ADDR and RANK, which counts the pods of the `master` and `worker` tasks together;
    # without this plug-in, only the pods of a single task can be numbered.
    Platform(
        "volcano",
        "give the Job the plug-ins env and svc, and pytorch where it has several tasks, or unset "
        "the VC_ variables",
        marks=("VC_TASK_INDEX", "VK_TASK_INDEX", "VC_*_HOSTS"),
        node_rank=("RANK", "VC_TASK_INDEX", "VK_TASK_INDEX"),
        nnodes=("WORLD_SIZE",),
        hosts=("VC_*_HOSTS",),
        read=_volcano,
    ),
    # Older releases of PyTorchJob set only RANK and WORLD_SIZE, which count pods. A pod is
    # recognized by its name, JOB-master-0 or JOB-worker-N, if MASTER_ADDR is JOB-master-0. The
    # PyTorch operator that preceded these releases, and KubeDL, set MASTER_ADDR to localhost on
    # the master itself.
    Platform(
        "pytorchjob",
        f"{_TOGETHER} them all",
        marks=("RANK", "WORLD_SIZE"),
        node_rank=("RANK",),
        nnodes=("WORLD_SIZE",),
        applies=_is_pod_of_rank,
        read=_pytorchjob,
    ),
    # The user states, in UNISONO_RANK_COUNTS, whether RANK and WORLD_SIZE count nodes or ranks, if
    # nothing else shows it.
    Platform(
        "stated",
        f"{_TOGETHER} UNISONO_RANK_COUNTS",
        marks=("UNISONO_RANK_COUNTS",),
        node_rank=("RANK",),
        nnodes=("WORLD_SIZE",),
        applies=lambda reader: reader.counts_nodes() and not reader.has("LOCAL_RANK"),
    ),
    # SkyPilot: SKYPILOT_NODE_IPS has one address a line, the head node first.
    Platform(
        "skypilot",
        "start it from the `run` section of a task, or unset the SKYPILOT_ variables",
        marks=("SKYPILOT_NODE_RANK",),
        node_rank=("SKYPILOT_NODE_RANK",),
        nnodes=("SKYPILOT_NUM_NODES",),
        nproc_per_node=("SKYPILOT_NUM_GPUS_PER_NODE",),
        hosts=("SKYPILOT_NODE_IPS",),
    ),
    # Multi-node parallel jobs of AWS Batch: on the main node no variable has the node's own
    # address, and its index may differ from 0.
    Platform(
        "aws-batch",
        "start it as a multi-node parallel job, or unset the AWS_BATCH_JOB_NODE variables",
        marks=("AWS_BATCH_JOB_NODE_INDEX",),
        node_rank=("AWS_BATCH_JOB_NODE_INDEX",),
        nnodes=("AWS_BATCH_JOB_NUM_NODES",),
        leader=("MASTER_ADDR", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),
        read=_aws_batch,
    ),
    # SageMaker training jobs: SM_HOSTS is a JSON list. If Open MPI's variables are set as well,
    # mpirun set them, not SageMaker.
    Platform(
        "sagemaker",
        "start it as a training job of SageMaker, or unset the SM_ variables",
        marks=("SM_HOSTS", "SM_CURRENT_HOST"),
        nproc_per_node=("SM_NUM_GPUS",),
        hosts=("SM_HOSTS",),
        parse=_parse_json,
    ),
    # Azure Machine Learning with one program on each node: NODE_RANK, MASTER_ADDR and MASTER_PORT
    # are documented; the undocumented AZUREML_NODE_COUNT is also set. AZ_BATCH_MASTER_NODE has
    # host and port. The program is started as rank 0 of its node.
    Platform(
        "azureml",
        "start it with the distribution PyTorch and one process per instance, or unset "
        "AZUREML_NODE_COUNT",
        marks=("AZUREML_NODE_COUNT",),
        node_rank=("NODE_RANK",),
        nnodes=("AZUREML_NODE_COUNT",),
        leader=("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        starts="ranks",
    ),
    # PBS, Torque and Grid Engine: a file lists the hosts. PBS's file has one line for each slot,
    # Grid Engine's has the number of slots; this node is the entry that has this host's name. A
    # job's script is started only on the first host; ssh, pbsdsh or qrsh must start it on the other
    # hosts, with the variable and a file that those hosts can read. Whether that happened can't be
    # detected, so the user has to state it.
    *(
        Platform(
            name,
            f"{_BY_HAND} {variable} set to a file that they all can read",
            marks=(variable,),
            hosts=(variable,),
            parse=_parse_file,
            starts="first node",
        )
        for name, variable in (("pbs", "PBS_NODEFILE"), ("sge", "PE_HOSTFILE"))
    ),
    # TPUs on GKE: TPU_WORKER_ID numbers the hosts of one slice, so it isn't enough for a job of
    # several slices (MEGASCALE_NUM_SLICES). Plain TPU VMs don't have these variables; their number
    # and their hosts are in the metadata server.
    Platform(
        "tpu",
        "set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES together, or unset the TPU_ variables",
        marks=("TPU_WORKER_ID",),
        node_rank=("TPU_WORKER_ID",),
        hosts=("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        read=_tpu,
    ),
    # Indexed Jobs and JobSets of Kubernetes set only a pod's index, so the manifest has to set the
    # number of pods, in torchrun's variable. Pods without it are treated as independent, such as
    # those of a sweep. The first pod's name is derived from this pod's.
    Platform(
        "kubernetes",
        "in the manifest, set PET_NNODES to the number of pods that train together (1 if each "
        "trains by itself)",
        marks=("JOB_COMPLETION_INDEX",),
        node_rank=("JOB_COMPLETION_INDEX",),
        nnodes=("PET_NNODES",),
        leader=("PET_MASTER_ADDR", "MASTER_ADDR"),
        derive_leader=_first_pod,
        port=("PET_MASTER_PORT", "MASTER_PORT"),
        nproc_per_node=("PET_NPROC_PER_NODE",),
        applies=lambda reader: reader.has("PET_NNODES"),
        read=_kubernetes,
    ),
)
