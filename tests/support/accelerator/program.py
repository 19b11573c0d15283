"""A program with the device that runs laws, mutants and training, and prints a JSON object."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as idist
from tests.support.accelerator.collectives import BACKEND
from tests.support.accelerator.device import MODULE, UNPINNED, VISIBLE
from tests.support.accelerator.mutants import MUTANTS, VALUES, Mutant, chooses
from unisono.errors import LaunchError
from unisono.models.native import process_group
from unisono.testing import Outcome, check, keep_laws, law_names

# Torch's autograd supports only index 0 of a device that is written in Python.
_OF_INDEX_0 = "gradients_are_clipped_by_the_norm_of_their_mean"
# Laws about CPU memory, about sparse tensors, which the device lacks, or about forks, which can't
# use it, and laws that choose the device of their tensors themselves.
_OFF_THE_DEVICE = (
    "shared", "sparse", "tensors_of_other", "one_rank_refuses", "fork",
    "for_every_declared", "movements_agree", "each_sample_is_evaluated", _OF_INDEX_0,
)  # fmt: skip
_choose = process_group.choose_device


def launch(
    backend: str | None, fn: Any, args: Any = (), before: Mutant | None = None, **options: Any
) -> Any:
    """Run `fn` in forks of this process, in which `before` has changed something."""
    with pytest.MonkeyPatch.context() as patch:
        if before is not None:
            before(patch)
        options = {"nproc_per_node": 2, "start_method": "fork", **options}
        return idist.spawn(backend, fn, args, **options)


def _masked(place: Callable[[int], int] = lambda rank: rank) -> Mutant:
    """Return a mutant in which each rank sees only one device."""

    def choose(*args: Any) -> torch.device:
        os.environ[VISIBLE] = str(place(int(os.environ["LOCAL_RANK"])))
        return _choose(*args)

    return chooses(choose)


def beside() -> list[str]:
    """Check every law with CPU tensors, in ranks that `spawn` starts; list the failures."""
    names = [name for name in law_names() if name != _OF_INDEX_0]
    return _failed(check(BACKEND, 2, laws=names, timeout_s=20), len(names))


def _failed(outcomes: list[Outcome], count: int) -> list[str]:
    assert len(outcomes) == count > 80
    return [f"{each.law}: {each.reason}" for each in outcomes if each.status == "failed"]


def laws() -> list[str]:
    """Check every law with the device as the default one of its tensors; list the failures."""
    names = [name for name in law_names() if not any(word in name for word in _OFF_THE_DEVICE)]
    launched = lambda backend, fn, **given: launch(backend, _on_device, **given)  # noqa: E731
    return _failed(check(BACKEND, 2, laws=names, launch=launched, timeout_s=20), len(names))


def _on_device(local_rank: int, *args: Any) -> Any:
    with torch.device(idist.device()):
        return keep_laws(local_rank, *args)


def mutants() -> dict[str, str]:
    """Return the outcomes of mutants that their law doesn't find as it should."""
    laws_used = {law for _, law, _ in MUTANTS.values()} - {VALUES}
    outcomes = check(BACKEND, 2, laws=laws_used, launch=launch)
    assert not [each for each in outcomes if each.status == "failed"]
    found = {name: _found(*mutant) for name, mutant in MUTANTS.items()}
    return {name: how for name, how in found.items() if how}


def _found(before: Mutant, law: str, words: str) -> str:
    """Return a mutant's outcome, or "" if its law fails with the expected words."""
    if law == VALUES:
        touches = launch(None, _values, before=before)
        how = f"{'failed' if any(touches) else 'passed'}: {touches[0]} touches"
    else:
        try:
            (outcome,) = check(BACKEND, 2, laws=[law], launch=partial(launch, before=before))
            how = f"{outcome.status}: {outcome.reason}"
        except LaunchError as error:  # the mutant failed before the law began
            how = f"failed: {error}"
    return "" if how.startswith("failed") and words in how else how


