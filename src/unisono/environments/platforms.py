"""The platforms that number pods and machines: one row each, for they say the same by other names.

A platform starts one program on each node and tells it who the node is; a launcher has to start the
node's ranks. What a row's variables are and what they can't tell stands above it, and its
`documentation` is the page that they were read from.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unisono.environments.reader import Number, Reader, counts_nodes, shown
from unisono.topology import NodeInfo

PORT = 29500
"""The port of node 0 where no variable says one: that of torchrun."""
_RANGE = re.compile(r"(?P<least>[0-9]{1,9}):(?P<most>[0-9]{1,9})")
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>[0-9]{1,20})")
_WORDS = ("auto", "gpu", "cpu")
_WAYS = ("c10d", "static")
_LOOPBACK = ("localhost", "127.0.0.1")
_ALONE = "or say --nnodes 1 (nnodes=1 to Parallel) for a job of this node alone"
_OF_PARTS = (
    "set PET_NODE_RANK, PET_NNODES and PET_MASTER_ADDR, which count the hosts of all parts, "
    + _ALONE
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a node knows besides its variables."""

    name: Callable[[], str]
    address: Callable[[], str]
    read: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class HostList:
    """Where the hosts of a job are listed, node 0's first."""

    variables: tuple[str, ...] = ()
    parse: Callable[[str], Sequence[str]] = str.split
    is_file: bool = False
    own: tuple[str, ...] = ()
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class _Listed:
    """What such a list says: the hosts in their order, each once, and the slots on each of them."""

    variable: str
    value: str
    hosts: Sequence[str]
    slots: int | None


