"""Each rank proves to each other that it belongs to the job, where the data plane doesn't ask.

Gloo takes whoever connects to it. What goes over the data plane before the proof is nothing but
tensors of fixed size, which nobody decodes: first a random number of each rank, then, from each
rank to each other directly, the HMAC of both their numbers under the secret of the job.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Protocol

import torch
from torch import Tensor

from unisono._memory import from_bytes, to_bytes
from unisono.control import derived
from unisono.control.strangers import strangers
from unisono.errors import PeerRefusedError
from unisono.topology import Group

__all__ = ("Provable", "authenticate")

_BYTES = 32


class Provable(derived.Carrier, Protocol):
    """What the proof needs of a model."""

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        """Send row i of [n, *shape] to the i-th rank; row i comes from there."""


def authenticate(
    model: Provable,
    group: Group | None,
    secret: bytes,
    label: str,
    device: torch.device | None = None,
) -> None:
    """Let each rank of a group prove to each other that it knows the secret of the job.

    Collective over `group`.

    Args:
        model: what carries the proofs.
        group: the ranks that take part.
        secret: what strangers can't know.
        label: tells groups of the same ranks apart.
        device: where the group takes tensors; None for where the model does.

    Raises:
        PeerRefusedError: another process answered in place of a rank; on those it answered.
        CollectiveError: a peer failed or didn't come.
    """
    ranks = model.members(group)
    place = ranks.index(model.topology.rank)
    shape = (len(ranks), _BYTES)
    device = model.transport_device if device is None else device
    own = from_bytes(secrets.token_bytes(_BYTES), torch.uint8, shape[1:]).to(device)
    numbers = [to_bytes(row) for row in model.all_gather(own, group).cpu()]
    subject = f"{label} {list(ranks)}".encode()

    def proof(source: int, target: int) -> bytes:
        text = struct.pack("<II", source, target) + numbers[source] + numbers[target] + subject
        return hmac.new(secret, text, "sha256").digest()

    mine = b"".join(proof(place, other) for other in range(len(ranks)))
    told = model.all_to_all(from_bytes(mine, torch.uint8, shape).to(device), group).cpu()
    proofs = [to_bytes(row) for row in told]
    wrong = [
        ranks[other]
        for other in range(len(ranks))
        if other != place and not hmac.compare_digest(proofs[other], proof(other, place))
    ]
    if wrong:
        raise PeerRefusedError(
            f"rank {ranks[place]} refuses what answered as rank {wrong[0]}: it couldn't prove that "
            f"it belongs to this job{strangers()}",
            wrong[0],
        )
