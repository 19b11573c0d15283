"""Hooks get a record of each call; a status page has it too."""

from __future__ import annotations

import _thread
import gc
import queue
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import unisono as idist
from tests.support.worlds import several
from unisono import context, registry
from unisono.models.serial import SerialModel
from unisono.recording.records import CallLog, CollectiveRecord, add_hook, is_in_step
from unisono.recording.status_page import PageReader, pages


@pytest.fixture
def records() -> Iterator[list[CollectiveRecord]]:
    """What this rank has called."""
    made: list[CollectiveRecord] = []
    rank = idist.get_rank()  # ranks may be threads: hooks are the process's

    def note(record: CollectiveRecord) -> None:
        if record.rank == rank:
            made.append(record)

    remove = add_hook(after=note)
    yield made
    remove()


def own_page() -> PageReader:
    rank, job = idist.get_rank(), context.current().calls.job
    return next(page for page in pages() if (page.facts["job"], page.facts["rank"]) == (job, rank))


def test_hooks_are_called_around_a_call_until_they_are_taken_back() -> None:
    order: list[tuple[str, int]] = []

    def note(record: CollectiveRecord) -> None:
        order.append((record.name, min(record.duration_ns, 0)))

    both, after = add_hook(before=note, after=note), add_hook(after=note)  # two of one function
    idist.all_reduce(torch.ones(2))
    both()
    both()
    idist.barrier()
    after()
    idist.barrier()
    assert order == [*(("all_reduce", time) for time in (-1, 0, 0)), ("barrier", 0)]


@several
def test_a_record_says_where_and_when_a_call_was_made(records: list[CollectiveRecord]) -> None:
    idist.all_reduce(torch.ones(3))
    idist.all_gather("x")
    first, second = records[-2:]
    assert (first.file, second.line, second.plane) == (__file__, first.line + 1, "control")
    assert first.arrival_ns + first.duration_ns <= second.arrival_ns


@several
def test_ranks_number_their_calls_alike(records: list[CollectiveRecord]) -> None:
    group = idist.new_group([0, 1])
    with idist.one_rank_first():
        pass
    idist.barrier(group)
    idist.all_reduce(1, async_op=True).wait()
    has_messages = "send_recv" in context.current_model().capabilities
    if has_messages and idist.get_rank() == 0:
        idist.send("x", 1)
    elif has_messages and idist.get_rank() == 1:
        idist.recv(0)
    mine = [(record.name, record.group, record.number) for record in records]
    everybody = idist.all_gather(mine)
    assert [name for name, *_ in mine[:2]] == ["new_group", "one_rank_first"]
    numbers = [{(n, g): k for n, g, k in rows} for rows in everybody]
    assert numbers[0][("barrier", group.name)] == numbers[1][("barrier", group.name)] == 1
    assert len({rows[("all_reduce", "all ranks")] for rows in numbers}) == 1
    pair = "rank 0 to rank 1"
    assert not has_messages or numbers[0][("send", pair)] == numbers[1][("recv", pair)] == 1


@several
def test_what_is_under_way_is_in_the_page() -> None:
    idist.all_gather("connect")
    seen: list[Any] = []

    def look(record: CollectiveRecord) -> None:
        if record.rank == 0 and record.name == "all_gather":
            seen.append(own_page().calls()[-1])

    remove = add_hook(before=look)
    idist.all_gather("x")
    remove()
    if idist.get_rank() == 0:
        assert [record.end_ns for record in seen] == [0]
    last = own_page().calls()[-1]
    assert (last.name, last.file) == ("all_gather", __file__)
    assert last.end_ns >= last.begin_ns


@several
def test_what_was_started_is_in_flight_until_it_is_waited_for() -> None:
    handle = idist.all_reduce(torch.ones(4), async_op=True)
    started = own_page().calls()[-1]
    handle.wait()
    done = own_page().calls()[-1]
    assert (started.name, started.begin_ns) == (done.name, done.begin_ns)
    assert not started.is_blocking or started.end_ns
    assert done.end_ns


