"""A simulated world around the machine: virtual time, seeded dice, generations that live, fail and die.

Invariants, checked after every step (`Broken` names the one that fell):

- one-alive        at most one generation has living processes
- empty-before-launch  no launch before every process of the generations before is gone
- proven-before-open   traffic reaches a generation only after its canary; never the one that was convicted
- no-harm          a generation that is well is not killed, except on an operator's order
- observe          in observe nothing is paused, held, killed, cleared or launched
- stopped          once the instance stops nothing more is asked of the world
- deadline         every phase that waits has a deadline
- budget           launches inside the window stay within the budget
- paused           an operator's pause is kept until the operator ends it
- settled          every incident settles exactly once
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
from defib.core.machine import Machine, Table
from defib.core.state import Phase, Rules
from defib.core.witnesses import FAILED

WAITING = frozenset(Phase) - {Phase.SERVING, Phase.STOPPING, Phase.PAUSED}
TOUCHING = (PauseTraffic, HoldTraffic, KillTree, ClearCaches, Launch, CheckGate)
QUIET = (Note, Settle, Persist)


class Broken(AssertionError):
    """An invariant fell."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        super().__init__(f"{name}: {detail}")


@dataclass
class Generation:
    """The truth about one generation."""

    number: int
    alive: bool = True
    ready: bool = False
    ill: bool = False
    tested: bool = False
    convicted: bool = False
    launched_at: float = 0.0


