"""One client request and what has been delivered of its answer."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from defib.gateway.heads import RequestHead
from defib.gateway.outlet import Outlet
from defib.gateway.rules import Limits, ReplayRule, body_facts, may_replay

if TYPE_CHECKING:
    from defib.gateway.answer import Answer
    from defib.gateway.upstream import Upstream


class State(StrEnum):
    """Where an exchange is."""

    WAITING = "waiting"
    SENT = "sent"
    PARKED = "parked"
    ENDED = "ended"


class BodySource(Protocol):
    """A client whose request body is too large to keep, and is passed on as it comes."""

    def body_to(self, upstream: Upstream) -> None:
        """Passes the body on to this connection from now on."""

    def hold_body(self, hold: bool) -> None:
        """The worker takes no more for now, or takes again."""

    @property
    def body_done(self) -> bool:
        """Whether all of it came."""
        ...


class Exchange:
    """One accepted request. The relay changes it; everything else reads."""

    __slots__ = (
        "answer",
        "attempts",
        "body",
        "body_bytes",
        "computes",
        "connect",
        "connection",
        "deaths",
        "generates",
        "generation",
        "head",
        "hold_left_s",
        "id",
        "known",
        "number",
        "outlet",
        "peer",
        "probe",
        "reached",
        "replayed",
        "rule",
        "source",
        "state",
        "streams",
        "timer",
        "wait_started",
        "was_held",
    )

    def __init__(
        self, number: int, name: str, head: RequestHead, body: bytes | None, outlet: Outlet, connection: int, peer: str
    ) -> None:
        self.number, self.id, self.connection, self.peer = number, name, connection, peer
        self.head, self.body, self.outlet = head, body, outlet
        self.body_bytes = len(body) if body is not None else max(0, head.length)
        self.rule: ReplayRule | None = None
        self.known = self.generates = self.probe = self.streams = False
        self.computes = False
        """Its answer proves that the engine computed."""
        self.source: BodySource | None = None
        self.state = State.WAITING
        self.answer: Answer | None = None
        self.connect: asyncio.Task[None] | None = None
        self.generation = 0
        self.attempts = 0
        self.deaths = 0
        self.reached = False
        """Some bytes of it may have reached a worker since it was last taken back."""
        self.replayed = self.was_held = False
        self.hold_left_s = 0.0
        self.wait_started = 0.0
        self.timer: asyncio.TimerHandle | None = None

    def look_into(self, limits: Limits) -> None:
        """Finds the hold limit of its form; reads the body, so only done when it has to wait."""
        if self.hold_left_s:
            return
        self.streams = self.generates and bool(self.body) and body_facts(self.body or b"").stream
        self.hold_left_s = limits.hold_stream_s if self.streams else limits.hold_plain_s

    def why_not_again(self, limits: Limits) -> str | None:
        """Why it may not be sent (again) although nothing was delivered; None: it may."""
        if not self.reached and not self.deaths:
            return None
        if self.head.no_replay:
            return "its client asked for that (X-Defib-Replay: never)"
        if self.deaths >= limits.deaths:
            return f"it was being worked on at {self.deaths} failures"
        if self.attempts >= limits.attempts:
            return f"it was sent {self.attempts} times"
        if self.rule is None:
            return f"{self.head.method} {self.head.path[:100]} is not known to be safe to repeat"
        if self.body is None:
            return "its body was too large to be kept"
        if not may_replay(self.rule, self.body):
            return "its options forbid it"
        return None

    def stop_timer(self) -> None:
        """No timer runs any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def shape(self) -> dict[str, Any]:
        """What may be told of it: never a body, a header value or a query."""
        return {
            "id": self.id,
            "method": self.head.method,
            "path": self.head.path[:200],
            "stream": self.answer.streaming if self.answer is not None else self.streams,
            "request_bytes": self.body_bytes,
            "generation": self.generation,
            "state": self.state.value,
            "events": self.answer.events if self.answer is not None else self.outlet.events,
            "attempts": self.attempts,
            "deaths": self.deaths,
            "connection": self.connection,
        }
