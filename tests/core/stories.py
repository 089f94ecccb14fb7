"""The stories that the machine is told: events in, commands out, as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from defib.core.budget import Budget, Rung
from defib.core.commands import Command, Note, Persist, Wait
from defib.core.events import (
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
    Symptom,
)
from defib.core.machine import Machine
from defib.core.state import Phase, Rules, State

IMA = FaultClass.POISONED_CONTEXT


class Story:
    """Tells a machine events and writes down what it says. Time moves by what each line says."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.machine = Machine(rules or Rules())
        self.at = 100.0
        self.lines: list[str] = []
        self.commands: list[Command] = []
        self.saved: Resume | None = None

    @property
    def state(self) -> State:
        return self.machine.state

    def tell(self, make: Callable[[float], Event], after: float = 0.1) -> Story:
        self.at = round(self.at + after, 3)
        event = make(self.at)
        self.lines.append(f"{self.at:9.3f} {_shown(event)}")
        self.commands = self.machine.step(event)
        for command in self.commands:
            self.saved = command.resume if isinstance(command, Persist) else self.saved
        self.lines += [f"          -> {_shown(c)}" for c in self.commands if not isinstance(c, Persist)]
        self.lines.append(f"          == {self.state.phase.value}")
        return self

    # the words of the stories
    def boots(
        self,
        resume: Resume | None = None,
        running: bool = True,
        generation: int = 1,
        launched_at: float | None = None,
        code: int | None = None,
    ) -> Story:
        def booted(at: float) -> Booted:
            began = at - 1 if launched_at is None else launched_at
            return Booted(at, generation, running, f"a:{generation}", began, code, resume)

        return self.tell(booted)

    def ready(self, after: float = 30.0) -> Story:
        return self.tell(lambda at: Ready(at, self.state.generation), after)

    def canary(self, outcome: CanaryOutcome = CanaryOutcome.ANSWERED, sent: float = 0.0) -> Story:
        """`sent`: so many seconds before the last event."""
        ticket, sent_at = self.state.probe or self.state.pending, self.at - sent
        return self.tell(lambda at: CanaryDone(at, ticket, outcome, sent_at))

    def found(self, signature: str = "ima", cause: bool = True, fault: FaultClass = IMA, after: float = 0.1) -> Story:
        process = "EngineCore"
        return self.tell(lambda at: Found(at, self.state.generation, signature, fault, cause, process, "text"), after)

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

    def relaunches_again(self) -> Story:
        """From killing to launching, after a rung that failed."""
        self.done(Effect.KILL).done(Effect.GATE)
        if self.state.phase is Phase.CLEARING:
            self.done(Effect.CLEAR)
        return self.done(Effect.LAUNCH)

    def replayed(self) -> Story:
        return self.tell(lambda at: Replayed(at, self.state.generation, 2, 0))

    def recovers(self) -> Story:
        return self.relaunches().ready().canary().replayed()

    def stalls(self, after: float = 2.0) -> Story:
        return self.tell(lambda at: Stalled(at, self.state.generation, 31.0, 30.0, 2), after)

    def steps(self) -> Story:
        return self.tell(lambda at: Progressed(at, self.state.generation, at, step=True))

    def xid(self, number: int, fault: FaultClass = IMA, ours: bool = True) -> Story:
        return self.tell(lambda at: GpuFault(at, self.state.generation, number, "0000:01:00", ours, fault))

    def restarts(self, rung: str = "") -> Story:
        return self.tell(lambda at: RestartOrdered(at, rung))

    def poisoned(self) -> Story:
        return self.found().canary(CanaryOutcome.ERROR)


def _shown(value: object) -> str:
    if isinstance(value, Note):
        return f"note {value.name} " + " ".join(f"{k}={v}" for k, v in value.fields)
    parts = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name != "at" or isinstance(value, Wait)]  # type: ignore[arg-type]
    return f"{type(value).__name__} " + " ".join(f"{k}={v}" for k, v in parts if v not in ("", None, (), False))


