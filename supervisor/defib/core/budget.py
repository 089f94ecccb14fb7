"""The launch budget: how often a cause may be answered with a launch, per rung and overall. Pure.

A launch counts from the moment it is ordered until its generation has survived probation under traffic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: its name and how many launches it may use per cause and window."""

    name: str
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits. `window_s` seconds; `overall`: counting launches of any cause inside the window."""

    window_s: float = 3600.0
    overall: int = 6


Ledger = tuple[tuple[float, str, str], ...]
"""Launches that count: (at, cause, rung name), oldest first."""

SLACK_S = 1.0
"""A launch is done within this time of its order; the one before it may have been ordered only seconds earlier."""

MAX_LEDGER = 64
"""Older entries than this many are dropped; far above any sensible overall budget."""


def trimmed(ledger: Ledger, budget: Budget, at: float) -> Ledger:
    """The entries still inside the window."""
    return tuple(entry for entry in ledger if entry[0] + budget.window_s > at)[-MAX_LEDGER:]


def next_rung(
    rungs: tuple[Rung, ...],
    first: int,
    bad: frozenset[str],
    ledger: Ledger,
    cause: str,
    budget: Budget,
    at: float,
) -> int | None:
    """The index of the first rung from `first` on that may be launched now; None when the budget is spent."""
    live = trimmed(ledger, budget, at)
    if len(live) >= min(budget.overall, MAX_LEDGER):
        return None
    for index in range(first, len(rungs)):
        rung = rungs[index]
        used = sum(1 for _, c, r in live if c == cause and r == rung.name)
        if rung.name not in bad and used < rung.launches:
            return index
    return None


def frees_at(
    rungs: tuple[Rung, ...], bad: frozenset[str], ledger: Ledger, cause: str, budget: Budget, at: float
) -> float:
    """The earliest time, not before `at`, at which some rung may be launched.

    A window from now where no passing of time helps, since every rung is bad: the world may have changed by then.
    """
    times = [at, *(entry[0] + budget.window_s for entry in trimmed(ledger, budget, at))]
    free = (t for t in sorted(times) if next_rung(rungs, 0, bad, ledger, cause, budget, t) is not None)
    return next(free, at + budget.window_s)


def ordered_at(ledger: Ledger, launched_at: float) -> float:
    """When the launch that happened at `launched_at` was ordered: the newest entry, if it is near enough.

    A restarted supervisor knows the launcher's time and a ledger that went through wall time: they differ a little.
    """
    return ledger[-1][0] if ledger and abs(ledger[-1][0] - launched_at) <= SLACK_S else launched_at


def without_rung(ledger: Ledger, launched_at: float) -> Ledger:
    """The ledger with the launch that was ordered at this time counted against no rung, only overall."""
    return tuple((at, cause, "" if at == launched_at else rung) for at, cause, rung in ledger)


def forgiven(ledger: Ledger, launched_at: float) -> Ledger:
    """The ledger without the launch that was ordered at this time: its generation has proven itself."""
    return tuple(entry for entry in ledger if entry[0] != launched_at)
