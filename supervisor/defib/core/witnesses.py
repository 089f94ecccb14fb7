"""Two witnesses or no kill: what is known against a generation, and whether it is enough (design.md section 5).

Group T is what a single exchange can cause (log text, HTTP results): it counts once, however much there is.
Group W is what it can't. Three symptoms of unlike exchanges are W too, but clients can gang up: they only count
beside another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from defib.core.events import CanaryOutcome, FaultClass, Found, GpuFault, Symptom

MAX_FINDINGS = 64
MAX_SYMPTOMS = 64
MAX_XIDS = 16
UNLIKE_EXCHANGES = 3
"""Symptoms of this many exchanges, each with its own connection and its own body, are a witness of group W. No more
than this many of one connection or of one body are kept: what one client says at length hides nobody else."""

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
    stalled_at: float | None = None
    """When the engine was last said to make no progress."""
    xids: tuple[GpuFault, ...] = ()
    """Errors that the driver charged to this worker, the first of each number."""
    resumed: FaultClass | None = None
    """What an earlier supervisor had found: our own memory of it is gone."""
    symptom_at: float = 0.0
    tokens_at: float = 0.0

    def with_found(self, found: Found) -> Case:
        """A cause is taken in the place of the latest finding when there are too many."""
        kept = self.findings
        if len(kept) >= MAX_FINDINGS:
            if not found.cause or self.cause() is not None:
                return self
            kept = kept[:-1]
        return replace(self, findings=(*kept, found))

    def with_symptom(self, symptom: Symptom) -> Case:
        known = self.symptoms
        seen = replace(self, symptom_at=max(self.symptom_at, symptom.at))
        if any((s.connection, s.body) == (symptom.connection, symptom.body) for s in known):
            return seen
        same_connection = sum(1 for s in known if s.connection == symptom.connection)
        same_body = sum(1 for s in known if s.body == symptom.body)
        if max(same_connection, same_body) >= UNLIKE_EXCHANGES or len(known) >= MAX_SYMPTOMS:
            return seen
        return replace(seen, symptoms=(*known, symptom))

    def with_xid(self, fault: GpuFault) -> Case:
        """Each number once: a storm of one Xid is one fact."""
        if len(self.xids) >= MAX_XIDS or any(known.xid == fault.xid for known in self.xids):
            return self
        return replace(self, xids=(*self.xids, fault))

    @property
    def accused_at(self) -> float:
        """When the latest accusation that a token or a canary can refute was made."""
        times = [f.at for f in self.findings if f.cause] + ([self.symptom_at] if self.symptoms else [])
        times += [fault.at for fault in self.xids] + ([] if self.stalled_at is None else [self.stalled_at])
        return max(times, default=self.opened_at)

    def cause(self) -> Found | None:
        """The first causal finding: the initiator as far as the log tells."""
        return next((f for f in self.findings if f.cause), None)

    def initiator(self) -> str:
        """The process that failed first. The CUDA runtime's own lines name none: then the next causal one does."""
        named = (f.process for f in self.findings if f.cause and f.process)
        return next(named, self.exits[0] if self.exits else "unknown")

    def fault(self) -> FaultClass:
        """The class of the verdict; UNKNOWN when nothing says why.

        Hardware first: what the log says of the context is then a consequence. The log before other Xids: it names
        the error, and a canary that hangs on a broken context makes a stall of anything.
        """
        if any(fault.fault is FaultClass.GPU_HARDWARE for fault in self.xids):
            return FaultClass.GPU_HARDWARE
        cause = self.cause()
        if cause is not None:
            return cause.fault
        if self.xids:
            return self.xids[0].fault
        if self.resumed is not None:
            return self.resumed
        return FaultClass.HANG if self.start_limit or self._hangs() else FaultClass.UNKNOWN

    def _hangs(self) -> bool:
        """Silence explains nothing once a process has ended or the engine calls itself dead."""
        return self.stalled_at is not None and not self.exits and not self.health

    def fingerprint(self) -> str:
        """What the budget counts by: the signature of the cause, else the strongest witness."""
        hardware = next((fault for fault in self.xids if fault.fault is FaultClass.GPU_HARDWARE), None)
        if hardware is not None:
            return f"xid:{hardware.xid}"
        cause = self.cause()
        if cause is not None:
            return cause.signature
        if self.xids:
            return f"xid:{self.xids[0].xid}"
        if self.exits:
            return f"exit:{self.exits[0]}"
        if self._hangs():
            return "hang"
        return "start-limit" if self.start_limit else "no-answer"


def group_t(case: Case) -> tuple[str, ...]:
    """The witnesses that a single exchange could have caused."""
    found = [f"log:{f.signature}" for f in case.findings if f.cause]
    stalled = () if case.stalled_at is None else ("stalled",)
    return tuple(dict.fromkeys(found)) + (("symptom",) if case.symptoms else ()) + stalled


def group_w(case: Case) -> tuple[str, ...]:
    """The witnesses that no single exchange can cause."""
    named = [f"exit:{name}" for name in dict.fromkeys(case.exits)]
    named += [f"xid:{fault.xid}" for fault in case.xids]
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
    """The most symptoms of which no two share a connection or a body: a matching, grown by augmenting paths."""
    bodies: dict[str, list[str]] = {}
    for symptom in case.symptoms:
        bodies.setdefault(symptom.connection, []).append(symptom.body)
    owner: dict[str, str] = {}

    def place(connection: str, tried: set[str]) -> bool:
        for body in bodies[connection]:
            if body not in tried:
                tried.add(body)
                if body not in owner or place(owner[body], tried):
                    owner[body] = connection
                    return True
        return False

    return sum(place(connection, set()) for connection in bodies)


def sufficient(case: Case) -> bool:
    """May this generation be killed?

    An engine process's exit or a start limit passed is a verdict by itself. Otherwise one of W, and either an
    agreeing T or a second W. `symptoms:3` only counts beside another W: three clients can gang up on a well server.
    A canary's timeout is also what a long prefill looks like: no HTTP result is agreement enough for that one, but
    an engine that counted no step for longer than it ever needed is. A stall agrees with a canary that failed, and
    with no other witness: it is silence, and an Xid or a 503 beside it may have any cause.
    """
    witnesses = group_w(case)
    if case.exits or case.start_limit:
        return True
    if not any(name != SYMPTOMS for name in witnesses):
        return False
    if len(witnesses) >= 2:
        return True
    if case.cause() is not None:
        return True
    if case.stalled_at is not None and case.canary in FAILED:
        return True
    return bool(case.symptoms) and case.canary is not CanaryOutcome.TIMEOUT
