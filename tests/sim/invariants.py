"""What must hold whatever befalls an instance. `Broken` names the rule that fell.

- one-alive            at most one generation has living processes
- empty-before-launch  no launch is ordered before every process of the generations before is known to be gone
- proven-before-open   traffic is opened only to a generation whose canary was answered (or blind) since it was last
                       accused; a first start that has never been answered is opened whatever its canary says
- held                 from the verdict until a proven generation the gate is held, refusing or starting, never open
- witnesses            no kill without sufficient witnesses, a start limit, a failed proof, or an engine's exit
- no-harm              a generation that is well and was proven is not killed
- observe              in observe nothing is paused, held, refused, killed, cleared or launched
- stopped              once the instance stops nothing more is asked of the world
- deadline             every phase that waits has a deadline that is armed
- lease                a pause or a hold is said again before its lease ends
- budget               launches inside the window stay within each rung's and the overall limit
- paused               an operator's pause is kept until the operator ends it; we only look meanwhile
- settled              every incident settles exactly once, and only one is open at a time
- peace                left in peace, an instance serves (or stands where an operator put it)

The watch keeps its own books from what was told and asked; it reads the machine's state only for its phase, its
deadlines and its causes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from defib.core.budget import Rung
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
    Booted,
    CanaryDone,
    CanaryOutcome,
    Done,
    Effect,
    Elapsed,
    Event,
    Exited,
    Found,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    ResumeOrdered,
    StopOrdered,
    Symptom,
)
from defib.core.state import Phase, Rules, State

WAITING = frozenset(Phase) - {Phase.SERVING, Phase.STOPPING, Phase.PAUSED}
UNPROVEN = (Phase.STARTING, Phase.LAUNCHING, Phase.PROVING)
TOUCHING = (PauseTraffic, HoldTraffic, RefuseTraffic, KillTree, ClearCaches, Launch, CheckGate)
LOOKING = (Note, Persist, Settle, Probe, OpenTraffic, RefuseTraffic)
QUIET = (Note, Persist, Settle, Finish, Wait)
GOOD = (CanaryOutcome.ANSWERED, CanaryOutcome.BLIND)


class Broken(AssertionError):
    """An invariant fell."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        super().__init__(f"{name}: {detail}")


def require(good: bool, name: str, detail: object) -> None:
    if not good:
        raise Broken(name, str(detail))


@dataclass
class Facts:
    """What was said against one generation since it was last cleared."""

    cause: bool = False
    exchanges: set[tuple[str, str]] = field(default_factory=set)
    strong: set[str] = field(default_factory=set)

    @property
    def sufficient(self) -> bool:
        """One of group W and one of T, or two of W; clients alone never. A timeout needs more than one bad answer."""
        gang = len({c for c, _ in self.exchanges}) >= 3 and len({b for _, b in self.exchanges}) >= 3
        if not self.strong:
            return False
        agree = self.cause or (bool(self.exchanges) and self.strong != {"timeout"})
        return agree or len(self.strong) + gang >= 2


@dataclass
class Books:
    """What a supervisor remembers across kill -9: the launches that count and how often each was forgiven."""

    launches: tuple[tuple[float, str, str, int], ...] = ()
    """(at, cause, rung, generation)"""


def _unmade(entry: tuple[float, str, str, int], generation: object) -> tuple[float, str, str, int]:
    """A launch that could not be made counts overall, but against no rung."""
    at, cause, rung, number = entry
    return (at, cause, "" if number == generation else rung, number)


