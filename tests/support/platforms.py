"""Variables that platforms set on each of two nodes, from the dumps of `tests/data/platforms`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from unisono.environments.platforms import Machine
from unisono.topology import NodeInfo

FOLDER = Path(__file__).parents[1] / "data" / "platforms"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
"""The addresses of both nodes, in dumps with addresses."""


@dataclass(frozen=True, slots=True)
class Node:
    """One dump, of one node.

    Args:
        name: name of the job, and the number of the node.
        documentation: URL of the page that documents these variables.
        says: the facts that should be detected, as `facts` writes them.
        env: the variables.
        host: the node's hostname; empty if it isn't used.
        files: text of the files that variables name, by path.
    """

    name: str
    documentation: str
    says: str
    env: Mapping[str, str]
    host: str
    files: Mapping[str, str]

    @property
    def number(self) -> int:
        return int(self.name[-1])

    def machine(self) -> Machine:
        """Return the node's facts besides its variables: hostname, address and files."""

        def read(path: str) -> str:
            if path not in self.files:
                raise FileNotFoundError(path)
            return self.files[path]

        return Machine(lambda: self.host or "host", lambda: ADDRESSES[self.number], read)


def _load(path: Path) -> Node:
    kind, address, says, *lines = path.read_text(encoding="utf-8").splitlines()
    assert kind.startswith("# Written from documentation, not recorded: "), path
    assert address.startswith("# https://"), path
    host, files = "", {}
    while lines[0].startswith("# "):
        what, _, value = lines.pop(0).removeprefix("# ").partition(": ")
        if what == "Host":
            host = value
        else:
            files[what.removeprefix("File ")] = value.replace("|", "\n") + "\n"
    pairs = (line.split("=", 1) for line in lines)
    env = {name: value.replace("\\n", "\n") for name, value in pairs}
    says = says.removeprefix("# Says: ")
    return Node(path.stem, address[2:], says, MappingProxyType(env), host, MappingProxyType(files))


NODES = {node.name: node for node in map(_load, sorted(FOLDER.glob("*.env")))}
ELASTIC = ("kubeflow-elastic",)
"""Jobs whose nodes get their rank only at the rendezvous."""
JOBS = sorted({name.partition(".")[0] for name in NODES} - set(ELASTIC))


def facts(info: NodeInfo) -> str:
    """Return the facts in the form of a dump's line "Says"."""
    nodes = f"{info.nnodes}" if info.nnodes == info.max_nnodes else "several"
    where = f"at {info.master_addr}:{info.master_port}"
    return (
        f"{info.source}, node {info.node_rank} of {nodes}, ranks {info.nproc_per_node or '?'}, "
        f"{where}"
    )
