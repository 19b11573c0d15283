"""The laws catch models that are broken on purpose: a kit that passes everything proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono import Group, ReduceOp, registry
from unisono.models.threads import ThreadsModel
from unisono.registry import register_model
from unisono.testing import Outcome, check


class _Caught(Exception):
    pass


class ReversesRanks(ThreadsModel):
    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        return super().all_gather(tensor, group).flip(0)


class ReducesWithTheWrongOperation(ThreadsModel):
    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        return super().all_reduce(tensor, ReduceOp.MAX if op is ReduceOp.OR else op, group)


class SumsIntegersAsFloats(ThreadsModel):
    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if tensor.dtype is torch.int64:
            return super().all_reduce(tensor.double(), op, group).long()
        return super().all_reduce(tensor, op, group)


class BroadcastsFromRank0Always(ThreadsModel):
    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        return super().broadcast(tensor, 0 if group is None else src, group)


class CutsLongBlobs(ThreadsModel):
    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        return [part[:248] for part in super().exchange(blob, group)]


class IgnoresGroups(ThreadsModel):
    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        return super().all_reduce(tensor, op, None)


class LetsGroupsOfTheSameRanksMeet(ThreadsModel):
    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        return Group(ranks, self.context_id, ranks)


class DeclaresMessagesItCantSend(ThreadsModel):
    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        raise RuntimeError("not written yet")


class SendsWithoutDeclaringIt(ThreadsModel):
    capabilities = frozenset({"groups", "launch"})


class GathersToEveryRank(ThreadsModel):
    def gather(self, tensor: Tensor, dst: int, group: Group | None = None) -> Tensor | None:
        return self.all_gather(tensor, group)


class GivesEveryRankTheFirstRow(ThreadsModel):
    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        return self.all_reduce(rows, op, group)[0]


class SwapsTheWrongWayRound(ThreadsModel):
    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        return super().all_to_all(rows.flip(0), group)


class CommunicatesInAFact(ThreadsModel):
    @property
    def device(self) -> torch.device:
        if self.topology.world_size > 1:
            self.exchange(b"where are you all?")
        return torch.device("cpu")


MUTANTS = [cls for cls in ThreadsModel.__subclasses__() if cls.__module__ == __name__]


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    cls: Any = request.param
    cls.name = cls.__name__
    cls.backends = (cls.__name__.lower(),)
    register_model(cls)
    yield cls.backends[0]
    registry.unregister_model(cls)


@pytest.mark.parametrize("registered", MUTANTS, indirect=True, ids=lambda cls: cls.__name__)
def test_a_broken_model_is_caught(registered: str) -> None:
    failed: list[Outcome] = []

    def stop_at_failure(outcome: Outcome) -> None:
        if outcome.status == "failed":
            failed.append(outcome)
            raise _Caught

    with pytest.raises(_Caught):
        check(registered, 3, timeout_s=3.0, on_outcome=stop_at_failure)
    assert failed[0].reason