@dataclass(frozen=True, slots=True)
class Platform:
    """One platform and its variables; of several for one fact the first that is set counts."""

    NAME: str
    title: str
    documentation: str
    remedy: str
    marks: tuple[str, ...]
    needs: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nnodes: tuple[str, ...] = ()
    leader: tuple[str, ...] = ("MASTER_ADDR",)
    leader_here: tuple[str, ...] = ()
    port: tuple[str, ...] = ("MASTER_PORT",)
    nproc_per_node: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    hosts: HostList | None = None
    owners: tuple[str, ...] = ()
    is_this: Callable[[Reader], bool] = lambda reader: True
    leader_of: Callable[[Reader, Machine, int], str | None] = lambda reader, machine, rank: None
    parts: tuple[tuple[str, str], ...] = ()
    starts_ranks: bool = False
    seats: tuple[str, ...] = ()
    numbers_more: bool = False
    starts_first: bool = False
    max_restarts: tuple[str, ...] = ()
    meets_by: tuple[str, ...] = ()

    def detect(self, env: Mapping[str, str], machine: Machine) -> NodeInfo | None:
        """Read the variables of this platform."""
        # MASTER_ADDR and MASTER_PORT count where they are set.
        reader = Reader(env, self.NAME, self.remedy)
        if not self._is_here(reader):
            return None
        self._refuse_parts(reader)
        listed = None if self.hosts is None else self._listed(reader, machine)
        least, most = self._nodes(reader, listed)
        rank = self._rank(reader, machine, listed, least, most)
        addr = None if most == 1 else self._leader(reader, machine, listed, rank)
        restarts = reader.number(*self.max_restarts)
        return NodeInfo(
            rank,
            least,
            most,
            addr,
            PORT if most == 1 else self._port(reader),
            self._count(reader, listed),
            self.NAME,
            hosts=tuple(listed.hosts) if listed and self.starts_first else (),
            max_restarts=None if restarts is None else restarts.value,
        )

    def _refuse_parts(self, reader: Reader) -> None:
        """Refuse a job of several parts, of which this row could number one alone."""
        for name, why in self.parts:
            count = reader.number(name)
            if count is not None and count.value > 1:
                own = Reader(reader.env, reader.source, _OF_PARTS)
                message = f"{count}, and {why}, and PET_NODE_RANK is not set"
                raise own.error(message, "PET_NODE_RANK", None)

    def _is_here(self, reader: Reader) -> bool:
        """Say whether the platform has started this node."""
        if reader.has(*self.owners) or not self.is_this(reader):
            return False
        if self.needs and not reader.has(*self.needs):
            return False
        pattern = None if self.hosts is None else self.hosts.pattern
        return reader.has(*self.marks) or bool(pattern and _matching(reader, pattern))

    def _listed(self, reader: Reader, machine: Machine) -> _Listed | None:
        """Read the hosts; a file has each of them once for each slot."""
        assert self.hosts is not None
        names = self.hosts.variables or _matching(reader, self.hosts.pattern or "")
        if self.hosts.pattern and len(names) > 1:
            if reader.has(*self.node_rank[:1]):
                return None  # that one counts the nodes of all lists together
            message = f"{' and '.join(names)} are lists, and nothing says which one has this node"
            raise reader.error(message, names[0], reader.env[names[0]])
        variable = reader.text(*names)
        if variable is None:
            return None
        name, value = variable
        try:
            text = machine.read(value) if self.hosts.is_file else value
            slots = Counter(self.hosts.parse(text))
        except (OSError, ValueError) as error:
            what = "can't be read" if self.hosts.is_file else "is not a list of hosts"
            message = f"{name}={shown(value)} {what}: {error}"
            raise reader.error(message, name, value) from error
        if not slots:
            raise reader.error(f"{name}={shown(value)} lists no host", name, value)
        hosts, counts = [reader.host(name, host) for host in slots], set(slots.values())
        is_even = self.hosts.is_file and len(counts) == 1
        return _Listed(name, value, hosts, counts.pop() if is_even else None)

    def _nodes(self, reader: Reader, listed: _Listed | None) -> tuple[int, int]:
        """Count the nodes: at least, and at most."""
        variable = reader.text(*self.nnodes)
        match = None if variable is None else _RANGE.fullmatch(variable[1])
        if variable is not None and match is not None:
            least, most = int(match["least"]), int(match["most"])
            if not 0 < least <= most:
                message = f"{variable[0]}={shown(variable[1])} should be MIN:MAX, at least 1 each"
                raise reader.error(message, *variable)
            return least, most
        if listed is None:
            missing = self.nnodes or (self.hosts.variables if self.hosts else ())
            number = reader.needed(*missing, least=1)
            return number.value, number.value
        said = reader.number(*self.nnodes, least=1)
        count = len(listed.hosts)
        if said is not None and said.value != count:
            message = f"{listed.variable}={shown(listed.value)} lists {count} hosts, but {said}"
            raise reader.error(message, listed.variable, listed.value)
        return count, count

    def _rank(
        self,
        reader: Reader,
        machine: Machine,
        listed: _Listed | None,
        least: int,
        nnodes: int,
    ) -> int | None:
        """Find the node's rank: what a variable says, or the node's place in the list."""
        if not self.node_rank:
            return self._place(reader, machine, listed)
        has_rank = reader.has(*self.node_rank)
        if nnodes == 1 and (self.numbers_more or not has_rank):
            return 0
        if least < nnodes or (reader.has(*self.seats) and not has_rank):
            return None
        said = reader.needed(*self.node_rank)
        main = reader.number(*self.main) or Number("", 0)
        for each in (said, main):
            if each.value >= nnodes:
                message = f"{each} is out of range: {nnodes} nodes allow 0 to {nnodes - 1}"
                raise reader.error(message, each.variable, str(each.value))
        # the node that leads has to be node 0, as ranks are numbered from there
        return 0 if said.value == main.value else said.value + (said.value < main.value)

    def _place(self, reader: Reader, machine: Machine, listed: _Listed | None) -> int:
        assert self.hosts is not None
        if listed is not None and len(listed.hosts) == 1:
            return 0  # under whatever name
        own = reader.text(*self.hosts.own)
        if self.hosts.own and own is None:
            reader.needed(*self.hosts.own)
        name = machine.name() if own is None else own[1]
        if listed is None:
            reader.needed(*self.hosts.variables)
        assert listed is not None
        places = [
            [place for place, host in enumerate(listed.hosts) if each(host) == each(name)]
            for each in (str, _short)
        ]
        found = next((some for some in places if len(some) == 1), None)
        if found is None:
            who = f"{own[0]}={shown(name)}" if own else f"this host, {shown(name)},"
            message = f"{who} isn't one host of {listed.variable}={shown(listed.value)}, which"
            message += f" lists {shown(' '.join(listed.hosts))}"
            raise reader.error(message, *(own or (listed.variable, listed.value)))
        return found[0]

    def _leader(
        self, reader: Reader, machine: Machine, listed: _Listed | None, rank: int | None
    ) -> str:
        """Find node 0's host."""
        way = reader.text(*self.meets_by)
        if way is not None and way[1] not in _WAYS:
            message = f"{way[0]}={shown(way[1])} isn't {' or '.join(_WAYS)}: unisono's nodes can't "
            raise reader.error(f"{message}meet in another way", *way)
        variable = reader.text(*self.leader)
        if variable is None and listed is not None:
            variable = listed.variable, listed.hosts[0]
        if variable is not None:
            if variable[1] in _LOOPBACK:
                variable = reader.text(*self.leader_here) or variable
            match = _HOST_PORT.fullmatch(variable[1])
            return reader.host(
                variable[0], (match["v6"] or match["host"]) if match else variable[1]
            )
        host = self.leader_of(reader, machine, rank or 0)
        if host is None:
            names = (*(self.hosts.variables if self.hosts else ()), *self.leader)
            message = f"none of {', '.join(names)} is set, so nothing says where node 0 is"
            raise reader.error(message, names[0], None)
        return reader.host(self.leader[0], host)

    def _port(self, reader: Reader) -> int:
        """Find node 0's port: a variable's of its own, else the one beside the host."""
        for name in (*self.port, *self.leader):
            _, value = reader.text(name) or ("", "")
            if name in self.leader:
                match = _HOST_PORT.fullmatch(value)
                value = match["port"] if match else ""
            alone = Reader({name: value}, reader.source, reader.remedy)
            number = alone.number(name, least=1, most=65535)
            if number is not None:
                return number.value
        return PORT

    def _count(self, reader: Reader, listed: _Listed | None) -> str | None:
        variable = reader.text(*self.nproc_per_node)
        if variable is None:
            return None if listed is None or listed.slots is None else str(listed.slots)
        if variable[1] in ("0", *_WORDS):
            return None if variable[1] == "0" else variable[1]
        number = reader.number(*self.nproc_per_node, least=1)
        return None if number is None else str(number.value)