class Watch:
    """Looks at every event and command of one instance."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.books = Books()
        self.saved = Books()
        self.facts: dict[int, Facts] = {}
        self.guilty: set[int] = set()
        self.proofs: set[int] = set()
        self.convicted: set[int] = set()
        self.emptied: set[int] = set()
        self.probes: dict[int, Probe] = {}
        self.answered = False
        self.opened: set[str] = set()
        self.settled: Counter[str] = Counter()
        self.forgotten: set[str] = set()
        """Incidents whose settling, or whose very number, could not be persisted: they may settle again, or never."""
        self.paused = False
        self.stopping = False

    # --- what the machine is told ---

    def told(self, before: State, event: Event) -> None:
        facts = self.facts.setdefault(before.generation, Facts())
        current = getattr(event, "generation", before.generation) == before.generation
        match event:
            case StopOrdered():
                self.stopping, self.paused = True, False
            case PauseOrdered() if not self.stopping:
                self.paused = True
            case ResumeOrdered():
                self.paused = False
            case Found(cause=True) if current:
                facts.cause = True
            case Symptom() if current:
                facts.exchanges.add((event.connection, event.body))
            case HealthFailed() if current:
                facts.strong.add("health")
            case Exited(kind=ProcessKind.ROOT | ProcessKind.ENGINE) if current:
                self.guilty.add(before.generation)
                if not self.rules.observe:
                    self.proofs.discard(before.generation)
            case Booted(running=False):
                self.guilty.add(event.generation)
            case Elapsed(name="phase") if before.phase in UNPROVEN and before.proven is False:
                self._limit_passed(before)
            case Done(effect=Effect.LAUNCH, ok=False) if event.ticket == before.pending:
                self.guilty.update((before.generation - 1, before.generation))
            case Done(effect=Effect.KILL, ok=True) if event.ticket == before.pending:
                self.emptied.add(before.generation)
            case CanaryDone():
                self._canary(before, event, facts)
            case _:
                pass
        if facts.sufficient:
            self.guilty.add(before.generation)

    def _limit_passed(self, before: State) -> None:
        if before.pending and before.phase in (Phase.STARTING, Phase.PROVING):
            self.proofs.add(before.generation)  # a canary that does not even report back is blind
            self.convicted.discard(before.generation)
        else:
            self.guilty.update((before.generation, before.generation - 1))

    def _canary(self, before: State, event: CanaryDone, facts: Facts) -> None:
        probe = self.probes.get(event.ticket)
        if probe is None or event.ticket not in (before.pending, before.probe):
            return
        failed = event.outcome in (CanaryOutcome.ERROR, CanaryOutcome.REFUSED, CanaryOutcome.TIMEOUT)
        answered = event.outcome in (CanaryOutcome.ANSWERED, CanaryOutcome.DIFFERS)
        strange = event.outcome is CanaryOutcome.DIFFERS and before.phase is Phase.PROVING and before.rung == 0
        if event.ticket == before.probe:
            if failed:
                facts.strong.add("timeout" if event.outcome is CanaryOutcome.TIMEOUT else "canary")
            return
        first = before.phase is Phase.STARTING and (self.rules.observe or not (self.answered or facts.cause))
        if (answered or event.outcome in GOOD or first) and not strange:
            self.proofs.add(before.generation)
            self.convicted.discard(before.generation)
        else:
            self.guilty.add(before.generation)
        self.answered = self.answered or answered

    # --- what it asks for ---

    def asked(self, now: float, state: State, command: Command, alive: set[int]) -> None:
        """`alive`: the generations that have processes which the launcher's list shows."""
        require(not self.stopping or isinstance(command, QUIET), "stopped", command)
        require(not self.rules.observe or not isinstance(command, TOUCHING), "observe", command)
        require(not self.paused or isinstance(command, LOOKING), "paused", command)
        match command:
            case Launch(generation=generation, rung=rung):
                self._launched(now, state, generation, rung, alive)
            case OpenTraffic(generation=generation):
                require(generation in self.proofs, "proven-before-open", f"{generation} unproven, {state.phase}")
            case KillTree(generation=generation):
                self.proofs.discard(generation)
                known = generation in self.guilty or generation not in alive
                require(known, "witnesses", f"{generation}: {self.facts.get(generation)}")
            case Probe():
                self.probes[command.ticket] = command
            case Note():
                self._noted(state, command)
            case Settle(incident=incident):
                self.settled[incident] += 1
                require(incident in self.opened, "settled", f"{incident} was never open")
                twice = self.settled[incident] > 1 and incident not in self.forgotten
                require(not twice, "settled", f"{incident} twice")
            case Finish():
                self.stopping = True
            case Persist(resume) if resume.incident is not None:
                self._opens(resume.incident)
            case _:
                pass
        if isinstance(command, (Capture, KillTree)):
            self._opens(command.incident)

    def _opens(self, incident: str) -> None:
        require(incident != "", "settled", "an incident without a name")
        open_now = {i for i in self.opened if not self.settled[i]} - self.forgotten - {incident}
        require(not open_now, "settled", f"{incident} while {open_now} is open")
        again = self.settled[incident] and incident not in self.forgotten
        require(not again, "settled", f"{incident} goes on after it settled")
        self.opened.add(incident)

    def _noted(self, state: State, note: Note) -> None:
        told = dict(note.fields)
        match note.name:
            case "verdict":
                self._opens(str(told["incident"]))
                if not self.rules.observe:
                    self.convicted.add(state.generation)
                    self.proofs.discard(state.generation)
            case "false_alarm" | "inconclusive":
                self.facts[state.generation] = Facts()
                self.guilty.discard(state.generation)
            case "survived_probation":
                kept = tuple(entry for entry in self.books.launches if entry[3] != state.generation)
                self.books = Books(kept)
            case "launch_failed":
                self.books = Books(tuple(_unmade(entry, told["generation"]) for entry in self.books.launches))
            case "resumed" if not state.ledger:
                self.books = Books()
            case _:
                pass

    def _launched(self, now: float, state: State, generation: int, rung: str, alive: set[int]) -> None:
        require(not alive, "empty-before-launch", f"{alive} alive at the launch of {generation}")
        require(generation - 1 in self.emptied, "empty-before-launch", f"{generation - 1} was not ended")
        self.facts.pop(generation, None)
        self.guilty.discard(generation)
        for known in (self.proofs, self.convicted, self.emptied):
            known.discard(generation)
        window = tuple(e for e in self.books.launches if e[0] + self.rules.budget.window_s > now)
        self.books = Books((*window, (now, state.cause, rung, generation)))
        require(len(window) < self.rules.budget.overall, "budget", f"{len(window)} launches count already")
        used = sum(1 for _, cause, name, _ in window if (cause, name) == (state.cause, rung))
        limit = next((r for r in self.rules.rungs if r.name == rung), Rung(rung, 0)).launches
        require(used < limit, "budget", f"{rung} was used {used} times for {state.cause}")

    # --- after each step ---

    def stepped(self, state: State, timers: dict[int, float], event: Event) -> None:
        waits = dict(state.waits)
        if state.phase in WAITING and state.generation:
            require(waits.get("phase") in timers, "deadline", f"{state.phase} after {event}")
        if self.paused:
            require(state.phase is Phase.PAUSED, "paused", f"{state.phase} after {event}")
        if state.phase in (Phase.SERVING, Phase.DOWN, Phase.PAUSED, Phase.STARTING):
            require(state.incident is None, "settled", f"{state.incident} is open in {state.phase} after {event}")
        require(len(state.waits) <= 3, "deadline", f"too many: {state.waits}")
