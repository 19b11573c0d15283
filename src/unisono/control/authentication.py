"""Mutual authentication of a group's ranks over the data plane.

Gloo accepts any connection. Before the proof, the data plane carries only tensors of fixed size
that are never decoded: first a random number of each rank, then, from each rank to each other
directly, the HMAC of both their numbers under the secret of the job.
"""

from __future__ import annotations

import hmac
import secrets
import struct

import torch

from unisono.errors import PeerRefusedError
from unisono.model.contract import ComputationModel
from unisono.payload.tensors import from_bytes, to_bytes
from unisono.topology import Group

_BYTES = 32


def authenticate(
    model: ComputationModel,
    group: Group | None,
    secret: bytes,
    label: str,
    device: torch.device | None = None,
) -> None:
    """Raise unless the ranks of a group prove to each other that they know the job's secret."""
    # Collective over `group`.
    ranks, place = model.topology.members(group), model.topology.position(group)
    shape = (len(ranks), _BYTES)
    device = model.transport_device if device is None else device
    own = from_bytes(secrets.token_bytes(_BYTES), torch.uint8, shape[1:]).to(device)
    nonces = [to_bytes(row) for row in model.all_gather(own, group).cpu()]
    subject = f"{label} {list(ranks)}".encode()

    def proof(source: int, target: int) -> bytes:
        text = struct.pack("<II", source, target) + nonces[source] + nonces[target] + subject
        return hmac.new(secret, text, "sha256").digest()

    mine = b"".join(proof(place, other) for other in range(len(ranks)))
    received_rows = model.all_to_all(from_bytes(mine, torch.uint8, shape).to(device), group).cpu()
    proofs = [to_bytes(row) for row in received_rows]
    wrong = [
        ranks[other]
        for other in range(len(ranks))
        if other != place and not hmac.compare_digest(proofs[other], proof(other, place))
    ]
    if wrong:
        raise PeerRefusedError(
            f"rank {ranks[place]} rejected the process that answered as rank {wrong[0]}: "
            "authentication failed",
            wrong[0],
        )
