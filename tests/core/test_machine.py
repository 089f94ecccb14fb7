"""The machine by golden transcripts (events in, commands out, as text) and over the full (phase, event) product."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from defib.core.budget import Budget
from defib.core.commands import Command, Finish, KillTree, Launch, Note, OpenTraffic, Persist, Wait
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
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Progressed,
    Ready,
    Replayed,
    Resume,
    ResumeOrdered,
    StopOrdered,
    StoreFailed,
    Symptom,
)
from defib.core.machine import TABLE, Machine
from defib.core.state import Phase, Rules, State
from defib.core.witnesses import Case

FOLDER = Path(__file__).parent / "transcripts"
IMA = FaultClass.POISONED_CONTEXT


class Story:
    """Tells a machine events and writes down what it says. Time moves by what each line says."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.machine = Machine(rules or Rules())
        self.at = 100.0
        self.lines: list[str] = []
        self.commands: list[Command] = []

    @property
    def state(self) -> State:
        return self.machine.state

    def tell(self, make: Callable[[float], Event], after: float = 0.1) -> Story:
        self.at = round(self.at + after, 3)
        event = make(self.at)
        self.lines.append(f"{self.at:9.3f} {_shown(event)}")
        self.commands = self.machine.step(event)
        self.lines += [f"          -> {_shown(c)}" for c in self.commands if not isinstance(c, Persist)]
        self.lines.append(f"          == {self.state.phase.value}")
        return self

    # the words of the stories
    def boots(self, resume: Resume | None = None, running: bool = True, generation: int = 1) -> Story:
        return self.tell(lambda at: Booted(at, generation, running, f"a:{generation}", at - 1, None, resume))

    def ready(self, after: float = 30.0) -> Story:
        return self.tell(lambda at: Ready(at, self.state.generation), after)

    def canary(self, outcome: CanaryOutcome = CanaryOutcome.ANSWERED) -> Story:
        ticket, sent = self.state.probe or self.state.pending, self.at
        return self.tell(lambda at: CanaryDone(at, ticket, outcome, sent))

    def found(self, signature: str = "ima", cause: bool = True, fault: FaultClass = IMA) -> Story:
        return self.tell(lambda at: Found(at, self.state.generation, signature, fault, cause, "EngineCore", "text"))

    def token(self, after: float = 0.3) -> Story:
        return self.tell(lambda at: Progressed(at, self.state.generation, at), after)

    def symptom(self, n: int = 1) -> Story:
        return self.tell(lambda at: Symptom(at, self.state.generation, f"x{n}", f"c{n}", f"b{n}", "status"))

    def exits(self, kind: ProcessKind = ProcessKind.ROOT, code: int | None = 0) -> Story:
        return self.tell(lambda at: Exited(at, self.state.generation, 9, kind, code, name=kind.value))

    def done(self, effect: Effect, ok: bool = True, stuck: bool = False) -> Story:
        ticket, address = self.state.pending, f"a:{self.state.generation}"
        return self.tell(lambda at: Done(at, ticket, effect, ok, "detail", address, stuck))

    def elapses(self, name: str = "phase", after: float = 1.0) -> Story:
        ticket = dict(self.state.waits)[name]
        return self.tell(lambda at: Elapsed(at, name, ticket), after)

    def serves(self) -> Story:
        return self.boots().ready().canary()

    def relaunches(self) -> Story:
        """From capturing to launching, all going well."""
        self.done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
        if self.state.phase is Phase.CLEARING:
            self.done(Effect.CLEAR)
        return self.done(Effect.LAUNCH) if self.state.phase is Phase.LAUNCHING else self

    def replayed(self) -> Story:
        return self.tell(lambda at: Replayed(at, self.state.generation, 2, 0))

    def recovers(self) -> Story:
        return self.relaunches().ready().canary().replayed()

    def poisoned(self) -> Story:
        return self.found().canary(CanaryOutcome.ERROR)


def _shown(value: object) -> str:
    if isinstance(value, Note):
        return f"note {value.name} " + " ".join(f"{k}={v}" for k, v in value.fields)
    parts = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name != "at" or isinstance(value, Wait)]  # type: ignore[arg-type]
    return f"{type(value).__name__} " + " ".join(f"{k}={v}" for k, v in parts if v not in ("", None, (), False))


