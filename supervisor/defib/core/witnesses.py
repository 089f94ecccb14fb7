"""Two witnesses or no kill: what is known against a generation, and whether it is enough (design.md section 5).

Group T is what a single exchange can cause (log text, HTTP results): it counts once, however much there is.
Group W is what it can't. Three symptoms of unlike exchanges are W too, but clients can gang up: they only count
beside another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from defib.core.events import CanaryOutcome, FaultClass, Found, Symptom

MAX_FINDINGS = 64
MAX_SYMPTOMS = 64
UNLIKE_EXCHANGES = 3
"""Symptoms of this many exchanges, each with its own connection and its own body, are a witness of group W."""

SYMPTOMS = "symptoms:3"
FAILED = frozenset({CanaryOutcome.ERROR, CanaryOutcome.TIMEOUT, CanaryOutcome.REFUSED})
"""Canaries that speak against a worker."""


@dataclass(frozen=True, slots=True)
class Case:
    """All that is known against one generation. Times are CLOCK_BOOTTIME seconds."""

    opened_at: float
    findings: tuple[Found, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    exits: tuple[str, ...] = ()
    health: bool = False
    canary: CanaryOutcome | None = None
    start_limit: bool = False
    tokens_at: float = 0.0

    def with_found(self, found: Found) -> Case:
        return self if len(self.findings) >= MAX_FINDINGS else replace(self, findings=(*self.findings, found))

    def with_symptom(self, symptom: Symptom) -> Case:
        return self if len(self.symptoms) >= MAX_SYMPTOMS else replace(self, symptoms=(*self.symptoms, symptom))

    @property
    def accused_at(self) -> float:
        """When the latest accusation that a token or a canary can refute was made."""
        times = [f.at for f in self.findings if f.cause] + [s.at for s in self.symptoms]
        return max(times, default=self.opened_at)

    def cause(self) -> Found | None:
        """The first causal finding: the initiator as far as the log tells."""
        return next((f for f in self.findings if f.cause), None)

    def initiator(self) -> str:
        """The process that failed first. The CUDA runtime's own lines name none: then the next causal one does."""
        named = (f.process for f in self.findings if f.cause and f.process)
        return next(named, self.exits[0] if self.exits else "unknown")

    def fault(self) -> FaultClass:
        """The class of the verdict; UNKNOWN when nothing in the log says why."""
        cause = self.cause()
        if cause is not None:
            return cause.fault
        return FaultClass.HANG if self.start_limit else FaultClass.UNKNOWN

    def fingerprint(self) -> str:
        """What the budget counts by: the signature of the cause, else the strongest witness."""
        cause = self.cause()
        if cause is not None:
            return cause.signature
        if self.exits:
            return f"exit:{self.exits[0]}"
        return "start-limit" if self.start_limit else "no-answer"


def group_t(case: Case) -> tuple[str, ...]:
    """The witnesses that a single exchange could have caused."""
    found = [f"log:{f.signature}" for f in case.findings if f.cause]
    return tuple(dict.fromkeys(found)) + (("symptom",) if case.symptoms else ())


def group_w(case: Case) -> tuple[str, ...]:
    """The witnesses that no single exchange can cause."""
    named = [f"exit:{name}" for name in dict.fromkeys(case.exits)]
    if case.health:
        named.append("health:503")
    if case.canary in FAILED:
        named.append(f"canary:{case.canary}")
    if case.start_limit:
        named.append("start-limit")
    if _unlike(case) >= UNLIKE_EXCHANGES:
        named.append(SYMPTOMS)
    return tuple(named)


def _unlike(case: Case) -> int:
    connections = {s.connection for s in case.symptoms}
    bodies = {s.body for s in case.symptoms}
    return min(len(connections), len(bodies))


def sufficient(case: Case) -> bool:
    """May this generation be killed?

    An engine process's exit or a start limit passed is a verdict by itself. Otherwise one of W, and either an
    agreeing T or a second W. `symptoms:3` only counts beside another W: three clients can gang up on a well server.
    """
    witnesses = group_w(case)
    if case.exits or case.start_limit:
        return True
    if not any(name != SYMPTOMS for name in witnesses):
        return False
    return len(witnesses) >= 2 or bool(group_t(case))