class World:
    """One instance from its first start. `run(seconds)` lets time pass; faults come from the caller or the dice."""

    def __init__(self, seed: int, rules: Rules | None = None, table: Table | None = None, trouble: float = 1.0) -> None:
        self.dice = random.Random(seed)
        self.rules = rules or Rules()
        self.table = table
        self.trouble = trouble
        self.now = 1000.0
        self.transcript: list[str] = []
        self.generations: dict[int, Generation] = {}
        self.saved = Resume()
        self.launches: list[float] = []
        self.opened: set[str] = set()
        self.settled: Counter[str] = Counter()
        self.stopped = False
        self.pause_ordered = False
        self.order = False
        """An operator said resume: the next kill is theirs."""
        self.gateway = True
        self.counts: Counter[str] = Counter()
        self._queue: list[tuple[float, int, int, Callable[[], Event | None]]] = []
        self._number = itertools.count()
        self._life = 0
        """Counts supervisors: what a dead one waited for is never heard."""
        self.machine = Machine(self.rules, table=table)
        self._begin(1)
        self._boot(None)

    # --- time ---

    def later(self, seconds: float, make: Callable[[], Event | None], ours: bool = True) -> None:
        """An event to come. `ours`: it dies with the supervisor that waits for it."""
        life = self._life if ours else -1
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), life, make))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            at, _, life, make = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            if life not in (-1, self._life):
                continue
            event = make()
            if event is not None:
                self.tell(event)
        self.now = end

    def tell(self, event: Event) -> None:
        self.transcript.append(f"{self.now:.3f} {event}")
        before = self.machine.state.phase
        commands = self.machine.step(event)
        for command in commands:
            self.transcript.append(f"    {command}")
            self._check(command)
            self._do(command)
        self._check_state(before, event)

    # --- what the world does ---

    def _begin(self, number: int) -> None:
        born = Generation(number, launched_at=self.now)
        self.generations[number] = born
        alive = [g.number for g in self.generations.values() if g.alive]
        if len(alive) > 1:
            raise Broken("one-alive", f"generations {alive}")
        fate = self.dice.random()
        if number > 1 and fate < 0.12 * self.trouble:
            born.ill = True
            code = self.dice.choice((1, 2, None))
            self.later(self.dice.uniform(0.1, 20), lambda: self._root_dies(born, code), ours=False)
        elif number > 1 and fate < 0.16 * self.trouble:
            born.ill = True  # never ready
        else:
            self.later(self.dice.uniform(1, 60), lambda: self._gets_ready(born), ours=False)

    def _gets_ready(self, g: Generation) -> Event | None:
        if not g.alive or self.stopped:
            return None
        g.ready = True
        if self.dice.random() < 0.1 * self.trouble and g.number > 1:
            g.ill = True  # ready and useless
        return Ready(self.now, g.number)

    def _root_dies(self, g: Generation, code: int | None) -> Event | None:
        if not g.alive:
            return None
        g.alive, g.ill = False, True
        return Exited(self.now, g.number, 100 + g.number, ProcessKind.ROOT, code)

    def _boot(self, resume: Resume | None) -> None:
        newest = self.generations[max(self.generations)]
        self.tell(
            Booted(
                at=self.now,
                generation=newest.number,
                running=newest.alive,
                address=f"127.0.0.1:{newest.number}",
                launched_at=newest.launched_at,
                code=None if newest.alive else 0,
                resume=resume,
            )
        )
        if newest.alive and newest.ready:  # the health sensor finds it so
            self.later(0.2, lambda: Ready(self.now, newest.number) if newest.alive else None)

    def current(self) -> Generation | None:
        alive = [g for g in self.generations.values() if g.alive]
        return alive[0] if alive else None

    def _effect(self, ticket: int, effect: Effect, act: Callable[[], Done | None], slow: float) -> None:
        """An effect that ends, fails, hangs or comes late."""
        fate = self.dice.random()
        if fate < 0.03 * self.trouble:
            return  # never heard of again; and not done either
        if fate < 0.07 * self.trouble:
            self.later(self.dice.uniform(0, slow), lambda: Done(self.now, ticket, effect, False, "failed"))
            return
        seconds = self.dice.uniform(0.01, slow) * (40 if fate > 1 - 0.03 * self.trouble else 1)
        self.later(seconds, lambda: None, ours=False)
        self.later(seconds, act)

    def _do(self, command: Command) -> None:
        match command:
            case Wait(name, at, ticket):
                self.later(max(0.0, at - self.now), lambda: Elapsed(self.now, name, ticket))
            case Persist(resume):
                self.saved = resume
                if self.dice.random() < 0.01 * self.trouble:
                    self.later(0, lambda: StoreFailed(self.now, "disk full"))
            case Capture(ticket=ticket):
                self._effect(ticket, Effect.CAPTURE, lambda: Done(self.now, ticket, Effect.CAPTURE, True), 1.0)
            case KillTree(ticket=ticket, generation=generation):
                self._effect(ticket, Effect.KILL, lambda: self._killed(ticket, generation), 2.0)
            case CheckGate(ticket=ticket):
                self._effect(ticket, Effect.GATE, lambda: Done(self.now, ticket, Effect.GATE, True), 0.5)
            case ClearCaches(ticket=ticket):
                self._effect(ticket, Effect.CLEAR, lambda: Done(self.now, ticket, Effect.CLEAR, True), 0.5)
            case Launch(ticket=ticket, generation=generation):
                self._effect(ticket, Effect.LAUNCH, lambda: self._launched(ticket, generation), 0.3)
            case Probe():
                self._probe(command)
            case OpenTraffic(generation=generation):
                if self.gateway and self.machine.state.phase is Phase.REPLAYING:
                    self.later(self.dice.uniform(0, 3), lambda: Replayed(self.now, generation, 1, 0))
            case Finish():
                self.later(0.1, self._stop)
            case _:
                pass

    def _killed(self, ticket: int, generation: int) -> Done:
        if self.dice.random() < 0.03 * self.trouble:
            return Done(self.now, ticket, Effect.KILL, False, "alive after SIGKILL")
        for g in self.generations.values():
            if g.number <= generation:
                g.alive = False
        return Done(self.now, ticket, Effect.KILL, True)

    def _launched(self, ticket: int, generation: int) -> Done:
        if any(g.alive for g in self.generations.values()) or generation in self.generations:
            return Done(self.now, ticket, Effect.LAUNCH, False, "refused: not empty")
        self._begin(generation)
        return Done(self.now, ticket, Effect.LAUNCH, True, address=f"127.0.0.1:{generation}")

    def _probe(self, command: Probe) -> None:
        g = self.generations.get(command.generation)
        sent = self.now
        if g is None or not g.alive:
            outcome, seconds = CanaryOutcome.REFUSED, 0.01
        elif g.ill:
            outcome = self.dice.choice((CanaryOutcome.ERROR, CanaryOutcome.TIMEOUT, CanaryOutcome.DIFFERS))
            outcome = (
                CanaryOutcome.ERROR if command.purpose != "prove" and outcome is CanaryOutcome.DIFFERS else outcome
            )
            seconds = command.timeout_s if outcome is CanaryOutcome.TIMEOUT else 0.1
        else:
            blind = self.dice.random() < 0.03 * self.trouble
            outcome, seconds = (CanaryOutcome.BLIND if blind else CanaryOutcome.ANSWERED), self.dice.uniform(0.02, 0.5)

        def done() -> Event:
            if g is not None and (command.purpose == "reference" or outcome not in FAILED):
                g.tested = True
            return CanaryDone(self.now, command.ticket, outcome, sent)

        self.later(seconds, done)

    def _stop(self) -> Event:
        self.stopped = True
        for g in self.generations.values():
            g.alive = False
        return StopOrdered(self.now)

    # --- what befalls it ---

    def poison(self) -> None:
        """A sticky error: the log says so, then the engine dies (or lingers, dead, with keep-alive)."""
        g = self.current()
        if g is None or not g.ready or self.stopped:
            return
        g.ill = True
        self.counts["poison"] += 1
        self.tell(Found(self.now, g.number, "cuda_ima", FaultClass.POISONED_CONTEXT, True, "EngineCore"))
        if self.dice.random() < 0.8:
            self.later(self.dice.uniform(0.1, 1.0), lambda: self._engine_dies(g), ours=False)
            self.later(self.dice.uniform(1.0, 2.0), lambda: self._root_dies(g, 0), ours=False)

    def _engine_dies(self, g: Generation) -> Event | None:
        return Exited(self.now, g.number, 7, ProcessKind.ENGINE, 1, name="EngineCore") if g.alive else None

    def crash(self) -> None:
        g = self.current()
        if g is not None and not self.stopped:
            self.counts["crash"] += 1
            event = self._root_dies(g, 0)
            if event is not None:
                self.tell(event)

    def mutter(self) -> None:
        """A healthy worker under forged text, failing answers of clients' making, and tokens or none."""
        g = self.current()
        if g is None or g.ill or not g.ready or self.stopped:
            return
        self.counts["mutter"] += 1
        for n in range(self.dice.randint(1, 5)):
            if self.dice.random() < 0.4:
                self.tell(Found(self.now, g.number, "cuda_ima", FaultClass.POISONED_CONTEXT, True, "forged"))
            else:
                self.tell(Symptom(self.now, g.number, f"x{n}", f"c{n}", f"b{n}", "status"))
            if self.dice.random() < 0.3:
                self.run(0.3)
                if not g.ill and g.alive:
                    self.tell(Progressed(self.now, g.number, self.now))

    def sicken(self) -> None:
        """Health says 503 and symptoms come: alive and useless."""
        g = self.current()
        if g is not None and g.ready and not self.stopped:
            g.ill = True
            self.tell(HealthFailed(self.now, g.number, 503))
            self.tell(Symptom(self.now, g.number, "x", "c", "b", "status"))

    def traffic(self) -> None:
        g = self.current()
        if g is not None and g.ready and not g.ill and not self.stopped:
            self.tell(Progressed(self.now, g.number, self.now))

    def replace_supervisor(self) -> None:
        """kill -9: what it waited for is never heard; the next one takes a snapshot and what was persisted."""
        if self.stopped:
            return
        self.counts["supervisor"] += 1
        self._life += 1
        self.machine = Machine(self.rules, table=self.table)
        self._boot(self.saved)

    def gateway_dies(self) -> None:
        if self.gateway and not self.stopped:
            self.gateway = False
            self.tell(GatewayLost(self.now))
            self.later(self.dice.uniform(0.05, 3), self._gateway_back, ours=False)

    def _gateway_back(self) -> Event | None:
        self.gateway = True
        return None if self.stopped else GatewayBack(self.now, 0, "starting")

    def replaced_by_others(self) -> None:
        """kubelet restarted the container: another generation that we didn't launch."""
        g = self.current()
        if g is None or self.stopped or self.machine.state.phase in (Phase.KILLING, Phase.GATING, Phase.CLEARING):
            return
        g.alive = False
        number = max(self.generations) + 1
        self._begin(number)
        self.tell(Adopted(self.now, number, f"127.0.0.1:{number}"))

    def pause(self) -> None:
        if not self.stopped:
            self.pause_ordered = True
            self.tell(PauseOrdered(self.now))

    def resume(self) -> None:
        if not self.stopped:
            self.pause_ordered, self.order = False, True
            self.tell(ResumeOrdered(self.now))

    def stop(self) -> None:
        if not self.stopped:
            self.tell(self._stop())

    def freeze(self) -> None:
        """We do not run for 90 s; deadlines move by that, as the loop does it."""
        self._queue = [(at + 90, n, life, make) for at, n, life, make in self._queue]
        heapq.heapify(self._queue)
        self.now += 90

    # --- invariants ---

    def _check(self, command: Command) -> None:
        if self.stopped and not isinstance(command, QUIET):
            raise Broken("stopped", f"{command}")
        if self.rules.observe and isinstance(command, TOUCHING):
            raise Broken("observe", f"{command}")
        match command:
            case Launch(generation=generation):
                self._check_launch(generation)
            case OpenTraffic(generation=generation):
                self._check_open(generation)
            case KillTree(generation=generation):
                g = self.generations.get(generation)
                if g is not None and g.alive and g.ready and not g.ill and not self.order and not self._long(g):
                    raise Broken("no-harm", f"generation {generation} is well")
                self.order = False
            case Note(name="verdict", fields=fields):
                told = dict(fields)
                if told["incident"]:
                    self.opened.add(str(told["incident"]))
                g = self.generations.get(int(str(told["generation"])))
                if g is not None and not self.rules.observe:
                    g.convicted = True
            case Settle(incident=incident):
                self.settled[incident] += 1
                if self.settled[incident] > 1:
                    raise Broken("settled", f"{incident} twice")
            case RefuseTraffic() | _:
                pass

    def _long(self, g: Generation) -> bool:
        """Blind canaries and start limits can end a well generation's proving: not a kill of a proven one."""
        return not g.tested

    def _check_launch(self, generation: int) -> None:
        alive = [g.number for g in self.generations.values() if g.alive]
        if alive:
            raise Broken("empty-before-launch", f"{alive} alive at the launch of {generation}")
        if self.pause_ordered:
            raise Broken("paused", f"launch of {generation}")
        self.launches = [at for at in self.launches if self.now - at < self.rules.budget.window_s]
        self.launches.append(self.now)

    def _check_open(self, generation: int) -> None:
        g = self.generations.get(generation)
        if g is None or self.rules.observe or self.pause_ordered:
            return
        if not g.tested:
            raise Broken("proven-before-open", f"generation {generation} has no canary yet")
        if g.convicted:
            raise Broken("proven-before-open", f"generation {generation} was convicted")

    def _check_state(self, before: Phase, event: Event) -> None:
        s = self.machine.state
        if s.phase in WAITING and not any(name == "phase" for name, _ in s.waits):
            raise Broken("deadline", f"{s.phase} after {event}")
        if self.pause_ordered and s.phase not in (Phase.PAUSED, Phase.STOPPING):
            raise Broken("paused", f"{s.phase} after {event}")
        if s.phase is Phase.SERVING and s.incident is not None:
            raise Broken("settled", f"{s.incident} is open while serving, after {event}")
        if len(s.ledger) > self.rules.budget.overall:
            raise Broken("budget", f"{len(s.ledger)} launches count")

    def finish(self) -> None:
        """Peace: whatever is open must settle by itself."""
        self.trouble = 0.0
        if self.pause_ordered:
            self.resume()
        for _ in range(400):
            self.run(30.0)
            self.traffic()
            if self.machine.state.incident is None and self.machine.state.phase in (
                Phase.SERVING,
                Phase.DOWN,
                Phase.STOPPING,
            ):
                break
        lost = {i for i in self.opened if not self.settled[i]}
        if lost or self.machine.state.incident is not None:
            raise Broken("settled", f"{lost or self.machine.state.incident} never; phase {self.machine.state.phase}")


def with_row(table: Table, phase: Phase, event: type[Event], handler: Callable[..., None]) -> Table:
    """A table with one answer changed: how mutants are made."""
    return {**table, phase: {**table[phase], event: handler}}
