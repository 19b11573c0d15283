"""Copies of pages say on another host what they say here, by that host's clock."""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import replace
from typing import Any

import pytest

from unisono.host.page_copies import PageCopy, copied, from_plain, packed, to_plain, unpacked
from unisono.host.status_page import CALLED, Lane, StatusPage, pages

pytestmark = pytest.mark.usefixtures("own_pages")


def made(**facts: Any) -> tuple[StatusPage, Lane]:
    page = StatusPage.make({"rank": 0, "world_size": 2, "job": "a", **facts})
    assert page is not None
    lane = page.lane()
    assert lane is not None
    return page, lane


def begin(page: StatusPage, lane: Lane, number: int, group: str = "all ranks") -> int:
    words = page.words_of("barrier", "train.py", 7, group)
    return lane.begin(*words, number, 0, 1000 + number, CALLED)


def copy_of(page: StatusPage) -> PageCopy:
    (copy,) = copied(pages())
    page.close()
    return copy


def sent(copy: PageCopy, shift_ns: int) -> PageCopy:
    return from_plain(unpacked(packed(to_plain(copy))), shift_ns)


def test_it_says_the_same_elsewhere_by_another_clock() -> None:
    page, lane = made(rank=3, world_size=4, job="é")
    lane.end(begin(page, lane, 1), 1500)
    begin(page, lane, 2)
    copy = copy_of(page)
    assert copy.vitals is not None
    assert copy.vitals.memory_bytes > 1 << 20
    assert copy.vitals.process_s > 0
    there = sent(copy, -600)
    assert there.vitals == copy.vitals
    assert there.facts == {**copy.facts, "made_ns": copy.facts["made_ns"] - 600}
    assert [(each.begin_ns, each.end_ns) for each in there.records] == [(401, 900), (402, 0)]
    assert [replace(each, begin_ns=0, end_ns=0) for each in there.records] == [
        replace(each, begin_ns=0, end_ns=0) for each in copy.records
    ]


def test_what_travels_has_the_last_calls_the_open_ones_and_the_last_of_each_group() -> None:
    page, lane = made()
    lane.end(begin(page, lane, 1, "pair"), 1)
    lane.end(begin(page, lane, 2, "pair"), 1)
    begin(page, lane, 1)  # open, and others within it
    for number in range(2, 100):
        lane.end(begin(page, lane, number), 1)
    found = {(each.group, each.number) for each in sent(copy_of(page), 0).records}
    last = {("all ranks", number) for number in range(68, 100)}
    assert found == {("pair", 2), ("all ranks", 1)} | last


def test_a_long_copy_fits_into_a_frame() -> None:
    page, lane = made(program="x" * 2000)
    for number in range(1, 200):
        lane.end(begin(page, lane, number), 2000 + number)
    assert len(packed(to_plain(copy_of(page)))) < 4096


def test_what_is_no_copy_is_refused() -> None:
    def coded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    bomb = zlib.compress(json.dumps({"a": "b" * (1 << 21)}).encode())
    for text in ("", "é", "!!!!", coded(b"x"), packed({})[:-8] + "AAAAAAAA", coded(bomb)):
        with pytest.raises(ValueError):
            unpacked(text)
    with pytest.raises(ValueError, match="isn't an object"):
        unpacked(coded(zlib.compress(b"[]")))
    facts = {"rank": 0, "pid": os.getpid(), "start_ticks": 1, "world_size": 1, "made_ns": 1}
    wrong: list[dict[str, Any]] = [{}, {"facts": {}}]
    for plain in (*wrong, {"facts": facts, "records": [[1]], "vitals": None}):
        with pytest.raises((KeyError, TypeError)):
            from_plain(plain, 0)
