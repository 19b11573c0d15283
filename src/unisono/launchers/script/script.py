"""A user's request: the program of every rank of a job, and the job's shape."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.errors import ArgumentError
from unisono.launchers.variables import node_variables, rank_variables, texts
from unisono.topology import GRACE_S, PRIVATE_STORE, LaunchPlan, RankInfo

RANK_WRAPPER = str(Path(__file__).with_name("rank"))
"""The folder of the wrapper between a launcher and one rank of a script."""


@dataclass(frozen=True, slots=True)
class Script:
    """A program, and the job that runs it."""

    program: tuple[str, ...]
    nproc_per_node: int = 1
    nnodes: int = 1
    max_nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    hosts: tuple[tuple[str, int], ...] = ()
    max_restarts: int = 0
    timeout_s: float | None = None
    log_dir: str | None = None
    is_coloured: bool = False
    is_function: bool = False
    is_fresh: bool = False
    has_server: bool = False
    stdin_rank: int | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    options: tuple[tuple[str, str], ...] = ()
    grace_s: float = GRACE_S
    local_ranks: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the whole job, if all nodes join."""
        if self.hosts:
            return sum(count for _, count in self.hosts)
        return self.nproc_per_node * self.nnodes

    @property
    def may_restart(self) -> bool:
        """Whether the launcher may restart the job: after a failure, or as nodes join or leave."""
        return self.max_restarts > 0 or self.max_nnodes > self.nnodes

    @classmethod
    def of(cls, plan: LaunchPlan) -> Script:
        """Build a request for the ranks of a plan; the caller sets the program."""
        return cls(
            program=(),
            nproc_per_node=plan.nproc_per_node,
            nnodes=plan.nnodes,
            max_nnodes=plan.nnodes,
            master_addr=plan.master_addr,
            master_port=plan.master_port,
            grace_s=plan.grace_s,
        )

    def address(self) -> dict[str, str]:
        """Return the variables of the rendezvous address, or of the part that the user gave."""
        return texts({"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port})

    def plan(self) -> LaunchPlan:
        """Return the plan, for a launcher that runs functions."""
        return LaunchPlan(
            self.nproc_per_node,
            self.nnodes,
            self.node_rank or 0,
            self.master_addr,
            self.master_port,
            # Several nodes would each choose a different id.
            job_id=secrets.token_hex(8) if self.max_nnodes == 1 else None,
            grace_s=self.grace_s,
        )

    def rank_options(self, terminal: Sequence[int] = ()) -> dict[str, Any]:
        """Return the options of each rank's wrapper, without those that are empty."""
        options = {
            "terminal": terminal,
            "log_dir": self.log_dir and str(Path(self.log_dir).absolute()),
            "token": self.token,
            "local_ranks": self.local_ranks,
            "is_coloured": self.is_coloured,
            "has_server": self.has_server,
        }
        given: dict[str, Any] = {name: value for name, value in options.items() if value}
        if self.grace_s != GRACE_S:  # added separately, since 0 is a valid value
            given["grace_s"] = self.grace_s
        return given

    def rank_argv(self, parent: int = 0) -> list[str]:
        """Return the command line of each rank; for a function, it is the program alone."""
        if self.is_function:
            return list(self.program)
        options = self.rank_options() | ({"parent": parent} if parent else {})
        return [sys.executable, RANK_WRAPPER, json.dumps(options), *self.program]

    def refuse(self, launcher: str, instead: str, *names: str) -> None:
        """Raise if the user gave any of these options, which the launcher doesn't support."""
        for name in names:
            if getattr(self, name):
                option = name.replace("_", "-")
                raise ArgumentError(f"launcher {launcher!r} does not support --{option}: {instead}")


def rank_infos(counts: Sequence[int], addr: str, port: int) -> list[RankInfo]:
    """Return a RankInfo for every rank of a job with `counts[i]` ranks on node i.

    The job's rendezvous store runs already.
    """
    nodes = [
        LaunchPlan(count, len(counts), node, addr, port, store_is_hosted=True)
        for node, count in enumerate(counts)
    ]
    infos = [node.info(local_rank) for node in nodes for local_rank in range(node.nproc_per_node)]
    # A plan's nodes are of one size. A program would detect torchrun from `env_for`'s variables.
    facts: dict[str, Any] = {"world_size": len(infos), "source": "torchrun"}
    return [replace(info, rank=rank, **facts) for rank, info in enumerate(infos)]


def dying_with(parent: int, number: int, arguments: list[str]) -> list[str]:
    """Return a command that runs a launcher, and sends it signal `number` when `parent` ends."""
    options = {"exec": int(number), "parent": parent}
    return [sys.executable, RANK_WRAPPER, json.dumps(options), *arguments]


def env_for(info: RankInfo, restarts: int = 0, max_restarts: int = 0) -> dict[str, str]:
    """Return torch's variables for one rank, as torch's own agent sets them."""
    job = {
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": info.store_is_hosted,
        "TORCHELASTIC_RUN_ID": info.job_id,
        PRIVATE_STORE: info.private_store,
    }
    return {**rank_variables(info), **node_variables(info), **texts(job)}
