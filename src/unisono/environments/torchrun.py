"""torchrun, torch elastic, and all that set torch's own variables.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are documented in PyTorch's "torchrun (Elastic Launch)", "Environment Variables";
TORCHELASTIC_USE_AGENT_STORE is read in ``torch/distributed/rendezvous.py``, TORCHELASTIC_RUN_ID is
torchrun's ``--rdzv-id``.

The same names are set by Kubeflow's PyTorchJob (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT alone,
which count pods: right as ranks where each pod has one), by SageMaker's ``torch_distributed``,
which runs torchrun (SageMaker Python SDK, "PyTorch Estimator"), by accelerate and by DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.environments.reader import Reader, UncheckedInfo, counts_nodes, make_info, shown
from unisono.topology import RankInfo

NAME = "torchrun"
EXAMPLES = (
    {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "42423",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "b5a7",
    },
)
# What torchrun says of a static rendezvous, and our launcher of an elastic one, whatever job it is.
_NO_IDS = ("none", "unisono")
_REMEDY = (
    "start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
    "together, or unset them all"
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read torch's variables."""
    # RANK and WORLD_SIZE make the environment; a MASTER_ADDR, MASTER_PORT or LOCAL_RANK
    # alone doesn't. The rank within the node is what LOCAL_RANK says, and is not guessed.
    reader = Reader(env, NAME, _REMEDY)
    if not reader.has("RANK", "WORLD_SIZE"):
        return None
    if not reader.has("LOCAL_RANK"):
        is_of_nodes = counts_nodes(reader)
        if is_of_nodes:
            return None
        if is_of_nodes is None:
            _refuse_both_meanings(reader)
    return make_info(
        reader,
        UncheckedInfo(
            reader.needed("RANK"),
            reader.needed("WORLD_SIZE", least=1),
            local_rank=reader.number("LOCAL_RANK"),
            local_world_size=reader.number("LOCAL_WORLD_SIZE", least=1),
            node_rank=reader.number("GROUP_RANK", "NODE_RANK"),
            nnodes=reader.number("GROUP_WORLD_SIZE", least=1),
            master_addr=reader.address(),
            master_port=reader.port(),
            store_is_hosted=_store_is_hosted(reader),
            job_id=_job_id(reader),
        ),
    )


def _refuse_both_meanings(reader: Reader) -> None:
    """Refuse a RANK that counts nodes beside a WORLD_SIZE that counts ranks."""
    names = ("RANK", "WORLD_SIZE", "PET_NODE_RANK", "PET_NNODES")
    rank, size, node_rank, nnodes = map(reader.text, names)
    if None in (rank, size, node_rank, nnodes):
        return
    assert rank is not None and size is not None and node_rank is not None and nnodes is not None
    if rank[1] == node_rank[1] and nnodes[1].isdecimal() and nnodes[1] != size[1]:
        message = (
            f"RANK={shown(rank[1])} counts nodes, as PET_NODE_RANK does, but "
            f"WORLD_SIZE={shown(size[1])} isn't PET_NNODES={shown(nnodes[1])}: it counts ranks, "
            "which are still to be started, by unisono run or Parallel"
        )
        raise reader.error(message, *size)


def _job_id(reader: Reader) -> str | None:
    variable = reader.text("TORCHELASTIC_RUN_ID")
    return None if variable is None or variable[1] in _NO_IDS else variable[1]


def _store_is_hosted(reader: Reader) -> bool:
    # torch compares with str(True), so any other text means no
    if reader.text("TORCHELASTIC_USE_AGENT_STORE") != ("TORCHELASTIC_USE_AGENT_STORE", "True"):
        return False
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not reader.has(name):
            message = f"{name} is not set, but TORCHELASTIC_USE_AGENT_STORE=True says that a store"
            raise reader.error(f"{message} listens there", name, None)
    return True
