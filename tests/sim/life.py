"""What befalls an instance in a simulated life, and the peace at its end."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.invariants import require
from tests.sim.world import POISONED, Worker, World

from defib.core.events import (
    Adopted,
    Event,
    Found,
    HealthFailed,
    PauseOrdered,
    ProcessKind,
    Progressed,
    ResumeOrdered,
    Symptom,
)
from defib.core.machine import Table
from defib.core.state import Phase
from defib.gateway.gate import Gate


class Life(World):
    """A world in which things happen: every method without an underscore is one of them, but `finish`."""

    def _served(self) -> Worker | None:
        worker = self.current()
        return worker if worker is not None and worker.ready else None

    def _say(self, worker: Worker, text: str = "engine", cause: bool = True) -> None:
        self.tell(Found(self.now, worker.number, "cuda_ima" if cause else "hint", POISONED, cause, text))

    def _symptoms(self, worker: Worker, unlike: int, alike: int = 0) -> None:
        """Failing answers; the gateway has only seen any if it let exchanges through."""
        if self.gateway and self.gate.gate in (Gate.OPEN, Gate.PAUSED) and self.gate.generation == worker.number:
            for n in range(unlike):
                self.tell(Symptom(self.now, worker.number, f"x{n}", f"c{n}", f"b{n}", "status"))
            for n in range(alike):
                self.tell(Symptom(self.now, worker.number, f"y{n}", "c0", f"d{n}", "cut"))

    def poison(self) -> None:
        """A sticky error: lines, then the engine dies within a second, or lingers."""
        worker = self.current()
        if worker is None:
            return
        self.counts["poison"] += 1
        worker.illness = worker.illness or "poisoned"
        if self.dice.random() < 0.3:
            self._say(worker, cause=False)
        self._say(worker)
        if self.dice.random() < 0.5:
            self._symptoms(worker, self.dice.randint(0, 4))
        if self.dice.random() < 0.8:
            self.later(self.dice.uniform(0.1, 0.5), lambda: self._engine_then_root(worker), ours=False)

    def crash(self) -> None:
        worker = self.current()
        if worker is not None:
            self.counts["crash"] += 1
            self.dice.choice((self._engine_then_root, lambda w: self._exits(w, 0)))(worker)

    def hang(self) -> None:
        worker = self._served()
        if worker is not None:
            self.counts["hang"] += 1
            worker.illness = worker.illness or "hung"
            self._symptoms(worker, self.dice.randint(0, 4))

    def mutter(self) -> None:
        """A well worker under forged text, failing answers of clients' making, a process that may end, and tokens."""
        worker = self._served()
        if worker is None or not worker.well or self.now < worker.busy_until:
            return
        self.counts["mutter"] += 1
        for _ in range(self.dice.randint(1, 4)):
            if self.dice.random() < 0.4:
                self._say(worker, "forged")
            else:
                self._symptoms(worker, self.dice.randint(0, 4), self.dice.randint(0, 9))
            if self.dice.random() < 0.1:
                self._exit(worker, ProcessKind.OTHER, 0)
            if self.dice.random() < 0.3:
                self.run(0.3)
                self.traffic()

    def busy(self) -> None:
        """A prefill so long that no token moves and no canary is answered; clients get impatient."""
        worker = self._served()
        if worker is not None and worker.well and self.machine.state.phase is Phase.SERVING:
            self.counts["busy"] += 1
            worker.busy_until = self.now + 60.0
            self._symptoms(worker, self.dice.randint(0, 2), self.dice.randint(0, 9))

    def sicken(self) -> None:
        """Health says 503 and stays up: alive and useless, or (rarely) a lie."""
        worker = self._served()
        if worker is None:
            return
        if self.dice.random() < 0.7:
            worker.illness = worker.illness or "poisoned"
        else:
            worker.lied_about = True
        self.tell(HealthFailed(self.now, worker.number, 503))
        self._symptoms(worker, self.dice.randint(0, 3))

    def traffic(self) -> None:
        """Tokens, or what clients see of an illness."""
        worker = self._served()
        if worker is None or self.now < worker.busy_until or self.gate.generation != worker.number:
            return
        if worker.well:
            self.tell(Progressed(self.now, worker.number, self.now))
        elif worker.illness:
            self._symptoms(worker, 4)

    def unkillable(self) -> None:
        worker = self.current()
        if worker is not None:
            worker.unkillable_until = self.now + self.dice.uniform(1, 300)

    def straggle(self) -> None:
        worker = self.current()
        if worker is not None:
            worker.straggler = True

    def replaced_by_others(self) -> None:
        """Another generation that we didn't launch: the launcher's owner put it there."""
        worker = self.workers[self.generation]
        if self.stopped or worker.straggler:
            return
        worker.processes = set()
        self._begin("primary")
        self.tell(Adopted(self.now, self.generation, self._address(self.generation)))

    def store_fills(self) -> None:
        self.store_fails_until = self.now + self.dice.uniform(1, 200)

    def pause(self) -> None:
        self.tell(PauseOrdered(self.now))

    def resume(self) -> None:
        self.tell(ResumeOrdered(self.now))

    def stop(self) -> None:
        if not self.stopped and not self.frozen:
            self.tell(self._stop())

    # --- the end ---

    def finish(self) -> None:
        """Peace: whatever is open settles by itself, and a worker that can serve does."""
        self.trouble, self.bad_flag, self.store_fails_until, self._crash_in = 0.0, False, 0.0, None
        keep = self.dice.random() < 0.3
        for _ in range(1500):
            self.run(20.0)
            for worker in self.workers.values():
                worker.unkillable_until, worker.straggler = 0.0, False
            if self.watch.paused and not keep:
                self.resume()
            self.traffic()
            if self._at_peace():
                break
        s = self.machine.state
        require(self._at_peace(), "peace", f"{s.phase} {s.incident} {self.workers[self.generation]} {self.gate}")
        lost = {i for i in self.watch.opened if not self.watch.settled[i]} - self.watch.forgotten
        require(not lost or not self.up, "settled", f"{lost} never")

    def _at_peace(self) -> bool:
        s, worker = self.machine.state, self.workers[self.generation]
        if self.stopped:
            return s.phase is Phase.STOPPING or not self.up
        if self.watch.paused:
            return s.phase is Phase.PAUSED
        if self.rules.observe and not worker.well:
            return s.phase in (Phase.SERVING, Phase.STARTING) and s.incident is None
        if s.phase is not Phase.SERVING or s.incident is not None:
            return False
        return worker.well and worker.ready and (self.gate.gate is Gate.OPEN and self.gate.generation == worker.number)


def with_row(table: Table, phase: Phase, event: type[Event], handler: Callable[..., None]) -> Table:
    """A table with one answer changed: how mutants are made."""
    return {**table, phase: {**table[phase], event: handler}}