@several
def test_a_record_says_how_long_a_rank_had_other_work(records: list[CollectiveRecord]) -> None:
    for value in (torch.ones(4), 1):  # which some models start themselves, and which we do
        handle = idist.all_reduce(value, async_op=True)
        before_ns = time.monotonic_ns()
        while time.monotonic_ns() < before_ns + 2_000_000 or not handle.is_completed():
            pass
        waited_ns = time.monotonic_ns()
        handle.wait()
        record = records[-1]
        assert record.name == "all_reduce"
        end_ns = record.arrival_ns + record.duration_ns
        assert 0 < record.overlap_ns <= record.duration_ns
        assert record.arrival_ns + record.overlap_ns >= min(waited_ns, end_ns)
    idist.barrier()
    assert records[-1].overlap_ns == 0


@pytest.mark.ranks(2, on="gloo")
def test_what_a_hook_raises_is_the_calls_and_keeps_no_other_from_it() -> None:
    seen: list[str] = []

    def fail(record: CollectiveRecord) -> None:
        seen.append("fail")
        raise ZeroDivisionError(f"error {len(seen)}")

    removers = [add_hook(after=each) for each in (fail, fail, lambda each: seen.append(each.name))]
    with pytest.raises(ZeroDivisionError, match="error 1") as caught:
        idist.barrier()
    for remove in removers:
        remove()
    assert seen == ["fail", "fail", "barrier"]
    assert is_in_step(caught.value)
    assert idist.all_gather("still in step") == ["still in step"] * 2


@several
def test_a_call_that_a_hook_refuses_on_one_rank_is_not_counted_there(
    records: list[CollectiveRecord],
) -> None:
    """So its next call has the number of the call that it meets."""
    size = idist.get_world_size()
    idist.barrier()
    if idist.get_rank() == size - 1:  # the hooks of threads are those of all of them
        refused: list[int] = []

        def refuse(record: CollectiveRecord) -> None:
            if record.rank == size - 1 and not refused:
                refused.append(record.number)
                raise ZeroDivisionError("not now")

        remove = add_hook(before=refuse)
        with pytest.raises(ZeroDivisionError, match="not now"):
            idist.all_reduce(torch.ones(2))
        remove()
        assert (records[-1].name, records[-1].number) == ("all_reduce", 0)
        assert records[-1].error == "ZeroDivisionError: not now"
        shown = own_page().calls()[-1]
        assert (shown.name, shown.number, shown.end_ns > 0) == ("all_reduce", 0, True)
    assert idist.all_reduce(torch.ones(2)).tolist() == [size, size]
    number = records[-1].number
    assert idist.all_gather(number) == [number] * size
    if idist.get_rank() == size - 1:
        assert refused == [number]


def call_from(file: str) -> None:
    names: dict[str, Any] = {}
    exec(compile("def work(run):\n    run()\n", file, "exec"), names)
    names["work"](idist.barrier)


def test_a_line_of_a_package_whose_name_begins_as_torchs_is_the_users(
    records: list[CollectiveRecord],
) -> None:
    call_from(f"{torch.__path__[0]}_geometric/loader.py")
    assert records[-1].file.endswith("torch_geometric/loader.py")
    call_from(f"{torch.__path__[0]}/nn/modules/module.py")
    assert records[-1].file == __file__


def test_code_without_lines_is_recorded_without_one(records: list[CollectiveRecord]) -> None:
    """As what a program makes of another's: its frames have no number."""

    def work() -> None:
        idist.barrier()

    FunctionType(work.__code__.replace(co_linetable=b""), {**globals()})()
    assert (records[-1].name, records[-1].line) == ("barrier", 0)