def places() -> list[Any]:
    """Return backends and devices that are chosen by default, with one visible device, for gloo."""
    assert BACKEND in idist.available_backends()
    masked = launch(None, _place, before=_masked(lambda rank: 1 - rank))
    return [launch(None, _place), masked, launch("gloo", _place)]


def _place(_: int) -> list[Any]:
    return [idist.backend(), str(idist.device()), MODULE.events[:1]]


def values() -> list[Any]:
    """Return for each rank how often values that are on the CPU touch the device."""
    found: list[Any] = launch(None, _values)
    return found


def _values(_: int) -> int:
    before = MODULE.n_touches
    rank = idist.get_rank()
    assert idist.all_reduce(rank + 0.5) == 2.0
    assert idist.all_gather(f"rank {rank}") == ["rank 0", "rank 1"]
    assert idist.broadcast({"é": [2**60, None]} if rank == 0 else None) == {"é": [2**60, None]}
    assert idist.all_gather([torch.ones(3)])[1][0].device.type == "cpu"
    with idist.one_rank_first():
        pass
    idist.barrier()
    return MODULE.n_touches - before


def training() -> list[Any]:
    """Train a wrapped model from a loader, and load its checkpoint on other devices."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "file.pt"))
        ranks = launch(None, _train, (path,), before=_masked())
        loaded = torch.load(path, map_location="cpu")
        again = launch(None, _load, (path,))
    return [ranks, {name: value.tolist() for name, value in loaded.items()}, again]


def _train(_: int, path: str) -> dict[str, Any]:
    torch.manual_seed(idist.get_rank())
    model = idist.auto_model(nn.Linear(2, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(list(torch.arange(16.0).view(8, 2)), batch_size=2, shuffle=False)
    for batch in loader:
        optimizer.zero_grad()
        output = model(batch.to(idist.device()))
        output.mean().backward()
        optimizer.step()
    plain = idist.unwrap_model(model)
    idist.save_checkpoint(plain.state_dict(), path)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return {
        "wrapper": type(model).__name__,
        "output": str(output.device),
        "devices": sorted({str(each.device) for each in model.parameters()}),
        "gradients": sorted({str(each.device) for each in gradients}),
        "weights": [each.tolist() for each in plain.parameters()],
    }


def _load(_: int, path: str) -> list[Any]:
    own = idist.load_checkpoint(path)
    host = idist.load_checkpoint(path, map_location="cpu")
    return [str(own["weight"].device), str(host["weight"].device), own["weight"].tolist()]


def loaders() -> list[Any]:
    """Return what a loader pins: by default, without pinned memory, for device data, for gloo."""
    unpinned = launch(None, _load_batches, before=lambda patch: patch.setenv(UNPINNED, "1"))
    there = launch(None, _load_batches_there)
    return [launch(None, _load_batches), unpinned, there, launch("gloo", _load_batches)]


def _load_batches_there(local_rank: int) -> dict[str, Any]:
    with torch.device(idist.device()):
        return _load_batches(local_rank)


def _load_batches(_: int) -> dict[str, Any]:
    data = list(torch.arange(16.0).view(8, 2))
    loader = idist.auto_dataloader(data, batch_size=2, to_device=True)
    before = len(MODULE.pinned)
    batches = [str(batch.device) for batch in loader]
    return {
        "asked": loader.pin_memory,
        "pinned": len(MODULE.pinned) - before,
        "copied in the background": MODULE.n_copies_in_background,
        "batches": batches,
    }


def _attempt(part: Callable[[], Any]) -> Any:
    """Run a part; one that raises mustn't hide what the others find."""
    try:
        return part()
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    parts = (laws, mutants, places, values, training, loaders, beside)
    found = {part.__name__: _attempt(part) for part in parts}
    found["parent initialised the device"] = MODULE.initialised_by == os.getpid()
    json.dump(found, sys.stdout)
