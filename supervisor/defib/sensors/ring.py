"""The last lines of the worker, kept before anything happens: a dying process leaves less than a second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_LINES = 20_000
MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """One line: when we read it (CLOCK_BOOTTIME), where it came from, its text."""

    at: float
    generation: int
    stream: str
    number: int
    text: str


class Ring:
    """Bounded by lines and by characters; the oldest go first. Health poll lines are counted, not kept."""

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self.max_lines, self.max_bytes = max_lines, max_bytes
        self.forgotten = 0
        self.polls_dropped = 0
        self._lines: deque[Kept] = deque()
        self._size = 0

    def add(self, line: Kept) -> None:
        if '"GET /health HTTP/1.1" 200' in line.text:
            self.polls_dropped += 1
            return
        self._lines.append(line)
        self._size += len(line.text) + 64
        while len(self._lines) > self.max_lines or self._size > self.max_bytes:
            gone = self._lines.popleft()
            self._size -= len(gone.text) + 64
            self.forgotten += 1

    def of(self, generation: int, since: float = 0.0) -> list[Kept]:
        """The kept lines of one generation from a time on, oldest first."""
        return [line for line in self._lines if line.generation == generation and line.at >= since]
