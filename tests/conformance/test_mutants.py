"""The laws catch models that are broken on purpose: a kit that passes everything proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from unisono import Group, ReduceOp, context, registry
from unisono.collectives import (
    _dtype_emulation,
    _exact_sums,
    _scalars,
    broadcasts,
    call,
    gathers,
    outcomes,
    p2p,
)
from unisono.errors import NotInitializedError, PayloadError
from unisono.model.reduction import fold_numbers, fold_tensors
from unisono.models.threads import ThreadsModel
from unisono.observe import waits
from unisono.payload import codec, pickling, tensors
from unisono.payload.tensors import TensorHeader
from unisono.recording import records
from unisono.registry import register_model
from unisono.testing import Outcome, check
from unisono.training import equality, evaluation, loader, preemption


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
        return Group(ranks, ranks)


class DeclaresMessagesItCantSend(ThreadsModel):
    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        raise RuntimeError("not written yet")


class SendsWithoutDeclaringIt(ThreadsModel):
    capabilities = frozenset({"groups", "launch"})


class ReducesToEveryRank(ThreadsModel):
    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp, group: Group | None = None
    ) -> Tensor | None:
        return self.all_reduce(tensor, op, group)


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


@pytest.mark.parametrize("model", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_broken_model_is_caught(model: type[ThreadsModel]) -> None:
    model.name, model.backends = model.__name__, (model.__name__.lower(),)
    failed: list[Outcome] = []

    def stop_at_failure(outcome: Outcome) -> None:
        if outcome.status == "failed":
            failed.append(outcome)
            raise _Caught

    register_model(model)
    try:
        with pytest.raises(_Caught):
            check(model.backends[0], 3, timeout_s=3.0, on_outcome=stop_at_failure)
    finally:
        registry.unregister_model(model)
    assert failed[0].reason


def _divides_last(tensor: Tensor, size: int) -> Any:
    return tensor, ReduceOp.SUM, lambda total: total / size


def _tells_nobody(model: Any, call: str, tensor: Any, group: Any, error: Exception) -> None:
    raise error


def _knows_one_kind_of_error(make: Callable[..., bytes], *args: Any) -> bytes:
    try:
        return make(*args)
    except PayloadError as error:
        return codec.failure(str(error))


def _sends_what_lies_in_memory(tensor: Tensor) -> tuple[bytes, bytes | memoryview]:
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    return _taken_apart(tensor.conj() if is_conj else torch._neg_view(tensor) if is_neg else tensor)


def _makes_tensors_dense(value: Any, part: Any) -> bytes:
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        value = value.to_dense()
    elif hasattr(value, "get_data"):
        value = value.get_data()
    return _object_encoded(value, part)


def _counts_sizes_beside_a_zero(data: memoryview, at: int = 0) -> Any:
    head, end = _header_read(data, at)
    if math.prod(max(size, 1) for size in head.shape) > 2**40:
        raise PayloadError("received a damaged frame")
    return head, end


def _knows_no_fork(model: Any) -> None:
    raise NotInitializedError("there is no context")


def _forgets_groups(log: Any, name: str, group: Any = None, *args: Any) -> Any:
    return _begun(log, name, None, *args)


def _ends_in_silence(token: Any, error: BaseException | None = None) -> None:
    token.record = None
    _ended(token)


def _is_fooled_by_durations(meeting: waits.Meeting) -> int:
    return max(meeting.records, key=lambda rank: meeting.records[rank].duration_ns)


def _begins_with_its_own(
    model: ThreadsModel, tensor: Tensor, op: ReduceOp, group: Group | None = None
) -> Tensor:
    rows, here = model.all_gather(tensor, group), model.topology.position(group)
    return fold_tensors(op, rows.roll(-here, 0))


def _begins_with_another_each_time(
    model: ThreadsModel, tensor: Tensor, op: ReduceOp, group: Group | None = None
) -> Tensor:
    calls = vars(model)["calls"] = vars(model).get("calls", 0) + 1
    return fold_tensors(op, model.all_gather(tensor, group).roll(calls, 0))


def _rounds_each_addition(context: Any, call: str, terms: Tensor, group: Any) -> Tensor:
    mine = terms.sum(0, dtype=terms.dtype)
    return _dtype_emulation.all_reduce(context, mine, ReduceOp.SUM, group)


def _rounds_long_ones_once_more(context: Any, call: str, terms: Tensor, group: Any) -> Tensor:
    total = _summed_exactly(context, call, terms, group)
    return total.bfloat16().to(total.dtype) if total.numel() > 30_000 else total


_summed_exactly = _exact_sums.sum_exactly


def _clips_half(tensors: Any, *args: Any) -> Any:
    for tensor in tensors:
        tensor.grad = tensor.grad / 2
    return _clipped(tensors, *args)


def _gathers_by_rank(part: Any, size: int, dst: Any) -> Any:
    return _gathered(part, size, dst) if dst is not None else gathers.all_gather(part)


_clipped = torch.nn.utils.clip_grad_norm_
_gathered = evaluation.gather_results
_begun, _ended = records.CallLog.begin, records.Token.end
_object_encoded, _taken_apart = codec._encode_object, tensors.taken_apart
_header_read = TensorHeader.unpack
# By law: the attributes above the models whose replacement must break it.
BREAKS: dict[str, list[tuple[Any, str, Any]]] = {
    "a_rank_out_of_memory_halves_the_batch_on_all": [
        (outcomes, "CollectiveMismatchError", KeyboardInterrupt)
    ],
    "each_sample_is_evaluated_once_and_results_are_in_order": [
        (evaluation, "gather_results", _gathers_by_rank)
    ],
    "what_a_rank_raises_in_evaluate_is_told_while_others_wait_in_it": [
        (outcomes, "CollectiveMismatchError", KeyboardInterrupt)
    ],
    "gradients_are_clipped_by_the_norm_of_their_mean": [
        (torch.nn.utils, "clip_grad_norm_", _clips_half)
    ],
    "values_that_differ_are_named_with_their_ranks": [
        (equality, "_leaf", lambda value: (type(value).__name__, b""))
    ],
    "a_position_is_followed_by_what_was_not_seen": [
        (loader._Rest, "__iter__", lambda rest: iter(rest.whole))
    ],
    "a_signal_to_one_rank_is_told_to_all_at_the_same_point": [
        (preemption, "_is_main", lambda: True)
    ],
    "a_fork_of_a_rank_is_told_so_in_every_call": [(context, "refuse_fork", _knows_no_fork)],
    "a_mean_overflows_nowhere": [(_dtype_emulation, "_scaled", _divides_last)],
    "containers_of_different_kinds_are_an_error_on_every_rank": [
        (_scalars, "_check_alike", lambda structures, ranks, call: None)
    ],
    "tensors_without_memory_of_their_own_are_refused_by_name": [
        (_dtype_emulation, "check_dense", lambda tensor, call: None)
    ],
    "a_tensor_that_one_rank_refuses_is_an_error_on_every_rank": [(call, "refuse", _tells_nobody)],
    "what_a_users_class_raises_leaves_the_ranks_in_step": [
        (call, "_is_of_users_class", lambda error: False)
    ],
    "what_is_several_times_in_memory_isnt_overwritten": [
        (_dtype_emulation, "check_writable", _dtype_emulation.check_dense)
    ],
    "whatever_is_raised_while_a_value_is_encoded_is_an_error_on_every_rank": [
        (module, "frame_or_reason", _knows_one_kind_of_error)
        for module in (gathers, p2p, codec, broadcasts)
    ],
    "classes_of_tensors_arrive_as_they_are_where_a_value_is_carried": [
        (codec, "is_exact", tensors.is_dense)
    ],
    "tensors_of_other_kinds_travel_as_objects": [(codec, "_encode_object", _makes_tensors_dense)],
    "conjugate_and_negative_views_are_what_they_show": [
        (tensors, "taken_apart", _sends_what_lies_in_memory)
    ],
    "empty_tensors_of_any_shape_arrive": [(TensorHeader, "unpack", _counts_sizes_beside_a_zero)],
    "hooks_see_every_collective_with_name_bytes_group_and_number": [
        (records.Token, "end", _ends_in_silence)
    ],
    "hooks_see_the_group_of_a_call": [(records.CallLog, "begin", _forgets_groups)],
    "a_call_that_fails_is_recorded_with_its_error": [(records, "summary", lambda error: "")],
    "watching_names_the_rank_that_comes_late": [(waits, "_last_of", _is_fooled_by_durations)],
    "sums_have_the_same_bits_on_every_rank": [(ThreadsModel, "all_reduce", _begins_with_its_own)],
    "sums_have_the_same_bits_when_they_are_made_again": [
        (ThreadsModel, "all_reduce", _begins_with_another_each_time)
    ],
    "an_exact_sum_is_rounded_once": [(_scalars, "sum_exactly", _rounds_each_addition)],
    "an_exact_sum_has_one_rule_for_what_isnt_finite": [
        (_exact_sums, "_apply_marks", lambda bits, marks, form: None)
    ],
    "exact_sums_of_containers_and_numbers_keep_their_shape": [
        (_scalars, "sum_numbers_exactly", partial(fold_numbers, ReduceOp.SUM))
    ],
    "an_exact_sum_doesnt_depend_on_which_rank_has_which_terms": [
        (_scalars, "sum_exactly", _rounds_each_addition)
    ],
    "exact_sums_of_parts_are_those_of_the_whole": [
        (_scalars, "sum_exactly", _rounds_long_ones_once_more)
    ],
    "exact_sums_are_those_of_a_group": [(_scalars, "sum_exactly", _rounds_each_addition)],
    "what_has_no_exact_sum_is_refused_by_name": [(_scalars, "check_summable", lambda tensor: None)],
    "what_pickle_would_turn_into_something_else_doesnt": [
        (pickling._ObjectPickler, "reducer_override", cloudpickle.Pickler.reducer_override)
    ],
}


@pytest.mark.parametrize("law", BREAKS)
def test_a_broken_part_above_the_models_is_caught(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, broken in BREAKS[law]:
        monkeypatch.setattr(owner, name, broken)
    # A sum of two numbers has the same bits in any order, so laws about sums need three ranks.
    (outcome,) = check("threads", 3 if "sum" in law else 2, laws=[law])
    assert outcome.status == "failed", outcome
    assert "it wasn't done" not in outcome.reason
