"""One round of the control plane, in which every rank says what it calls."""

from __future__ import annotations

from torch import Tensor

from unisono._memory import from_bytes, to_bytes
from unisono.control.calls import pack, unpack
from unisono.model import ComputationModel
from unisono.reduction import ReduceOp, fold_tensors
from unisono.topology import Group

__all__ = ("check", "fold", "signature", "swap")


def swap(model: ComputationModel, call: str, blob: bytes, group: Group | None) -> list[bytes]:
    """Give every rank the blob of every rank, if all made the same call.

    Collective over `group`.

    Args:
        model: carries the blobs.
        call: the operation and all that must agree: ``"broadcast from 0"``.
        blob: any bytes.
        group: the ranks that take part.

    Returns:
        The blobs in the order of ranks.

    Raises:
        CollectiveMismatchError: the calls differ (on every rank, naming each rank's).
        CollectiveError: a peer failed or didn't come in time.
    """
    return unpack(model.exchange(pack(call, blob), group), model.members(group))


def signature(call: str, tensor: Tensor) -> str:
    """Name a call with the dtype and shape that must agree. Local."""
    return f"{call} of {str(tensor.dtype)[6:]}{list(tensor.shape)}"


def check(model: ComputationModel, call: str, tensor: Tensor, group: Group | None) -> None:
    """Compare what the ranks are about to call on the data plane, if ``UNISONO_DEBUG`` is 1.

    Collective over `group` then, else local.

    Raises:
        CollectiveMismatchError: as in `swap`.
    """
    if model.is_checked:
        swap(model, signature(call, tensor), b"", group)


def fold(model: ComputationModel, tensor: Tensor, op: ReduceOp, group: Group | None) -> Tensor:
    """Reduce a small CPU tensor [*shape] from everybody's bytes, in the order of ranks.

    Collective over `group`.
    """
    call = signature(f"all_reduce {op.name}", tensor)
    parts = swap(model, call, to_bytes(tensor), group)
    shape = tuple(tensor.shape)
    return fold_tensors(op, [from_bytes(part, tensor.dtype, shape) for part in parts])