def _matching(reader: Reader, pattern: str) -> tuple[str, ...]:
    """List the variables that are set and whose names match a pattern."""
    names = sorted(name for name in reader.env if re.fullmatch(pattern, name))
    return tuple(name for name in names if reader.has(name))


def _short(host: str) -> str:
    return host if re.fullmatch(r"[0-9.]+|.*:.*", host) else host.partition(".")[0].lower()


def _by_commas(text: str) -> list[str]:
    return [host.strip() for host in text.split(",") if host.strip()]


def _from_json(text: str) -> list[str]:
    hosts = json.loads(text)
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ValueError('it should be of the form ["algo-1", "algo-2"]')
    return hosts


def _first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def _with_slots(text: str) -> list[str]:
    """Return the hosts of lines of host and slots, each as often as it has slots."""
    hosts = []
    for line in filter(str.strip, text.splitlines()):
        host, slots = [*line.split(), ""][:2]
        if not re.fullmatch(r"[1-9][0-9]{0,4}", slots):
            raise ValueError(f"{shown(line)} should begin with a host and its slots")
        hosts += [host] * int(slots)
    return hosts


def _is_pytorchjob(reader: Reader) -> bool:
    """Say whether the pod's own name shows that RANK is its number in the job."""
    if reader.has("LOCAL_RANK"):
        return False
    names = [reader.text(name) for name in ("HOSTNAME", "MASTER_ADDR", "RANK")]
    pod, addr, rank = ("" if each is None else each[1] for each in names)
    match = re.fullmatch(r"(?P<job>.+)-(?P<role>master|worker)-(?P<index>[0-9]{1,9})", pod)
    if match is None or (rank and not rank.isdecimal()):
        return False
    if addr in _LOOPBACK:  # what a master's own pod is told by still older ones
        return (match["role"], match["index"], rank or "0") == ("master", "0", "0")
    for leader, first in (("master", 1), ("worker", 0)):
        if addr.partition(".")[0] == f"{match['job']}-{leader}-0":
            offset = first if match["role"] == "worker" else 0
            return not rank or int(match["index"]) + offset == int(rank)
    return False