THREE = Rules(rungs=(Rung("same-again", 1), Rung("eager", 2), Rung("blocking", 1)))

REACH: dict[Phase, Callable[[], Story]] = {
    Phase.STARTING: lambda: Story().boots(),
    Phase.SERVING: lambda: Story().serves(),
    Phase.SUSPECTING: lambda: Story().serves().found(),
    Phase.CAPTURING: lambda: Story().serves().poisoned(),
    Phase.KILLING: lambda: REACH[Phase.CAPTURING]().done(Effect.CAPTURE),
    Phase.GATING: lambda: REACH[Phase.KILLING]().done(Effect.KILL),
    Phase.CLEARING: lambda: REACH[Phase.GATING]().done(Effect.GATE),
    Phase.LAUNCHING: lambda: Story().serves().poisoned().relaunches(),
    Phase.PROVING: lambda: REACH[Phase.LAUNCHING]().ready(),
    Phase.REPLAYING: lambda: REACH[Phase.PROVING]().canary(),
    Phase.STOPPING: lambda: Story().serves().tell(StopOrdered),
    Phase.PAUSED: lambda: Story().serves().tell(PauseOrdered),
    Phase.STUCK: lambda: REACH[Phase.KILLING]().done(Effect.KILL, ok=False),
    Phase.DOWN: lambda: (
        Story(Rules(budget=Budget(3600.0, 0))).serves().poisoned().done(Effect.CAPTURE).done(Effect.KILL)
        .done(Effect.GATE).done(Effect.CLEAR)
    ),
}  # fmt: skip
"""A story that has come to each phase."""


def in_each(then: Callable[[Story], Story]) -> Story:
    """The same thing befalls every phase: only what follows is told."""
    told = Story()
    for phase, reach in REACH.items():
        story = reach()
        assert story.state.phase is phase
        story.lines = []
        told.lines += [f"# {phase.value}", *then(story).lines]
    return told


