"""How long may this worker be silent? Learnt from its own steps; a sensor feeds it, nothing here looks at a clock.

1. Silence is time with exchanges in flight and nothing moved: no token, no engine step. An idle worker is not silent.
2. A young worker (few steps seen) has the `first` limit: compiling, first use of a kernel, a long first prefill.
3. Afterwards the limit is a multiple of its own longest silence, never below the floor, never above the cap.
4. Where only tokens can be seen (`blind`), a plain answer looks like silence until it is complete: the longer limit.
5. Time in which we did not run is nobody's silence.
6. Two windows of steps are kept, so that one slow step is forgotten after a while. Memory is constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WINDOW_STEPS = 4096
"""The longest silence of this many steps counts, and that of as many before."""


@dataclass(frozen=True, slots=True)
class PaceRules:
    """Limits in seconds. `factor`: so many times the longest silence seen is still no hang."""

    floor_s: float = 10.0
    first_s: float = 120.0
    blind_s: float = 120.0
    cap_s: float = 600.0
    factor: float = 5.0
    enough_steps: int = 32
    enough_s: float = 20.0
    """A worker is young until it made so many steps, in so many seconds of work."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the worker, taken at `at` (seconds).

    `moved_at`: the latest token; 0 for none. `steps`: a counter that moves with the engine; any change counts, a
    smaller value too. None: it could not be read this time. `blind`: it can't be read at all. `absent_s`: for so long
    before `at` we did not run.
    """

    at: float
    in_flight: int
    moved_at: float = 0.0
    steps: float | None = None
    blind: bool = False


@dataclass(frozen=True, slots=True)
class Silence:
    """It lasts longer than it may."""

    silent_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What was learnt of one generation. `observe` gives the next one."""

    rules: PaceRules = PaceRules()
    steps: int = 0
    worked_s: float = 0.0
    longest_s: float = 0.0
    longest_before_s: float = 0.0
    in_window: int = 0
    busy_at: float | None = None
    """Since when exchanges are in flight; None: none is."""
    moved_at: float = 0.0
    counter: float | None = None

    @property
    def young(self) -> bool:
        return self.steps < self.rules.enough_steps or self.worked_s < self.rules.enough_s

    def limit_s(self, blind: bool = False) -> float:
        """How long it may be silent now."""
        rules = self.rules
        learnt = min(rules.factor * max(self.longest_s, self.longest_before_s), rules.cap_s)
        least = max(rules.floor_s, rules.first_s if self.young else 0.0, rules.blind_s if blind else 0.0)
        return max(least, learnt)

    def observe(self, seen: Seen) -> tuple[Pace, Silence | None]:
        """Takes a look; also tells whether the silence is too long by now."""
        moved = self._latest(seen)
        now = self._busy(seen)
        if moved is not None:
            now = self._learn(now, *moved)
        if seen.steps is not None:
            now = replace(now, counter=seen.steps)
        if now.busy_at is None:
            return now, None
        silent = seen.at - max(now.busy_at, now.moved_at)
        limit = now.limit_s(seen.blind)
        return now, Silence(round(silent, 3), round(limit, 3)) if silent > limit else None

    def absent(self, seconds: float) -> Pace:
        """For so long we did not run: whatever happened then, it is nobody's silence."""
        busy = None if self.busy_at is None else self.busy_at + seconds
        return replace(self, busy_at=busy, moved_at=self.moved_at + seconds if self.moved_at else 0.0)

    def _latest(self, seen: Seen) -> tuple[float, int] | None:
        """When it moved last, if it did since the last look, and by how many steps."""
        if seen.steps is not None and self.counter is not None and seen.steps != self.counter:
            return seen.at, max(1, int(seen.steps - self.counter))
        if seen.moved_at > self.moved_at:
            return min(seen.moved_at, seen.at), 1
        return None

    def _busy(self, seen: Seen) -> Pace:
        if seen.in_flight > 0:
            return self if self.busy_at is not None else replace(self, busy_at=seen.at)
        return self if self.busy_at is None else replace(self, busy_at=None)

    def _learn(self, now: Pace, at: float, steps: int) -> Pace:
        """It moved at `at`. Outside of work (a canary, an exchange that came and went) only the time is kept."""
        now = replace(now, moved_at=max(self.moved_at, at))
        since = None if self.busy_at is None else max(self.busy_at, self.moved_at)
        if since is None or at < since:
            return now
        silent, count = at - since, self.in_window + steps
        full = count >= WINDOW_STEPS
        longest = max(self.longest_s, silent)
        return replace(
            now,
            steps=self.steps + steps,
            worked_s=self.worked_s + silent,
            longest_s=0.0 if full else longest,
            longest_before_s=longest if full else self.longest_before_s,
            in_window=0 if full else count,
        )