def _is_pai(reader: Reader) -> bool:
    addr = reader.text("MASTER_ADDR")
    is_its = addr is not None and re.fullmatch(r"dlc[0-9a-z]+-master-0(\..+)?", addr[1])
    return bool(is_its) and not reader.has("LOCAL_RANK")


def _is_stated(reader: Reader) -> bool:
    return bool(counts_nodes(reader)) and not reader.has("LOCAL_RANK")


def _first_pod(reader: Reader, machine: Machine, rank: int) -> str:
    """Derive the first pod's name from this pod's: train-3.train.ns.svc is number 3."""
    rank = reader.needed("JOB_COMPLETION_INDEX").value  # also where the nodes seat themselves
    name, dot, domain = machine.name().partition(".")
    job, _, index = name.rpartition("-")
    if index != str(rank) or not job:
        message = f"JOB_COMPLETION_INDEX={rank}, but this pod's name, {shown(name)}, doesn't end so"
        raise reader.error(f"{message}: MASTER_ADDR has to be set", "MASTER_ADDR", None)
    if not dot:
        message = f"this pod's name, {shown(name)}, has no domain under which others could find it"
        more = "create a headless Service and name it as the pods' subdomain, or set MASTER_ADDR"
        raise reader.error(f"{message}: {more}", "MASTER_ADDR", None)
    return f"{job}-0.{domain}"


def _own_address(reader: Reader, machine: Machine, rank: int) -> str | None:
    """Return the address of this node where it leads: the others are told it by a variable."""
    if rank != 0:
        return None
    try:
        return machine.address()
    except OSError as error:
        message = f"this is the main node, and its own address isn't known: {error}"
        raise reader.error(f"{message}; or set MASTER_ADDR", "MASTER_ADDR", None) from error


_BY_HAND = 'say --nnodes auto (nnodes="auto" to Parallel) on each host of the job, with'

