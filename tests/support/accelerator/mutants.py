"""Mutants that handle the device wrongly, each with the law that fails, and words of its error."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from tests.support.accelerator.device import NAME
from unisono.collectives import _dtype_emulation
from unisono.control import plane
from unisono.model import fallback
from unisono.models.native import process_group
from unisono.models.native.model import NativeModel
from unisono.payload import pickling, tensors

Mutant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
"""A function that breaks something in a process, and so in its forks, before they initialise."""
_choose, _gather = process_group.choose_device, NativeModel.all_gather
_reduce, _from_bytes = _dtype_emulation.all_reduce, tensors.from_bytes


def replaces(owner: Any, name: str, by: Any) -> Mutant:
    return lambda patch: patch.setattr(owner, name, by)


chooses = partial(replaces, process_group, "choose_device")


def _and_leaves_the_current_one(*args: Any) -> torch.device:
    device = _choose(*args)
    torch.accelerator.set_device_index(0)
    return device


def _first_of_all(*args: Any) -> torch.device:
    torch.accelerator.set_device_index(0)
    return torch.device(NAME, 0)


def _makes_its_own_tensors_on_the_default_device(patch: pytest.MonkeyPatch) -> None:
    def from_bytes(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if len(data):
            tensors.view_bytes(tensor)[:] = data
        return tensor

    patch.setattr(tensors, "from_bytes", from_bytes)


def _over_the_device(control: Any, blob: bytes, group: Any = None) -> list[bytes]:
    return fallback.exchange(control.model, blob, group)


VALUES = "values"
"""Used in place of a law: no value that is on the CPU may touch the device."""
_INDEX = "a_replica_s_device_has_an_index_and_is_the_current_one"
_OWN = "ranks_of_a_node_have_a_device_each_where_tensors_travel_on_it"
_RESULTS = "results_are_on_the_device_of_the_input"
_ARRIVES = "what_is_on_a_device_arrives_on_the_receiver_s_own"
_CONTRACT = "all_gather_stacks_in_rank_order_for_every_declared_dtype"
_DEFAULT = "the_user_s_default_device_changes_nothing"
_OF_CPU = "got a tensor of device cpu"
MUTANTS: dict[str, tuple[Mutant, str, str]] = {
    "a device without an index": (
        chooses(lambda *args: torch.device(_choose(*args).type)),
        _INDEX,
        "device_id with index",
    ),
    "a device that isn't made the current one": (
        chooses(_and_leaves_the_current_one),
        _INDEX,
        "isn't current",
    ),
    "the first device for every rank": (chooses(_first_of_all), _OWN, "Duplicate device"),
    "sums on the CPU": (
        replaces(
            _dtype_emulation,
            "all_reduce",
            lambda *args, **options: _reduce(*args, **options).cpu(),
        ),
        _RESULTS,
        _OF_CPU,
    ),
    "gathered rows on the CPU": (
        replaces(NativeModel, "all_gather", lambda *args: _gather(*args).cpu()),
        _CONTRACT,
        _OF_CPU,
    ),
    "CPU tensors given to the device's backend": (
        replaces(_dtype_emulation, "private_copy", lambda context, tensor: tensor.detach().clone()),
        _RESULTS,
        "No backend type associated with device type cpu",
    ),
    "subclasses on the sender's device": (
        replaces(
            pickling,
            "_restore_storage",
            lambda data: torch.load(io.BytesIO(data), weights_only=False),
        ),
        _ARRIVES,
        "index=1",
    ),
    "tensors in objects on the CPU": (
        replaces(
            tensors.TensorHeader,
            "tensor",
            lambda head, data: head.finish(_from_bytes(data, head.dtype, head.shape)),
        ),
        _ARRIVES,
        _OF_CPU,
    ),
    "own tensors on the user's default device": (
        _makes_its_own_tensors_on_the_default_device,
        _DEFAULT,
        "can't be read",
    ),
    "numbers and objects over the device": (
        replaces(plane.SocketControlPlane, "exchange", _over_the_device),
        VALUES,
        "touches",
    ),
}