STORIES: dict[str, Callable[[], Story]] = {
    "first-start": lambda: Story().serves(),
    "refuted-by-a-token": lambda: Story().serves().found().token(),
    "refuted-by-the-canary": lambda: Story().serves().found().canary(),
    "inconclusive": lambda: Story().serves().found().canary(CanaryOutcome.BLIND).elapses(after=15.0),
    "poisoned": lambda: Story().serves().poisoned().recovers().token().elapses("probation", 120.0),
    "engine-exit": lambda: Story().serves().exits(ProcessKind.ENGINE).recovers(),
    "silent-root-exit": lambda: Story().serves().exits().recovers(),
    "health-and-a-symptom": lambda: (
        Story().serves().tell(lambda at: HealthFailed(at, 1, 503)).symptom().recovers()
    ),
    "three-symptoms-and-a-good-canary": lambda: Story().serves().symptom(1).symptom(2).symptom(3).canary(),
    "three-symptoms-a-line-and-a-blind-canary": lambda: (
        Story().serves().found().symptom(1).symptom(2).symptom(3).canary(CanaryOutcome.BLIND).elapses(after=15.0)
    ),
    "death-while-proving": lambda: (
        Story().serves().poisoned().relaunches().ready().exits().done(Effect.KILL).done(Effect.GATE)
    ),
    "death-while-replaying": lambda: Story().serves().poisoned().relaunches().ready().canary().exits().recovers(),
    "a-finding-while-replaying-is-refuted": lambda: (
        Story().serves().poisoned().relaunches().ready().canary().found().canary()
    ),
    "bad-flag-at-the-first-start": lambda: Story().boots().exits(code=2),
    "bad-flag-of-a-rung": lambda: (
        Story().serves().poisoned().relaunches().exits(code=2).done(Effect.KILL).done(Effect.GATE)
    ),
    "start-limit": lambda: Story().boots().elapses(after=900.0).relaunches(),
    "stuck-and-freed": lambda: (
        Story().serves().poisoned().done(Effect.CAPTURE).done(Effect.KILL, ok=False).elapses(after=30.0)
        .done(Effect.KILL)
    ),
    "budget-spent-and-freed": lambda: (
        Story(Rules(budget=Budget(3600.0, 1))).serves().poisoned().recovers().poisoned().done(Effect.CAPTURE)
        .done(Effect.KILL).done(Effect.GATE).done(Effect.CLEAR).elapses(after=3700.0).done(Effect.KILL)
        .done(Effect.GATE).done(Effect.LAUNCH)
    ),
    "budget-spent-and-exit": lambda: (
        Story(Rules(budget=Budget(3600.0, 0), on_spent="exit")).serves().poisoned().relaunches().elapses(after=60.0)
    ),
    "observe": lambda: Story(Rules(observe=True)).serves().poisoned().done(Effect.CAPTURE).exits(),
    "operator-pauses-and-resumes": lambda: (
        Story().serves().tell(PauseOrdered).found().exits(ProcessKind.ENGINE).tell(ResumeOrdered)
    ),
    "operator-resumes-the-accused": lambda: (
        Story().serves().poisoned().tell(PauseOrdered).tell(ResumeOrdered).canary(CanaryOutcome.ERROR)
    ),
    "replaced-by-someone-else": lambda: Story().serves().tell(lambda at: Adopted(at, 2, "a:2")).ready().canary(),
    "stop-in-mid-recovery": lambda: (
        Story().serves().poisoned().done(Effect.CAPTURE).tell(StopOrdered).exits().found()
    ),
    "gateway-lost-in-mid-recovery": lambda: (
        Story().serves().poisoned().tell(GatewayLost).tell(lambda at: GatewayBack(at, 0, "starting")).elapses("lease")
    ),
    "supervisor-back-while-serving": lambda: Story().boots(Resume("serving", 1, True, True)),
    "supervisor-back-while-killing": lambda: Story().boots(Resume("killing", 1, False, True, 0, "0001-g1", 1, "ima")),
    "supervisor-back-while-launching": lambda: (
        Story().boots(Resume("launching", 2, False, True, 0, "0001-g1", 1, "ima"), generation=2).ready().canary()
    ),
    "supervisor-back-and-the-worker-is-gone": lambda: (
        Story().boots(Resume("serving", 1, True, True), running=False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_a_story_goes_as_written(name: str, regenerate: bool) -> None:
    path = FOLDER / f"{name}.txt"
    text = "\n".join(STORIES[name]().lines) + "\n"
    if regenerate:
        path.write_text(text)
    assert text == path.read_text(), "read the difference; `pytest tests/core --regenerate` accepts it"


def test_no_transcript_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(STORIES)


NOT_IN_OBSERVE = (Phase.KILLING, Phase.GATING, Phase.CLEARING, Phase.STUCK, Phase.DOWN)
"""Observe never gets there: nothing is killed, so nothing is launched."""


def _states() -> list[State]:
    """A state of every phase, as a story would leave it."""
    case = replace(Case(99.0), findings=(Found(99.0, 2, "ima", IMA, True),))
    base = State(
        generation=2, address="a:2", launched_at=50.0, alive=True, ever_ready=True, ticket=9, incident="0001-g1"
    )
    out = []
    for phase, proven, alive in itertools.product(Phase, (False, True), (False, True)):
        waits = (("phase", 8), ("lease", 7), ("probation", 6))
        out.append(replace(base, phase=phase, proven=proven, alive=alive, case=case, waits=waits, pending=9, probe=5))
        out.append(replace(base, phase=phase, proven=proven, alive=alive, waits=waits, pending=9, incident=None))
    return out


def _events(at: float) -> list[Event]:
    made: list[Event] = [
        Booted(at, 2, True, "a:2", at - 9),
        Booted(at, 2, False, None, at - 9, 1, Resume("launching", 2)),
        Adopted(at, 3, "a:3"),
        Ready(at, 2),
        Found(at, 2, "ima", IMA, True),
        Found(at, 2, "hint", FaultClass.UNKNOWN, False),
        HealthFailed(at, 2, 503),
        Symptom(at, 2, "x", "c", "b", "cut"),
        Progressed(at, 2, at),
        Replayed(at, 2, 1, 0),
        GatewayLost(at),
        GatewayBack(at, 2, "open"),
        StopOrdered(at),
        PauseOrdered(at),
        ResumeOrdered(at),
        StoreFailed(at, "full"),
    ]
    made += [Exited(at, 2, 9, kind, code) for kind in ProcessKind for code in (0, 2, None)]
    made += [CanaryDone(at, t, outcome, at - 1) for outcome in CanaryOutcome for t in (5, 9)]
    made += [Done(at, 9, effect, ok, stuck=not ok) for effect in Effect for ok in (True, False)]
    made += [Elapsed(at, name, n) for name, n in (("phase", 8), ("lease", 7), ("probation", 6))]
    return made


def test_every_event_has_an_answer_in_every_phase_and_keeps_the_rules() -> None:
    events = _events(100.0)
    assert {type(e) for e in events} == set(EVENTS)
    assert set(TABLE) == set(Phase)
    for rules in (Rules(), Rules(observe=True)):
        for state, event in itertools.product(_states(), events):
            if rules.observe and state.phase in NOT_IN_OBSERVE:
                continue
            machine = Machine(rules, state)
            commands = machine.step(event)
            told = f"{state.phase} {event} -> {commands}"
            assert isinstance(machine.state.phase, Phase), told
            if state.phase is Phase.STOPPING:
                assert not [c for c in commands if isinstance(c, (KillTree, Launch, OpenTraffic, Finish))], told
            if rules.observe:
                assert not [c for c in commands if isinstance(c, Launch)], told
            if any(isinstance(c, Launch) for c in commands):
                assert state.phase in (Phase.GATING, Phase.CLEARING), told
            if (
                machine.state.phase not in (Phase.SERVING, Phase.STOPPING, Phase.PAUSED)
                and machine.state.phase != state.phase
            ):
                assert "phase" in dict(machine.state.waits), told


def test_facts_of_another_generation_and_stale_tickets_change_nothing() -> None:
    story = Story().serves()
    before = story.state
    for event in (
        Found(200.0, 7, "ima", IMA, True),
        Exited(200.0, 7, 9, ProcessKind.ROOT, 0),
        Ready(200.0, 0),
        CanaryDone(200.0, 999, CanaryOutcome.ERROR, 199.0),
        Done(200.0, 999, Effect.KILL, True),
        Elapsed(200.0, "phase", 999),
    ):
        assert story.machine.step(event) == []
        assert story.state == before


def test_a_hold_is_told_what_is_left_of_the_time_to_ready() -> None:
    story = Story().serves().poisoned().relaunches()
    expected = story.state.ready_in_s
    assert expected is not None
    story.elapses("lease", 10.0)
    holds = [c.ready_in_s for c in story.commands if type(c).__name__ == "HoldTraffic"]
    assert holds and holds[0] is not None and holds[0] < expected - 9.0
