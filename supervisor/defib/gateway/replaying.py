"""How a replay goes: which of the exchanges that waited for an `open` have had their first byte or their end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Replaying:
    """The exchanges sent after one `open`. `started`: `loop.time()`."""

    generation: int
    started: float
    pending: set[int]
    answered: int = 0
    failed: int = 0

    def over(self, number: int, answered: bool) -> bool:
        """One of them got its first byte or ended; True: it was the last one."""
        if number not in self.pending:
            return False
        self.pending.discard(number)
        if answered:
            self.answered += 1
        else:
            self.failed += 1
        return not self.pending
