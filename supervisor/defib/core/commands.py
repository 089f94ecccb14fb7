"""What the machine asks of the world. A command is a thing we can log and a thing we can do.

Commands with a `ticket` are the start of something slow; its end comes back as an event with that ticket.
"""

from __future__ import annotations

from dataclasses import dataclass

from defib.core.events import Resume

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class PauseTraffic:
    """New exchanges wait, failing answers stay parked. A lease: said again while it holds."""

    generation: int


@dataclass(frozen=True, slots=True)
class HoldTraffic:
    """The generation is given up: its exchanges are taken back and wait for the next one."""

    generation: int
    incident: str
    ready_in_s: float | None


@dataclass(frozen=True, slots=True)
class OpenTraffic:
    """Exchanges may reach this generation. Said of the same generation again, it releases what was parked."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class RefuseTraffic:
    """Every exchange is told at once why there is no answer."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Send the canary to this generation. `purpose`: reference (first start), suspect, prove."""

    ticket: int
    generation: int
    address: str
    purpose: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Capture:
    """Put on disk what dies with the process."""

    ticket: int
    incident: str
    generation: int
    deadline: float


@dataclass(frozen=True, slots=True)
class KillTree:
    """End every process of this generation."""

    ticket: int
    generation: int
    incident: str


@dataclass(frozen=True, slots=True)
class CheckGate:
    """Is there room for the next launch: processes gone, GPU fit, port free."""

    ticket: int
    generation: int


@dataclass(frozen=True, slots=True)
class ClearCaches:
    """Move the caches that the verdict names aside."""

    ticket: int
    generation: int
    incident: str
    caches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the next generation with the remedies of this rung."""

    ticket: int
    generation: int
    rung: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Send `Elapsed(name, ticket)` at `at`. Nothing is cancelled: a stale ticket is dropped."""

    name: str
    at: float
    ticket: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Remember this across a restart of the supervisor."""

    resume: Resume


@dataclass(frozen=True, slots=True)
class Settle:
    """The incident is over: complete its folder and report."""

    incident: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the event log and of the incident's timeline."""

    name: str
    fields: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The instance ends in order, with this exit code."""

    code: int
    reason: str


Command = (
    PauseTraffic
    | HoldTraffic
    | OpenTraffic
    | RefuseTraffic
    | Probe
    | Capture
    | KillTree
    | CheckGate
    | ClearCaches
    | Launch
    | Wait
    | Persist
    | Settle
    | Note
    | Finish
)
