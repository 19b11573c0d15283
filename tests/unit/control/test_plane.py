"""Whom a control plane asks about the ranks of a group."""

from __future__ import annotations

from typing import Any

from unisono.control.plane import SocketControlPlane
from unisono.topology import EVERYBODY, Group, Topology


class Model:
    topology = Topology(0, 4)

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks)


class Hub:
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.peers = self

    def gone(self, *what: Any) -> None:
        self.asked.append(what)


def test_who_is_gone_in_a_part_of_an_operation_may_be_any_rank() -> None:
    model, hub = Model(), Hub()
    control: Any = SocketControlPlane(model, None)  # type: ignore[arg-type]
    control.hubs[EVERYBODY] = hub
    control.steps.counts[EVERYBODY] = 7
    part, other = control.make_part((0, 2)), Group((0, 1))
    assert control.gone(part, 1) is control.gone(other, 1) is None
    assert hub.asked == [(None, EVERYBODY, 7), ((0, 1), other.name, 1)]
