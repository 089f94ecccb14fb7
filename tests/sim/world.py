"""A simulated world around the machine: virtual time, seeded dice, no asyncio, no clock.

It has a launcher with generations of processes, sensors, a gateway with the real gate, a state store, an operator,
and a supervisor that can be killed between any two commands. Effects end, fail, hang, come late or lose their answer.
What must hold stands in `invariants.py` and is checked after every step.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.sim.invariants import Watch, require

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
    GatewayBack,
    GatewayLost,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Ready,
    Replayed,
    Resume,
    StopOrdered,
    StoreFailed,
)
from defib.core.machine import Machine, Table
from defib.core.state import Phase, Rules
from defib.gateway.gate import Gate, GateKeeper
from defib.runtime.seam import SeamRefused

LEASE_S = 30.0
FREEZE_S = 90.0
POISONED = FaultClass.POISONED_CONTEXT
Make = Callable[[], Event | None]
MachineType = Callable[..., Machine]


def _quietly(act: Callable[[], object]) -> Make:
    """It happens, and nobody is told."""

    def make() -> None:
        act()

    return make


@dataclass
class Worker:
    """The truth about one generation."""

    number: int
    launched_at: float
    rung: str = "primary"
    processes: set[ProcessKind] = field(default_factory=lambda: set(ProcessKind))
    ready: bool = False
    illness: str = ""
    """`poisoned`: answers errors. `hung`: answers nothing. Empty: well, though it may be busy."""
    busy_until: float = 0.0
    unkillable_until: float = 0.0
    straggler: bool = False
    """A process that no proof finds until somebody looks again."""
    tested: bool = False
    lied_about: bool = False
    code: int | None = None

    @property
    def alive(self) -> bool:
        return bool(self.processes) or self.straggler

    @property
    def well(self) -> bool:
        return {ProcessKind.ROOT, ProcessKind.ENGINE} <= self.processes and not self.illness


@dataclass
class Sensor:
    """The health probe: says ready once per address, and 503 once until it has seen 200 again."""

    watched: tuple[int, str | None] = (0, None)
    ready: bool = False
    failed: bool = False


class World:
    """One instance from its first start. `run(seconds)` lets time pass; faults are methods."""

    def __init__(
        self,
        seed: int,
        rules: Rules | None = None,
        table: Table | None = None,
        machine: MachineType = Machine,
        trouble: float = 1.0,
    ) -> None:
        self.dice = random.Random(seed)
        self.rules = rules or Rules()
        self._new_machine: Callable[[], Machine] = lambda: machine(self.rules, table=table)
        self.trouble = trouble
        self.bad_flag = self.dice.random() < 0.1
        """This engine doesn't know the fallback's flag."""
        self.now = 1000.0
        self.transcript: list[str] = []
        self.counts: Counter[str] = Counter()
        self.watch = Watch(self.rules)
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.machine = self._new_machine()
        self.timers: dict[int, tuple[float, str]] = {}
        self.saved: Resume | None = None
        self.stale = False
        """What is saved is older than what was known: the disk was full, or kill -9 came first."""
        self.store_fails_until = 0.0
        self.stopped = False
        self.up = False
        self.frozen = False
        self.inbox: list[Event] = []
        self.sensor = Sensor()
        self.gate = GateKeeper()
        self.gateway = True
        self._queue: list[tuple[float, int, int | None, Make]] = []
        self._number = itertools.count()
        self._life = 0
        self._crash_in: int | None = None
        self._begin("primary")
        self.later(self.dice.uniform(0.05, 1), self._boot, ours=False)

    # --- time ---

    def later(self, seconds: float, make: Make, ours: bool = True) -> None:
        """Something to come. `ours`: it dies with the supervisor that waits for it."""
        life = self._life if ours else None
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), life, make))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            at, _, life, make = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            if life is None or life == self._life:
                event = make()
                if event is not None:
                    self.tell(event)
        self.now = max(self.now, end)

    def tell(self, event: Event) -> None:
        """The supervisor learns something, if there is one; a frozen one learns it later."""
        if not self.up:
            return
        if self.frozen:
            self.inbox.append(event)
            return
        self.counts["steps"] += 1
        self.transcript.append(f"{self.now:.3f} {event}")
        before = self.machine.state
        self.watch.told(before, event)
        commands = self.machine.step(event)
        for number, command in enumerate(commands):
            if self._crash_in is not None and number == self._crash_in:
                self._cut(commands[:number], commands[number:])
                return
            self.transcript.append(f"    {command}")
            alive = {w.number for w in self.workers.values() if w.processes}
            self.watch.asked(self.now, self.machine.state, command, alive)
            self._do(command)
        timers = {ticket: at for ticket, (at, _) in self.timers.items()}
        self.watch.stepped(self.machine.state, timers, event)
        self._check_gate()
        self._follow()

    def _cut(self, done: list[Command], lost: list[Command]) -> None:
        """kill -9 between two commands: what was opened or settled but not persisted may be so again, or never."""
        self._crash_in = None
        if any(isinstance(c, Persist) for c in lost):
            self.stale = True
            self.watch.forgotten |= {c.incident for c in [*done, *lost] if isinstance(c, Settle)}
            notes = [dict(c.fields).get("incident") for c in done if isinstance(c, Note)]
            self.watch.forgotten |= {str(incident) for incident in notes if incident}
            self.watch.forgotten |= {c.resume.incident for c in done if isinstance(c, Persist) and c.resume.incident}
        self.kill_supervisor()

    # --- the supervisor's life ---

    def _boot(self) -> Event | None:
        if self.stopped or self.up:
            return None
        self.up, self.machine = True, self._new_machine()
        watch, resume = self.watch, self._remembered()
        watch.stopping, watch.books = False, watch.saved
        if self.stale:
            watch.convicted.clear()
            if resume is not None and resume.proven and resume.generation == self.generation:
                watch.proofs.add(self.generation)
        watch.paused = resume is not None and resume.phase == Phase.PAUSED
        watch.facts = {}
        watch.answered = resume is not None and resume.answered
        if self.dice.random() < 0.05 * self.trouble:
            self.tell(PauseOrdered(self.now))  # an operator who is faster than the launcher's snapshot
        worker = self.workers[self.generation]
        running = ProcessKind.ROOT in worker.processes
        address = self._address(worker.number)
        code = None if running else worker.code
        self.tell(Booted(self.now, worker.number, running, address, worker.launched_at, code, resume))
        if self.up and self.gateway:
            self.tell(GatewayBack(self.now, self.gate.generation, self.gate.gate.value))
        return None

    def _remembered(self) -> Resume | None:
        """What was persisted; times that went through wall time differ a little."""
        if self.saved is None:
            return None
        near = self.dice.uniform(-0.001, 0.001)
        return replace(self.saved, ledger=tuple((at + near, c, r) for at, c, r in self.saved.ledger))

    def kill_supervisor(self) -> None:
        """kill -9: what it waited for is never heard."""
        if self.up and not self.frozen:
            self.counts["supervisor"] += 1
            self._life += 1
            self.up, self.timers, self.inbox, self.sensor = False, {}, [], Sensor()
            self.later(self.dice.uniform(0.05, 1.5), self._boot, ours=False)

    def kill_supervisor_soon(self) -> None:
        """Not between two events but between two commands of the next step."""
        self._crash_in = self.dice.randint(0, 8)

    def freeze(self) -> None:
        """SIGSTOP, suspend or throttling: we do not run for a while, the world does. Deadlines move, as in the loop."""
        if self.up and not self.frozen:
            self.counts["freeze"] += 1
            self.frozen = True
            self.timers = {t: (at + FREEZE_S, name) for t, (at, name) in self.timers.items()}
            self.later(FREEZE_S, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        inbox, self.inbox = self.inbox, []
        for event in inbox:
            self.tell(replace(event, at=self.now))

    def _follow(self) -> None:
        """The health probe looks at what the machine calls current, as the app tells it to."""
        s = self.machine.state
        watched = (s.generation, s.address if s.alive else None)
        if self.up and watched != self.sensor.watched:
            ready = s.phase not in (Phase.STARTING, Phase.LAUNCHING) and s.proven
            self.sensor = Sensor(watched, ready)
            self._look()

    def _look(self) -> None:
        self.later(self.dice.uniform(0.01, 0.5), self._ask_health)

    def _ask_health(self) -> Event | None:
        generation, address = self.sensor.watched
        worker = self.workers.get(generation)
        if address is None or worker is None or not worker.ready or ProcessKind.ROOT not in worker.processes:
            return None
        dead = ProcessKind.ENGINE not in worker.processes
        if not dead and not self.sensor.ready:
            self.sensor.ready, self.sensor.failed = True, False
            return Ready(self.now, generation)
        if dead and self.sensor.ready and not self.sensor.failed:
            self.sensor.failed = True
            return HealthFailed(self.now, generation, 503)
        return None

    # --- what it asks for ---

    def _do(self, command: Command) -> None:
        match command:
            case Wait(name, at, ticket):
                self.timers[ticket] = (at, name)
                self.later(max(0.0, at - self.now), lambda: self._ring(ticket))
            case Persist(resume):
                self._save(resume)
            case Capture(ticket=ticket):
                self._effect(ticket, Effect.CAPTURE, 1.0)
            case KillTree(ticket=ticket, generation=generation):
                self._check_harm(generation)
                self._effect(ticket, Effect.KILL, 2.0, lambda: self._killed(generation))
            case CheckGate(ticket=ticket, generation=generation):
                self._effect(ticket, Effect.GATE, 0.5, lambda: self._gated(generation))
            case ClearCaches(ticket=ticket):
                self._effect(ticket, Effect.CLEAR, 0.5)
            case Launch(ticket=ticket, generation=generation, rung=rung):
                self._launch(ticket, generation, rung)
            case Probe():
                self._probe(command)
            case Finish():
                if self.dice.random() > 0.3 * self.trouble:
                    self.later(0.1, self._stop)
            case PauseTraffic() | HoldTraffic() | OpenTraffic() | RefuseTraffic():
                self._rule(command)
            case _:
                pass

    def _ring(self, ticket: int) -> Event | None:
        at, name = self.timers[ticket]
        if at > self.now + 1e-6:  # it was moved
            self.later(at - self.now, lambda: self._ring(ticket))
            return None
        del self.timers[ticket]
        return Elapsed(self.now, name, ticket)

    def _save(self, resume: Resume) -> None:
        if self.now >= self.store_fails_until:
            self.saved, self.watch.saved, self.stale = resume, self.watch.books, False
            return
        self.stale = True
        self.watch.forgotten |= self.watch.opened
        if resume.incident is not None:
            self.watch.forgotten.add(resume.incident)
        self.later(0, lambda: StoreFailed(self.now, "disk full"))

    def _effect(self, ticket: int, effect: Effect, slow_s: float, act: Callable[[], Done | None] | None = None) -> None:
        """An effect ends, fails, hangs (done or not) or comes late."""
        fate, seconds = self.dice.random() / (self.trouble or 1e-9), self.dice.uniform(0.01, slow_s)

        def end() -> Event:
            done = act() if act is not None else None
            return replace(done, ticket=ticket, at=self.now) if done else Done(self.now, ticket, effect, True)

        if fate < 0.02:
            return
        if fate < 0.04:
            self.later(seconds, _quietly(end))
        elif fate < 0.08:
            self.later(seconds, lambda: Done(self.now, ticket, effect, False, "failed"))
        else:
            self.later(seconds * (40 if fate < 0.11 else 1), end)

    def _killed(self, generation: int) -> Done | None:
        worker = self.workers.get(generation)
        if worker is None or generation != self.generation:
            return None  # gone with the launch of the next, or never launched
        for kind in sorted(worker.processes):
            if kind is not ProcessKind.ENGINE or self.now >= worker.unkillable_until:
                self._exit(worker, kind, None, ordered=True)
        if worker.processes:
            return Done(self.now, 0, Effect.KILL, False, "alive after SIGKILL")
        worker.straggler = worker.straggler and self.dice.random() < 0.5
        return None

    def _gated(self, generation: int) -> Done | None:
        worker = self.workers.get(generation)
        if worker is not None and worker.straggler:
            return Done(self.now, 0, Effect.GATE, False, "a straggler", stuck=True)
        return Done(self.now, 0, Effect.GATE, False, "unreadable") if self.dice.random() < 0.05 else None

    def _launch(self, ticket: int, generation: int, rung: str) -> None:
        fate, seconds = self.dice.random() / (self.trouble or 1e-9), self.dice.uniform(0.01, 0.3)
        if fate < 0.03:  # not even tried: a full disk
            self.later(seconds, lambda: Done(self.now, ticket, Effect.LAUNCH, False, "no space left"))
        elif fate < 0.04:  # never heard of, never done
            return
        else:
            ended: list[Event] = []
            self.later(0.01, _quietly(lambda: ended.append(self._launched(ticket, generation, rung))), ours=False)
            if fate < 0.06:  # the answer was lost with the connection; the next snapshot shows what is
                self.later(0.011, lambda: Done(self.now, ticket, Effect.LAUNCH, False, "lost"))
                self.later(0.012, self._snapshot)
            else:
                self.later(0.011 + seconds * (40 if fate < 0.1 else 1), lambda: replace(ended[0], at=self.now))

    def _launched(self, ticket: int, generation: int, rung: str) -> Event:
        if generation != self.generation + 1 or any(w.alive for w in self.workers.values()) or self.stopped:
            return Done(self.now, ticket, Effect.LAUNCH, False, "refused")
        self._begin(rung)
        address = self._address(generation)
        return Done(self.now, ticket, Effect.LAUNCH, True, "", address)

    def _snapshot(self) -> Event | None:
        """The connection to the launcher is back: the app compares generations."""
        s = self.machine.state
        if self.generation > s.generation:
            return Adopted(self.now, self.generation, self._address(self.generation))
        if self.generation == s.generation and s.alive and not self._root_lives(self.generation):
            return Exited(self.now, s.generation, 1, ProcessKind.ROOT, None, name="root")
        return None

    def _probe(self, command: Probe) -> None:
        sent, worker = self.now, self.workers.get(command.generation)
        if self.dice.random() < 0.02 * self.trouble:
            return
        seconds, outcome = self._answer(command, worker)

        def done() -> Event | None:
            if worker is not None and command.ticket in (self.machine.state.pending, self.machine.state.probe):
                worker.tested = worker.tested or outcome is CanaryOutcome.ANSWERED
            return CanaryDone(self.now, command.ticket, outcome, sent)

        self.later(seconds, done)

    def _answer(self, command: Probe, worker: Worker | None) -> tuple[float, CanaryOutcome]:
        dice, quick = self.dice.random() / (self.trouble or 1e-9), self.dice.uniform(0.01, 0.5)
        if worker is None or ProcessKind.ROOT not in worker.processes or not worker.ready:
            return quick, CanaryOutcome.REFUSED
        if dice < 0.03:
            return quick, CanaryOutcome.BLIND
        if worker.illness == "hung" or self.now < worker.busy_until:
            return command.timeout_s, CanaryOutcome.TIMEOUT
        if worker.illness or ProcessKind.ENGINE not in worker.processes:
            return quick, CanaryOutcome.ERROR
        differs = dice < 0.1 and worker.rung == "eager"
        return quick, CanaryOutcome.DIFFERS if differs else CanaryOutcome.ANSWERED

    # --- the gateway ---

    def _rule(self, command: Command) -> None:
        if not self.gateway:
            return
        try:
            match command:
                case OpenTraffic(generation, address):
                    self.gate.open(generation, address, 0.0)
                    waits = self.dice.random() < 0.5
                    self.later(self.dice.uniform(0, 3 if waits else 0.01), lambda: self._replayed(generation))
                case PauseTraffic(generation):
                    self.gate.pause(generation, self.now, LEASE_S)
                case HoldTraffic(generation, incident, ready_in_s):
                    self.gate.hold(generation, self.now, LEASE_S, ready_in_s, incident)
                case RefuseTraffic(reason, retry_after_s):
                    self.gate.refuse(reason, retry_after_s)
                case _:
                    pass
        except SeamRefused:
            self.counts["refused"] += 1
        if self.gate.lease_ends is not None:
            self.later(LEASE_S, _quietly(lambda: self.gate.expire(self.now)), ours=False)

    def _replayed(self, generation: int) -> Event | None:
        lost = self.dice.random() < 0.05 * self.trouble
        return None if lost or not self.gateway else Replayed(self.now, generation, 1, 0)

    def _check_gate(self) -> None:
        """`held` and `lease`, as the gateway sees them."""
        s = self.machine.state
        if not self.up or not self.gateway or self.rules.observe or self.stopped or s.phase is Phase.STOPPING:
            return
        if self.gate.gate is Gate.OPEN:
            require(self.gate.generation not in self.watch.convicted, "held", f"open to {self.gate.generation}")
        if self.gate.gate in (Gate.HELD, Gate.PAUSED):
            ticket = dict(s.waits).get("lease", -1)
            armed = ticket in self.timers and self.timers[ticket][0] <= self.now + self.rules.lease_renew_s + FREEZE_S
            looking = s.phase is Phase.SUSPECTING or (s.phase is Phase.STARTING and s.generation <= 1)
            require(armed or looking, "lease", f"{self.gate.gate} in {s.phase} and not said again")

    def _check_harm(self, generation: int) -> None:
        worker = self.workers.get(generation)
        if worker is not None and worker.number not in self.watch.convicted:
            well = worker.well and worker.ready and worker.tested and not worker.lied_about
            require(not well, "no-harm", f"generation {generation} is well")

    def gateway_dies(self) -> None:
        if self.gateway and not self.stopped:
            self.counts["gateway"] += 1
            self.gateway = False
            self.tell(GatewayLost(self.now))
            self.later(self.dice.uniform(0.05, 3), self._new_gateway, ours=False)

    def _new_gateway(self) -> Event | None:
        if self.stopped:
            return None
        self.gateway = True
        if self.dice.random() < 0.7:
            self.gate = GateKeeper()  # else only the connection was lost
        return GatewayBack(self.now, self.gate.generation, self.gate.gate.value)

    # --- workers ---

    def _address(self, generation: int) -> str:
        return f"127.0.0.1:{generation}"

    def _root_lives(self, generation: int) -> bool:
        return ProcessKind.ROOT in self.workers[generation].processes

    def current(self) -> Worker | None:
        worker = self.workers.get(self.generation)
        return worker if worker is not None and worker.processes and not self.stopped else None

    def _begin(self, rung: str) -> None:
        self.generation += 1
        worker = self.workers[self.generation] = Worker(self.generation, self.now, rung)
        alive = [w.number for w in self.workers.values() if w.processes]
        require(len(alive) == 1, "one-alive", alive)
        fate, soon = self.dice.random() / (self.trouble or 1e-9), self.dice.uniform(0.1, 20)
        first = worker.number == 1
        if rung == "eager" and self.bad_flag:
            self.later(0.3, lambda: self._exits(worker, 2), ours=False)
        elif fate < (0.02 if first else 0.08):
            code = self.dice.choice((1, 2) if first else (1, 1, 0, None))
            self.later(soon, lambda: self._exits(worker, code), ours=False)
        elif fate < (0.03 if first else 0.12):
            worker.illness = "never ready"
        elif fate < (0.03 if first else 0.14):
            self.later(soon, lambda: self._engine_then_root(worker), ours=False)
        else:
            self.later(self.dice.uniform(1, 60), lambda: self._gets_ready(worker), ours=False)

    def _gets_ready(self, worker: Worker) -> None:
        worker.ready = bool(worker.processes)
        if self.dice.random() < 0.08 * self.trouble:
            worker.illness = self.dice.choice(("poisoned", "hung"))  # ready and useless
        self._look()

    def _exit(self, worker: Worker, kind: ProcessKind, code: int | None, ordered: bool = False) -> None:
        if kind in worker.processes:
            worker.processes.discard(kind)
            worker.code = code if kind is ProcessKind.ROOT else worker.code
            event = Exited(self.now, worker.number, 1, kind, code, ordered=ordered, name=kind.value)
            self.later(0.005, lambda: event, ours=True)
            self._look()

    def _exits(self, worker: Worker, code: int | None) -> None:
        self._exit(worker, ProcessKind.ROOT, code)
        for kind in (ProcessKind.ENGINE, ProcessKind.OTHER):
            if self.dice.random() < 0.8:
                self._exit(worker, kind, code)

    def _engine_then_root(self, worker: Worker) -> None:
        self._exit(worker, ProcessKind.ENGINE, 1)
        if self.dice.random() < 0.9:
            self.later(self.dice.uniform(0.1, 1), lambda: self._exits(worker, 0), ours=False)

    def _stop(self) -> Event:
        self.stopped = True
        return StopOrdered(self.now)