def _supervisor_back(story: Story) -> Story:
    """kill -9, and the next one reads what was persisted last. Nothing runs where nothing can."""
    s, saved = story.state, story.saved
    story.machine = Machine(story.machine.rules)
    running = s.phase not in (Phase.GATING, Phase.CLEARING, Phase.DOWN)
    return story.boots(saved, running, s.generation)


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
        Story(THREE).serves().poisoned().relaunches().exits(code=1).relaunches_again().exits(code=2)
        .relaunches_again().ready().canary().replayed().token().elapses("probation", 120.0)
        .poisoned().relaunches()
    ),
    "a-launch-that-fails": lambda: (
        Story().serves().poisoned().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE).done(Effect.CLEAR)
        .done(Effect.LAUNCH, ok=False).elapses(after=5.0).done(Effect.KILL).done(Effect.GATE).done(Effect.LAUNCH)
    ),
    "an-engine-that-exits-while-starting": lambda: (
        Story().boots().exits(ProcessKind.ENGINE, 1).ready(1.0).exits(ProcessKind.ROOT, 1).done(Effect.CAPTURE)
    ),
    "an-engine-that-exits-while-starting-and-no-root-follows": lambda: (
        Story().boots().ready().exits(ProcessKind.ENGINE, 1).elapses(after=10.0).done(Effect.CAPTURE)
    ),
    "a-hang": lambda: Story().serves().stalls().stalls().canary(CanaryOutcome.TIMEOUT).relaunches(),
    "a-stall-and-a-step": lambda: Story().serves().stalls().steps(),
    "a-stall-and-a-good-canary": lambda: Story().serves().stalls().canary(),
    "an-xid-of-ours-and-the-line": lambda: Story().serves().xid(31).found(),
    "an-xid-of-a-neighbour": lambda: Story().serves().xid(31, ours=False),
    "a-gpu-that-fell-off": lambda: (
        Story().serves().found().xid(79, FaultClass.GPU_HARDWARE).done(Effect.CAPTURE).done(Effect.KILL)
        .done(Effect.GATE, ok=False, stuck=True).elapses(after=30.0).done(Effect.KILL).done(Effect.GATE)
    ),
    "an-operator-restarts-on-a-rung": lambda: (
        Story().serves().restarts("eager").done(Effect.KILL).done(Effect.GATE).done(Effect.LAUNCH)
        .ready().canary().replayed()
    ),
    "an-operator-restarts-in-mid-recovery": lambda: (
        Story().serves().poisoned().restarts("eager").done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE)
        .done(Effect.CLEAR).done(Effect.LAUNCH).restarts("same-again").done(Effect.KILL).done(Effect.GATE)
    ),
    "what-worked-is-tried-first": lambda: (
        Story().serves().exits().relaunches().exits().relaunches_again().ready().canary().replayed().token()
        .elapses("probation", after=120.0).restarts("same-again").done(Effect.KILL).done(Effect.GATE)
        .done(Effect.LAUNCH).ready().canary().replayed().exits().relaunches()
    ),
    "health-alone-and-a-good-canary": lambda: Story().serves().tell(lambda at: HealthFailed(at, 1, 503)).canary(),
    "three-symptoms-and-a-canary-that-fails": lambda: (
        Story().serves().symptom(1).symptom(2).symptom(3).canary(CanaryOutcome.TIMEOUT)
    ),
    "a-symptom-and-a-canary-that-times-out": lambda: (
        Story().serves().symptom().canary(CanaryOutcome.TIMEOUT).elapses(after=15.0)
    ),
    "a-canary-that-is-older-than-the-accusation": lambda: (
        Story().serves().found().found("other", after=0.5).canary(sent=1.0).canary()
    ),
    "paused-before-the-first-ready": lambda: (
        Story().boots().tell(PauseOrdered).ready().canary().tell(ResumeOrdered)
    ),
    "paused-while-a-launch-is-under-way": lambda: (
        Story().serves().poisoned().done(Effect.CAPTURE).done(Effect.KILL).done(Effect.GATE).done(Effect.CLEAR)
        .tell(PauseOrdered).done(Effect.LAUNCH).ready().canary().tell(ResumeOrdered)
    ),
    "the-worker-dies-while-paused": lambda: (
        Story().serves().tell(PauseOrdered).exits().tell(ResumeOrdered).relaunches()
    ),
    "observe-and-the-engine-dies": lambda: (
        Story(Rules(observe=True)).serves().exits(ProcessKind.ENGINE).exits(code=0).done(Effect.CAPTURE)
    ),
    "observe-says-it-once": lambda: (
        Story(Rules(observe=True)).serves().poisoned().done(Effect.CAPTURE).found().symptom().found(after=301.0)
    ),
    "finish-is-said-again": lambda: Story().boots().exits(code=2).elapses(after=10.0),
    "all-rungs-bad": lambda: (
        Story(Rules(rungs=(Rung("same-again", 1), Rung("eager", 1)))).serves().exits().relaunches().exits(code=1)
        .relaunches_again().exits(code=2).done(Effect.KILL).done(Effect.GATE).elapses(after=3600.0).done(Effect.KILL)
        .done(Effect.GATE)
    ),
    "supervisor-back-in-each-phase": lambda: in_each(_supervisor_back),
    "gateway-back-in-each-phase": lambda: in_each(
        lambda s: s.tell(GatewayLost).tell(lambda at: GatewayBack(at, 0, "starting"))
    ),
    "a-pause-in-each-phase": lambda: in_each(lambda s: s.tell(PauseOrdered)),
    "a-stop-in-each-phase": lambda: in_each(lambda s: s.tell(StopOrdered)),
    "an-adoption-in-each-phase": lambda: in_each(
        lambda s: s.tell(lambda at: Adopted(at, s.state.generation + 1, "a:new"))
    ),
    "the-root-exits-in-each-phase": lambda: in_each(lambda s: s.exits()),
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