@pytest.mark.ranks(2, on="threads")
def test_a_call_that_one_rank_refuses_counts_on_all(records: list[CollectiveRecord]) -> None:
    size = -1 if idist.get_rank() == 0 else 1
    with pytest.raises(idist.errors.UnisonoError):
        idist.shared_empty(size)
    idist.barrier()
    last = records[-1]
    assert [record.name for record in records[-2:]] == ["shared_empty", "barrier"]
    assert len(set(idist.all_gather(last.number))) == 1


def test_a_call_from_c_with_no_frame_above_it_is_recorded() -> None:
    """As one that autograd's own thread makes of a tensor's hook."""
    lines: queue.Queue[tuple[str, int]] = queue.Queue()
    remove = add_hook(after=lambda record: lines.put((record.file, record.line)))
    try:
        _thread.start_new_thread(idist.barrier, ())
        assert lines.get(timeout=20) == ("", 0)
    finally:
        remove()


@pytest.mark.ranks(2, on="gloo")
def test_gradients_that_go_through_memory_say_so(records: list[CollectiveRecord]) -> None:
    model = idist.auto_model(torch.nn.Linear(3, 3))
    del records[:]
    model(torch.ones(2, 3)).sum().backward()
    assert [(record.name, record.plane) for record in records] == [("gradients", "memory")]


class Unreadable(torch.Tensor):
    """A tensor whose class refuses whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("value", "size_bytes", "dtype"),
    [
        (torch.nn.Parameter(torch.ones(3)), 12, "float32"),
        (torch.ones(3, dtype=torch.float64).as_subclass(Unreadable), 24, "float64"),
        (torch.nn.UninitializedParameter(), 0, "float32"),
        (torch.ones(3).to_sparse(), 0, "float32"),
        ([torch.ones(3)], 0, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tensor_of_any_class_has_its_size(
    value: object, size_bytes: int, dtype: str, records: list[CollectiveRecord]
) -> None:
    with context.current().calls.begin("mine", None, value):
        pass
    assert (records[-1].name, records[-1].size_bytes) == ("mine", size_bytes)
    assert records[-1].dtype == dtype


def test_arguments_of_a_program_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [Path("train.py"), 3])
    log = CallLog.of_rank(0, 1, "arguments")
    try:
        facts = [page.facts for page in pages() if page.facts["job"] == "arguments"]
    finally:
        log.close()
    assert [each["program"] for each in facts] == ["train.py 3"]


@pytest.mark.usefixtures("own_pages")
def test_a_page_goes_with_its_context_and_those_of_threads_that_fail_too() -> None:
    def work(local_rank: int, is_wrong: bool) -> str:
        idist.barrier()
        assert not is_wrong
        return str(own_page().facts["job"])

    first, second = idist.spawn("gloo", work, (False,), nproc_per_node=2)
    assert first == second
    with pytest.raises(idist.errors.WorkerFailedError):
        idist.spawn("threads", work, (True,), nproc_per_node=2)
    assert pages() == []


@pytest.mark.usefixtures("own_pages")
def test_a_context_of_another_library_releases_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class First(SerialModel):
        def is_alive(self) -> bool:
            return is_there

    class Second(First): ...

    def shown() -> list[str]:
        return [str(page.facts["model"]) for page in pages()]

    is_there, model = True, First()
    monkeypatch.setattr(First, "name", "first")
    monkeypatch.setattr(Second, "name", "second")
    monkeypatch.setattr(registry, "probe", lambda hint: model if is_there else None)
    assert (idist.model_name(), shown()) == ("first", ["first"])
    model = First()  # a new view of the same context
    idist.sync()
    assert (idist.model_name(), shown()) == ("first", ["first"])
    model = Second()
    idist.sync()
    assert (idist.model_name(), shown()) == ("second", ["second"])
    is_there = False
    assert (idist.model_name(), shown()) == ("serial", [])


def test_a_context_that_has_ended_by_itself_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    idist.initialize("serial")
    kept, ended = weakref.ref(context.current()), id(context.current_model())
    monkeypatch.setattr(SerialModel, "is_alive", lambda model: id(model) != ended)
    assert context.current() is not kept()
    gc.collect()
    assert kept() is None
