"""Every event in every phase: there is an answer, it raises nothing, and the rules at the head of machine.py hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.core.stories import REACH, Story

from defib.core.commands import (
    Capture,
    CheckGate,
    ClearCaches,
    Command,
    Finish,
    HoldTraffic,
    KillTree,
    Launch,
    Note,
    OpenTraffic,
    PauseTraffic,
    Persist,
    Probe,
    RefuseTraffic,
    Settle,
    Wait,
)
from defib.core.events import (
    EVENTS,
    Adopted,
    Booted,
    CanaryDone,
    CanaryOutcome,
    Done,
    Effect,
    Elapsed,
    Event,
    Exited,
    FaultClass,
    Found,
    GatewayBack,
    GatewayLost,
    GpuFault,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Progressed,
    Ready,
    Replayed,
    RestartOrdered,
    Resume,
    ResumeOrdered,
    Stalled,
    StopOrdered,
    StoreFailed,
    Symptom,
)
from defib.core.machine import ANY, TABLE, Machine
from defib.core.state import Phase, Rules, State
from defib.core.witnesses import Case, sufficient

IMA = FaultClass.POISONED_CONTEXT
RULES = (Rules(), Rules(on_spent="exit", caches=()))
OBSERVE = Rules(observe=True)
AT_REST = (Phase.SERVING, Phase.STOPPING, Phase.PAUSED)
TOUCHING = (PauseTraffic, HoldTraffic, RefuseTraffic, KillTree, CheckGate, ClearCaches, Launch)
TICKETED = (Wait, Probe, Capture, KillTree, CheckGate, ClearCaches, Launch)
HAS_NO_INCIDENT = (Phase.STARTING, Phase.SERVING, Phase.STOPPING, Phase.PAUSED, Phase.DOWN)
NOT_IN_OBSERVE = (Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.STUCK, Phase.DOWN)


def _reached(rules: Rules) -> Iterator[State]:
    """What stories leave behind, with variations that a life can bring about."""
    for phase, reach in REACH.items():
        if rules.observe and phase in (*NOT_IN_OBSERVE, Phase.LAUNCHING, Phase.PROVING, Phase.REPLAYING):
            continue
        s = reach().state
        s = replace(s, waits=(("phase", s.ticket), ("lease", s.ticket), ("probation", s.ticket)))
        case = replace(s.case or Case(s.launched_at), findings=(Found(99.0, s.generation, "ima", IMA, True),))
        incidents = {s.incident} if s.phase in HAS_NO_INCIDENT or s.incident else {None, "0001-g1"}
        for alive, ready, incident in itertools.product((True, False), (True, False), incidents):
            if s.phase in (Phase.SUSPECTING, Phase.PAUSED) or s.case is not None:
                yield replace(s, alive=alive, ready=ready, incident=incident, case=case)
            yield replace(s, alive=alive, ready=ready, incident=incident)
        if phase is Phase.PAUSED:
            yield replace(s, proven=False, pending=s.ticket)
            yield replace(s, proven=False, alive=False, address=None, pending=s.ticket)


def _events(s: State) -> Iterator[Event]:
    at, g = s.launched_at + 40.0, s.generation
    tickets = {s.pending, s.probe, s.ticket + 50} - {0}
    for running, code, phase in itertools.product((True, False), (None, 0, 2), (None, *Phase)):
        resume = (
            None
            if phase is None
            else Resume(phase.value, g, True, True, 9, None if phase in HAS_NO_INCIDENT else "i", 1)
        )
        yield Booted(at, g, running, f"a:{g}", at - 9, None if running else code, resume)
    yield from (Adopted(at, n, None if n == g else "a:n") for n in (g - 1, g, g + 1, g + 7))
    yield from (kind(at, n) for kind in (Ready,) for n in (g, g + 1))
    yield from (Found(at, g, "ima", fault, cause) for fault in FaultClass for cause in (True, False))
    yield from (Exited(at, g, 9, k, c, ordered=o) for k in ProcessKind for c in (0, 2, None) for o in (True, False))
    yield from (
        CanaryDone(at, t, outcome, sent) for t in tickets for outcome in CanaryOutcome for sent in (1.0, at - 1)
    )
    for t, effect, ok, stuck in itertools.product(tickets, Effect, (True, False), (True, False)):
        yield Done(at, t, effect, ok, "d", "a:new" if ok else None, stuck)
    yield from (Elapsed(at, name, t) for name, t in (*s.waits, ("phase", s.ticket + 50)))
    yield from (Symptom(at, g, f"x{n}", f"c{n}", f"b{n}", "cut") for n in range(3))
    yield from (HealthFailed(at, g, 503), Progressed(at, g, at), Progressed(at, g, 0.0), Replayed(at, g, 1, 0))
    yield from (GatewayLost(at), GatewayBack(at, g, "open"), GatewayBack(at, 0, "starting"), StoreFailed(at, "full"))
    yield from (StopOrdered(at), PauseOrdered(at), ResumeOrdered(at))
    yield from (RestartOrdered(at, rung) for rung in ("", "eager", "no such rung"))
    yield from (Stalled(at, g, 31.0, 30.0, 2), Progressed(at, g, at, step=True), Progressed(at, g, 0.0, step=True))
    yield from (GpuFault(at, g, 31, "0", ours, fault) for ours in (True, False) for fault in FaultClass)


def _check(rules: Rules, before: State, event: Event, after: State, commands: list[Command]) -> None:
    said = {type(c) for c in commands}
    assert after.phase in AT_REST or "phase" in dict(after.waits), "rule 7: a deadline"
    assert all(ticket <= after.ticket for _, ticket in after.waits) and before.ticket <= after.ticket
    assert max(after.pending, after.probe) <= after.ticket
    fresh = [
        c.ticket for c in commands if isinstance(c, (Wait, Probe, Capture, KillTree, CheckGate, ClearCaches, Launch))
    ]
    assert len(set(fresh)) == len(fresh) and all(t > before.ticket for t in fresh), "a ticket is given out once"
    if Launch in said:
        assert before.phase in (Phase.GATING, Phase.CLEARING), "rules 1, 3: only after a kill and a gate"
        assert len(after.ledger) and after.ledger[-1][0] == event.at, "rule 8"
        assert after.generation == before.generation + 1
    if KillTree in said:
        assert after.phase is Phase.KILLING and not rules.observe, "rule 4"
        assert before.phase is not Phase.PAUSED, "rule 4"
    for command in commands:
        if isinstance(command, OpenTraffic):
            assert after.proven and after.alive and command.generation == after.generation, "rules 5, 6"
        if isinstance(command, Settle):
            assert after.incident != command.incident, "rule 10"
        if isinstance(command, Persist):
            assert command.resume.generation > 0
    if after.phase in (Phase.CAPTURING, Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.STUCK):
        assert after.incident is not None or before.phase is after.phase, "what is done is done for an incident"
        assert not after.proven or rules.observe or before.phase is after.phase
    if after.phase in HAS_NO_INCIDENT:
        assert after.incident is None or after.phase is before.phase, "rule 10"
    if before.phase is Phase.STOPPING:
        assert after.phase is Phase.STOPPING and said <= {Note, Wait, Finish, Persist}, "rule 9"
    if before.phase is Phase.PAUSED and not isinstance(event, (ResumeOrdered, StopOrdered)):
        assert after.phase is Phase.PAUSED, "an operator's pause is kept"
    if rules.observe:
        assert not said & set(TOUCHING), "observe"


@pytest.mark.parametrize("rules", [*RULES, OBSERVE], ids=["default", "exit, no caches", "observe"])
def test_every_event_in_every_phase_keeps_the_rules(rules: Rules) -> None:
    pairs, kinds = set(), set()
    for before in _reached(rules):
        for event in _events(before):
            machine = Machine(rules, before)
            told = f"{before.phase} {event}\n{before}"
            try:
                commands = machine.step(event)
                _check(rules, before, event, machine.state, commands)
            except Exception as error:
                raise AssertionError(f"{error!r} after {told}") from error
            pairs.add((before.phase, type(event)))
            kinds |= {type(c) for c in commands}
    phases = {s.phase for s in _reached(rules)}
    assert pairs == set(itertools.product(phases, EVENTS))
    if not rules.observe:
        assert phases == set(Phase)
        assert kinds >= {Launch, KillTree, Capture, CheckGate, OpenTraffic, HoldTraffic, RefuseTraffic, Finish, Settle}


def test_every_phase_names_its_answers() -> None:
    assert set(TABLE) == set(Phase)
    assert set(ANY) == set(EVENTS)
    for phase, row in TABLE.items():
        assert set(row) <= set(EVENTS), phase


def test_no_verdict_without_sufficient_witnesses() -> None:
    """Rule 4, from the case itself: whatever opens an incident while serving has a case that suffices."""
    for before in _reached(Rules()):
        if before.phase not in (Phase.SERVING, Phase.SUSPECTING, Phase.REPLAYING):
            continue
        for event in _events(before):
            machine = Machine(Rules(), before)
            machine.step(event)
            if machine.state.phase is Phase.CAPTURING and not isinstance(event, Booted):
                assert machine.state.case is not None and sufficient(machine.state.case), f"{before} {event}"


def test_before_the_first_snapshot_nothing_is_overwritten_and_a_pause_is_kept() -> None:
    for event in (StopOrdered(1.0), PauseOrdered(1.0), GatewayBack(1.0, 3, "open"), StoreFailed(1.0)):
        assert not [c for c in Machine(Rules()).step(event) if isinstance(c, Persist)], event
    story = Story().tell(PauseOrdered).boots(Resume("serving", 1, True, True))
    assert story.state.phase is Phase.PAUSED and story.state.proven
