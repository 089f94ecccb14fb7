"""What the gateway tells the supervisor unasked, at a bounded rate: symptoms, progress, counts."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from defib.gateway.rules import Limits

Tell = Callable[..., None]


class Outcome(StrEnum):
    """How an exchange ended; the names of its counts."""

    ANSWERED = "answered"
    PASSED_ERROR = "passed_error"
    REFUSED = "refused"
    GIVEN_UP = "given_up"
    ENDED_WITH_ERROR = "ended_with_error"


@dataclass(slots=True)
class Counts:
    """Since the gateway's start; only ever growing."""

    accepted: int = 0
    answered: int = 0
    refused: int = 0
    given_up: int = 0
    ended_with_error: int = 0
    passed_error: int = 0
    parked: int = 0
    held: int = 0
    replayed: int = 0
    symptoms: int = 0

    def add(self, outcome: Outcome) -> None:
        """One exchange ended."""
        setattr(self, outcome, getattr(self, outcome) + 1)


class Teller:
    """Sends events through `tell(name, **fields)`; `clock()` is CLOCK_BOOTTIME in seconds."""

    def __init__(self, tell: Tell, clock: Callable[[], float], limits: Limits) -> None:
        self.counts = Counts()
        self.tokens = 0
        self.token_at = 0.0
        self._tell, self.clock, self._limits = tell, clock, limits
        self._key = secrets.token_bytes(32)
        self._second, self._symptoms = 0, 0
        self._told_progress: tuple[int, int, int] = (0, 0, 0)
        self._told_counts: dict[str, int] = {}
        self._counts_at = self._progress_at = 0.0

    def body_hash(self, body: bytes | None) -> str:
        """A hash that says whether two bodies of this gateway's life are the same, and nothing else."""
        return "" if body is None else hashlib.blake2b(body, digest_size=16, key=self._key).hexdigest()

    def symptom(self, **fields: Any) -> None:
        """Counted always, told at most so often a second."""
        self.counts.symptoms += 1
        at = self.clock()
        if int(at) != self._second:
            self._second, self._symptoms = int(at), 0
        self._symptoms += 1
        if self._symptoms <= self._limits.symptoms_per_s:
            self._tell("symptom", at=at, **fields)

    def saw_tokens(self, number: int) -> None:
        """The current generation delivered so many events with content."""
        self.tokens += number
        self.token_at = self.clock()

    @property
    def untold(self) -> bool:
        """Whether the counts changed since they were last told."""
        return asdict(self.counts) != self._told_counts

    def turn(self, generation: int, in_flight: int, calm: bool = False) -> None:
        """Tells progress and counts if they changed; called ten times a second at most.

        `calm`: nobody is accused, so that nothing waits for a token to refute it: progress is told more seldom.
        """
        progress = (generation, in_flight, self.tokens)
        due = not calm or self.clock() - self._progress_at >= self._limits.calm_progress_s
        if due and progress != self._told_progress:
            self._told_progress, self._progress_at = progress, self.clock()
            fields = {"tokens": self.tokens, "token_at": self.token_at}
            self._tell("progress", generation=generation, in_flight=in_flight, **fields)
        now = self.clock()
        if now - self._counts_at >= self._limits.counts_s:
            counts = asdict(self.counts)
            if counts != self._told_counts:
                self._told_counts, self._counts_at = counts, now
                self._tell("counts", counts=counts)

    def replayed(self, generation: int, answered: int, failed: int, seconds: float) -> None:
        """All that was replayed after an `open` has its first byte, or has ended."""
        self._tell("replayed", generation=generation, answered=answered, failed=failed, seconds=round(seconds, 3))