# In order of priority: what is built on another one, and says more, comes first.
#
# Kubeflow Trainer, newer releases of Kubeflow's PyTorchJob, and charts that follow them: torchrun
# takes each of its options from PET_ and the option's name. PET_NNODES may be MIN:MAX; then the
# nodes seat themselves at PET_RDZV_ENDPOINT, unless PET_RDZV_BACKEND says that etcd is there.
# PyTorchJob sets RANK and WORLD_SIZE too: RANK counts pods, and so does WORLD_SIZE, unless
# nprocPerNode is a number: then it counts ranks.
#
# PAI DLC of Alibaba Cloud: RANK and WORLD_SIZE count nodes. The address of the first node begins
# with the job's id, dlc and letters.
#
# Volcano: the plug-in env numbers a task's pods (VK_TASK_INDEX is the older name), svc lists them
# by task, as VC_WORKER_HOSTS. The plug-in pytorch sets RANK, which counts pods over the tasks
# master and worker, WORLD_SIZE and MASTER_ADDR; without it only one task can be numbered.
#
# Older releases of PyTorchJob: RANK and WORLD_SIZE alone, which count pods. That they are a pod's
# is known by its name, JOB-master-0 or JOB-worker-N, where MASTER_ADDR is JOB-master-0. The
# operator before them, and KubeDL, tell the master itself localhost.
#
# UNISONO_RANK_COUNTS=nodes: what the user says of a RANK and a WORLD_SIZE that nothing explains.
#
# SkyPilot: one address a line in SKYPILOT_NODE_IPS, the head node's first; no accelerator is 0.
#
# AWS Batch, multi-node parallel jobs: the main node isn't told its own address, and may have
# another index than 0.
#
# SageMaker training: the hosts as JSON; Open MPI's variables beside them are mpirun's own.
#
# Azure Machine Learning, one program a node: NODE_RANK, MASTER_ADDR and MASTER_PORT are documented;
# AZUREML_NODE_COUNT is what its nodes carry besides. AZ_BATCH_MASTER_NODE is host and port.
#
# PBS, Torque and Grid Engine: a file lists the hosts, PBS's once for each slot, Grid Engine's with
# the number of slots; this node is the one with its name. They start a job's script on the first
# host alone: ssh, pbsdsh or qrsh has to start it on the others, with the variable and a file that
# they can read. That this was done isn't to be seen, so the user has to say it.
#
# TPUs on GKE: TPU_WORKER_ID counts the hosts of one slice; in a job of several slices
# (MEGASCALE_NUM_SLICES) it says too little. Plain TPU VMs have neither variable: their number and
# their hosts are in the metadata server.
#
# Indexed Jobs and JobSets of Kubernetes: a pod's number and nothing else, so the number of pods has
# to be in the manifest, by torchrun's name; without it they are taken for pods that work alone, as
# those of a sweep do. The first pod's name follows from this one's.
PLATFORMS: tuple[Platform, ...] = (
    Platform(
        "kubeflow",
        "Kubeflow Trainer, PyTorchJob",
        "https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/",
        "set PET_NODE_RANK, PET_NNODES and PET_MASTER_ADDR together, or unset the PET_ variables, "
        + _ALONE,
        marks=("PET_NODE_RANK", "PET_RDZV_ENDPOINT"),
        node_rank=("PET_NODE_RANK",),
        nnodes=("PET_NNODES",),
        leader=("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "MASTER_PORT"),
        nproc_per_node=("PET_NPROC_PER_NODE",),
        seats=("PET_RDZV_ENDPOINT",),
        max_restarts=("PET_MAX_RESTARTS",),
        meets_by=("PET_RDZV_BACKEND",),
    ),
    Platform(
        "pai",
        "PAI DLC",
        "https://www.alibabacloud.com/help/en/pai/general-environment-variables",
        f"set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or unset them all, {_ALONE}",
        marks=("RANK", "WORLD_SIZE"),
        node_rank=("RANK",),
        nnodes=("WORLD_SIZE",),
        nproc_per_node=("NPROC_PER_NODE",),
        is_this=_is_pai,
    ),
    Platform(
        "volcano",
        "Volcano",
        "https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md",
        "give the Job the plug-ins env and svc, and pytorch where it has several tasks, or unset "
        f"the VC_ variables, {_ALONE}",
        marks=("VC_TASK_INDEX", "VK_TASK_INDEX"),
        node_rank=("RANK", "VC_TASK_INDEX", "VK_TASK_INDEX"),
        nnodes=("WORLD_SIZE",),
        hosts=HostList(parse=_by_commas, pattern=r"VC_[A-Z0-9_]+_HOSTS"),
    ),
    Platform(
        "pytorchjob",
        "older PyTorchJob",
        "https://github.com/kubeflow/training-operator/blob/"
        "1417bbc35b6e7840b3ecab1cec17dbf553ad9e85/pkg/controller.v1/pytorch/envvar.go",
        f"set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or unset them all, {_ALONE}",
        marks=("RANK", "WORLD_SIZE"),
        node_rank=("RANK",),
        nnodes=("WORLD_SIZE",),
        leader_here=("HOSTNAME",),
        is_this=_is_pytorchjob,
    ),
    Platform(
        "stated",
        "UNISONO_RANK_COUNTS=nodes",
        "https://pytorch.org/docs/stable/distributed.html#environment-variable-initialization",
        "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or unset "
        f"UNISONO_RANK_COUNTS, {_ALONE}",
        marks=("UNISONO_RANK_COUNTS",),
        node_rank=("RANK",),
        nnodes=("WORLD_SIZE",),
        is_this=_is_stated,
    ),
    Platform(
        "skypilot",
        "SkyPilot",
        "https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html",
        f"start it by the run section of a task, or unset the SKYPILOT_ variables, {_ALONE}",
        marks=("SKYPILOT_NODE_RANK",),
        node_rank=("SKYPILOT_NODE_RANK",),
        nnodes=("SKYPILOT_NUM_NODES",),
        nproc_per_node=("SKYPILOT_NUM_GPUS_PER_NODE",),
        hosts=HostList(("SKYPILOT_NODE_IPS",), str.split),
    ),
    Platform(
        "aws-batch",
        "AWS Batch",
        "https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html",
        "start it as a multi-node parallel job, or unset the AWS_BATCH_JOB_NODE variables, "
        + _ALONE,
        marks=("AWS_BATCH_JOB_NODE_INDEX",),
        node_rank=("AWS_BATCH_JOB_NODE_INDEX",),
        nnodes=("AWS_BATCH_JOB_NUM_NODES",),
        leader=("MASTER_ADDR", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),
        main=("AWS_BATCH_JOB_MAIN_NODE_INDEX",),
        leader_of=_own_address,
    ),
    Platform(
        "sagemaker",
        "SageMaker",
        "https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
        f"start it as a training job of SageMaker, or unset the SM_ variables, {_ALONE}",
        marks=("SM_HOSTS", "SM_CURRENT_HOST"),
        nproc_per_node=("SM_NUM_GPUS",),
        hosts=HostList(("SM_HOSTS",), _from_json, own=("SM_CURRENT_HOST",)),
    ),
    Platform(
        "azureml",
        "Azure Machine Learning",
        "https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu",
        "start it with the distribution PyTorch and one process per instance, or unset "
        f"AZUREML_NODE_COUNT, {_ALONE}",
        marks=("AZUREML_NODE_COUNT",),
        node_rank=("NODE_RANK",),
        nnodes=("AZUREML_NODE_COUNT",),
        leader=("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        starts_ranks=True,
    ),
    Platform(
        "pbs",
        "PBS, Torque",
        "https://github.com/openpbs/openpbs/blob/master/doc/man1/qsub.1B",
        f"{_BY_HAND} PBS_NODEFILE set to a file that they all can read, {_ALONE}",
        marks=("PBS_NODEFILE",),
        hosts=HostList(("PBS_NODEFILE",), _first_words, is_file=True),
        starts_first=True,
    ),
    Platform(
        "sge",
        "Grid Engine",
        "https://manpages.debian.org/bookworm/gridengine-common/sge_pe.5.en.html",
        f"{_BY_HAND} PE_HOSTFILE set to a file that they all can read, {_ALONE}",
        marks=("PE_HOSTFILE",),
        hosts=HostList(("PE_HOSTFILE",), _with_slots, is_file=True),
        starts_first=True,
    ),
    Platform(
        "tpu",
        "TPUs on GKE",
        "https://cloud.google.com/kubernetes-engine/docs/how-to/tpus",
        "set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES together, or unset the TPU_ variables, "
        + _ALONE,
        marks=("TPU_WORKER_ID",),
        node_rank=("TPU_WORKER_ID",),
        hosts=HostList(("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"), _by_commas),
        parts=(("MEGASCALE_NUM_SLICES", "TPU_WORKER_ID counts the hosts of one slice alone"),),
    ),
    Platform(
        "kubernetes",
        "Indexed Job, JobSet",
        "https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/",
        "set PET_NNODES to the number of pods that train together in the manifest: 1 where each "
        f"trains by itself, {_ALONE}",
        marks=("JOB_COMPLETION_INDEX",),
        needs=("PET_NNODES",),
        node_rank=("JOB_COMPLETION_INDEX",),
        nnodes=("PET_NNODES",),
        leader=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "MASTER_PORT"),
        nproc_per_node=("PET_NPROC_PER_NODE",),
        leader_of=_first_pod,
        numbers_more=True,
    ),
)
