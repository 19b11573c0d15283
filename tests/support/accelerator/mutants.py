"""Wrong handlings of the device, each with the law that finds it.

Each is put into a rank before it initialises.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.accelerator.device import NAME
from unisono.collectives import _dtype_emulation
from unisono.control import plane
from unisono.model import fallback
from unisono.models.native import process_group
from unisono.models.native.model import NativeModel
from unisono.payload import codec, memory, pickling

_choose, _reduce, _from_bytes = (
    process_group.choose_device,
    _dtype_emulation.all_reduce,
    memory.from_bytes,
)


def _chooses(change: Callable[..., torch.device]) -> Callable[[], None]:
    return lambda: setattr(process_group, "choose_device", change)


def _without_index(*args: Any) -> torch.device:
    return torch.device(_choose(*args).type)


def _and_leaves_the_current_one(*args: Any) -> torch.device:
    device = _choose(*args)
    torch.accelerator.set_device_index(0)
    return device


def _first_of_all(*args: Any) -> torch.device:
    torch.accelerator.set_device_index(0)
    return torch.device(NAME, 0)


def _sets_the_device_last() -> None:
    wanted: list[torch.device] = []

    def choose(*args: Any) -> torch.device:
        wanted.append(_and_leaves_the_current_one(*args))
        return wanted[-1]

    placed = process_group.place_by_hosts

    def place(model: Any) -> Any:
        model.all_gather(torch.ones(1, device=wanted[-1]))  # a first collective of the set-up
        torch.accelerator.set_device_index(wanted[-1].index)
        return placed(model)

    _chooses(choose)()
    process_group.place_by_hosts = place


def _gives_results_on_the_cpu() -> None:
    def reduce(context: Any, tensor: Any, op: Any, group: Any, device: Any) -> Tensor:
        return _reduce(context, tensor, op, group, torch.device("cpu"))

    _dtype_emulation.all_reduce = reduce


def _gathers_on_the_cpu() -> None:
    gather = NativeModel.all_gather
    NativeModel.all_gather = lambda *args: gather(*args).cpu()  # type: ignore[method-assign]


def _leaves_cpu_tensors_where_they_are() -> None:
    _dtype_emulation.own = lambda context, tensor: tensor.detach().clone()


def _restores_storages_on_the_senders_device() -> None:
    pickling._restore_storage = lambda data: torch.load(io.BytesIO(data), weights_only=False)


def _restores_tensors_on_the_cpu() -> None:
    def restore(
        data: Any, dtype: torch.dtype, shape: tuple[int, ...], on_accelerator: bool
    ) -> Tensor:
        return _from_bytes(data, dtype, shape)

    pickling._restore = restore


def _makes_its_own_tensors_on_the_default_device() -> None:
    def from_bytes(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if len(data):
            memory.view_bytes(tensor)[:] = data
        return tensor

    for module in (memory, codec, pickling):
        if hasattr(module, "from_bytes"):
            module.from_bytes = from_bytes  # type: ignore[attr-defined]


def _sends_values_over_the_device() -> None:
    def exchanged(control: Any, blob: bytes, group: Any = None) -> list[bytes]:
        return fallback.exchange(control.model, blob, group)

    vars(plane)["SocketControlPlane"].exchange = exchanged


def _copies_values_to_the_device_and_back() -> None:
    exchange = plane.SocketControlPlane.exchange

    def copied(control: Any, blob: bytes, group: Any = None) -> list[bytes]:
        there = torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(NAME)
        return exchange(control, memory.to_bytes(there.cpu()), group)

    vars(plane)["SocketControlPlane"].exchange = copied


VALUES = "values"
"""In place of a law: that no value of the CPU touches the device."""
_INDEX = "a_replica_s_device_has_an_index_and_is_the_current_one"
_OWN = "ranks_of_a_node_have_a_device_each_where_tensors_travel_on_it"
_RESULTS = "results_are_on_the_device_of_the_input"
_ARRIVES = "what_is_on_a_device_arrives_on_the_receiver_s_own"
_CONTRACT = "all_gather_stacks_in_rank_order_for_every_declared_dtype"
_DEFAULT = "the_user_s_default_device_changes_nothing"
MUTANTS: dict[str, tuple[Callable[[], None], str]] = {
    "a device without an index": (_chooses(_without_index), _INDEX),
    "a device that isn't made the current one": (_chooses(_and_leaves_the_current_one), _INDEX),
    "the first device for every rank": (_chooses(_first_of_all), _OWN),
    "set_device after the first collective": (_sets_the_device_last, _INDEX),
    "sums on the CPU": (_gives_results_on_the_cpu, _RESULTS),
    "gathered rows on the CPU": (_gathers_on_the_cpu, _CONTRACT),
    "CPU tensors given to the device's backend": (_leaves_cpu_tensors_where_they_are, _RESULTS),
    "subclasses on the sender's device": (_restores_storages_on_the_senders_device, _ARRIVES),
    "tensors in objects on the CPU": (_restores_tensors_on_the_cpu, _ARRIVES),
    "own tensors on the user's default device": (
        _makes_its_own_tensors_on_the_default_device,
        _DEFAULT,
    ),
    "numbers and objects over the device": (_sends_values_over_the_device, VALUES),
    "numbers and objects copied to it": (_copies_values_to_the_device_and_back, VALUES),
}
