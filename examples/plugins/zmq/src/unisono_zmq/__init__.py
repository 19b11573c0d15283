"""Replicas that talk over ZeroMQ: encrypted, and closed to others where the job has a secret."""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable

import torch
import zmq
from typing_extensions import Self
from zmq.utils import z85

from unisono import ComputationModel, ContextHint, Group, RankInfo, Topology
from unisono.deadlines import limit_of
from unisono.errors import CollectiveTimeoutError
from unisono.rendezvous import JobStore, join_store

__all__ = ("ZmqModel",)

_log = logging.getLogger(__name__)
_LOOK_S = 0.2
_HEAD = struct.Struct("<qi")  # the number of the round, the rank
_LINGER_MS = 5000


class ZmqModel(ComputationModel):
    """Each rank has one socket that it hears all others on, and one to each of them."""

    name = "zmq-dist"
    backends = ("zmq",)
    dtypes = frozenset({torch.uint8, torch.int64, torch.float32, torch.float64})

    def __init__(self, info, timeout=None):
        self.info = info
        self.limit_s = None if timeout is None else timeout.total_seconds()
        self.round = 0
        self.early: dict[tuple[int, int], bytes] = {}
        self.job = job = join_store(info, timeout)  # rank 0 may host the store, others read it yet
        self.context = zmq.Context()
        secret = job.secret or _agreed(job, info)
        self.inbox = self._socket(zmq.PULL, secret)
        host = _own_host(info)
        port = self.inbox.bind_to_random_port(f"tcp://{host}")
        job.store.set(f"zmq/{info.rank}", f"tcp://{host}:{port}")
        self.peers = {}
        for rank in range(info.world_size):
            if rank != info.rank:
                peer = self.peers[rank] = self._socket(zmq.PUSH, secret)
                peer.connect(job.store.get(f"zmq/{rank}").decode())

    def _socket(self, kind: int, secret: bytes) -> zmq.Socket:
        """Make a socket that speaks to those alone who know the secret."""
        private = z85.encode(hashlib.sha256(secret).digest())
        # One pair of keys for all ranks: who doesn't know it can't greet any of them.
        public = zmq.curve_public(private)
        made = self.context.socket(kind)
        made.linger, made.sndhwm, made.rcvhwm = _LINGER_MS, 0, 0
        made.curve_secretkey, made.curve_publickey = private, public
        if kind == zmq.PULL:
            made.curve_server = True
        else:
            made.curve_serverkey = public
        return made

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        return None  # nobody makes such a context by hand

    @classmethod
    def initialize(cls, backend, info, **options):
        return cls(info, **options)

    def finalize(self) -> None:
        self.context.destroy()  # once what was sent has arrived

    def abort(self) -> None:
        self.context.destroy(linger=0)

    @property
    def topology(self) -> Topology:
        return self.info.topology()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        self.round += 1
        for peer in self.peers.values():
            peer.send_multipart([_HEAD.pack(self.round, self.info.rank), blob])
        found = {self.info.rank: blob}
        limit_s = limit_of(self.limit_s)
        until = None if limit_s is None else time.monotonic() + limit_s
        while len(found) < self.info.world_size:
            for rank in self.peers.keys() - found:
                if (self.round, rank) in self.early:
                    found[rank] = self.early.pop((self.round, rank))
            if len(found) < self.info.world_size:
                self._hear(lambda: sorted(self.peers.keys() - found), until)
        return [found[rank] for rank in range(self.info.world_size)]

    def _hear(self, late: Callable[[], list[int]], until: float | None) -> None:
        """Take one message in; one of a later round comes from a rank that has gone on."""
        while not self.inbox.poll(_LOOK_S * 1000):
            if until is not None and time.monotonic() > until:
                raise CollectiveTimeoutError(
                    f"rank {self.info.rank} of {self.info.world_size}: ranks {late()} did not "
                    f"reach round {self.round} in time"
                )
        head, blob = self.inbox.recv_multipart()
        self.early[_HEAD.unpack(head)] = blob

    def all_gather(self, tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
        blobs = self.exchange(tensor.numpy().tobytes(), group)
        data = bytearray(b"".join(blobs))
        flat = torch.frombuffer(data, dtype=tensor.dtype) if data else tensor.new_empty(0)
        return flat.view(len(blobs), *tensor.shape)


def _agreed(job: JobStore, info: RankInfo) -> bytes:
    """Agree on a secret in a store that has none, where others can read it; rank 0 warns."""
    if info.rank == 0 and info.world_size > 1:
        _log.warning(
            "this job has no secret of its own (it is of several hosts, or `unisono run` and spawn "
            "didn't start it): the keys of its connections lie in its store, and who reaches "
            "%s:%s can read them and all that ranks send",
            info.master_addr,
            info.master_port,
        )
    return job.store.compare_set("zmq/secret", "", secrets.token_hex(32))


def _own_host(info: RankInfo) -> str:
    """Give the address of this host under which the other ranks' hosts reach it."""
    if info.nnodes == 1 or info.master_addr is None or info.world_size == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((info.master_addr, info.master_port or 1))  # sends nothing
        return probe.getsockname()[0]
