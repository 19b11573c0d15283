"""What a process does after its exit handlers."""

from __future__ import annotations

from unisono.at_exit import LastCalls


def test_exit_handlers_leave_them_to_the_rank_and_peers_get_time_before_they_are_ended() -> None:
    said: list[str] = []
    LastCalls.add(lambda: said.append("first"))
    LastCalls.add(lambda: said.append("second"), ends_peers="a call was given up")
    with LastCalls.held():
        LastCalls._at_exit()
    assert said == []
    LastCalls.make(said.append)
    assert said == ["a call was given up", "second", "first"]
    LastCalls.make(said.append)
    assert len(said) == 3


def test_without_a_rank_that_makes_them_an_exit_handler_does() -> None:
    said: list[str] = []
    LastCalls.add(lambda: said.append("end"))
    LastCalls._at_exit()
    assert said == ["end"]
