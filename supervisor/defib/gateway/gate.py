"""The gate: may an exchange be sent to the worker now, and may a failing answer be kept back? Pure.

                 open            pause           hold            refuse          lease ends
    starting     open            refused         held            refusing        starting
    open         open            paused          held            refusing        -
    paused       open            paused          held            refusing        open, parking off
    held         open            refused         held            refusing        held
    refusing     open            refused         held            refusing        -

A command for a generation lower than the gate's is refused (`stale_generation`). `pause` for a later one than an
open gate's is refused too: there is nothing of it to pause. Times are the caller's, in seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from defib.runtime.seam import SeamRefused


class Gate(StrEnum):
    """What happens to a new exchange."""

    STARTING = "starting"
    OPEN = "open"
    PAUSED = "paused"
    HELD = "held"
    REFUSING = "refusing"


@dataclass(slots=True)
class GateKeeper:
    """The gate's state. Its methods raise SeamRefused and change nothing when they do."""

    gate: Gate = Gate.STARTING
    generation: int = 0
    address: str = ""
    parking: bool = True
    incident: str = ""
    reason: str = ""
    retry_after_s: float = 0.0
    ready_at: float | None = None
    ramp_per_s: float = 0.0
    lease_ends: float | None = None

    @property
    def accepts(self) -> bool:
        """Whether a request sent now would be accepted at once."""
        return self.gate in (Gate.OPEN, Gate.PAUSED)

    def open(self, generation: int, address: str, ramp_per_s: float) -> bool:
        """True: this is the ruling that a pause or a hold waited for, or the first opening."""
        self._check(generation)
        ruled = self.gate is not Gate.OPEN or generation != self.generation
        self.gate, self.generation, self.address = Gate.OPEN, generation, address
        self.ramp_per_s, self.parking, self.lease_ends, self.ready_at = ramp_per_s, True, None, None
        return ruled

    def pause(self, generation: int, now: float, lease_s: float) -> None:
        """New exchanges wait, parked answers stay parked."""
        self._check(generation)
        if self.gate not in (Gate.OPEN, Gate.PAUSED):
            raise SeamRefused("refused", f"the gate is {self.gate}: there is nothing to pause")
        if generation != self.generation:
            raise SeamRefused("refused", f"generation {self.generation} is open, not {generation}")
        self.gate, self.parking, self.lease_ends = Gate.PAUSED, True, now + lease_s

    def hold(self, generation: int, now: float, lease_s: float, ready_in_s: float | None, incident: str) -> None:
        """This generation is dead."""
        self._check(generation)
        self.gate, self.generation, self.incident = Gate.HELD, generation, incident
        self.parking, self.lease_ends = True, now + lease_s
        self.ready_at = None if ready_in_s is None else now + ready_in_s

    def refuse(self, reason: str, retry_after_s: float) -> None:
        """Nothing is accepted until further notice."""
        self.gate, self.reason, self.retry_after_s = Gate.REFUSING, reason, retry_after_s
        self.lease_ends = self.ready_at = None

    def expire(self, now: float) -> bool:
        """The lease's end, if it has come; True: the gate changed."""
        if self.lease_ends is None or now < self.lease_ends:
            return False
        self.lease_ends = None
        if self.gate is not Gate.PAUSED:
            return False
        self.gate, self.parking, self.ramp_per_s = Gate.OPEN, False, 0.0
        return True

    def ready_in_s(self, now: float) -> float | None:
        """Seconds until the next generation is expected to serve; None: unknown, or overdue."""
        if self.ready_at is None or self.ready_at <= now:
            return None
        return self.ready_at - now

    def _check(self, generation: int) -> None:
        if generation < self.generation:
            text = f"generation {generation} is gone, {self.generation} is current"
            raise SeamRefused("stale_generation", text)
