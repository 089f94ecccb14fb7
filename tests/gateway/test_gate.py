from __future__ import annotations

import pytest

from defib.gateway.gate import Gate, GateKeeper
from defib.runtime.seam import SeamRefused

GATES = ("starting", "open", "paused", "held", "refusing")


def keeper(gate: str) -> GateKeeper:
    made = GateKeeper()
    if gate != "starting":
        made.open(2, "127.0.0.1:1", 0.0)
    if gate == "paused":
        made.pause(2, 0.0, 10.0)
    if gate == "held":
        made.hold(2, 0.0, 10.0, None, "i")
    if gate == "refusing":
        made.refuse("down", 5.0)
    assert made.gate == gate
    return made


def do(verb: str, made: GateKeeper, generation: int = 2) -> str:
    try:
        if verb == "open":
            made.open(generation, "127.0.0.1:1", 0.0)
        elif verb == "pause":
            made.pause(generation, 0.0, 10.0)
        elif verb == "hold":
            made.hold(generation, 0.0, 10.0, None, "i")
        elif verb == "refuse":
            made.refuse("down", 5.0)
        else:
            made.expire(100.0)
    except SeamRefused as refused:
        return refused.error
    return made.gate.value


TABLE = {
    "starting": ("open", "refused", "held", "refusing", "starting"),
    "open": ("open", "paused", "held", "refusing", "open"),
    "paused": ("open", "paused", "held", "refusing", "open"),
    "held": ("open", "refused", "held", "refusing", "held"),
    "refusing": ("open", "refused", "held", "refusing", "refusing"),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("column, verb", list(enumerate(("open", "pause", "hold", "refuse", "lease"))))
def test_every_command_has_an_answer_at_every_gate(gate: str, column: int, verb: str) -> None:
    assert do(verb, keeper(gate)) == TABLE[gate][column]


@pytest.mark.parametrize("verb", ["open", "pause", "hold"])
@pytest.mark.parametrize("gate", GATES[1:])
def test_a_command_for_a_generation_that_is_gone_is_refused_and_changes_nothing(gate: str, verb: str) -> None:
    made = keeper(gate)
    before = repr(made)
    assert do(verb, made, generation=1) == "stale_generation"
    assert repr(made) == before


def test_the_end_of_a_pauses_lease_opens_the_gate_without_parking() -> None:
    made = keeper("paused")
    assert not made.expire(9.9)
    assert made.expire(10.0)
    assert (made.gate, made.parking) == (Gate.OPEN, False)
    made.open(2, "127.0.0.1:1", 0.0)
    assert made.parking


def test_a_lease_is_renewed_by_saying_it_again() -> None:
    made = keeper("paused")
    made.pause(2, 8.0, 10.0)
    assert not made.expire(17.9)
    assert made.expire(18.0)


def test_an_opening_is_a_ruling_only_if_something_waited_for_it() -> None:
    made = keeper("open")
    assert not made.open(2, "127.0.0.1:1", 0.0)
    assert made.open(3, "127.0.0.1:2", 0.0)
    made.pause(3, 0.0, 1.0)
    assert made.open(3, "127.0.0.1:2", 0.0)


def test_the_time_to_ready_runs_down_and_is_unknown_when_overdue() -> None:
    made = keeper("open")
    made.hold(2, 100.0, 10.0, 30.0, "i")
    assert made.ready_in_s(110.0) == 20.0
    assert made.ready_in_s(130.0) is None
